"""The command line as a user meets it: what it prints, and how it fails."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support import PATIENCE_S, unmeasured
from support.command import run, without_progress
from typer.main import get_command

import legato
from legato.cli.axes import SEVERAL, SEVERAL_TIMES
from legato.commands import app
from legato.core import files
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import EXTRAS
from legato.core.plan import Plan
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS
from legato.schedule.bound.lower_bound import lower_bound

ROOT = Path(__file__).resolve().parents[2]


def fails(capsys, *arguments):
    """The one line with which a command must refuse wrong input."""
    status, out, err = run(capsys, *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert status == 2 and out == ""
    assert len(lines) == 1 and lines[0].startswith("legato: "), err
    return lines[0]


def test_plan_prints_a_row_for_every_scheduler(capsys, workload):
    status, out, _ = run(capsys, "plan", workload, "--json", "--workers", 4, "--bandwidth", "1Gbit")
    rows = json.loads(out)
    assert status == 0 and [row["scheduler"] for row in rows] == list(SCHEDULERS)
    keys = ["scheduler", "iteration_s", "lower_bound_s", "gap", "overlap", "utilization", "num_messages", "runnable"]
    keys += ["plan_s"]
    for row in rows:
        assert list(row) == keys
        assert row["iteration_s"] >= row["lower_bound_s"] * (1 - 1e-12)
        assert row["gap"] == pytest.approx(row["iteration_s"] / row["lower_bound_s"] - 1)


def test_plan_says_what_can_only_be_simulated(capsys, workload, tmp_path):
    run(capsys, "workload", "resnet-v1-50", "-o", tmp_path / "branches.json")
    said = run(capsys, "plan", tmp_path / "branches.json", "--workers", 8, "--scheduler", "ddp,caramel")[2]
    assert (
        "can only be simulated, because they compute in another order or gather other slices than they reduce: caramel"
        in said
    )
    assert "only be simulated" not in run(capsys, "plan", workload, "--scheduler", "ddp,dear")[2]


@pytest.mark.slow
def test_plan_says_which_bound_each_plan_is_compared_with(capsys, tmp_path):
    run(capsys, "workload", "googlenet", "-o", tmp_path / "w.json")
    ring = (tmp_path / "w.json", "--workers", 512, "--bandwidth", "3Gbit", "--latency", "30us", "--collective", "ring")
    said = run(capsys, "plan", *ring, "--scheduler", "single,dear")[2]
    line = "the bound for what it sends: only all-reduces 378 ms, also halves in pairs 354 ms"
    assert f"above bound: each plan is compared with {line}" in " ".join(said.split())
    assert "no plan can be faster than 354 ms" in " ".join(
        run(capsys, "plan", *ring, "--scheduler", "single,dear")[1].split()
    )
    status, out, said = run(capsys, "plan", *ring, "--scheduler", "single,fifo")
    assert status == 0 and "no plan of all-reduces can be faster than 378 ms" in " ".join(out.split())
    assert "above bound" not in said


def test_plan_on_parameter_servers(capsys, workload):
    status, out, _ = run(capsys, "plan", workload, "--json", "--workers", 4, "--servers", 2)
    assert status == 0 and [row["scheduler"] for row in json.loads(out)] == list(SERVER_SCHEDULERS)
    assert all(row["runnable"] for row in json.loads(out))
    assert "0 parameter servers (expected at least 1" in fails(capsys, "plan", workload, "--scheduler", "tac")


@pytest.mark.parametrize("options", [(), ("--compute", "unlimited"), ("--workers", 4, "--servers", 2)])
def test_plan_proves_its_bounds_again(capsys, workload, options):
    status, out, _ = run(capsys, "plan", workload, "--check-bound", "--json", *options)
    assert status == 0 and all(row["bound_checked"] is True for row in json.loads(out))
    assert "(proved in exact arithmetic)" in run(capsys, "plan", workload, "--check-bound", *options)[1]


def test_a_bound_that_its_certificate_does_not_prove_gets_one_line(capsys, workload, tmp_path, monkeypatch):
    def too_much(*arguments, **options):
        bound = lower_bound(*arguments, **options)
        return msgspec.structs.replace(bound, seconds=bound.seconds * 1.01)

    monkeypatch.setattr("legato.schedule.compare.lower_bound", too_much)
    plan = tmp_path / "plan.json"
    line = fails(capsys, "plan", workload, "--scheduler", "fifo", "--check-bound", "-o", plan)
    assert "its certificate proves only" in line and not plan.exists()
    assert run(capsys, "plan", workload, "--scheduler", "fifo")[0] == 0


def test_plan_by_hand(capsys, workload):
    """Ring on two workers: alpha = 2 * 1 ms, beta = 2 * 1/2 * 8 bits / 1 Gbit/s."""
    _, out, _ = run(
        capsys, "plan", workload, "--json", "--scheduler", "single",
        "--workers", 2, "--bandwidth", "1Gbit", "--latency", "1ms", "--collective", "ring",
    )  # fmt: skip
    (row,) = json.loads(out)
    assert row["iteration_s"] == pytest.approx(0.02 + (0.002 + 5_000_000 * 8e-9) + 0.01)


def save(path, backward_s, sizes, forward_s=0.01, readers=(0,)):
    """A workload with one backward op per tensor."""
    ops = [legato.Op("f", "forward", forward_s)]
    ops += [legato.Op(f"b{i}", "backward", backward_s, (i,)) for i in range(len(sizes))]
    tensors = [legato.Tensor(f"w{i}", nbytes, i + 1, readers) for i, nbytes in enumerate(sizes)]
    legato.write(path, legato.Workload("job", tuple(ops), tuple(tensors)))
    return path


def test_the_network_is_named_also_where_a_plan_sends_otherwise(capsys, workload):
    gloo = ("plan", workload, "--scheduler", "ddp,legato", "--backend", "gloo")
    _, out, err = run(capsys, *gloo, "--latency", "1ms")
    assert out.startswith("toy on 8 workers, 10 Gbit/s, latency 1 ms, 5 us a send, ring;")
    assert "legato sends with " in err and "--collective ring allows only ring" in err
    assert "sends with" not in run(capsys, *gloo, "--collective", "ring")[2]


def test_a_plan_is_for_all_backends_or_for_one(capsys, tmp_path, workload):
    def collectives(*options):
        assert run(capsys, "plan", workload, *options, "-o", tmp_path / "p.json")[0] == 0
        return {message.collective for message in files.read(tmp_path / "p.json", Plan).messages}

    slow = ("--latency", "1ms")
    assert collectives(*slow) == collectives(*slow, "--backend", "nccl") == {"ring"}
    assert collectives(*slow, "--backend", "gloo") != {"ring"}
    measured = tmp_path / "cluster.json"
    files.write(measured, Cluster(8, {"gloo": LinearCost(1e-4, 1e-9), "ring": LinearCost(2e-4, 1e-9)}))
    assert collectives("--cluster", measured) == {"gloo"}
    assert collectives("--cluster", measured, "--backend", "any") == {"ring"}
    code, _, err = run(capsys, "plan", workload, "--collective", "shuffle", "--backend", "nccl")
    assert (code, err) == (2, "legato: backend nccl: the cluster has shuffle (expected ring or nccl)\n")


def test_buckets_are_printed_only_where_they_gain(capsys, tmp_path):
    """154 tensors: DDP's buckets hide behind computation, gain no more than half a per cent, or gain."""
    names = ("--scheduler", "ddp,merge-optimal", "--collective", "ring")
    hidden = save(tmp_path / "hidden.json", 0.01, [1000] * 154)
    err = run(capsys, "plan", hidden, *names)[2]
    assert "stay with DDP: with its default buckets it is predicted to be within 0.5% of the bound" in err
    assert "bucket_cap_mb_list" not in err
    exposed = save(tmp_path / "exposed.json", 1e-6, [2**20] * 154, forward_s=10.0, readers=())
    err = run(capsys, "plan", exposed, *names, "--bandwidth", "100Mbit")[2]
    assert "stay with DDP: no plan is predicted to be more than 0.5% faster" in err and "bucket_cap" not in err
    late = save(tmp_path / "late.json", 0.05, [1_000_000, 5_000_000])
    assert "bucket_cap_mb_list=[0.95" in run(capsys, "plan", late, *names, "--bandwidth", "1Gbit")[2]


