"""One answer to each question: what several commands and functions say of the same thing is the same.

A row asks one question at all doors that answer it. Where two doors mean different things on purpose, both say what
they assume, and the row reads these words.
"""

import json

import pytest
from support.command import run

import legato
from legato import zoo
from legato.core.errors import InputError
from legato.core.job import Job, Mesh
from legato.fsdp.costs import Costs
from legato.schedule import schedule
from legato.schedule.bound.plan_kind import kind_of
from legato.simulator.flow import FABRICS
from legato.whole_jobs.cost import collective
from legato.whole_jobs.flow.step import network_of
from legato.whole_jobs.flow.step import simulate as simulate_links
from legato.whole_jobs.step import predict
from legato.zoo.presets import cluster_of, framework_named, machine_named

SAME = 1e-9


@pytest.fixture
def ask(capsys):
    """A function that runs a command with `--json`, and returns what it prints: one value, or the only row."""

    def ask(*command):
        status, out, err = run(capsys, *command, "--json")
        assert status == 0, err
        found = json.loads(out)
        return found[0] if isinstance(found, list) and len(found) == 1 else found

    return ask


def same(*answers):
    first, *others = answers
    for other in others:
        assert other == pytest.approx(first, rel=SAME)


# ---- a step of data-parallel training on a network ---------------------------------------


@pytest.mark.parametrize("reduce", ["0s", "500us"])
@pytest.mark.parametrize(
    ("fidelity", "fabric"),
    [
        *(("formulas", fabric) for fabric in ("ring", "tree", "shuffle", "parameter-server")),
        *(pytest.param("transfers", fabric, marks=pytest.mark.slow if "+" in fabric else ()) for fabric in FABRICS),
    ],
)
def test_a_step_on_a_fabric(ask, tmp_path, fidelity, fabric, reduce):
    """`simulate` and its cell in `sweep`; and Python's functions for a plan of a collective."""
    file, workload = tmp_path / "w.json", zoo.workload("alexnet-v2")
    legato.write(file, workload)
    network = ["--workers", 4, "--bandwidth", "10Gbit", "--latency", "20us", "--reduce", reduce]
    arguments = [file, *network, "--fabric", fabric, "--fidelity", fidelity]
    servers = ["--servers", 2] if fabric == "parameter-server" else []
    answers = [ask(verb, *arguments, *servers)["iteration_s"] for verb in ("simulate", "sweep")]
    if fidelity == "formulas" and not servers:
        cluster = legato.Cluster.derive(
            4, 10e9, 20e-6, reduce_s_per_byte=(5e-4 if reduce != "0s" else 0) / 2**20, collectives=[fabric]
        )
        answers.append(legato.simulate(workload, schedule("fifo", workload, cluster), cluster).iteration_s)
    same(*answers)


# ---- a language model on one GPU -------------------------------------------------------------


@pytest.mark.parametrize("device", ["h100", "a100"])
@pytest.mark.parametrize("model", ["llama-3-8b", "gpt3", "mixtral-8x7b"])
@pytest.mark.parametrize("training", [[], ["--recompute"], ["--efficiency", 0.4]], ids=str)
def test_what_a_language_model_computes(ask, tmp_path, capsys, model, device, training):
    """`workload` is the part of one GPU of the job that it writes with options of whole jobs; so is Python's."""
    arguments = [model, "--device", device, *training]
    alone, job = ask("workload", *arguments), ask("workload", *arguments, "--gpus", 1)
    computing = [alone["forward_s"] + alone["backward_s"], job["computing_s"]]
    if training != ["--efficiency", 0.4]:
        computing.append(zoo.workload(model, device=device, recompute=bool(training)).compute_s)
    same(*computing)


@pytest.mark.parametrize("model", ["llama-3-8b", "llama-3-70b"])
def test_what_the_states_of_a_language_model_take(ask, capsys, model):
    """In 32-bit gradients the same as in a job; without this option both commands say in what they assume them."""
    job = ask("workload", model, "--gpus", 1)["memory_nbytes"]
    same(
        ask("workload", model, "--gradients", "fp32")["states_nbytes"],
        job["parameters"] + job["gradients"] + job["optimizer"],
    )
    _, _, alone = run(capsys, "workload", model)
    _, _, whole = run(capsys, "workload", model, "--gpus", 1)
    assert "bf16 gradients" in alone and "parameters" in whole and "gradients" in whole


def test_a_stated_peak_is_that_of_the_precision(ask):
    """Products take as long in 32 bits at 100 TFLOP/s as in 16 bits; memory traffic twice as long."""
    wide, narrow = (
        ask("workload", "llama-3-8b", "--device-flops", "100T", "--precision", precision)["forward_s"]
        for precision in ("fp32", "bf16")
    )
    assert narrow < wide < 1.1 * narrow


def test_accumulated_micro_batches(ask):
    alone = ask("workload", "llama-3-8b", "--batch", 6, "--accumulate", 3)
    job = ask("workload", "llama-3-8b", "--gpus", 1, "--microbatches", 3, "--microbatch-size", 2)
    same(alone["forward_s"] + alone["backward_s"], job["computing_s"])


