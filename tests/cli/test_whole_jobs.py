"""`legato workload` and `legato simulate` of whole jobs, as a user meets them."""

import csv
import json
import re

import pytest
from support.command import run

import legato
from legato.core.job import Job
from legato.reports.breakdowns import PARTS
from legato.whole_jobs.cost import COMPUTING, KINDS
from legato.whole_jobs.flow import simulation
from legato.whole_jobs.flow.step import network_of
from legato.whole_jobs.flow.step import simulate as simulate_links
from legato.whole_jobs.step import predict

LAYOUT = ["--tensor", 8, "--pipeline", 16, "--data", 128, "--microbatches", 16, "--sequence-parallel"]


@pytest.fixture
def job(tmp_path, capsys):
    path = tmp_path / "job.json"
    layout = [*LAYOUT, "--pipeline-schedule", "interleaved", "--shard", "optimizer"]
    status, out, err = run(capsys, "workload", "llama-3-405b", *layout, "-o", path)
    assert status == 0, err
    assert "16,384 x h100 (pipeline 16, data 128, tensor 8), megatron-core, 16 micro-batches" in err
    assert (
        "does not fit in 79 GiB (most of it: activations)" in err
        and "bubble: " in err
        and "in four cases of five" in err
    )
    assert "between hosts" in out and "pipeline" in out
    return path


@pytest.fixture
def small(tmp_path, capsys):
    """A job on eight hosts."""
    path = tmp_path / "small.json"
    layout = ["--tensor", 2, "--pipeline", 4, "--data", 8, "--microbatches", 4, "--shard", "optimizer"]
    status, _, err = run(capsys, "workload", "llama-3-8b", *layout, "-o", path)
    assert status == 0, err
    return path


def test_a_job_is_written_and_simulated(job, capsys):
    written = legato.read(job)
    assert isinstance(written, Job) and written.split[:3] == (3, 4, 4) and written.model.layers == 126
    status, out, err = run(capsys, "simulate", job, "--fidelity", "formulas")
    assert status == 0, err
    assert all(kind in out for kind in ("computing", "bubble", "tensor", "pipeline", "data", "optimizer"))
    assert "tokens/s, model FLOPs utilization" in err
    status, out, err = run(capsys, "simulate", job, "--fidelity", "formulas", "--json")
    found, step = json.loads(out), predict(written)
    assert found["step_s"] == step.seconds and found["gpus"] == 16_384
    assert found["sent_nbytes"]["data"]["network"] == step.sent["data", "network"]
    assert sum(found["memory_nbytes"].values()) == step.memory.total


def test_links_of_the_machine_are_options_of_simulate(job, capsys):
    def step_s(*options):
        status, out, err = run(capsys, "simulate", job, "--fidelity", "formulas", "--json", *options)
        assert status == 0, err
        return json.loads(out)["step_s"]

    assert step_s("--bandwidth", "400Gbit") == step_s()
    assert step_s("--bandwidth", "800Gbit") < step_s() < step_s("--bandwidth", "100Gbit")
    assert step_s("--local-bandwidth", "7200Gbit") < step_s() < step_s("--gpus-per-host", 1)


