"""Schedulers and fabrics of one's own: functions, files and installed packages, and what they do wrong."""

import pytest
from support.command import run

import legato
from legato.core import code
from legato.core.errors import InputError
from legato.schedule import schedule
from legato.schedule.compare import compare
from legato.schedule.published.baselines import fifo
from legato.simulator.flow import Network, simulate_flow
from legato.simulator.flow.fabrics.ring import WholeRing
from legato.sweeps import Grid, sweep

JOB = legato.Workload(
    "toy",
    (legato.Op("f", "forward", 0.01), legato.Op("b", "backward", 0.02, (0,))),
    (legato.Tensor("w", 4_000_000, 1, (0,)), legato.Tensor("v", 1_000_000, 1, (0,))),
)
CLUSTER = legato.Cluster.derive(4, 1e9, 1e-5, collectives=["ring"])
FILE = """
from legato import Plan
from legato.schedule.published.baselines import fifo
from legato.simulator.flow.fabrics.ring import WholeRing

def mine(workload, cluster, *, least=0):
    return Plan(f"mine {least}", fifo(workload, cluster).messages)

def nothing(workload, cluster):
    pass

def part(workload, cluster):
    return Plan("part", fifo(workload, cluster).messages[:1])

def broken(workload, cluster):
    return workload.nothing_like_it

class Circle(WholeRing):
    pass

class Broken(WholeRing):
    def reduce(self, topology, fragments, ready):
        return topology.nothing_like_it
"""


def mine(workload, cluster, *, least=0):
    return legato.Plan(f"mine {least}", fifo(workload, cluster).messages)


class Circle(WholeRing):
    pass


@pytest.fixture
def files(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    legato.write(tmp_path / "job.json", JOB)
    return tmp_path


def test_a_function_stands_where_a_name_does():
    assert legato.plan(JOB, CLUSTER, mine, least=3).scheduler == "mine 3"
    assert schedule(mine, JOB, CLUSTER, shard="optimizer").shard == "optimizer"
    plan = legato.plan(JOB, CLUSTER, "single")
    found = compare(JOB, CLUSTER, ["fifo", mine, plan])
    assert [one.plan.scheduler for one in found] == ["fifo", "mine 0", "single"]
    assert found[0].iteration_s == found[1].iteration_s and found[2].plan == plan
    with pytest.raises(InputError, match=r"^unknown option of mine 'most'; did you mean 'least'\?|known: least"):
        legato.plan(JOB, CLUSTER, mine, most=1)


def test_in_a_sweep_they_are_what_those_of_legato_are():
    grid = Grid(workloads=(JOB,), fabrics=("ring-whole", Circle()), schedulers=("fifo", mine), axes={"workers": (2, 4)})
    rows = sweep(grid, jobs=2)
    times = {(row.fabric, row.scheduler, row.axes["workers"]): row.iteration_s for row in rows}
    assert {key[:2] for key in times} == {(f, s) for f in ("ring-whole", "Circle") for s in ("fifo", "mine")}
    for workers in (2, 4):
        assert len({seconds for key, seconds in times.items() if key[2] == workers}) == 1
    for wrong in ({"schedulers": (mine, mine)}, {"fabrics": (Circle(), Circle(in_flight=None))}):
        with pytest.raises(InputError, match="another has this name"):
            sweep(Grid(workloads=(JOB,), **wrong))
    own = [cell.own for cell in grid.cells()]
    assert [bool(one) for one in own] == [False] * 2 + [True] * 6


@pytest.mark.parametrize("verb", ["plan", "sweep"])
def test_a_file_stands_where_a_name_does(files, capsys, verb):
    scheduler = f"{files / 'own.py'}:mine"
    status, out, err = run(capsys, verb, files / "job.json", "--workers", 4, "--scheduler", f"fifo,{scheduler}")
    assert status == 0 and "mine" in out, err


def test_a_fabric_of_a_file(files, capsys):
    one = ["simulate", files / "job.json", "--workers", 4, "--bandwidth", "1Gbit", "--fabric"]
    status, out, err = run(capsys, *one, f"ring-whole,{files / 'own.py'}:Circle", "--json")
    assert status == 0, err
    expected = simulate_flow(
        JOB, None, "ring-whole", Network(workers=4, bandwidth_bps=1e9, latency_s=30e-6)
    ).iteration_s
    assert out.count(f'"iteration_s": {expected}') == 2 and '"Circle"' in out
    for name in ("mine", "Broken"):
        status, _, err = run(capsys, *one, f"{files / 'own.py'}:{name}")
        assert status == 2 and "own.py:" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("nothing", "nothing: returned a NoneType (expected a legato.Plan)"),
        ("part", "part: 'v': byte 0 is never sent (expected exactly once)"),
        ("broken", "{path}:broken raised AttributeError: 'Workload' object has no attribute 'nothing_like_it'"),
        ("Cirkle", "{path}: no function 'Cirkle'; did you mean 'Circle'?"),
    ],
)
def test_what_is_wrong_is_one_line(files, capsys, function, said):
    path = files / "own.py"
    status, _, err = run(capsys, "plan", files / "job.json", "--workers", 4, "--scheduler", f"{path}:{function}")
    assert status == 2 and said.format(path=path) in err and len(err.splitlines()) == 1


def test_entry_points_of_installed_packages_have_names_everywhere(files, monkeypatch, capsys):
    info = files / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[legato.schedulers]\nmine = own:mine\ngone = own:gone\n[legato.fabrics]\ncircle = own:Circle\n"
    )
    monkeypatch.syspath_prepend(files)
    code.installed.cache_clear()
    try:
        assert legato.plan(JOB, CLUSTER, "mine", least=2).scheduler == "mine 2"
        assert legato.simulate(JOB, legato.plan(JOB, CLUSTER, "mine"), CLUSTER, fabric="circle").iteration_s > 0
        status, out, err = run(capsys, "simulate", files / "job.json", "--workers", 4, "--fabric", "all", "--json")
        assert status == 0 and '"circle"' in out, err
        with pytest.raises(InputError, match=r"^legato.schedulers 'gone' \(own:gone\): importing it raised Attribute"):
            legato.plan(JOB, CLUSTER, "gone")
        with pytest.raises(InputError, match="did you mean 'mine'"):
            legato.plan(JOB, CLUSTER, "minee")
        left_out = []
        found = compare(JOB, CLUSTER, left_out=lambda name, error: left_out.append(name))
        assert "mine 0" in [one.plan.scheduler for one in found] and "gone" in left_out
    finally:
        code.installed.cache_clear()


def test_no_plan_file_names_code(files, capsys):
    """A plan's `scheduler` is a text that nothing looks up."""
    plan = files / "plan.json"
    legato.write(plan, legato.Plan(f"{files / 'own.py'}:broken", fifo(JOB, CLUSTER).messages))
    status, _, err = run(capsys, "simulate", files / "job.json", "--workers", 4, "--fabric", "ring", "--plan", plan)
    assert status == 0, err
    with pytest.raises(InputError, match="unknown scheduler"):
        legato.plan(JOB, CLUSTER, f"{files / 'own.py'}:mine")