def test_messages_have_a_limit_and_larger_tensors_are_named(capsys, tmp_path):
    job, plan = save(tmp_path / "job.json", 0.01, [2**20, 2**20, 3 * 2**20]), tmp_path / "p.json"
    err = run(capsys, "plan", job, "--scheduler", "single,p3,legato", "--max-message", "2MiB")[2]
    assert "1 tensor of more than 2 MiB: sent whole by single, which do not partition" in err
    err = run(capsys, "plan", job, "--scheduler", "p3,legato", "--max-message", "2MiB", "-o", plan)[2]
    assert "sent whole" not in err
    assert max(message.nbytes for message in legato.read(plan, legato.Plan).messages) <= 2**21
    assert "max_message_bytes: 8 (expected at least 16)" in fails(capsys, "plan", job, "--max-message", "8")


def test_sharded_plans(capsys, workload, tmp_path):
    """5 MB of gradients, eight workers: each keeps an eighth, and saves 4.38 MB, or 4.17 MiB."""
    plan, options = tmp_path / "p.json", ["--workers", 8, "--scheduler", "ddp,dear,legato"]
    status, out, err = run(capsys, "plan", workload, *options, "--shard", "optimizer", "--check-bound", "-o", plan)
    assert status == 0 and "ring, optimizer sharded; no plan can be faster than" in " ".join(out.split())
    assert "each worker saves 4.17 MiB per state of the optimizer (Adam has two)" in err
    assert "of gradients" not in err and "stock DDP" not in err
    written = legato.read(plan, legato.Plan)
    legato.check_plan(written, legato.read(workload, legato.Workload))
    assert written.shard == "optimizer" and {m.kind for m in written.messages} == {"reduce_scatter", "all_gather"}
    assert ", and 4.17 MiB of gradients" in run(capsys, "plan", workload, *options, "--shard", "gradients")[2]
    found = json.loads(run(capsys, "plan", workload, *options, "--shard", "gradients", "--json")[1])
    assert [row["scheduler"] for row in found] == ["ddp", "dear", "legato"]
    assert all(row["iteration_s"] >= row["lower_bound_s"] * (1 - 1e-12) for row in found)
    error = fails(capsys, "plan", workload, "--shard", "optimizer", "--servers", 1)
    assert "shard: 'optimizer' with parameter servers (expected none" in error


