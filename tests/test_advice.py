"""`legato advise`: from traces of known jobs to the right verdict, through the command line."""

import html
import json
import re
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fsdp_samples
from support import kineto_samples as samples
from support.command import run
from support.mesh_samples import BEGIN_US, DATA, GRADIENT, TENSOR, MeshJob
from support.strategies import examples

from legato.advice import (
    Advice,
    KindSeconds,
    Prediction,
    RankTimes,
    Seconds,
    _bottleneck,
    _verdict,
    advise,
    changes,
    told,
    with_workers,
)
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.text import percent
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.units import Precision, Unit
from legato.ingest.kineto.importer import import_kineto
from legato.ingest.network import cluster_of
from legato.schedule.bound.lower_bound import lower_bound
from legato.simulator.collective import iteration_time, simulate


def written(folder, name="job.json", **options):
    path = folder / name
    path.write_text(samples.ahead(**options).text())
    return path


@pytest.fixture
def job(tmp_path):
    return import_kineto([written(tmp_path)])


def test_the_breakdown_is_the_median_and_the_noise_over_the_steps(job):
    (rank,) = advise(job).ranks
    assert rank.steps == 4 and rank.late_s is None
    assert rank.iteration_s.mean == pytest.approx((2200e-6 + 3 * 1000e-6) / 4)
    assert rank.iteration_s.median == pytest.approx(1000e-6) and rank.iteration_s.noise < 1e-12
    assert rank.exposed_s.median == pytest.approx(60e-6) and rank.exposed_s.noise < 1e-12
    assert str(Seconds.of([0.1])) == "100 ms" and str(Seconds.of([0.09, 0.1, 0.12, 9.0])) == "110 ms ± 15 ms"


def test_one_odd_step_of_many_changes_no_word():
    """Of 30 steps one takes 5 s, in which its device waits for its host: by the mean, 67% of the time."""

    def told_of(odd_s):
        def step(host_s):
            return Seconds.of([0.02] * 29 + [host_s])

        none = Seconds.of([0.0])
        iteration = Seconds.of([0.1] * 29 + [0.08 + odd_s])
        rank = RankTimes(0, 30, iteration, Seconds.of([0.08]), none, none, step(odd_s), step(odd_s))
        return told(Advice("job", (rank,), 2, tuple(_bottleneck([rank]))))

    assert [*map(str, told_of(0.02))] == [*map(str, told_of(5.0))]
    assert "the device waits for it 20% of the time" in told_of(5.0)[1]


def test_the_traced_plan_is_predicted_beside_what_was_measured(job):
    """All-reduces of 4 and 12 kB take 60 and 250 us, and the period is 1,000 us."""
    found = advise(job)
    network = found.cluster
    assert network.workers == 2
    cost = network.cost()
    # A line through both points would be below zero at 0 bytes.
    assert (cost.cost(4000), cost.cost(12000)) == pytest.approx((76e-6, 228e-6), rel=0.01)
    assert found.measured_s == pytest.approx(1000e-6) and abs(found.error) < 0.03
    assert [p.plan for p in found.predictions] == ["as traced", "DDP, best buckets", "legato"]
    traced, _, ours = found.predictions
    assert traced.iteration_s == pytest.approx(simulate(job.workload, job.plan, network).iteration_s)
    assert ours.win == pytest.approx(1 - ours.iteration_s / traced.iteration_s)
    assert found.lower_bound_s == pytest.approx(lower_bound(job.workload, network).seconds)
    assert found.gap == pytest.approx(ours.iteration_s / found.lower_bound_s - 1) and found.gap > -1e-9


def test_nothing_to_gain_where_the_network_is_fast(job):
    found = advise(job, Cluster(2, {"c": LinearCost(0.0, 1e-12)}))
    assert "Nothing to gain" in found.verdict[-1] and found.code == ""