def test_a_fault(ask, tmp_path):
    """`simulate`, its cell in `sweep`, and Python, of an iteration in which a link is slow for a while."""
    file, workload = tmp_path / "w.json", zoo.workload("alexnet-v2")
    legato.write(file, workload)
    fault, cluster = "link:1:4:20ms:60ms", legato.Cluster.derive(4, 10e9, 30e-6)
    disturbed = [file, "--workers", 4, "--fabric", "ring", "--disturb", fault]
    plan = legato.plan(workload, cluster, "fifo")
    python = legato.simulate(workload, plan, cluster, fabric="ring", fault=fault)
    same(*(ask(verb, *disturbed)["iteration_s"] for verb in ("simulate", "sweep")), python.iteration_s)
    assert python.iteration_s > 1.01 * legato.simulate(workload, plan, cluster, fabric="ring").iteration_s
    with pytest.raises(InputError, match="expected none without a fabric"):
        legato.simulate(workload, plan, cluster, fault=fault)


# ---- a machine and its links -----------------------------------------------------------------


@pytest.mark.parametrize("gpus", [2, 8, 24, 512])
def test_what_a_collective_among_the_gpus_of_a_machine_takes(gpus):
    """Fully sharded training and whole jobs pay one price."""
    machine, nbytes = machine_named("h100"), 436_224_000
    costs = Costs.of_machine(machine, gpus)
    group = Job("j", zoo.SHAPES["llama-3-8b"], Mesh(data=gpus), framework_named("torchtitan"), machine).group("data")
    same(costs.gather.cost(nbytes), collective("data", machine, group, nbytes).total_s)
    ring = cluster_of(machine, gpus).cost("ring")
    same(ring.cost(nbytes), collective("data", machine, group, nbytes, halves=2).total_s)


@pytest.mark.parametrize("changed", [{}, {"bandwidth": 100}, {"local_bandwidth": 900, "gpus_per_host": 4}], ids=str)
def test_a_machine_is_the_network_of_its_rates_that_are_reached(ask, tmp_path, changed):
    """`simulate` and `sweep` of a workload, with a machine by its name and with the same network in numbers."""
    file = tmp_path / "w.json"
    legato.write(file, zoo.workload("alexnet-v2"))
    stated = {"bandwidth": 400, "local_bandwidth": 3600, "gpus_per_host": 8} | changed
    shares = {"bandwidth": 0.8, "local_bandwidth": 0.78, "gpus_per_host": 1}

    def options(values):
        for name, value in values.items():
            yield from (f"--{name.replace('_', '-')}", value if name == "gpus_per_host" else f"{value}Gbit")

    where = ["--workers", 16, "--fabric", "hierarchical"]
    reached = options({name: value * shares[name] if name in shares else value for name, value in stated.items()})
    numbers = [*where, "--latency", "3us", *reached]
    named = [*where, "--machine", "h100", *options(changed)]
    same(*(ask(verb, file, *network)["iteration_s"] for verb in ("simulate", "sweep") for network in (named, numbers)))


def test_all_that_is_on_a_machine_says_what_is_reached(capsys, tmp_path):
    workload, job = tmp_path / "w.json", tmp_path / "j.json"
    small = ["--layers", 4, "--hidden", 512, "--heads", 8, "--vocab", 32_000, "--sequence", 512]
    config = tmp_path / "config.json"
    config.write_text('{"n_layers": 4, "hidden_size": 512, "n_head": 8, "vocab_size": 32000}')
    on = ["--machine", "h100", "--workers", 16]
    run(capsys, "workload", "llm", *small, "-o", workload)
    for command in (
        ["workload", "llm", *small, "--data", 16, "-o", job],
        ["simulate", job, "--fidelity", "formulas"],
        ["sweep", job, "--fidelity", "formulas", "--jobs", 1],
        ["layouts", config, "--sequence", 512, "--gpus", 8, "--batch", 8, "--number", 1],
        ["simulate", workload, *on, "--fabric", "ring"],
        ["sweep", workload, *on, "--fabric", "ring", "--jobs", 1],
        ["plan", workload, *on, "--scheduler", "ddp"],
        ["plan", workload, *on, "--shard", "parameters"],
    ):
        status, out, err = run(capsys, *command)
        said = (
            "hosts of 8 x h100: 400 Gbit/s a GPU and 3.6 Tbit/s inside hosts (nominal rates, of which 80% and 78% are"
        )
        assert status == 0 and said in out + err, command


@pytest.mark.parametrize(
    ("gpus", "bandwidth"),
    [
        (8, "50Gbit"),
        *(pytest.param(512, bandwidth, marks=pytest.mark.slow) for bandwidth in ("50Gbit", "100Gbit", "400Gbit")),
    ],
)
def test_a_fully_sharded_step(ask, tmp_path, gpus, bandwidth):
    """Two models of one step: events of FSDP2's rules, and a layer's communication beside its passes. Within 2%."""
    workload, job = tmp_path / "w.json", tmp_path / "j.json"
    ask("workload", "llama-3-70b", "-o", workload)
    ask("workload", "llama-3-70b", "--data", gpus, "--shard", "parameters", "--preset", "torchtitan", "-o", job)
    links = ["--bandwidth", bandwidth]
    rows = ask("plan", workload, "--shard", "parameters", "--workers", gpus, "--machine", "h100", *links)
    (block,) = [row for row in rows if row["name"] == "by block"]
    step = ask("simulate", job, "--fidelity", "formulas", *links)
    assert block["iteration_s"] == pytest.approx(step["step_s"] - step["exposed_s"]["optimizer"], rel=0.02)