def test_a_job_is_simulated_link_by_link(small, tmp_path, capsys):
    job, timeline = small, tmp_path / "t.json"

    def step(*options):
        status, out, err = run(capsys, "simulate", job, "--json", *options)
        assert status == 0, err
        return json.loads(out)

    plain, slow = step("--topology", "rails"), step("--topology", "rails", "--disturb", "compute:9:2:0", "-o", timeline)
    assert plain["step_s"] < slow["step_s"] < 2 * plain["step_s"]
    drawn = legato.read(timeline)
    assert drawn.iteration_s == slow["step_s"] == max(span.end_s for span in drawn.spans)
    assert (9, 1) in drawn.members and sum(number for _, number in drawn.members) == 64
    assert {span.kind for span in drawn.spans} == {"forward", "backward", "optimizer", "message"}
    for verb, made in (("report", "r.html"), ("trace", "trace.json")):
        status, _, err = run(capsys, verb, timeline, "-o", tmp_path / made)
        assert status == 0, err
    page = (tmp_path / "r.html").read_text()
    assert f"{len(drawn.members)} GPUs of one job, predicted" in page
    names = [one.name for one in drawn.drawn()]
    assert "GPU 9" in names and len(names) == len(drawn.members) and all(f">{name}</td>" in page for name in names)
    assert sum(len(one.spans) for one in drawn.drawn()) == len(drawn.spans)
    status, out, err = run(capsys, "simulate", job, "--racks", 4, "--oversubscription", 2)
    assert status == 0 and "4 racks, oversubscription 2:1, by flows" in " ".join(out.split()), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fidelity", "formulas", "--racks", 2], "--racks: does not apply to --fidelity formulas (expected"),
        (["--topology", "rails", "--gpus-per-host", 1], "topology: rails for hosts of 1 on one card"),
        (["--racks", 3000], "racks: 3000 (expected 1 to the 2048 hosts)"),
        (["--disturb", "link:16384:2:0"], "link: 16384 (expected 0 to 16383)"),
        (["--disturb", "compute:3:2"], "disturb: 'compute:3:2' (expected something like"),
        (["--fidelity", "formulas", "--workers", 8], "--workers: does not apply to a whole job"),
        (["--fidelity", "formulas", "-o", "t.json"], "--output: does not apply to --fidelity formulas"),
        (["--fidelity", "formulas", "--share"], "--share: does not apply to a whole job"),
    ],
)
def test_what_simulate_refuses_for_a_job(job, capsys, options, message):
    status, _, err = run(capsys, "simulate", job, *options)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_job_beside_a_workload_is_refused(job, workload, capsys):
    status, _, err = run(capsys, "simulate", workload, job, "--fidelity", "formulas")
    assert status == 2 and "w.json: together with whole jobs (expected only one kind)" in err
    status, _, err = run(capsys, "simulate", job, job)
    assert status == 2 and "job.json: a whole job together with other files (expected it alone, or --share)" in err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama-3-70b", ["--gpus", 100, "--tensor", 8], "gpus: 100 (expected 96: tensor 8 x context 1"),
        ("llama-3-70b", ["--gpus", 64, "--tensor", 8, "--data", 4], "gpus: 64 (expected 32"),
        ("llama-3-70b", ["--tensor", 0], "tensor: 0 (expected 1 to 1,048,576)"),
        ("llama-3-70b", ["--tensor", 3], "model.heads: 64 (expected a multiple of the 3 workers of tensor)"),
        ("llama-3-70b", ["--pipeline", 2, "--split", "40,41"], "layers: 81 together (expected the model's 80)"),
        ("llama-3-70b", ["--pipeline", 2, "--split", "40,x"], "--split '40,x' (expected whole numbers"),
        ("llama-3-70b", ["--pipeline", 2, "--split", "40"], "layers: 1 numbers"),
        ("llama-3-70b", ["--preset", "megatron"], "unknown preset 'megatron'; did you mean 'megatron-core'"),
        ("llama-3-70b", ["--data", 2, "--device", "v100"], "unknown machine 'v100'"),
        ("llama-3-70b", ["--data", 2, "--overlap", "tensr"], "overlap: 'tensr' (expected tensor, tensor:forward"),
        (
            "llama-3-70b",
            ["--data", 4, "--replicas", 2],
            "replicas: 2 (expected a divisor of the 4 workers of data, and",
        ),
        ("llama-3-70b", ["--gradient-dtype", "bf16:int8"], "--gradient-dtype: 'bf16:int8' (expected fp32, bf16, or"),
        ("llama-3-70b", ["--data", 2, "--order", "data,tensor"], "order: data, tensor (expected each of"),
        ("llama-3-70b", ["--data", 2, "--batch", 3], "--batch-size: does not apply to a whole job"),
        ("llama-3-70b", ["--data", 2, "--accumulate", 3], "--accumulate: does not apply to a whole job"),
        ("llama-3-70b", ["--data", 2, "--recompute", "--recompute-only", "core"], "--recompute and --recompute-only"),
        ("resnet-v1-50", ["--data", 2], "resnet-v1-50: no language model (expected one of llm, gpt3"),
        ("deepseek-v3", ["--layers", 4], "model: latent attention only in whole jobs (expected --gpus"),
        ("deepseek-v3", ["--data", 2, "--heads", 64], "kv_heads: 128 (expected a divisor of the 64 heads)"),
        ("llm", ["--data", 2], "--layers, --hidden, --heads, --vocab: missing"),
    ],
)
def test_what_workload_refuses_for_a_job(capsys, tmp_path, name, options, message):
    status, _, err = run(capsys, "workload", name, *options, "-o", tmp_path / "job.json")
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "job.json").exists()


