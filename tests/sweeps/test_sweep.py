"""Grids: which cells they have, that they resume, that a cluster gives the same, and what the files hold."""

import csv
import dataclasses
import itertools
import math
import os
import re
import signal
import sys
import time

import msgspec
import pyarrow.parquet as pq
import pytest
from distributed import LocalCluster
from support.nets import chain

import legato
from legato.core.cluster import Cluster
from legato.core.errors import FileError, InputError, LegatoError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.compare import compare
from legato.simulator.flow import FABRICS, Disturbance, Network, fabric, simulate_flow
from legato.sweeps import Grid, JobResults, JobRow, sweep, write_rows
from legato.sweeps.journal import Journal, journal_of
from legato.sweeps.parallel import in_parallel


def job(name="toy", layers=3):
    ops = [Op(f"f{i}", "forward", 0.01, (i - 1,) if i else ()) for i in range(layers)]
    ops += [Op(f"b{i}", "backward", 0.02, (layers + k - 1,) if k else ()) for k, i in enumerate(range(layers)[::-1])]
    tensors = [Tensor(f"w{i}", 1_000_000 * (i + 1), 2 * layers - 1 - i, (i,)) for i in range(layers)]
    return Workload(name, tuple(ops), tuple(tensors))


JOB = job()


def test_a_faster_link_can_make_an_iteration_longer():
    slower = chain((0.04, 0.05, 0.04), (0.02, 0.07, 0.01), (23_000_000, 27_000_000, 25_000_000))
    found = sweep(grid(slower, fabrics=("tree",), workers=4, bandwidth_bps=(11e9, 12e9), options={"in_flight": None}))
    assert [row.iteration_s for row in found] == pytest.approx([0.306545, 0.308], abs=1e-6)


def grid(
    *workloads, fabrics=("ring",), schedulers=("plain",), fidelity="transfers", iterations=None, options=None, **axes
):
    """A grid without latency, of one workload if none is given; axes with one value need no tuple."""
    return Grid(
        workloads=workloads or (JOB,),
        fabrics=fabrics,
        schedulers=schedulers,
        fidelity=fidelity,
        iterations=iterations,
        options=options or {},
        axes={"latency_s": (0.0,)} | {name: one if isinstance(one, tuple) else (one,) for name, one in axes.items()},
    )


WIDE = {"fabrics": ("parameter-server", "ring"), "workers": (2, 4), "bandwidth_bps": (1e9, 10e9), "servers": (1, 2)}
GRID = grid(**WIDE)


def timeless(rows):
    """Rows without the time that the machine needed."""
    return [msgspec.structs.replace(row, wall_s=None) for row in rows]


def test_a_grid_is_every_combination_once():
    cells = GRID.cells()
    assert len(cells) == (2 + 1) * 2 * 2  # servers are an axis of the fabrics that have some
    assert len({cell.key for cell in cells}) == len(cells)
    assert {cell.axes["servers"] for cell in cells if cell.settings["fabric"] == "ring"} == {0}
    twice = msgspec.structs.replace(GRID, workloads=(JOB, job()), axes=GRID.axes | {"workers": (2, 4, 2)})
    assert twice.cells() == cells


def test_the_key_is_the_content():
    (cell, *_) = GRID.cells()
    for field in cell.__struct_fields__:
        value = getattr(cell, field)
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        for name, part in parts:
            other = "another" if part != "another" else ""
            changed = other if name is None else value | {name: other}
            changed = (changed,) if isinstance(value, tuple) else changed
            assert msgspec.structs.replace(cell, **{field: changed}).key != cell.key, (field, name)


def test_all_means_the_schedulers_made_for_a_fabric():
    asked = grid(fabrics=("ring", "parameter-server"), schedulers=("all",), fidelity="formulas")
    found = {(cell.settings["fabric"], cell.settings["scheduler"]) for cell in asked.cells()}
    assert {("ring", "legato"), ("parameter-server", "tac")} <= found and ("ring", "tac") not in found