@pytest.mark.parametrize("bandwidth", ["50Gbit", pytest.param("400Gbit", marks=pytest.mark.slow)])
def test_a_wrapping_as_a_program(ask, tmp_path, bandwidth):
    """The row that `plan` takes, and `simulate` of what its GPUs do, by formulas and on links that nothing shares."""
    workload, program = tmp_path / "w.json", tmp_path / "p.json"
    ask("workload", "llama-3-8b", "-o", workload)
    network, memory = ["--bandwidth", bandwidth], ["--memory", "16GiB"]
    plan = ["plan", workload, "--shard", "parameters", "--workers", 32, "--machine", "h100", *network, *memory]
    (answer,) = [row for row in ask(*plan, "--program", program) if row["answer"]]
    steps = [
        ask("simulate", program, *network, "--fidelity", name)["predicted"]["step_s"] for name in ("formulas", "flows")
    ]
    same(answer["iteration_s"], *steps)


# ---- the step of a whole job -------------------------------------------------------------------


@pytest.mark.parametrize("fidelity", ["formulas", "flows"])
def test_a_step_of_a_job(ask, tmp_path, fidelity):
    """`workload` that writes it, `simulate`, its cell in `sweep`, Python, and a job that has the network for itself."""
    file = tmp_path / "j.json"
    layout = ["--tensor", 2, "--pipeline", 2, "--data", 4, "--microbatches", 4, "--shard", "optimizer"]
    written = ask("workload", "llama-3-8b", *layout, "-o", file)
    bandwidth = ["--bandwidth", "400Gbit", "--fidelity", fidelity]
    job = legato.read(file, Job)
    assert job == legato.job("llama-3-8b", tensor=2, pipeline=2, data=4, microbatches=4, shard="optimizer")
    python = predict(job).seconds if fidelity == "formulas" else simulate_links(job, network_of(job.machine, 16))
    same(
        ask("simulate", file, *bandwidth)["step_s"],
        ask("simulate", file, "--fidelity", fidelity)["step_s"],
        ask("sweep", file, *bandwidth)["step_s"],
        python if fidelity == "formulas" else python.step.seconds,
        *([written["step_s"]] if fidelity == "formulas" else []),
    )


def test_a_row_of_layouts(ask, tmp_path):
    """The fastest layout that fits, written as a job, takes what its row says: time, memory and bytes."""
    file = tmp_path / "j.json"
    rows = ask("layouts", "llama-3-8b", "--gpus", 16, "--batch", 32, "--number", 3, "-o", file)
    step = ask("simulate", file, "--fidelity", "formulas")
    fitting = [row for row in rows["layouts"] if row["room"] == "fits"]
    row = min(fitting, key=lambda row: row["step_s"])
    python = legato.layouts("llama-3-8b", gpus=16, batch=32, number=3)
    assert python.first.job == legato.read(file, Job)
    same(*(one["step_s"] for one in (next(one for one in python.rows if one["room"] == "fits"), row)))
    same(step["step_s"], row["step_s"])
    for part in step["memory_nbytes"]:
        same(step["memory_nbytes"][part], row["memory_nbytes"][part])


# ---- a plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["ddp", "mg-wfbp", "legato"])
def test_the_time_of_a_plan(ask, tmp_path, scheduler):
    """`plan`, which writes it, `simulate` of that plan, and of its scheduler; its cell in `sweep`; and Python."""
    file, plan, network = tmp_path / "w.json", tmp_path / "p.json", ["--workers", 8, "--bandwidth", "10Gbit"]
    workload = zoo.workload("resnet-v1-50")
    legato.write(file, workload)
    row = ask("plan", file, *network, "--scheduler", scheduler, "--collective", "ring", "-o", plan)
    formulas = [*network, "--fabric", "ring", "--fidelity", "formulas"]
    cluster = legato.Cluster.derive(8, 10e9, 30e-6, collectives=["ring"])
    cell = ask("sweep", file, *formulas, "--scheduler", scheduler)
    same(
        row["iteration_s"],
        ask("simulate", file, *formulas, "--plan", plan)["iteration_s"],
        ask("simulate", file, *formulas, "--scheduler", scheduler)["iteration_s"],
        cell["iteration_s"],
        legato.simulate(workload, legato.read(plan, legato.Plan), cluster).iteration_s,
        legato.simulate(workload, legato.plan(workload, cluster, scheduler), cluster).iteration_s,
    )
    kind = kind_of(legato.read(plan, legato.Plan), workload)._asdict()
    same(row["lower_bound_s"], cell["lower_bound_s"], legato.lower_bound(workload, cluster, **kind).seconds)