def test_gradients_in_a_wire_format(capsys, tmp_path):
    """24 MB behind a backward op of 30 ms and 8 MB at the end: at 8 Gbit/s, two workers, a byte takes a nanosecond."""
    ops = (legato.Op("f", "forward", 0.01), legato.Op("b1", "backward", 0.001), legato.Op("b0", "backward", 0.03))
    tensors = (legato.Tensor("late", 24_000_000, 1, (0,)), legato.Tensor("first", 8_000_000, 2, (0,)))
    job, plan = tmp_path / "w.json", tmp_path / "p.json"
    legato.write(job, legato.Workload("toy", ops, tensors))
    options = ["--workers", 2, "--bandwidth", "8Gbit", "--latency", 0, "--collective", "ring"]
    given = [*options, "--scheduler", "ddp,fifo,legato", "--wire", "bf16"]
    status, out, err = run(capsys, "plan", job, *given, "--check-bound", "-o", plan)
    assert status == 0 and "gradients in bf16; no plan of all-reduces can be faster than" in " ".join(out.split())
    assert "stock DDP" not in err
    assert {m.wire for m in legato.read(plan, legato.Plan).messages} == {"bf16"}
    rows = json.loads(run(capsys, "plan", job, *given, "--json")[1])
    assert [row["iteration_s"] for row in rows] == pytest.approx([0.045] * 3)
    assert "wire: 'bf16' with parameter servers" in fails(capsys, "plan", job, "--wire", "bf16", "--servers", 1)
    assert "wire: 'bf16' with shard 'optimizer'" in fails(capsys, "plan", job, "--wire", "bf16", "--shard", "optimizer")
    assert "'bf17' is not one of" in fails(capsys, "plan", job, "--wire", "bf17")