def test_facts_of_a_job_are_options(capsys, tmp_path):
    options = ["--gpus", 64, "--tensor", 8, "--context", 2, "--order", "data,pipeline,context,tensor", "--recompute"]
    options += ["--device", "a100", "--efficiency", 0.5, "--overlap", "none", "--preset", "torchtitan"]
    options += ["--gradient-dtype", "bf16:fp32", "--whole-logits", "--eager", "--host-time", "5ms"]
    options += ["--mixture-time", "4ms", "--attention-efficiency", 0.3, "--deduplicate-experts"]
    path = tmp_path / "job.json"
    status, out, err = run(capsys, "workload", "llama-3-8b", *options, "--sequence", 4096, "-o", path, "--json")
    assert status == 0 and err == "", err
    job = legato.read(path)
    assert json.loads(out)["gpus"] == 64 == job.mesh.workers
    assert (job.mesh.data, job.mesh.order[0], job.recompute, job.model.sequence) == (4, "data", "full", 4096)
    assert (job.machine.name, job.machine.efficiency) == ("a100", 0.5)
    assert (job.framework.name, job.framework.hidden) == ("torchtitan", ())
    assert (job.framework.gradient_nbytes, job.framework.sent_nbytes) == (2, 4)
    assert not job.framework.fused_loss and not job.framework.fused and job.framework.deduplicates
    assert (job.framework.host_s, job.framework.mixture_s, job.machine.attention_efficiency) == (5e-3, 4e-3, 0.3)


def test_a_small_layer_is_said_to_be_bound_by_the_host(capsys):
    shape = ["--layers", 4, "--hidden", 512, "--heads", 8, "--vocab", 32_000, "--sequence", 512]
    status, _, err = run(capsys, "workload", "llm", *shape, "--data", 2)
    assert status == 0 and "the host may take longer" in err


def test_what_only_a_measured_step_says_of_a_mixture(capsys):
    for options, said in ([], True), (["--mixture-time", "4ms"], False):
        status, _, err = run(capsys, "workload", "deepseek-v2", "--data", 8, "--expert", 8, *options)
        assert status == 0 and ("small kernels of a mixture are counted as none" in err) == said


@pytest.mark.slow
def test_a_machine_is_fitted_and_used(job, capsys, tmp_path):
    machine = tmp_path / "machine.json"
    status, out, err = run(capsys, "fit-machine", f"{job}=8s", "-o", machine)
    assert status == 0 and "one step fits exactly" in err, err
    fitted = legato.read(machine)
    layout = [*LAYOUT, "--pipeline-schedule", "interleaved", "--shard", "optimizer", "--device", machine]
    status, out, err = run(capsys, "workload", "llama-3-405b", *layout, "-o", tmp_path / "again.json")
    assert status == 0 and "given or fitted" in err, err
    again = legato.read(tmp_path / "again.json")
    assert again.machine == fitted and predict(again).seconds == pytest.approx(8)
    status, out, err = run(capsys, "fit-machine", f"{job}=8s", f"{tmp_path / 'again.json'}=10s", "--json")
    found = json.loads(out)
    assert status == 0 and [step["measured_s"] for step in found["steps"]] == [8, 10]
    assert [step["left_out_s"] for step in found["steps"]] == pytest.approx([10, 8])
    status, out, err = run(capsys, "layouts", "llama-3-8b", "--gpus", 8, "--batch", 8, "--device", machine, "--json")
    assert status == 0, err


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("J", "J (expected a file and its seconds, such as job.json=4.21s)"),
        ("J=fast", "J: 'fast' is not a time"),
        ("J=1ms", "with an efficiency of 1"),
        ("nothing.json=1s", "nothing.json: cannot read"),
    ],
)
def test_what_fit_machine_refuses(job, capsys, step, message):
    status, out, err = run(capsys, "fit-machine", step.replace("J", str(job)))
    assert status == 2 and not out
    assert message.replace("J", str(job)) in err and err.count("\n") == 1


