"""`legato simulate` as a user meets it."""

import json

import pytest
from support.command import run
from typer.main import get_command

import legato
from legato.__main__ import main
from legato.commands import app
from legato.schedule import schedule
from legato.simulator.flow import FABRICS

#: The options of --share.
JOBS = ("share", "hosts", "shift", "priority")
KEYS = ["fabric", "iteration_s", "speedup", "overlap", "utilization", "simulate_s"]


def rows(capsys, *arguments):
    status, out, err = run(capsys, "simulate", *arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_a_row_for_every_fabric(capsys, workload):
    found = rows(capsys, workload, "--workers", 8, "--bandwidth", "1Gbit", "--latency", 0)
    assert [row["fabric"] for row in found] == list(FABRICS)
    baseline = found[0]["iteration_s"]
    for row in found:
        assert list(row) == KEYS
        assert row["speedup"] == pytest.approx(baseline / row["iteration_s"])
    # 40 ms of data at 1 Gbit/s; nothing overlaps, for both gradients are ready at the end.
    by_name = {row["fabric"]: row["iteration_s"] for row in found}
    assert by_name["ring"] == pytest.approx(0.03 + 2 * 7 / 8 * 0.04)
    assert by_name["butterfly"] == pytest.approx(0.03 + 3 * 0.04)


def test_what_was_compiled_is_said_and_does_not_count(capsys, monkeypatch, workload):
    seconds = iter([100.0, 100.0, 107.5, 107.5])  # before all; before and behind the one fabric; behind all
    monkeypatch.setattr("legato.simulator.flow.engine.loop.compiled_s", lambda: next(seconds))
    status, out, err = run(capsys, "simulate", workload, "--workers", 8, "--bandwidth", "1Gbit", "--fabric", "ring",
                           "--json")  # fmt: skip
    assert status == 0 and json.loads(out)[0]["simulate_s"] < 0 and "the simulator was compiled in 7.5 s, once" in err


def test_a_sharded_plan_is_simulated_as_such_or_refused(capsys, tmp_path):
    """An update of 8 ms, of which each of eight workers makes an eighth: 10 + 20 + 1 ms, and 70 ms of messages."""
    ops = (legato.Op("f", "forward", 0.01), legato.Op("b", "backward", 0.02), legato.Op("u", "optimizer", 0.008))
    path, plan = tmp_path / "w.json", tmp_path / "p.json"
    legato.write(path, legato.Workload("toy", ops, (legato.Tensor("w", 5_000_000, 1, (0, 2)),)))
    network = ["--workers", 8, "--bandwidth", "1Gbit", "--latency", 0]
    run(capsys, "plan", path, *network, "--scheduler", "single", "--shard", "optimizer", "-o", plan)
    arguments = [path, "--plan", plan, "--fabric", "ring", *network]
    assert rows(capsys, *arguments, "--fidelity", "formulas")[0]["iteration_s"] == pytest.approx(0.101)
    status, _, err = run(capsys, "simulate", *arguments)
    assert status == 2 and "shard: 'optimizer' transfer by transfer (expected a plan without shards" in err


def test_the_baseline_is_simulated_once_and_only_where_that_costs_little(capsys, workload, monkeypatch):
    from legato.sweeps import cell

    simulated, simulate_flow = [], cell.simulate_flow

    def counted(job, plan, fabric, *arguments, **options):
        simulated.append(next(name for name, known in FABRICS.items() if known == fabric))
        return simulate_flow(job, plan, fabric, *arguments, **options)

    monkeypatch.setattr(cell, "simulate_flow", counted)
    (ring,) = rows(capsys, workload, "--fabric", "ring")
    assert simulated == ["ring", "parameter-server"] and ring["speedup"] > 1
    simulated.clear()
    found = rows(capsys, workload, "--fabric", "ring,parameter-server")
    assert simulated == ["ring", "parameter-server"] and found[0]["speedup"] == ring["speedup"]
    simulated.clear()
    (ring,) = rows(capsys, workload, "--fabric", "ring", "--workers", 2**20)
    assert simulated == ["ring"] and ring["speedup"] is None
    status, out, _ = run(capsys, "simulate", workload, "--fabric", "ring", "--workers", 2**20)
    assert status == 0 and "speedup" not in out
    status, out, _ = run(capsys, "simulate", workload, "--fabric", "ring")
    assert status == 0 and "speedup over 1 server" in out


def test_a_timeline_says_for_how_many_workers_it_is(capsys, workload, tmp_path):
    timeline = tmp_path / "t.json"
    for fabric, shown, members in (("ring", 1, ((0, 4096),)), ("parameter-server", 32, ())):
        status, _, err = run(capsys, "simulate", workload, "--fabric", fabric, "--workers", 4096, "-o", timeline)
        assert status == 0 and f"({shown} of 4,096 workers)" in err
        assert legato.read(timeline, legato.Timeline).members == members


def test_all_fabrics_are_checked_before_the_first_is_simulated(capsys, workload, monkeypatch):
    from legato.sweeps import cell

    monkeypatch.setattr(cell, "simulate_flow", None)
    status, out, err = run(capsys, "simulate", workload, "--workers", 2**20, "--iterations", 1000)
    assert status == 2 and out == "" and "parameter-server: more than 100,000,000" in err


def test_formulas_and_transfers_agree_on_a_message_at_a_time(capsys, workload):
    shared = (workload, "--workers", 8, "--latency", "1ms", "--fabric", "ring,halving-doubling,shuffle")
    flow = rows(capsys, *shared, "--in-flight", 1, "--reduce", 0)
    formulas = rows(capsys, *shared, "--fidelity", "formulas")
    assert [row["iteration_s"] for row in flow] == pytest.approx([row["iteration_s"] for row in formulas])


def test_of_formulas_all_is_what_has_a_cost(capsys, workload):
    names = [row["fabric"] for row in rows(capsys, workload, "--fidelity", "formulas")]
    assert "ring" in names and "parameter-server" in names and "ring-whole" not in names


@pytest.mark.parametrize(
    ("options", "what"), [({"shard": "optimizer"}, "shard 'optimizer'"), ({"wire": "bf16"}, "wire formats")]
)
def test_parameter_servers_run_no_plans_with_shards_or_wire_formats(capsys, workload, tmp_path, options, what):
    """As `legato plan` refuses them; --fabric all has the other fabrics."""
    job, file = legato.read(workload, legato.Workload), tmp_path / "p.json"
    legato.write(file, schedule("ddp", job, legato.Cluster.derive(4, 10e9, 0.0), **options))
    command = [workload, "--workers", 4, "--fidelity", "formulas", "--plan", file]
    names = [row["fabric"] for row in rows(capsys, *command)]
    assert "ring" in names and not {"parameter-server", "multicast", "aggregation", "multicast+aggregation"} & {*names}
    status, out, err = run(capsys, "simulate", *command, "--fabric", "ring,parameter-server")
    assert (status, out) == (2, "")
    assert (
        err
        == f"legato: parameter-server: a plan with {what} on parameter servers (expected a fabric without servers)\n"
    )


def test_the_table_and_the_timeline(capsys, workload, tmp_path):
    timeline, report = tmp_path / "t.json", tmp_path / "r.html"
    status, out, _ = run(capsys, "simulate", workload, "--workers", 4, "--servers", 2, "--no-barrier", "-o", timeline)
    assert status == 0 and "multicast+aggregation" in out and "speedup" in out
    assert legato.read(timeline, legato.Timeline).iteration_s > 0
    with pytest.raises(SystemExit) as end:
        main(["report", str(timeline), "-o", str(report)])
    assert end.value.code == 0 and "<html" in report.read_text()


def test_a_plan_or_a_scheduler(capsys, workload, tmp_path):
    plan = tmp_path / "p.json"
    job = legato.read(workload, legato.Workload)
    whole = tuple(legato.Slice(t.name, 0, t.nbytes) for t in job.tensors)
    legato.write(plan, legato.Plan("one", (legato.Message(whole),)))
    (given,) = rows(capsys, workload, "--fabric", "tree", "--plan", plan)
    (planned,) = rows(capsys, workload, "--fabric", "tree", "--scheduler", "single")
    assert given["iteration_s"] == planned["iteration_s"]


def test_a_slow_worker_and_jitter(capsys, workload):
    shared = (workload, "--fabric", "ring", "--workers", 4, "--iterations", 1)
    (usual,), (slow,), (uneven,) = (
        rows(capsys, *shared, *more) for more in ((), ("--disturb", "compute:3:3:0"), ("--jitter", 0.5))
    )
    # The others are done before, and what they send on without the slow one is little.
    assert slow["iteration_s"] - usual["iteration_s"] == pytest.approx(0.06, rel=0.01)
    assert uneven["iteration_s"] != usual["iteration_s"]


def test_every_option_that_is_about_the_network_is_one_of_sweep_too():
    options = {name: {p.name for p in get_command(app).commands[name].params} for name in ("simulate", "sweep")}
    assert options["simulate"] - options["sweep"] == {"plan", *JOBS} - {"share", "hosts"}  # which belong to one network


def test_a_cluster_file_is_the_network(capsys, workload, tmp_path):
    """A measured all-reduce has the cost of a ring of 4 workers on 1 Gbit/s and 1 ms."""
    derived, measured = tmp_path / "d.json", tmp_path / "m.json"
    cluster = legato.Cluster.derive(4, 1e9, 1e-3)
    legato.write(derived, cluster)
    legato.write(measured, legato.Cluster(4, {"gloo": cluster.cost("ring")}))
    options = ("--workers", 4, "--bandwidth", "1Gbit", "--latency", "1ms")
    for verb, fabric in (("simulate", "ring,tree"), ("sweep", "ring,tree,parameter-server")):
        for more in ((), ("--fidelity", "formulas")):
            shared = (verb, workload, "--fabric", fabric, "--json", *more)
            found = [run(capsys, *shared, *by) for by in (options, ("--cluster", derived), ("--cluster", measured))]
            seconds = [[row["iteration_s"] for row in json.loads(out)] for _, out, _ in found]
            assert seconds[0] == seconds[1] == pytest.approx(seconds[2])
        status, _, err = run(capsys, verb, workload, "--cluster", derived, "--latency", "1ms")
        assert status == 2 and "--cluster and --latency: give one or the other" in err
        status, out, err = run(capsys, verb, workload, "--cluster", measured, "--fabric", "ring")
        assert status == 0 and "4 workers, 1 Gbit/s, latency 1 ms" in out and str(measured) in out


def test_a_slow_link_and_a_fast_server(capsys, workload):
    shared = (workload, "--fabric", "parameter-server", "--workers", 4)
    (usual,), (slow,), (fast,) = (
        rows(capsys, *shared, *more) for more in ((), ("--disturb", "link:3:3:0"), ("--server-bandwidth", "100Gbit"))
    )
    assert fast["iteration_s"] < usual["iteration_s"] < slow["iteration_s"]


def test_a_workload_a_worker(capsys, workload):
    (one,) = rows(capsys, workload, "--fabric", "ring", "--workers", 2)
    (two,) = rows(capsys, workload, workload, "--fabric", "ring", "--workers", 2)
    assert one["iteration_s"] == two["iteration_s"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--fabric", "rng"), "did you mean 'ring'"),
        (("--fabric", "ring", "--servers", "2"), "servers: ring has no such option"),
        (("--fabric", "ring,tree,ring", "--servers", "2"), "servers: ring, tree have no such option"),
        (("--fidelity", "packet"), "fidelity"),
        (("--sharing", "unfair"), "sharing"),
        (("--workers", "0"), "workers: 0"),
        (("--bandwidth", "fast"), "--bandwidth: 'fast' is not a bandwidth"),
        (("--latency", "5"), "--latency: '5' is not a time"),
        (("--reduce", "x"), "--reduce: 'x' is not a time"),
        (("--placement", "random"), "placement"),
        (("--racks", "64"), "racks: 64"),
        (("--bandwidth", "1e-300bit"), "not a bandwidth of"),
        (("--latency", "1e300s"), "not a time of at most"),
        (("--workers", "1000000000000"), "workers: 1000000000000 (expected 1 to 1048576)"),
        (("--server-bandwidth", "x"), "--server-bandwidth: 'x' is not a bandwidth"),
        (("--jitter", "-1"), "jitter"),
        (("--iterations", "0"), "iterations: 0"),
        (("--gpus-per-host", "5"), "gpus_per_host: 5 (expected a divisor of the 8 workers)"),
        (("--spines", "2"), "spines: 2 above one rack"),
        (("--topology", "fat-tree", "--racks", "2"), "racks: 2 in topology fat-tree"),
        (("--racks", "2", "--disturb", "spine:1:2:0"), "spine: 1 (expected 0 to 0)"),
        (("--topology", "fat-tree", "--disturb", "uplink:99:2:0"), "uplink: 99 (expected 0 to 7)"),
        (("--topology", "rails"), "expected several cards a host"),
        (("--topology", "torus"), "--topology"),
        (("--local-bandwidth", "x"), "--local-bandwidth: 'x' is not a bandwidth"),
        (("--workers", "1048576", "--racks", "1024", "--fabric", "ring"), "ring: more than 100,000,000"),
        (("--fidelity", "formulas", "--jitter", "0.1"), "--fidelity formulas"),
        (("--workers", "1048576", "--iterations", "1000"), "parameter-server: more than 100,000,000"),
        (("--workers", "1048576", "--fabric", "ring", "--jitter", "0.1"), "ring: more than 100,000,000"),
        (("--sharing", "fair", "--workers", "1000", "--fabric", "ring"), "more than 1,000,000"),
        (("--fidelity", "formulas", "--fabric", "ring-whole"), "ring-whole"),
        (("--plan", "nowhere.json"), "nowhere.json"),
        (("--plan", "p.json", "--scheduler", "ddp"), "one or the other"),
        (("--scheduler", "dpd"), "did you mean 'ddp'"),
    ],
)
def test_wrong_input_is_one_line(capsys, workload, arguments, says):
    status, out, err = run(capsys, "simulate", workload, *arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert status == 2 and out == "" and len(lines) == 1, err
    assert lines[0].startswith("legato: ") and says in lines[0]


def test_workloads_that_differ_are_refused(capsys, workload, tmp_path):
    other = tmp_path / "other.json"
    job = legato.read(workload, legato.Workload)
    legato.write(other, legato.Workload("other", job.ops, job.tensors[:1]))
    status, _, err = run(capsys, "simulate", workload, other, "--workers", 2)
    assert status == 2 and "worker 1" in err
    status, _, err = run(capsys, "simulate", workload, other, "--workers", 3)
    assert status == 2 and "2 workloads for 3 workers" in err


def test_a_disturbance_beside_the_undisturbed_iteration(capsys, workload):
    """5 MB in a ring of 4 take 6 ms on 10 Gbit/s after 20 ms of the backward pass. A link that fails in the middle for
    1 ms delays them by this; one that fails before, by nothing."""
    shared = (workload, "--fabric", "ring", "--workers", 4, "--latency", 0)
    (quiet,) = rows(capsys, *shared)
    for at, passed in (("22ms:23ms", 1.0), ("2ms:3ms", 0.0)):
        (row,) = rows(capsys, *shared, "--disturb", f"link:3:fails:{at}")
        assert row["undisturbed_s"] == quiet["iteration_s"]
        assert row["iteration_s"] - row["undisturbed_s"] == pytest.approx(passed * 1e-3, abs=1e-9)
    (slow,) = rows(capsys, *shared, "--disturb", "compute:0:2:5ms:15ms, link:1:2:0")
    assert slow["iteration_s"] == pytest.approx(0.03 + 0.005 + 0.012)


def test_a_link_that_flaps_over_ten_iterations(capsys, workload):
    """5 MB in a ring of 4 take 6 ms after 20 ms, and 10 ms follow: of three failures of 1 ms, two meet a transfer."""
    shared = (workload, "--fabric", "ring", "--workers", 4, "--latency", 0, "--iterations", 10)
    flaps = ("--disturb", ",".join(f"link:3:fails:{at}ms:{at + 1}ms" for at in (22, 50, 96)))
    (row,) = rows(capsys, *shared, *flaps)
    assert row["undisturbed_s"] == pytest.approx(0.036)
    assert row["iteration_s"] == pytest.approx(0.036 + 0.002 / 10)
    assert row["longest_s"] == pytest.approx(0.037)
    status, out, err = run(capsys, "simulate", *shared, *flaps)
    assert status == 0 and "longest" in out and "costs nothing" not in err
    status, _, err = run(capsys, "simulate", *shared, "--disturb", "link:3:fails:2ms:3ms")
    assert status == 0 and "link:3:fails:2ms:3ms: costs nothing with ring" in err


def test_a_second_server_is_disturbed_that_the_baseline_does_not_have(capsys, workload):
    """Each of two servers has half of the parameters, and a link that is half as fast as the workers' all the time."""
    shared = (workload, "--fabric", "multicast+aggregation", "--servers", 2, "--placement", "equal", "--workers", 4)
    shared = (*shared, "--send", 0)  # which a slower link leaves alone, and a disturbed one does not
    (slow,) = rows(capsys, *shared, "--disturb", "server:0:2:0,server:1:2:0")
    (same,) = rows(capsys, *shared, "--server-bandwidth", "5Gbit")
    assert slow["iteration_s"] == same["iteration_s"] > slow["undisturbed_s"] and slow["speedup"] is None
    assert rows(capsys, *shared, "--disturb", "server:0:2:0")[0]["speedup"] is not None


@pytest.mark.parametrize("fabric", [("ring",), ("aggregation", "--no-barrier")])
def test_a_disturbance_of_factor_one_changes_nothing(capsys, workload, fabric):
    """Also where workers differ, and several iterations are simulated without a disturbance."""
    shared = (workload, "--fabric", *fabric, "--workers", 4, "--jitter", 0.5)
    assert rows(capsys, *shared)[0]["iteration_s"] != rows(capsys, *shared, "--iterations", 1)[0]["iteration_s"]
    found, quiet = rows(capsys, *shared, "--disturb", "link:0:1:0"), rows(capsys, *shared, "--iterations", 1)
    for row, other in zip(found, quiet, strict=True):
        assert row["undisturbed_s"] == row["iteration_s"] == other["iteration_s"]
        assert row["speedup"] == other["speedup"]


@pytest.mark.parametrize(
    "options, words",
    [
        (("--disturb", "link:7"), "disturb: 'link:7' (expected something like link:7:4:10ms:30ms)"),
        (("--disturb", "link:7:x:0"), "'link:7:x:0'"),
        (("--disturb", "link:7:2:5"), "disturb: 'link:7:2:5': '5' is not a time"),
        (("--disturb", "compute:0:2:0,link:7:0.5:0"), "disturb: 'link:7:0.5:0': factor: 0.5 (expected 1 to 1e+06"),
        (("--disturb", "link:1:2:3:4:5"), "'link:1:2:3:4:5'"),
        (("--disturb", "link:8:2:0"), "link: 8 (expected 0 to 7)"),
        (("--disturb", "links:1:2:0"), "unknown disturbance 'links'"),
        (("--disturb", "link:1:fails:0"), "works again"),
        (("--disturb", "server:0:2:0"), "server: 0 (there is no server)"),
        (("--disturb", "link:1:2:0", "--fidelity", "formulas"), "expected --fidelity transfers"),
    ],
)
def test_impossible_disturbances_get_one_line(capsys, workload, options, words):
    status, out, err = run(capsys, "simulate", workload, "--fabric", "ring", *options)
    assert status == 2 and out == "" and words in err and len(err.strip().splitlines()) == 1


def test_flows_are_for_whole_jobs(capsys, workload):
    status, _, err = run(capsys, "simulate", workload, "--fabric", "ring", "--fidelity", "flows")
    assert status == 2 and err == "legato: --fidelity: flows (expected formulas or transfers here)\n"