def test_plan_writes_plan_and_timeline(capsys, workload, tmp_path):
    plan, timeline = tmp_path / "p.json", tmp_path / "t.json"
    status, out, _ = run(capsys, "plan", workload, "-o", plan, "--timeline", timeline)
    assert status == 0 and "merge-optimal" in out
    legato.check_plan(legato.read(plan, legato.Plan), legato.read(workload, legato.Workload))
    assert legato.read(timeline, legato.Timeline).iteration_s > 0


def test_trace_and_report(capsys, workload, tmp_path):
    timeline, trace, report = tmp_path / "t.json", tmp_path / "t.perfetto.json", tmp_path / "r.html"
    run(capsys, "plan", workload, "--timeline", timeline)
    assert run(capsys, "trace", timeline, "-o", trace)[0] == 0
    assert json.loads(trace.read_text())["traceEvents"]
    status, out, _ = run(capsys, "report", timeline, timeline, "-o", report, "--json")
    assert status == 0 and json.loads(out) == {"report": str(report), "timelines": 4}  # each with DDP's
    assert "<html" in report.read_text()


def test_a_cluster_file_is_used(capsys, workload, tmp_path):
    cluster = tmp_path / "c.json"
    legato.write(cluster, legato.Cluster(workers=3, collectives={"gloo": legato.LinearCost(0.5, 0.0)}))
    _, out, _ = run(capsys, "plan", workload, "--cluster", cluster, "--scheduler", "single", "--json")
    assert json.loads(out)[0]["iteration_s"] == pytest.approx(0.02 + 0.5 + 0.01)
    assert "--cluster and --workers" in fails(capsys, "plan", workload, "--cluster", cluster, "--workers", 2)


def test_unknown_names_come_with_the_nearest(capsys, workload):
    assert "did you mean 'merge-optimal'" in fails(capsys, "plan", workload, "--scheduler", "merge-optimum")
    assert "did you mean 'ring'" in fails(capsys, "plan", workload, "--collective", "rings")
    assert "Did you mean 'plan'?" in fails(capsys, "plann", workload)
    assert "did you mean --bandwidth" in fails(capsys, "plan", workload, "--bandwith", "1Gbit")
    assert "resnet-50" in fails(capsys, "demo", "--model", "resnet50")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "w.json"),
        (b"{", "w.json"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"format": "legato.plan/1"}', "legato.plan/1"),
        (b'{"format":"legato.workload/1","name":"x","ops":[{"name":"b","phase":"backward","duration_s":-1}],'
         b'"tensors":[{"name":"t","nbytes":1,"ready_after":0}]}', "ops[0].duration_s: -1"),
        (b'{"format":"legato.workload/1","name":"x","ops":[{"name":"b","phase":"backward","duration_s":1,"deps":[3]}],'
         b'"tensors":[{"name":"t","nbytes":1,"ready_after":0}]}', "ops[0].deps: 3"),
        (b'{"format":"legato.workload/1","name":"x","ops":[{"name":"b","phase":"backward","duration_s":1}],'
         b'"tensors":[]}', "tensors: none"),
    ],
)  # fmt: skip
def test_bad_files_get_one_line(capsys, tmp_path, content, expected):
    path = tmp_path / "w.json"
    path.write_bytes(content)
    line = fails(capsys, "plan", path)
    assert expected in line and str(path) in line