def test_jobs_are_swept_over_links_and_hosts(job, capsys, tmp_path):
    axes = ["--bandwidth", "200,800Gbit", "--local-bandwidth", "3.6Tbit", "--gpus-per-host", "4,8", "--jobs", 1]
    rows = tmp_path / "rows.csv"
    status, out, err = run(capsys, "sweep", job, "--fidelity", "formulas", *axes, "--json", "-o", rows)
    assert status == 0, err
    cells = json.loads(out)
    assert len(cells) == 4
    for cell in cells:
        alone = ["--bandwidth", f"{cell['bandwidth_bps'] / 1e9}Gbit", "--gpus-per-host", cell["gpus_per_host"]]
        status, out, err = run(capsys, "simulate", job, "--fidelity", "formulas", "--json", *alone)
        found = json.loads(out)
        assert {
            name: found[name] for name in ("step_s", "tokens_per_s", "utilization", "bubble_s")
        }.items() <= cell.items()
        assert found["exposed_s"] == {kind: cell[f"{kind}_s"] for kind in found["exposed_s"]}
    with open(rows) as file:
        written = list(csv.DictReader(file))
    assert [float(row["step_s"]) for row in written] == [cell["step_s"] for cell in cells]
    status, out, err = run(capsys, "sweep", job, "--fidelity", "formulas", *axes)
    assert "4 cells, 3.6 Tbit/s inside hosts, by formulas" in out and "800 Gbit/s" in out and "1.00x" in out


def test_a_slow_link_is_beside_the_same_gpu_undisturbed(tmp_path, capsys):
    """Its stage computes less than the other one, and waits longer: it is named, and its own figures stand beside."""
    path = tmp_path / "j.json"
    layout = ("--pipeline", 2, "--data", 16, "--microbatches", 8, "--split", "12,20", "--shard", "gradients")
    assert run(capsys, "workload", "llama-3-8b", *layout, "-o", path)[0] == 0
    status, out, err = run(capsys, "simulate", path, "--disturb", "link:0:200:0")
    assert status == 0 and int(re.search("by flows: the busiest, GPU ([0-9]+)", out)[1]) < 16
    assert "costs nothing" not in err
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if line.count("│") > 3]
    cells = {kind: (before, now) for _, kind, before, now, *_ in rows}
    assert cells["computing"][0] == cells["computing"][1] and cells["data"][0] != cells["data"][1]
    status, out, err = run(capsys, "simulate", path, "--disturb", "link:0:fails:0:1us")
    assert status == 0 and "link:0:fails:0:1us: costs nothing" in err and int(re.search("GPU ([0-9]+)", out)[1]) >= 16
    found = json.loads(run(capsys, "simulate", path, "--disturb", "link:0:fails:0:1us", "--json")[1])
    assert found["undisturbed_s"] == pytest.approx(found["step_s"])


