"""`legato report` and `legato trace` on what other commands write."""

import json
import os

import pytest
from support.command import run

import legato
from legato.core.measurement import MeasuredPlan, Measurement
from legato.schedule import schedule
from legato.simulator.collective import simulate

VERBS = ("report", "trace")


@pytest.fixture
def folder(tmp_path):
    """What `legato rehearse -o DIR` writes: a workload, a cluster, predicted and measured timelines."""
    layers = 8
    ops = [legato.Op(f"f{i}", "forward", 0.01, (i - 1,) if i else ()) for i in range(layers)]
    ops += [legato.Op(f"b{i}", "backward", 0.02, (layers + k - 1,) if k else ()) for k, i in enumerate(range(8)[::-1])]
    tensors = [legato.Tensor(f"w{i}", 4_000_000, 2 * layers - 1 - i, (i,)) for i in range(layers)]
    job = legato.Workload("chain", tuple(ops), tuple(tensors))
    cluster = legato.Cluster.derive(8, 1e9, 1e-4, collectives=["ring"])
    legato.write(tmp_path / "workload.json", job)
    legato.write(tmp_path / "cluster.json", cluster)
    for name in ("ddp", "legato"):
        predicted = simulate(job, schedule(name, job, cluster), cluster)
        measured = legato.Timeline(name, "measured", predicted.iteration_s * 1.02, predicted.spans)
        legato.write(tmp_path / f"{name}.measured.json", measured)
        legato.write(tmp_path / f"{name}.predicted.json", predicted)
    return tmp_path


def test_a_folder_written_before_measurements_were_saved_is_still_drawn(capsys, folder):
    """Its measured timelines are single iterations, which do not say what is faster; nothing is planned in silence."""
    status, out, err = run(capsys, "report", folder, "-o", folder / "r.html", "--json")
    assert status == 0 and json.loads(out)["timelines"] == 4 and "planned" not in err
    page = (folder / "r.html").read_text()
    assert "Use this plan" not in page and "as fast" not in page and "(measured)" not in page
    assert "One measured iteration took" in page and "The workload" in page and "The cluster" in page
    at = [
        page.index(f"<h4><span>{name}</span> <small>{kind}")
        for name in ("ddp", "legato")
        for kind in ("predicted", "one measured iteration")
    ]
    assert at == sorted(at)
    with_files = run(capsys, "report", *sorted(folder.glob("*.json")), "-o", folder / "same.html")
    assert with_files[0] == 0 and (folder / "same.html").read_text() == page


def test_a_measurement_of_the_folder_is_what_the_page_compares(capsys, folder):
    plans = [MeasuredPlan.of("ddp", [0.5, 0.6, 0.7], predicted_s=0.4), MeasuredPlan.of("legato", [0.9])]
    legato.write(folder / "measured.json", Measurement("chain", "8 workers, 1 Gbit/s", tuple(plans), ("it was busy",)))
    (folder / "result.json").write_text('{"rows": []}')
    status, _, err = run(capsys, "report", folder, "-o", folder / "r.html")
    assert status == 0 and f"left out: {folder / 'result.json'} (not a file of legato)" in err
    page = (folder / "r.html").read_text()
    assert "600 ms</strong> under DDP (measured); <strong>no other plan" in page
    assert "Beware: it was busy." in page and "8 workers, 1 Gbit/s" in page and "550 ms to 650 ms" in page
    assert "left out" not in run(capsys, "report", folder / "result.json", "-o", folder / "r.html")[2]


def test_what_is_planned_for_the_page_is_said(capsys, folder):
    status, _, err = run(capsys, "report", folder / "workload.json", folder / "cluster.json", "-o", folder / "r.html")
    page = (folder / "r.html").read_text()
    assert status == 0 and "planned for this page: ddp, merge-optimal and legato" in err
    assert "Use this plan: legato, 1." in page and "(Planned for this page: ddp, merge-optimal and legato.)" in page
    assert "under DDP (predicted)" in page and "tensors takes" in page  # what is in the messages is known from the plan