@pytest.mark.parametrize(
    "options",
    [
        ["--bandwidth", "fast"], ["--bandwidth", "-1Gbit"], ["--bandwidth", "0Gbit"], ["--latency", "3"],
        ["--latency", "nan"], ["--workers", "0"], ["--workers", "many"], ["--compute", "two"], ["--reduce", "1Gbit"],
        ["--workers", "99999999999999999999"], ["--servers", "99999999999999999999"], ["--latency", "1e300s"],
    ],
)  # fmt: skip
def test_bad_options_get_one_line(capsys, workload, options):
    line = fails(capsys, "plan", workload, *options)
    assert options[1] in line or options[0] in line


def test_files_that_are_not_there(capsys, workload, tmp_path):
    assert "nowhere.json" in fails(capsys, "plan", tmp_path / "nowhere.json")
    assert "Missing argument" in fails(capsys, "plan")
    assert "nowhere" in fails(capsys, "plan", workload, "-o", tmp_path / "nowhere" / "p.json", "--json")


def test_help_shows_an_example(capsys):
    for verb, command in get_command(app).commands.items():
        status, out, _ = run(capsys, verb, "--help")
        assert status == 0 and f"legato {verb}" in out and "Example" in out
        assert "\n" not in command.help.replace("\n\n", ""), (
            f"{verb}: its help breaks lines that the terminal would not"
        )
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out == f"legato {legato.__version__}\n"


def test_it_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "legato", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"legato {legato.__version__}\n"