def test_jobs_are_swept_link_by_link_and_go_on_from_there(small, capsys, tmp_path):
    page = tmp_path / "page.html"
    axes = ["--topology", "leaf-spine", "--racks", "1,2", "--oversubscription", 8, "--balance", "spray"]
    axes += ["--disturb", "none", "--disturb", "link:0:4:0", "--jobs", 1]
    status, out, err = run(capsys, "sweep", small, *axes, "--json", "-o", page)
    assert status == 0, err
    cells = json.loads(out)
    assert [(cell["racks"], cell["disturb"]) for cell in cells] == [
        (1, "none"), (1, "link:0:4:0"), (2, "none"), (2, "link:0:4:0")
    ]  # fmt: skip
    for cell in cells:
        alone = ["--racks", cell["racks"], "--disturb", cell["disturb"], "--oversubscription", 8, "--balance", "spray"]
        status, out, err = run(capsys, "simulate", small, *alone, "--json")
        assert json.loads(out)["step_s"] == cell["step_s"]
    assert len({cell["step_s"] for cell in cells}) > 2 and cells[0]["speedup"] == 1
    assert "The step on each network, leaf-spine, oversubscription 8:1, spray, by flows" in page.read_text()
    status, out, err = run(capsys, "sweep", small, *axes, "-o", page)
    assert status == 0 and "has 4 finished cells" in err and "4 rows -> " in err and "disturbed" in out


def test_a_cell_that_fails_does_not_end_a_sweep_of_jobs(small, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "_MOST_SERVICES", 10)
    status, out, err = run(capsys, "sweep", small, "--racks", "1,2", "--jobs", 1, "-o", tmp_path / "rows.csv")
    assert status == 0 and out.count("failed") == 2
    assert "2 failed: more than 10 flows and computations" in err


def test_the_first_cell_of_a_file_may_have_failed(small, capsys, tmp_path, monkeypatch):
    step = simulate_links(legato.read(small), network_of(legato.read(small).machine, 64))
    several = len(step.lanes) * max(len(lane.actions) for lane in step.program.lanes)
    monkeypatch.setattr(simulation, "_MOST_SERVICES", 3 * several)
    rows, slow = tmp_path / "rows.csv", ",".join(f"compute:{k}:{1 + k / 64}:0" for k in range(64))
    status, _, err = run(capsys, "sweep", small, "--disturb", slow, "--disturb", "none", "--jobs", 1, "-o", rows)
    assert status == 0 and "1 failed: more than" in err
    with open(rows) as file:
        failed, found = csv.DictReader(file)
    assert failed["error"] and not failed["step_s"] + failed["computing_s"]
    assert float(found["step_s"]) == step.step.seconds and float(found["speedup"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fidelity", "formulas", "--workers", 4], "--workers: does not apply to a whole job"),
        (["--fidelity", "formulas", "--racks", 2], "--racks: does not apply to --fidelity formulas"),
        (["-o", "rows.parquet"], "--output rows.parquet: .parquet (expected .csv, .html, .svg, .pdf)"),
        (["--fidelity", "formulas", "--gpus-per-host", 0], "gpus_per_host: 0 (expected 1 to"),
        (["--racks", "0,1"], "racks: 0"),
        (["--disturb", "link:16384:4:0"], "link: 16384"),
        (["--racks", ",".join(map(str, range(1, 10002)))], "10,001 cells (expected at most 10,000)"),
    ],
)
def test_what_sweep_refuses_for_a_job(job, capsys, options, message):
    status, out, err = run(capsys, "sweep", job, *options)
    assert status == 2 and not out and message in err and err.count("\n") == 1


def test_a_job_beside_a_workload_is_not_swept(job, workload, capsys):
    status, _, err = run(capsys, "sweep", job, workload)
    assert status == 2 and "together with whole jobs" in err


def test_a_configuration_is_a_model(capsys, tmp_path):
    path = tmp_path / "config.json"
    config = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    path.write_text(json.dumps(config | {"hidden_act": "silu"}))
    status, _, err = run(capsys, "workload", path, "--data", 2, "--device", "h200", "-o", tmp_path / "job.json")
    assert status == 0 and err.startswith("config on 2 x h200"), err
    assert legato.read(tmp_path / "job.json").model.hidden == 512
    status, _, err = run(capsys, "workload", path, "-o", tmp_path / "w.json")
    assert status == 0 and err.startswith("llm-"), err
    status, out, err = run(capsys, "layouts", path, "--gpus", 2, "--batch", 4, "--json")
    assert status == 0 and json.loads(out)["layouts"], err
    status, _, err = run(capsys, "workload", tmp_path / "job.json", "--data", 2)
    assert status == 2 and "expected a model's configuration" in err and err.count("\n") == 1