def test_flow_cells_are_what_the_simulator_says():
    for row in sweep(GRID, jobs=1):
        fabric = FABRICS[row.fabric]
        fabric = dataclasses.replace(fabric, servers=row.axes["servers"]) if row.axes["servers"] else fabric
        network = Network(workers=row.axes["workers"], bandwidth_bps=row.axes["bandwidth_bps"])
        expected = simulate_flow(JOB, None, fabric, network)
        assert (row.iteration_s, row.utilization) == (expected.iteration_s, expected.utilization)
        assert row.error is None and row.gap is None


def test_collective_cells_are_what_plan_says():
    names = ("ddp", "mg-wfbp", "legato")
    asked = grid(schedulers=names, fidelity="formulas", workers=(4,), latency_s=(1e-4,))
    rows = sweep(asked, jobs=1)
    expected = compare(JOB, Cluster.derive(4, 10e9, 1e-4, collectives=["ring"]), names)
    assert [row.iteration_s for row in rows] == [one.iteration_s for one in expected]
    assert [row.gap for row in rows] == pytest.approx([one.gap for one in expected], abs=1e-12)


def test_speedup_is_over_the_first_fabric_on_the_same_machines():
    rows = sweep(GRID, jobs=1)
    for row in rows:
        (base,) = [
            other
            for other in rows
            if (other.fabric, other.axes["workers"], other.axes["bandwidth_bps"])
            == ("parameter-server", row.axes["workers"], row.axes["bandwidth_bps"])
            and other.axes["servers"] == (row.axes["servers"] or 1)
        ]
        assert row.speedup == base.iteration_s / row.iteration_s


def test_there_is_no_speedup_over_a_cell_that_fails(monkeypatch):
    """Not even over the same cell with another number of servers."""

    def failing(workload, plan, fabric, *arguments, **options):
        if fabric.servers == 2 and not fabric.multicast:
            raise InputError("too much")
        return simulate_flow(workload, plan, fabric, *arguments, **options)

    monkeypatch.setattr("legato.sweeps.cell.simulate_flow", failing)
    asked = grid(fabrics=("parameter-server", "multicast", "ring"), servers=(1, 2))
    found = {(row.fabric, row.axes["servers"]): row for row in sweep(asked, jobs=1)}
    base_s = found["parameter-server", 1].iteration_s
    assert found["multicast", 2].iteration_s > 0 and found["multicast", 2].speedup is None
    for cell in (("multicast", 1), ("ring", 0)):
        assert found[cell].speedup == base_s / found[cell].iteration_s


def test_a_cell_that_fails_is_a_row():
    asked = grid(schedulers=("tac", "plain"), workers=(2,))
    bad, good = sweep(asked, jobs=1)
    assert "servers" in bad.error and bad.iteration_s is None and bad.speedup is None
    assert good.error is None and good.iteration_s > 0


def test_a_bug_in_a_cell_is_a_row_too_and_is_tried_again(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ZeroDivisionError("no such luck")

    asked = grid(workers=(2,))
    with monkeypatch.context() as patch, Journal(tmp_path / "j") as journal:
        patch.setattr("legato.sweeps.cell.simulate_flow", broken)
        assert sweep(asked, journal=journal, jobs=1)[0].error == "ZeroDivisionError: no such luck"
    with Journal(tmp_path / "j") as journal:
        assert sweep(asked, journal=journal, jobs=1)[0].error is None


def test_an_interrupted_sweep_goes_on(tmp_path):
    path, seen = tmp_path / "j", []

    def stop(done, total):
        seen.append((done, total))
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Journal(path) as journal:
        sweep(GRID, journal=journal, jobs=1, progress=stop)
    path.write_bytes(path.read_bytes()[:-7])  # the last line is torn
    seen.clear()
    with Journal(path) as journal:
        assert len(journal.done) == 4
        rows = sweep(GRID, journal=journal, jobs=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 12) for done in range(4, 13)]
    assert timeless(rows) == timeless(sweep(GRID, jobs=1))
    with Journal(path) as journal:  # the torn line is in the middle now
        seen.clear()
        sweep(GRID, journal=journal, jobs=1, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(12, 12)]