def test_stock_ddp_gets_its_buckets(capsys, tmp_path):
    """Two large tensors that DDP puts into one bucket: apart, the first is sent during the second's backward op."""
    ops = (
        legato.Op("f", "forward", 0.001),
        legato.Op("b1", "backward", 0.01, (0,)),
        legato.Op("b0", "backward", 0.05, (1,)),
    )
    tensors = (legato.Tensor("w1", 1_000_000, 1), legato.Tensor("w0", 5_000_000, 2, (0,)))
    legato.write(tmp_path / "w.json", legato.Workload("two", ops, tensors))
    legato.write(tmp_path / "c.json", legato.Cluster.derive(8, 1e9, 1e-4, collectives=["ring"]))
    run(capsys, "report", tmp_path / "w.json", tmp_path / "c.json", "-o", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "or with stock DDP: bucket_cap_mb_list=[0.95367431640625, 4.76837158203125]: 1." in page


def test_where_nothing_helps_it_says_so(capsys, tmp_path):
    ops = (legato.Op("f", "forward", 1.0), legato.Op("b", "backward", 1.0, (0,)))
    legato.write(tmp_path / "w.json", legato.Workload("one", ops, (legato.Tensor("w", 1000, 1, (0,)),)))
    legato.write(tmp_path / "c.json", legato.Cluster.derive(2, 1e9, 0.0))
    run(capsys, "report", tmp_path / "w.json", tmp_path / "c.json", "-o", tmp_path / "r.html")
    assert "Stay with DDP: no plan is predicted to be more than 0.5% faster." in (tmp_path / "r.html").read_text()


def test_a_trace_has_arrows_from_gradients_where_the_workload_is_known(capsys, folder):
    trace, timeline = folder / "t.json", folder / "legato.predicted.json"
    counts = []
    for more in ((), (folder / "workload.json",)):
        assert run(capsys, "trace", timeline, *more, "-o", trace)[0] == 0
        counts.append(sum(event["ph"] == "s" for event in json.loads(trace.read_text())["traceEvents"]))
    assert 0 < counts[0] < counts[1]


def test_trace_takes_what_report_takes(capsys, folder):
    """The same files give a page and a trace, with the workload's arrows; a plan tells what is in the messages."""
    job, cluster = legato.read(folder / "workload.json"), legato.read(folder / "cluster.json")
    legato.write(folder / "plan.json", schedule("ddp", job, cluster))
    inputs = sorted(folder.glob("*.json"))
    assert run(capsys, "report", *inputs, "-o", folder / "r.html")[0] == 0
    status, out, _ = run(capsys, "trace", *inputs, "-o", folder / "t.perfetto.json", "--json")
    assert status == 0 and json.loads(out)["timelines"] == 4
    found = json.loads((folder / "t.perfetto.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == [
        f"{name} ({source})" for name in ("ddp", "legato") for source in ("predicted", "one measured iteration")
    ]
    both = {verb: run(capsys, verb, *inputs, folder / "workload.json", "-o", folder / "x")[2] for verb in VERBS}
    assert all("two workloads (expected one at most)" in err for err in both.values())
    timeline, plan = folder / "ddp.predicted.json", folder / "plan.json"
    assert run(capsys, "report", timeline, plan, "-o", folder / "r.html")[0] == 0
    assert "tensors takes" in (folder / "r.html").read_text()
    assert run(capsys, "trace", timeline, plan, folder / "workload.json", "-o", folder / "t.et")[0] == 0


def test_timelines_of_one_name_are_told_apart_by_their_files(capsys, folder):
    """As those of one scheduler's plans with shards, with a wire format and with neither; none hides another."""
    first = legato.read(folder / "legato.predicted.json", legato.Timeline)
    other = folder / "other.json"
    legato.write(other, legato.Timeline("legato", "predicted", 2 * first.iteration_s, first.spans))
    given = [folder / "legato.predicted.json", other, folder / "ddp.predicted.json"]
    names = [f"legato ({given[0]})", f"legato ({other})", "ddp"]
    assert run(capsys, "report", *given, "-o", folder / "r.html")[0] == 0
    page = (folder / "r.html").read_text()
    assert all(f"<h4><span>{name}</span> <small>predicted" in page for name in names)
    assert all(f'<td data-sort="{name}">' in page for name in names)
    assert run(capsys, "trace", *given, "-o", folder / "t.json")[0] == 0
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    shown = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert shown == [f"{name} (predicted)" for name in names]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cluster.json"], "nothing to draw"),
        (["workload.json", "workload.json"], "two workloads"),
        (["nothing.json"], "nothing.json: cannot read"),
        (["broken.json"], "broken.json: not JSON"),
        (["empty"], "empty: no .json in this folder"),
        (["cluster.json", ""], "two clusters"),
    ],
)
def test_wrong_input_gets_one_line(capsys, folder, names, words):
    (folder / "empty").mkdir()
    if names == ["broken.json"]:
        (folder / "broken.json").write_text("{")
    status, out, err = run(capsys, "report", *(folder / name for name in names), "-o", folder / "r.html")
    assert (status, out) == (2, "")
    assert len(err.strip().splitlines()) == 1 and words in err