def test_legato_where_transfers_can_hide_in_the_forward_pass(job):
    found = advise(job, Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
    _, stock, ours = found.predictions
    assert ours.win > stock.win + 0.05 and ours.win > 0.1
    assert found.code == "model, optimizer = legato.distribute(model, optimizer)"
    assert found.verdict[0].startswith(f"Predicted to save {ours.win:.1%}")


def test_the_median_of_what_is_won_in_all_steps(tmp_path):
    """The host waits before it launches each step, longer and longer: a smaller and smaller part of a step is won."""
    record = samples.ahead()
    for step in (1, 2, 3):
        last = next(e["ts"] for e in record.events if e["name"] == f"ProfilerStep#{step}")
        first = min(e["ts"] for e in record.events if e["name"] == "forward0" and e["ts"] > last)
        for event in record.events:
            if event["ts"] >= (first if event["cat"] == "kernel" else last):
                event["ts"] += 1000 * step
    (tmp_path / "job.json").write_text(record.text())
    job = import_kineto([tmp_path / "job.json"])
    found = advise(job, Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
    ours, steps = found.predictions[-1], [job.workload, *job.others]
    seconds = [[iteration_time(w, plan, found.cluster) for w in steps] for plan in (found.plans[0], found.plans[-1])]
    wins = [1 - mine / traced for traced, mine in zip(*seconds, strict=True)]
    assert ours.win == pytest.approx(statistics.median(wins)) and ours.wins == pytest.approx((min(wins), max(wins)))
    assert ours.iteration_s == pytest.approx(statistics.median(seconds[1]))
    assert ours.wins[0] < ours.win - 0.02 < ours.wins[1] - 0.04
    said = f"{ours.wins[0]:.1%} to {ours.wins[1]:.1%} in the traced steps"
    assert found.verdict[0].startswith(f"Predicted to save {ours.win:.1%} of an iteration ({said}): legato.")


def test_plans_are_for_the_rank_that_takes_longest(tmp_path):
    """All that rank 1 does takes twice as long."""
    slow = samples.ahead(rank=1)
    for event in slow.events:
        event["ts"], event["dur"] = 2 * event["ts"], 2 * event["dur"]
    (tmp_path / "1.json").write_text(slow.text())
    paths = [written(tmp_path, "0.json"), tmp_path / "1.json"]
    for asked, rank in ((None, 1), (0, 0)):
        job = import_kineto(paths, rank=asked)
        found = advise(job, Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
        assert job.rank == found.rank == rank and len(job.workload.tensors) == 2
        assert found.measured_s == found.undelayed_s[rank]
        named = "which takes longest" if rank else "as asked for"
        assert any(
            str(line).startswith(f"Plans are for rank {rank}, {named}: rank {rank} takes") for line in told(found)
        )
    assert found.undelayed_s[0] < 0.7 * found.undelayed_s[1]


def test_ddps_own_buckets_where_messages_are_dear(job):
    """One message instead of two saves a latency of 1 ms; nothing else can be won."""
    found = advise(job, Cluster(2, {"c": LinearCost(1e-3, 1e-12)}))
    assert "DDP with its best buckets." in found.verdict[0] and found.code.startswith("DistributedDataParallel(model")
    assert found.predictions[1].win > 0.1


def test_the_traced_buckets_may_be_ddps_best(job):
    """DDP's smallest cap, 1 MiB, puts all into one message, of which nothing hides behind computation."""
    found = advise(job, Cluster(2, {"c": LinearCost(0.0, 2e-8)}))
    traced, stock, _ = found.predictions
    assert stock.iteration_s == traced.iteration_s and stock.win == 0
    assert "bucket_cap_mb" not in " ".join(found.verdict) + found.code


def test_the_host_is_the_bottleneck(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(samples.record().text())
    found = advise(import_kineto([path]))
    assert any(line.startswith("The host is the bottleneck: the device waits for it 45%") for line in found.verdict)


def test_late_ranks_are_named(tmp_path):
    paths = [written(tmp_path, "0.json", rank=0, late_us=400), written(tmp_path, "1.json", rank=1)]
    found = advise(import_kineto(paths))
    assert any(line.endswith("Rank 1 waits least: the other ranks wait for it.") for line in found.verdict)


def test_another_number_of_workers_is_a_ring_over_the_same_links(job):
    two = advise(job).cluster
    eight = with_workers(two, 8, job.notes)
    assert eight.workers == 8 and list(eight.collectives) == ["ring"]
    assert eight.cost().beta_s_per_byte == pytest.approx(two.cost().beta_s_per_byte * (7 / 8) / (1 / 2))
    assert eight.cost().alpha_s == pytest.approx(two.cost().startup_s * 7)


def times(iteration, host=0.0, noise=0.0):
    steps = [iteration - noise, iteration, iteration + noise]
    none, computing = Seconds.of([0.0]), Seconds.of([0.05])
    return RankTimes(0, 3, Seconds.of(steps), computing, none, none, None, Seconds.of([host]))


def test_of_many_ranks_those_that_wait_least_and_most_are_shown(tmp_path, capsys):
    paths = [written(tmp_path, f"{k}.json", rank=k, workers=10, late_us=10 * k) for k in range(10)]
    status, out, err = run(capsys, "advise", *paths)
    assert status == 0 and "10 of 10 ranks" in out and "only the 8 ranks that wait least and most" in err
    shown = [int(cell) for line in out.splitlines() if (cell := line[1:7].strip()).isdecimal()]
    assert shown == [0, 1, 2, 3, 6, 7, 8, 9]


def test_without_communication_nothing_is_said_to_be_hidden():
    none, computing = Seconds.of([0.0]), Seconds.of([0.1])
    job = RankTimes(0, 1, computing, computing, none, none, None, none)
    assert _bottleneck([job]) == []


def test_what_changed():
    before, after = (Advice("a", (times(0.1 + host, host, 0.001),), 2, ()) for host in (0.05, 0.01))
    assert changes(before, after) == [
        "An iteration is 26.7% shorter: 150 ms before, 110 ms after.",
        "By cause: waiting for the host -40 ms.",
    ]
    assert changes(before, before)[0].startswith("No change beyond the spread of the steps")


def test_the_command(tmp_path, capsys):
    path = written(tmp_path)
    status, out, err = run(capsys, "advise", path, "-o", tmp_path / "r.html")
    assert status == 0 and "job: 1 of 2 ranks, 4 steps, measured" in out and "lower bound" in out
    assert "missing: the other ranks" in err and (tmp_path / "r.html").stat().st_size > 10_000
    status, out, _ = run(capsys, "advise", path, "--bandwidth", "1Gbit", "--workers", "16", "--json")
    (found,) = json.loads(out)["jobs"]
    assert found["cluster"]["workers"] == 16 and found["predictions"][0]["plan"] == "as traced"


def test_a_folder_stands_for_the_traces_in_it(tmp_path, capsys):
    (tmp_path / "traces").mkdir()
    files = [written(tmp_path / "traces", f"rank{rank}.json", rank=rank) for rank in (0, 1)]
    (tmp_path / "traces" / "notes.txt").write_text("none")
    assert run(capsys, "advise", tmp_path / "traces") == run(capsys, "advise", *files)
    (tmp_path / "empty").mkdir()
    status, _, err = run(capsys, "advise", tmp_path / "empty")
    assert status == 2 and "empty: no traces in this folder (expected names that end in .json or .json.gz)" in err


def test_two_traces_of_one_rank_are_before_and_after(tmp_path, capsys):
    before, after = written(tmp_path, "before.json", late_us=500), written(tmp_path, "after.json")
    status, out, _ = run(capsys, "advise", before, after)
    assert status == 0 and "An iteration is" in out and "shorter" in out and "exposed communication -" in out
    status, _, err = run(capsys, "advise", before, after, before)
    assert status == 2 and "3 traces of one rank" in err


def test_a_trace_without_sizes_or_transfers_still_gets_its_breakdown(tmp_path, capsys):
    status, out, _ = run(capsys, "advise", written(tmp_path, shapes=False, sized=False))
    assert status == 0 and "310 us" in out and "No plan: ProfilerStep#" in out and "without sizes" in out
    r = samples.ahead(workers=1)
    r.events = [e for e in r.events if not e["name"].startswith("nccl")]
    (tmp_path / "one.json").write_text(r.text())
    status, out, _ = run(capsys, "advise", tmp_path / "one.json")
    assert status == 0 and "No plan: the trace does not tell what the network costs" in out
    status, out, _ = run(capsys, "advise", tmp_path / "one.json", "--workers", "4", "--bandwidth", "1Gbit")
    assert status == 0 and "Plans for 4 workers" in out and "│ as traced " not in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-o", "x.txt"], "expected .html"),
        (["--latency", "1us"], "--latency without --bandwidth"),
        (["--cluster", "c.json", "--workers", "4"], "--cluster and --workers"),
        (["--rank", "7"], "rank 7 is in none"),
        (["--step", "99"], "no step '99'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path, capsys, options, says):
    status, _, err = run(capsys, "advise", written(tmp_path), *options)
    assert status == 2 and says in err and len(err.splitlines()) == 1


def test_import_writes_the_network_and_says_what_a_plan_lacks(tmp_path, capsys):
    path = written(tmp_path)
    status, _, _ = run(capsys, "import", "kineto", path, "-o", tmp_path / "w.json", "--cluster", tmp_path / "c.json")
    assert status == 0 and json.loads((tmp_path / "c.json").read_text())["workers"] == 2
    path = written(tmp_path, "n.json", shapes=False, sized=False)
    status, _, err = run(capsys, "import", "kineto", path, "-o", tmp_path / "w.json")
    assert status == 2 and "310 us" in err and err.splitlines()[-1].startswith("legato: no workload: ProfilerStep#")


def test_only_the_network_that_was_traced_tells_how_good_the_prediction_is(job):
    own, other = advise(job), advise(job, Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
    assert own.error is not None and other.error is None and advise(job, workers=4).error is None
    assert [line.name for line in own.timelines[:2]] == ["as traced"] * 2
    assert [line.source for line in own.timelines[:2]] == ["measured", "predicted"]
    assert other.timelines[0].name == "job"


def test_a_wait_is_not_taken_for_a_network(tmp_path):
    """All-reduces of 4 and 12 kB that both take more than 5 ms: no plan is made for such a network, and none wins."""
    late = samples.ahead()
    for event in late.events:
        if event["name"].startswith("ncclDevKernel"):
            event["dur"] += 5400
    path = tmp_path / "t.json"
    path.write_text(late.text())
    found = advise(import_kineto([path]))
    assert "more than on any network: it waits for late ranks or for the host" in found.lacking
    assert found.predictions == () and found.code == "" and "save" not in " ".join(found.verdict)
    given = advise(import_kineto([path]), Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
    assert given.predictions and not given.lacking


def test_collectives_that_carry_no_gradients_make_no_plan_but_have_their_times(tmp_path, capsys):
    node = ("cpu_op", "autograd::engine::evaluate_function: _ToTorchTensorBackward", 480, 60)
    reduced = {"op": "allreduce_", "mark": "all_reduce", "at": 490, "begins": 500, "takes": 200, "inside": (node,)}
    path = tmp_path / "t.json"
    path.write_text(samples.on_host(reduced).text())
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "No plan: none of the job's collectives carries gradients" in out
    assert "Exposed communication takes 20% of the time: all-reduce 20%." in out
    assert "communication were hidden, an iteration would take 800 us instead of 1 ms, 20.0% less." in out
    assert "no operator runs 56% of the time" in out


def test_kinds_of_traffic_and_what_faster_links_would_win(tmp_path, capsys):
    """Nothing hides the sums of activations: the job's own model says what half of their time would win."""
    job = MeshJob(layers=4, seed=1)
    job.sums = 400
    status, out, err = run(capsys, "advise", *job.write(tmp_path), "--json")
    assert status == 0, err
    (found,) = json.loads(out)["jobs"]
    step, faster = (BEGIN_US + max(job.run({TENSOR: sums, DATA: job.gradients})) for sums in (400, 200))
    rows = {row["kind"]: row for row in found["traffic"]}
    assert list(rows) == ["tensor", "data", "all kinds"] and rows["tensor"]["at_most"]
    assert rows["tensor"]["win"] == pytest.approx(1 - faster / step)
    assert rows["tensor"]["seconds"] == pytest.approx(8 * 400e-6)
    assert found["step_s"] == pytest.approx(step * 1e-6) == found["replayed_s"]
    share = percent(rows["tensor"]["exposed_s"] / found["step_s"])
    told = f"Tensor: ranks wait {share} of the step; twice the bandwidth of its links is predicted to save at most"
    assert any(line.startswith(told) for line in found["verdict"])


def test_what_is_exposed_and_not_waited_for_is_told_apart(tmp_path, capsys):
    """Hosts are late with each kernel, so that most transfers end before anything could be computed."""
    status, out, _ = run(capsys, "advise", *MeshJob(late_us=4000).write(tmp_path))
    told = re.search(r"exposed ([0-9.]+)% of the time, but computation waits for it only ([0-9.]+)%", out)
    assert status == 0 and float(told[2]) < float(told[1])
    waited = re.search(r"all kinds +│[^│]+│[^│]+│ +([0-9.]+)%", out)
    assert told[2] == waited[1]


def test_plans_are_for_the_workers_that_share_gradients_on_what_their_collectives_cost(tmp_path):
    job = MeshJob(data=3)
    job.sums = 500
    found = import_kineto(job.write(tmp_path))
    assert (found.workers, found.replicas) == (6, 3)
    cluster = cluster_of(found)
    assert cluster.workers == 3
    assert cluster.cost().cost(4 * GRADIENT) == pytest.approx(job.gradients * 1e-6)


def test_a_job_that_sends_gradients_alone_has_no_table_of_traffic(tmp_path, capsys):
    status, out, _ = run(capsys, "advise", *MeshJob(tensor=1).write(tmp_path))
    assert status == 0 and "raffic" not in out


def test_traffic_needs_the_traces_of_all_ranks(tmp_path, capsys):
    status, out, err = run(capsys, "advise", *MeshJob().write(tmp_path)[:3])
    assert status == 0 and "Traffic" not in out
    assert "missing: traffic by kind: traces of rank 3: missing (expected traces of all 4 ranks)" in err


def test_communication_that_is_short_is_not_said_to_be_hidden():
    def rank(communication_s, exposed_s):
        kinds = (KindSeconds("all_reduce", Seconds.of([communication_s]), Seconds.of([exposed_s])),)
        times = [Seconds.of([s]) for s in (1.0, 0.9, communication_s, exposed_s)]
        return RankTimes(0, 1, *times, None, Seconds.of([0.0]), kinds)

    assert _bottleneck([rank(0.01, 0.01)]) == ["Little communication is exposed: it takes 1.0% of the time."]
    assert _bottleneck([rank(0.1, 0.05)]) == []


def test_a_prediction_that_is_far_off_promises_nothing():
    alike = [Prediction(name, 1e-3, 0.0) for name in "abc"]
    ((good,), _), ((bad,), _) = (_verdict([], alike, error, "") for error in (-0.02, -0.64))
    assert good == "Nothing to gain: no plan of transfers is predicted to save 2% of an iteration."
    assert bad.startswith("Probably nothing to gain: ") and bad.endswith(
        "the prediction of the traced plan is itself off by 64.0%."
    )


@pytest.mark.parametrize(("error", "code"), [(-0.28, "ddp(25)"), (0.31, "")])
def test_a_win_below_a_third_of_the_predictions_error_is_too_close_to_tell(error, code):
    rows = [Prediction("traced", 1.0, 0.0), Prediction("stock", 0.9, 0.1), Prediction("legato", 0.9, 0.1)]
    (verdict, *_), found = _verdict([], rows, error, "ddp(25)")
    assert found == code
    assert verdict.startswith("Predicted to save 10.0%" if code else "Too close to tell: a gain of 10.0% is predicted")


def test_the_report_says_all_that_the_console_says(tmp_path, capsys):
    """What it says of plans, of why there are none, of what is missing and assumed, and of what has changed."""
    page = tmp_path / "r.html"
    for options in (
        [written(tmp_path, "0.json", late_us=400), written(tmp_path, "1.json", rank=1)],
        [written(tmp_path, "bare.json", shapes=False, sized=False)],
        [written(tmp_path, "before.json", late_us=500), written(tmp_path, "after.json")],
    ):
        status, out, err = run(capsys, "advise", *options, "-o", page)
        assert status == 0
        shown = re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", " ", page.read_text().partition("<script")[0])))
        for line in (out + err.replace(f"-> {page}", "")).splitlines():
            for cell in re.split("[│┃]|[━─┏┓┡┩├┤└┘┳╇┴┼]+", line):
                assert cell.strip() in shown, cell
        # The console says how far the prediction is off; the page says nothing else about it.
        assert "prediction error" not in shown
        assert ("computing includes waiting for the host" in shown) == ("│ as traced " in out)


def test_traces_of_other_numbers_of_ranks_are_of_another_job(tmp_path, capsys):
    two, four = written(tmp_path, "two.json"), written(tmp_path, "four.json", rank=1, workers=4, late_us=500)
    status, out, _ = run(capsys, "advise", two, four)
    assert status == 0 and "two: 1 of 2 ranks" in out and "four: 1 of 4 ranks" in out and "longer" in out
    eight = written(tmp_path, "eight.json", rank=2, workers=8)
    status, _, err = run(capsys, "advise", two, four, eight)
    assert status == 2 and "traces of 3 jobs, of 2, 4, 8 ranks" in err and str(two) in err


def test_names_in_traces_control_no_terminal(tmp_path, capsys):
    status, out, err = run(capsys, "advise", written(tmp_path, "a\x1b[31mb.json"))
    assert status == 0 and "\x1b[31m" not in out + err and "31mb: 1 of 2 ranks" in out


def test_of_sharded_gradients_there_is_the_breakdown_only(tmp_path):
    path = tmp_path / "t.json"
    text = samples.ahead().text().replace("AllReduce", "ReduceScatter").replace("all_reduce", "reduce_scatter")
    path.write_text(text.replace('"allreduce"', '"_reduce_scatter_base"'))
    found = advise(import_kineto([path]), Cluster(2, {"c": LinearCost(0.0, 5e-8)}))
    assert found.lacking == "the job sends gradients by reduce_scatter (FSDP?)" and found.predictions == ()
    assert found.ranks[0].communication_s.median == pytest.approx(310e-6)


def test_what_the_network_costs_may_not_be_in_the_trace(job):
    found = advise(replace(job, workers=None))
    assert "number of workers" in found.lacking and found.cluster is None and found.predictions == ()
    assert advise(replace(job, workers=None), workers=2).cluster.workers == 2


@examples(200)
@given(st.data())
def test_any_trace_that_can_be_imported_gets_a_verdict(tmp_path_factory, data):
    """Whatever kernels, marks and sizes are missing, moved or changed: a breakdown that adds up, or one clear line."""
    r = samples.ahead(shapes=data.draw(st.booleans()), sized=data.draw(st.booleans()))
    kept = data.draw(st.lists(st.booleans(), min_size=len(r.events), max_size=len(r.events)))
    r.events = [event for event, keep in zip(r.events, kept, strict=True) if keep or data.draw(st.booleans())]
    for event in data.draw(st.lists(st.sampled_from(r.events or [{}]), max_size=6)):
        event["ts"] = data.draw(st.integers(0, 6000))
        if "In msg nelems" in event.get("args", {}):
            event["args"]["In msg nelems"] = data.draw(st.integers(-1, 2**40))
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(r.text())
    try:
        found = advise(import_kineto([path]))
    except InputError as error:
        assert str(error).isprintable()
        return
    assert found.lacking or (found.verdict and found.predictions[-1].iteration_s >= found.lower_bound_s * (1 - 1e-9))
    (rank,) = found.ranks
    parts = rank.computation_s.mean + rank.exposed_s.mean + rank.host_s.mean + (rank.late_s.mean if rank.late_s else 0)
    assert parts == pytest.approx(rank.iteration_s.mean, abs=1e-9)


def sharded(folder, *, alpha_s=3e-4, beta_s=2e-11, kept=1, name="sharded.json", **options):
    """(a trace, the step) of a decoder under FSDP2: each block a group, and the last `kept` of them kept."""
    mib = 2**20
    units = [
        Unit("embed", 1e-5, 2e-5, 64 * mib, 128 * mib, 64 * mib, input_needs_gradient=False),
        *(Unit(f"layers.{k}", 1.5e-3, 3e-3, 24 * mib, 48 * mib, 24 * mib, named=k + 1) for k in range(12)),
        Unit("head", 2e-3, 4e-3, 64 * mib, 128 * mib, 64 * mib, named=13),
    ]
    groups = tuple(Group((unit.path,), k < len(units) - kept) for k, unit in enumerate(units))
    cost = LinearCost(alpha_s, beta_s)
    costs = Costs(8, cost, cost, cost, copy_s_per_byte=1e-12)
    text, step = fsdp_samples.trace(units, Wrapping("traced", groups), costs, Precision(4, 2, 4), **options)
    path = folder / name
    path.write_text(text)
    return path, step


def test_groups_of_fsdp_as_traced_and_what_others_win(tmp_path, capsys):
    path, step = sharded(tmp_path, beta_s=6e-11)
    found = advise(import_kineto([path]))
    assert found.predictions[0].plan == "groups as traced" and found.predictions[0].win == 0
    assert found.predictions[0].iteration_s == pytest.approx(step.seconds + fsdp_samples.UPDATE_US * 1e-6)
    assert found.error == pytest.approx(0, abs=1e-6)
    assert found.code.splitlines()[-1] == "fully_shard(model, **options)"
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "No plan" not in out
    assert re.search(r"embed +│ +64 MiB │ +128 MiB │ +resharded +│ +0, 1 +│ +10 us │ +20 us", out)
    assert re.search(
        r"layers.0 to layers.11 \(12 groups\) +│ +24 MiB │ +48 MiB │ +resharded +│ +0, 1 +│ +1.5 ms │ +3 ms", out
    )
    assert re.search(r"head +│ +64 MiB │ +128 MiB │ +kept +│ +0, 0 +│ +2 ms │ +4 ms", out)
    assert "A traced all-gather takes 300 us + 62.9 us per MiB (fitted to 2 sizes, off by at most 0.0%)" in out
    assert re.search("Predicted to save [0-9.]+% of an iteration in no more memory: planned", out)
    assert re.search("save [0-9.]+% of an iteration with 544 MiB instead of 280 MiB of buffers: planned", out)
    assert "Try:\nfrom torch.distributed.fsdp import fully_shard" in out and "DDP" not in out and "(HSDP)" not in out
    for phase in ("forward", "backward"):
        assert f"all-gather ({phase})" in out
    page = tmp_path / "report.html"
    status, _, _ = run(capsys, "advise", path, "-o", page)
    assert status == 0 and all(text in page.read_text() for text in ("layers.0 to layers.11", "fully_shard(model, "))


def test_nothing_to_gain_from_other_groups_where_the_network_is_fast(tmp_path, capsys):
    path, _ = sharded(tmp_path, alpha_s=1e-6, beta_s=1e-12)
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "Nothing to gain: no other groups are predicted to save 2% of an iteration" in out
    assert re.search(r"\(the traced ones are 2.[0-9]% above the bound for their memory\).", out)
    assert "Try" not in out
    # On another network there is something.
    status, out, _ = run(capsys, "advise", path, "--bandwidth", "50Gbit", "--latency", "100us")
    assert status == 0 and "Predicted to save" in out and "Try" in out and "A traced" not in out and "off by" not in out


def test_groups_that_would_need_more_memory_are_told_apart(tmp_path):
    """All blocks could be kept: that is the only thing that wins much, and needs more memory."""
    found = advise(import_kineto([sharded(tmp_path, alpha_s=1e-5, beta_s=4e-11)[0]]))
    rows = {row.name: row for row in found.comparison.rows}
    assert rows["everything kept (ZeRO-2)"].nbytes > rows["groups as traced"].nbytes
    assert all(
        f"{1 - row.seconds / found.predictions[0].iteration_s:.1%}" in found.verdict[0]
        for row in rows.values()
        if row.name in found.verdict[0]
    )


def test_a_job_of_fsdp_that_no_table_fits(tmp_path, capsys):
    path, _ = sharded(tmp_path)
    status, out, _ = run(capsys, "advise", path, "--workers", "4")
    assert status == 0 and "No plan: groups are sharded over 8 ranks (for 4, give --bandwidth, too)." in out
    text = path.read_text()
    path.write_text(re.sub(r"FSDP::(\w+) \([\w.]+\)", r"FSDP::\1", text))
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "No plan: the whole model is one group" in out
    path.write_text(text.replace("ReduceScatter", "AllGather").replace("_reduce_scatter_base", "_allgather_base"))
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "No plan: no reduce-scatter whose size is known" in out
    path.write_text(text.replace("AllGather", "Broadcast").replace("_allgather_base", "broadcast"))
    status, out, _ = run(capsys, "advise", path)
    assert status == 0 and "No plan: " in out


@examples(40)
@given(st.data())
def test_any_trace_of_fsdp_gets_a_verdict(tmp_path_factory, data):
    """Whatever is missing, moved or changed: groups and predictions that are numbers, or one clear line."""
    folder = tmp_path_factory.mktemp("t")
    path, _ = sharded(folder)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    for index in sorted(data.draw(st.sets(st.integers(0, len(events) - 1), max_size=20)), reverse=True):
        del events[index]
    for event in data.draw(st.lists(st.sampled_from(events), max_size=6)):
        event["ts"] = data.draw(st.integers(0, 6000))
        if "In msg nelems" in event.get("args", {}):
            event["args"]["In msg nelems"] = data.draw(st.integers(-1, 2**40))
            event["args"]["Group size"] = data.draw(st.integers(-1, 2**20))
    path.write_text(json.dumps(trace))
    try:
        found = advise(import_kineto([path]))
    except InputError as error:
        assert str(error).isprintable()
        return
    assert told(found)
    assert found.lacking or all(prediction.iteration_s > 0 for prediction in found.predictions)