def test_journals_are_told_from_other_files(tmp_path):
    for content in (b"", b'{"form'):
        (tmp_path / "j").write_bytes(content)
        with Journal(tmp_path / "j") as journal:
            assert journal.done == {}
    (tmp_path / "notes").write_bytes(b"buy milk\n")
    with pytest.raises(FileError, match="not the journal of a sweep"):
        Journal(tmp_path / "notes")
    assert (tmp_path / "notes").read_bytes() == b"buy milk\n"
    with Journal(tmp_path / "j"), pytest.raises(FileError, match="another sweep"):
        Journal(tmp_path / "j")
    with pytest.raises(FileError, match="directory"):
        Journal(tmp_path)


def test_processes_give_what_one_gives():
    assert timeless(sweep(GRID, jobs=2)) == timeless(sweep(GRID, jobs=1))


def test_a_dask_cluster_gives_what_this_machine_gives(tmp_path):
    """A scheduler, and workers in processes of their own."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
        dask = cluster.scheduler_address
        with Journal(tmp_path / "j") as journal:
            rows = sweep(GRID, journal=journal, dask=dask)
            assert len(journal.done) == len(rows) == 12
        assert timeless(rows) == timeless(sweep(GRID, jobs=1))
        assert os.getpid() not in {pid for _, pid, _ in in_parallel(_where, [0.0] * 20, dask=dask)}
        spans = sorted(in_parallel(_span, range(8), jobs=1, dask=dask))
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        with pytest.raises(LegatoError, match="dask: the scheduler or a worker was stopped or killed"):
            list(in_parallel(_ends, range(4), dask=dask))


def test_a_dask_cluster_without_workers():
    with (
        LocalCluster(n_workers=0, dashboard_address=":0") as cluster,
        pytest.raises(InputError, match=r"dask: the cluster at .* has no workers"),
    ):
        sweep(GRID, dask=cluster.scheduler_address)


def test_machines_of_all_kinds_are_what_the_simulator_says():
    axes = {"racks": (1, 2), "oversubscription": (1.0, 4.0), "jitter": (0.0, 0.1)}
    fixed = {"seed": 3, "server_bandwidth_bps": 40e9, "sharing": "fair", "iterations": 2}
    options = {"message_bytes": 2_000_000, "barrier": False}
    asked = grid(fabrics=("parameter-server", "ring"), workers=(4,), **axes, **fixed, options=options)
    rows = sweep(asked, jobs=1)
    assert len(rows) == 2 * 2**3
    for row in rows:
        network = Network(
            workers=4,
            bandwidth_bps=10e9,
            racks=row.axes["racks"],
            oversubscription=row.axes["oversubscription"],
            server_bandwidth_bps=40e9,
            sharing="fair",
            jitter=row.axes["jitter"],
            seed=3,
        )
        mine = options if row.axes["servers"] else {"message_bytes": 2_000_000}
        expected = simulate_flow(JOB, None, fabric(row.fabric, **mine), network, iterations=2)
        assert row.iteration_s == expected.iteration_s
        (base,) = [r for r in rows if r.fabric == "parameter-server" and _machines(r) == _machines(row)]
        assert row.speedup == base.iteration_s / row.iteration_s


def test_every_item_is_done_once():
    found = list(in_parallel(_where, [0.03] * 20 + [0.0] * 500 + [0.03] * 20, jobs=2))
    assert sorted(seconds for seconds, *_ in found) == [0.0] * 500 + [0.03] * 40
    assert os.getpid() not in {pid for _, pid, _ in found}


def test_a_worker_that_is_killed():
    with pytest.raises(LegatoError, match="a worker process was killed"):
        list(in_parallel(_ends, range(40), jobs=2))


def _where(seconds):
    """(the item, the process it is done in, whether Ctrl-C is kept from it), after this time."""
    time.sleep(max(0, seconds))
    return seconds, os.getpid(), signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def _span(_):
    """When it began and ended."""
    began = time.monotonic()
    time.sleep(0.02)
    return began, time.monotonic()


def _ends(_):
    os.kill(os.getpid(), signal.SIGKILL)


def _machines(row):
    return row.axes["racks"], row.axes["oversubscription"], row.axes["jitter"]


@pytest.mark.parametrize("address", ["", "nowhere", "http://127.0.0.1:8786", "127.0.0.1:", "127.0.0.1:65536"])
def test_what_is_no_address_of_dask(address):
    with pytest.raises(InputError, match="expected the scheduler's HOST:PORT"):
        sweep(GRID, dask=address)


def test_dask_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match="dask: not installed"):
        sweep(GRID, dask="127.0.0.1:8786")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"fabrics": ("rings",)}, "did you mean 'ring'"),
        ({"fabrics": ("butterfly",), "fidelity": "formulas"}, "fabric by formulas"),
        ({"schedulers": ("legatto",)}, "did you mean 'legato'"),
        ({"workers": (0,)}, "workers: 0"),
        ({"workers": ()}, "workers: empty"),
        ({"bandwidths": (1e9,)}, "did you mean 'bandwidth_bps'"),
        ({"servers": (0,)}, "servers: 0"),
        ({"bandwidth_bps": (-1.0,)}, "bandwidth_bps: -1"),
        ({"racks": (9,)}, "racks: 9"),
        ({"oversubscription": (0.5,)}, "oversubscription: 0.5"),
        ({"sharing": "unfair"}, "sharing"),
        ({"options": {"in_flyght": 2}}, "no such option"),
        ({"gpus_per_host": (3,)}, "gpus_per_host: 3"),
        ({"topology": "rails"}, "several cards a host"),
        ({"spines": (1, 2)}, "spines: 2 above one rack"),
        ({"jitter": (0.1,), "fidelity": "formulas"}, "identical hosts"),
        ({"gpus_per_host": (2,), "fidelity": "formulas"}, "identical hosts"),
        ({"options": {"placement": "random"}}, "placement"),
        ({"disturb": ()}, "disturb: empty"),
        ({"disturb": ("none", "link:2:2:0")}, "link: 2 (expected 0 to 1)"),
        ({"disturb": ("link:1:2",)}, "disturb: 'link:1:2' (expected something like"),
        ({"disturb": ("none, link:1:2:0",)}, "disturb: 'none'"),
        ({"disturb": ("none", "link:1:2:0"), "iterations": 2}, "iterations: 2 (expected 1 with disturb"),
        ({"disturb": ("none", "link:1:2:0"), "fidelity": "formulas", "fabrics": ("ring",)}, "identical hosts"),
        ({"workers": tuple(range(1, 10**5)), "bandwidth_bps": tuple(map(float, range(1, 100)))}, "cells"),
    ],
)
def test_wrong_grids(changed, words):
    with pytest.raises(InputError, match=re.escape(words)):
        grid(**WIDE | changed)


def test_files_hold_the_rows(tmp_path):
    rows = sweep(grid(job('a,"b'), job(), schedulers=("plain", "tac"), workers=(2,)), jobs=1)
    write_rows(tmp_path / "s.parquet", rows)
    write_rows(tmp_path / "s.csv", rows)
    built = [row.columns for row in rows]
    assert pq.read_table(tmp_path / "s.parquet").to_pylist() == built
    with open(tmp_path / "s.csv", newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [{key: "" if value is None else str(value) for key, value in row.items()} for row in built]
    assert journal_of(tmp_path / "s.csv").name == "s.csv.cells.jsonl"
    assert list(built[0])[3:6] == ["fidelity", "workers", "servers"] and "axes" not in built[0]


def test_disturbed_cells_are_what_the_simulator_says():
    """All of one iteration, so that they can be compared: without a barrier or with jitter, it would be three."""
    texts = {
        "none": (),
        "link:3:fails:20ms:25ms": (Disturbance(kind="link", number=3, factor=math.inf, start_s=0.02, end_s=0.025),),
        "compute:0:2:0, server:0:3:1ms:70ms": (
            Disturbance(kind="compute", number=0, factor=2.0),
            Disturbance(kind="server", number=0, factor=3.0, start_s=1e-3, end_s=0.07),
        ),
    }
    axes = {"workers": (4,), "jitter": (0.1,), "bandwidth_bps": (1e9, 5e9), "disturb": tuple(texts)}
    rows = sweep(grid(fabrics=("parameter-server", "ring"), options={"barrier": False}, **axes), jobs=1)
    assert len(rows) == 2 * 2 * 3 and [row.axes["disturb"] for row in rows[::2]] == [*texts, *texts]
    for row in rows:
        network = Network(
            workers=4, bandwidth_bps=row.axes["bandwidth_bps"], jitter=0.1, disturbances=texts[row.axes["disturb"]]
        )
        if row.axes["servers"]:
            made = fabric(row.fabric, barrier=False)
        elif "server" in row.axes["disturb"]:
            assert row.iteration_s is None and row.error == "server: 0 (there is no server)"
            continue
        else:
            made = fabric(row.fabric)
        assert row.iteration_s == simulate_flow(JOB, None, made, network, iterations=1).iteration_s
        (base,) = [
            one.iteration_s
            for one in rows
            if (one.fabric, one.axes["bandwidth_bps"], one.axes["disturb"])
            == ("parameter-server", row.axes["bandwidth_bps"], row.axes["disturb"])
        ]
        assert row.speedup == base / row.iteration_s


def test_switches_and_hosts_of_all_kinds_are_what_the_simulator_says():
    axes = {"gpus_per_host": (2, 4), "racks": (2,), "spines": (1, 3), "oversubscription": (1.0, 2.0)}
    fixed = {"gpus_per_card": 2, "local_bandwidth_bps": 50e9, "seed": 5}
    rows = sweep(grid(fabrics=("shuffle", "hierarchical"), workers=(8,), **axes, **fixed), jobs=1)
    assert len(rows) == 2 * 2**3
    for row in rows:
        network = Network(
            workers=8,
            bandwidth_bps=10e9,
            gpus_per_host=row.axes["gpus_per_host"],
            gpus_per_card=2,
            local_bandwidth_bps=50e9,
            racks=2,
            spines=row.axes["spines"],
            oversubscription=row.axes["oversubscription"],
            seed=5,
        )
        assert row.iteration_s == simulate_flow(JOB, None, row.fabric, network).iteration_s
    (tree,) = sweep(grid(workers=(16,), topology="fat-tree", core_oversubscription=2.0), jobs=1)
    network = Network(workers=16, bandwidth_bps=10e9, topology="fat-tree", core_oversubscription=2.0)
    assert tree.iteration_s == simulate_flow(JOB, None, "ring", network).iteration_s


def test_a_page_tells_of_each_job_its_own_failures():
    ran = JobRow(
        job="a",
        axes={},
        step_s=1.0,
        speedup=1.0,
        tokens_per_s=1.0,
        utilization=0.5,
        parts={"computing": 1.0},
        error=None,
    )
    failed = JobRow(
        job="b", axes={}, step_s=None, speedup=None, tokens_per_s=None, utilization=None, parts={}, error="too large"
    )
    jobs = dict.fromkeys("ab", legato.job("llama-3-8b", data=8))
    first, second = JobResults([ran, failed], jobs, "formulas").sections()
    assert len(first.told) == 1 and second.told[1:] == ("1 failed: too large",)