def test_deepseek_is_named_as_a_whole_job(capsys, tmp_path):
    path = tmp_path / "job.json"
    options = ["--layers", 5, "--gpus", 64, "--expert", 64, "--microbatches", 2, "--device", "b200"]
    status, out, err = run(capsys, "workload", "deepseek-v3", *options, "-o", path)
    assert status == 0, err
    assert "deepseek-v3 on 64 x b200 (data 64, expert 64)" in err and "expert" in out
    model = legato.read(path).model
    assert (model.layers, len(model.mixtures), model.latent.query) == (5, 2, 1536)


@pytest.mark.parametrize("option", [["--machine", "a100"], ["--bandwidth", "800Gbit"], ["--gpus", 8]])
def test_the_layout_and_machine_of_a_job_stay(job, capsys, option):
    status, out, err = run(capsys, "layouts", job, *option)
    assert status == 2 and not out and err == f"legato: {option[0]}: does not apply to a whole job\n"


def figures_of(page):
    text = page.read_text().split('<script type="application/json" id="figures">')[1].split("</script>")[0]
    return [
        {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in figure["data"]}
        for figure in json.loads(text).values()
    ]


@pytest.mark.slow
def test_layouts_and_machines_are_drawn(capsys, tmp_path):
    page = tmp_path / "layouts.html"
    options = ["--gpus", 32, "--batch", 32, "--device", "a100", "--number", 5]
    status, out, err = run(capsys, "layouts", "llama-3-8b", *options, "--report", page, "--json")
    assert status == 0 and err == "", err
    found = json.loads(out)
    layouts, machines = figures_of(page)
    for k, step in enumerate(found["layouts"]):
        parts = {"computing": step["computing_s"], "bubble": step["bubble_s"], **step["exposed_s"]}
        drawn = {part: layouts.get(part, {}).get(-k, 0) for part in PARTS}
        assert drawn == pytest.approx(parts, rel=1e-9, abs=1e-9 * step["step_s"])
    steps = [sum(part.get(-k, 0) for part in machines.values()) for k in range(8)]
    assert steps == pytest.approx([found["layouts"][0]["step_s"], *sorted(found["faster"].values())])
    text = page.read_text()
    assert f"The fastest of {found['compared']:,} layouts, as predicted" in text and "(a default; legato" in text
    assert "that allocators and libraries take is not counted" in text


def test_machines_are_drawn_for_a_job(job, capsys, tmp_path):
    page = tmp_path / "machines.html"
    status, out, err = run(capsys, "layouts", job, "--report", page)
    assert status == 0 and f"report -> {page}" in err and "the machine as it is" in out, err
    (machines,) = figures_of(page)
    assert sum(part.get(0, 0) for part in machines.values()) == pytest.approx(predict(legato.read(job)).seconds)
    assert "does not fit in 79 GiB" in page.read_text()


def test_every_part_of_a_step_can_be_drawn():
    assert list(PARTS) == [COMPUTING, "bubble", *KINDS]


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("L.txt", ": .txt (expected .html, .svg, .pdf)"),
        ("missing/L.html", ": no such directory"),
        ("J", ": would overwrite an input"),
    ],
)
def test_where_layouts_are_not_drawn(job, capsys, tmp_path, report, message):
    path = job if report == "J" else tmp_path / report
    before = job.read_bytes()
    status, _, err = run(capsys, "layouts", job, "--report", path)
    assert status == 2 and f"--report {path}{message}" in err and err.count("\n") == 1
    assert job.read_bytes() == before


def test_layouts_say_what_a_prediction_does_not_know(capsys, tmp_path):
    shape = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    small = [tmp_path / "config.json", "--sequence", 1024, "--gpus", 4, "--batch", 16]
    status, out, err = run(capsys, "layouts", *small)
    assert status == 0 and "the machine as it is" in out
    assert "in four cases of five" in err and "the host may take longer" in err