def test_capture_needs_no_more_than_three_things(capsys, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "w.json"
    status, out, _ = run(capsys, "capture", f"{ROOT}/examples/train.py:training", "-o", path, "--runs", 2, "--json")
    said, workload = json.loads(out), legato.read(path, legato.Workload)
    assert status == 0 and said["num_tensors"] == len(workload.tensors) == 12
    assert said["nbytes"] == workload.nbytes and said["num_ops"] == len(workload.ops)
    assert "no such" in fails(capsys, "capture", f"{ROOT}/examples/nothing.py:training", "-o", path).lower()


def test_calibrate_says_how_it_is_started(capsys, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.delenv("RANK", raising=False)
    assert "torchrun" in fails(capsys, "calibrate", "-o", tmp_path / "c.json")


@pytest.mark.slow
def test_calibrate_under_torchrun(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "c.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    legato_command = str(Path(sys.executable).with_name("legato"))
    out = subprocess.run(
        [*torchrun, legato_command, "calibrate", "-o", path, "--collectives", "ring", "--depths", "1,2",
         "--max-message", "1MiB", "--json"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip
    said, cluster = json.loads(out), legato.read(path, legato.Cluster)
    assert cluster.workers == 2 and cluster.default_collective == "gloo" and 0 < cluster.send_s < 1
    assert said["cluster"]["collectives"]["gloo"]["alpha_s"] == cluster.cost().alpha_s
    assert list(cluster.collectives) == ["gloo", "ring"] and list(cluster.depths["ring"]) == [2]
    assert said["cluster"]["depths"]["ring"]["2"]["alpha_s"] == cluster.cost("ring", 2).alpha_s
    sizes = {sample["nbytes"] for sample in said["samples"]}
    assert max(sizes) == 2**20
    assert len(said["samples"]) == 3 * len(sizes) and said["worst_error"] >= said["median_error"] >= 0


@pytest.mark.slow
def test_workload_of_a_paper_s_model(capsys, tmp_path):
    """What `zoo` holds is tested there; here what the verb makes of its options."""
    path = tmp_path / "w.json"
    status, out, _ = run(
        capsys, "workload", "inception-v3", "--batch-size", 8, "--device", "k80", "--device-flops", "10T",
        "--forward", "176ms", "-o", path, "--json",
    )  # fmt: skip
    said, job = json.loads(out), legato.read(path, legato.Workload)
    assert status == 0 and said["workload"] == str(path) and said["nbytes"] == job.nbytes
    assert said["num_tensors"] == len(job.tensors) == 196 and said["num_ops"] == len(job.ops)
    assert job.batch_size == 8 and job.device == "k80 at 10T"
    assert said["forward_s"] == pytest.approx(0.176)
    rows = json.loads(run(capsys, "workload", "--list", "--json")[1])
    assert {"name": "vgg-16", "num_tensors": 32, "parameters": 138_357_544}.items() <= rows[15].items()
    assert "gpt2-xl" in run(capsys, "workload", "--list")[1]
    for wrong, expected in [
        (["resnet-v1-5O"], "did you mean 'resnet-v1-50'"), ([], "--list"), (["gpt2", "--device", "v10"], "'v100'"),
        (["gpt2", "--device-flops", "10"], "10T"),
        (["gpt2", "--batch-size", 0], "batch_size: 0"), (["gpt2", "--forward", "0"], "forward_s: 0"),
    ]:  # fmt: skip
        assert expected in fails(capsys, "workload", *wrong)


def test_workload_of_a_language_model(capsys, tmp_path):
    path = tmp_path / "w.json"
    seventy = ["llm", "--layers", 80, "--hidden", 8192, "--heads", 64, "--kv-heads", 8, "--vocab", 128_256]
    status, out, _ = run(
        capsys, "workload", *seventy, "--batch", 4, "--sequence", 2048, "--device", "a100", "--recompute",
        "--accumulate", 2, "--replica-devices", 8, "--gradients", "fp32", "--efficiency", 0.4, "-o", path, "--json",
    )  # fmt: skip
    said, job = json.loads(out), legato.read(path, legato.Workload)
    assert status == 0 and said["name"] == job.name == "llm-70.6b" and job.batch_size == 4
    assert job.device == "a100 at 40% bf16 (1 of 8)"
    vectors = (2 * 80 + 1) * 8192  # every device holds all of them
    assert said["nbytes"] == 4 * ((70_553_706_496 - vectors) // 8 + vectors)
    assert {"accumulation", "layer79/recompute"} <= {op.name for op in job.ops}
    status, _, err = run(capsys, "workload", "llama-3-405b", "--replica-devices", 128)
    assert status == 0 and "llama-3-405b, 1 sample on h100 bf16 (1 of 128): " in err
    assert "47.2 GiB on a device" in err  # 16 bytes a parameter
    said = json.loads(run(capsys, "workload", "llama-3-8b", "--layers", 2, "--sequence", 64, "--json")[1])
    assert said["name"] == "llm-1.49b" and said["num_tensors"] == 2 * 9 + 3
    assert json.loads(run(capsys, "workload", "gpt3", "--sequence", 64, "--json")[1])["name"] == "gpt3"
    for wrong, expected in [
        (["llm", "--hidden", 64, "--heads", 4], "--layers, --vocab: missing"), (["gpt-3"], "did you mean 'gpt3'"),
        ([*seventy, "--hidden", 8193], "hidden: 8193"), ([*seventy, "--kv-heads", 7], "kv_heads: 7"),
        ([*seventy, "--layers", 0], "layers: 0"), ([*seventy, "--layers", 10**6], "layers: 1,000,000"),
        ([*seventy, "--device", "h10"], "did you mean 'h100'"), ([*seventy, "--device", "k80"], "no peak in bf16"),
        ([*seventy, "--precision", "bf61"], "did you mean 'bf16'"), ([*seventy, "--efficiency", 0], "efficiency: 0"),
        ([*seventy, "--accumulate", 3], "batch_size: 1"), ([*seventy, "--experts", 2.5], "--experts"),
        (["gpt2", "--kv-heads", 4], "--kv-heads: gpt2 has no such option"), (["vgg-16", "--recompute"], "recompute"),
        (["vgg-16", "--vocab", 4], "--vocab: vgg-16"), (["mixtral-8x7b", "--active-experts", 9], "active_experts: 9"),
    ]:  # fmt: skip
        assert expected in fails(capsys, "workload", *wrong)


def test_an_option_that_several_verbs_have_is_the_same_in_all():
    """Name, help and default; verbs that start real workers on this machine have fewer of them and slower links."""
    verbs = {name: {p.name: p for p in verb.params} for name, verb in get_command(app).commands.items()}
    shared = ("workers", "servers", "bandwidth", "latency", "reduce", "collective", "cluster", "fidelity", "sharing")
    for option in (
        *shared,
        "server_bandwidth",
        "placement",
        "seed",
        "racks",
        "spines",
        "topology",
        "balance",
        "jitter",
        "disturb",
    ):
        having = {name: options[option] for name, options in verbs.items() if option in options and name != "trace"}
        if option == "cluster":
            del having["import"]  # which writes one
        assert len({p.help.removesuffix(SEVERAL).removesuffix(SEVERAL_TIMES) for p in having.values()}) == 1, option
        modelled = [p for name, p in having.items() if name not in ("rehearse", "demo")]
        assert len({str(p.default).removesuffix(".0") for p in modelled}) <= 1, option
    for verb, options in verbs.items():
        assert "json" in options, verb
        for option in options.values():
            assert option.help and re.match(r"[A-Z.a-z].*\.$", option.help, re.DOTALL), (
                f"{verb} {option.name}: {option.help}"
            )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("plan", "W"), ("plan", "W", "--json"), ("workload", "--list"), ("--help",)])
def test_output_that_cannot_be_written_is_one_line(workload, arguments):
    command = [sys.executable, "-m", "legato", *(workload if word == "W" else word for word in arguments)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    lines = [line for line in without_progress(done.stderr).splitlines() if "bucket_cap_mb_list" not in line]
    assert lines == ["legato: cannot write standard output: No space left on device"]


def test_a_closed_pipe_ends_a_command_silently(workload):
    command = [sys.executable, "-m", "legato", "plan", workload, "--scheduler", "fifo", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert without_progress(process.stderr.read()) == ""


def test_two_quick_ctrl_c_are_one_line(tmp_path):
    """The command reads a pipe that nothing is written to; the second Ctrl-C comes while the first is handled."""
    os.mkfifo(tmp_path / "w.json")
    command = [sys.executable, "-m", "legato", "plan", tmp_path / "w.json"]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=unmeasured(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
    )
    with process, open(tmp_path / "w.json", "w"):  # opens when the command has opened the other end
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130 and err == "legato: interrupted\n"


def test_plan_says_who_is_left_out(capsys, tmp_path):
    ops = (legato.Op("f", "forward", 1.0), legato.Op("b", "backward", 1.0, (0,)))
    legato.write(tmp_path / "w.json", legato.Workload("vast", ops, (legato.Tensor("t", 2**50, 1, (0,)),)))
    status, out, err = run(capsys, "plan", tmp_path / "w.json", "--json")
    schedulers = [row["scheduler"] for row in json.loads(out)]
    assert status == 0 and schedulers == [name for name in SCHEDULERS if name not in ("p3", "bytescheduler")]
    assert "p3 is left out: slice_bytes: 4,194,304 makes 268,435,456 messages (expected at most 1,000,000)" in err
    assert "makes 268,435,456 messages" in fails(capsys, "plan", tmp_path / "w.json", "--scheduler", "p3")


def test_a_plan_with_too_many_chunks_is_refused(capsys, workload, tmp_path):
    slices = [{"tensor": "w", "start": 0, "stop": 4_000_000}], [{"tensor": "v", "start": 0, "stop": 1_000_000}]
    messages = [{"slices": s, "depth": 2**31} for s in slices]
    (tmp_path / "p.json").write_text(json.dumps({"format": "legato.plan/1", "scheduler": "x", "messages": messages}))
    line = fails(capsys, "simulate", workload, "--plan", tmp_path / "p.json")
    assert line.endswith("p.json: messages[0].depth: 2147483648 (expected 1 to 1,000,000)")


def test_too_little_memory_is_one_line(capsys, monkeypatch, workload):
    def exhaust(*_, **__):
        raise MemoryError

    monkeypatch.setattr("legato.schedule.compare.compare", exhaust)
    status, out, err = run(capsys, "plan", workload)
    assert (status, out) == (1, "") and len(err.splitlines()) == 1 and "memory" in err


def test_ctrl_c_while_the_commands_are_imported_is_one_line():
    code = """
import os, signal, sys
class Press:
    def find_spec(name, path, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press)
from legato.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (130, "legato: interrupted\n")


def test_ctrl_c_inside_of_exec_gives_the_same_status(tmp_path):
    """As while a module makes a dataclass. CPython remembers such a Ctrl-C, and would end `python -m` by SIGINT.

    With a thread that does not block SIGINT, as numpy has some.
    """
    (tmp_path / "pressed.py").write_text("""
import os, signal, threading
from legato import commands
from legato.__main__ import main
threading.Thread(target=threading.Event().wait, daemon=True).start()
commands.app = lambda *_, **__: exec("os.kill(os.getpid(), signal.SIGINT)")
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
""")
    command = [sys.executable, "-m", "pressed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (130, "legato: interrupted\n")


def test_shell_completion(monkeypatch):
    environment = {**os.environ, "_LEGATO_COMPLETE": "complete_bash", "COMP_WORDS": "legato pl", "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'legato'; from legato.__main__ import main; main()"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split() == ["plan"]


def run_without(library, *arguments):
    """A command in a process in which the library is not installed."""
    code = f"""
import sys
sys.modules[{library!r}] = None
from legato.__main__ import main
main({[str(a) for a in arguments]!r})
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "arguments", "extra"),
    [
        ("torch", ("demo",), "demo"),
        ("transformers", ("demo",), "demo"),
        ("jinja2", ("demo",), "report"),
        ("torch", ("rehearse", "W"), "torch"),
        ("torch", ("rehearse", "W", "--servers", 1), "torch"),
        ("torch", ("capture", "train.py:training", "-o", "w.json"), "torch"),
    ],
)
def test_what_is_not_installed_is_named_before_any_work(workload, library, arguments, extra):
    pytest.importorskip("torch")
    done = run_without(library, *(workload if word == "W" else word for word in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"legato: legato {arguments[0]} needs {library}: pip install {EXTRAS[extra]}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "W"),
        ("simulate", "W", "W", "--share", "--fabric", "ring"),
        ("sweep", "W", "--fabric", "ring", "--workers", "2,4"),
    ],
)
def test_every_transfer_is_simulated_with_numba_only(workload, arguments):
    done = run_without("numba", *(workload if word == "W" else word for word in arguments))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"legato: a simulation of every transfer needs numba: pip install {EXTRAS['flow']}\n"


@pytest.mark.slow
def test_planners_are_simulated_without_numba(workload):
    for command in (("simulate", workload, "--fabric", "ring"), ("sweep", workload, "--workers", "2,4")):
        done = run_without("numba", *command, "--fidelity", "formulas")
        assert done.returncode == 0, done.stderr


def test_planning_needs_no_torch(workload):
    done = run_without("torch", "plan", workload, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == len(SCHEDULERS)


def test_no_file_is_overwritten_that_is_read_or_written_as_well(tmp_path, capsys):
    job, plan, timeline = (tmp_path / f"{name}.json" for name in ("job", "plan", "timeline"))
    run(capsys, "workload", "alexnet-v2", "-o", job)
    known = job.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(job)
    for output in (job, link):
        assert "an input file" in fails(capsys, "plan", job, "-o", output)
        assert "an input file" in fails(capsys, "simulate", job, "-o", output)
        assert "an input file" in fails(capsys, "calibrate", "--nccl-tests", job, "-o", output)
    assert "would overwrite the file of --output" in fails(capsys, "plan", job, "-o", plan, "--timeline", plan)
    run(capsys, "plan", job, "--scheduler", "ddp", "-o", plan, "--timeline", timeline)
    assert "an input file" in fails(capsys, "trace", timeline, "-o", timeline)
    page = tmp_path / "page.html"
    assert "would overwrite the file of --output" in fails(capsys, "sweep", job, "-o", page, "--report", page)
    assert job.read_bytes() == known and not page.exists()