def test_a_pipe_is_read_once(capsys, folder):
    reader, writer = os.pipe()
    os.write(writer, (folder / "workload.json").read_bytes())
    os.close(writer)
    status, _, err = run(capsys, "report", f"/dev/fd/{reader}", "-o", folder / "r.html")
    os.close(reader)
    assert status == 0, err


@pytest.mark.parametrize(
    ("options", "told", "drawn"),
    [
        (("--scheduler", "legato,ddp"), "", ["ddp", "legato"]),
        (("--scheduler", "legato"), "ddp was planned too, to be drawn next to legato", ["ddp", "legato"]),
        (("--scheduler", "ddp"), "", ["ddp"]),
        (("--servers", "2", "--scheduler", "tac"), "random was planned too", ["random", "tac"]),
        (("--shard", "optimizer", "--scheduler", "legato,ddp"), "", ["ddp", "legato"]),
    ],
)
def test_the_timeline_of_a_plan_shows_what_is_gained_and_where(capsys, folder, options, told, drawn):
    network = ("--workers", "4", "--bandwidth", "1Gbit")
    status, out, err = run(
        capsys, "plan", folder / "workload.json", *network, *options, "--timeline", folder / "t.json", "--json"
    )
    assert status == 0 and ("planned too" in err) == bool(told) and told in err
    rows = {row["scheduler"]: row["iteration_s"] for row in json.loads(out)}
    best = legato.read(folder / "t.json", legato.Timeline)
    assert [line.name for line in (best.baseline, best) if line] == drawn
    assert best.iteration_s == rows[drawn[-1]]
    assert run(capsys, "report", folder / "t.json", "-o", folder / "r.html")[0] == 0
    page = (folder / "r.html").read_text()
    assert "<h1>chain</h1>" in page and "1 Gbit/s, latency 30 us" in page
    assert f"4 workers{' and 2 servers' if '--servers' in options else ''}" in page
    assert all(f"<h4><span>{name}</span> <small>predicted" in page for name in drawn)
    if len(drawn) > 1 and best.baseline.iteration_s > 1.006 * best.iteration_s:
        assert f"{best.baseline.iteration_s / best.iteration_s:.2f}x as fast" in page
    status, out, _ = run(capsys, "trace", folder / "t.json", "-o", folder / "t.perfetto.json", "--json")
    assert status == 0 and json.loads(out)["timelines"] == len(drawn)


def test_the_chakra_trace_of_a_plan_s_timeline_is_of_that_plan(capsys, folder):
    plan, timeline, job = folder / "p.json", folder / "t.json", folder / "workload.json"
    run(capsys, "plan", job, "--scheduler", "legato", "-o", plan, "--timeline", timeline)
    assert run(capsys, "trace", timeline, plan, job, "-o", folder / "t.et")[0] == 0


def test_a_simulated_timeline_says_what_was_trained_where(capsys, folder):
    network = ("--workers", "4", "--bandwidth", "1Gbit", "--fabric", "ring")
    assert run(capsys, "simulate", folder / "workload.json", *network, "-o", folder / "t.json")[0] == 0
    assert run(capsys, "report", folder / "t.json", "-o", folder / "r.html")[0] == 0
    page = (folder / "r.html").read_text()
    assert "<h1>chain</h1>" in page and "4 workers, 1 Gbit/s, latency 30 us" in page
    assert "An iteration takes" in page and "under ring (predicted)" in page
