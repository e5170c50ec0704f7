"""Cells that are slower than with less."""

import pytest
from support.command import run
from support.nets import chain

from legato.core import files
from legato.sweeps import Grid, sweep

CHAIN = chain((0.04, 0.05, 0.04), (0.02, 0.07, 0.01), (23_000_000, 27_000_000, 25_000_000))


def rows(**axes):
    axes = {"workers": (4,), **axes}
    return sweep(Grid(workloads=(CHAIN,), fabrics=("tree",), axes=axes, options={"in_flight": None}), jobs=1)


def test_a_faster_link_makes_an_iteration_longer_and_the_cell_says_so():
    slow, fast, fastest = rows(bandwidth_bps=(11e9, 12e9, 100e9), latency_s=(0.0,))
    assert (slow.iteration_s, fast.iteration_s) == pytest.approx((0.306545, 0.308), abs=1e-6)
    assert slow.anomaly is None and fast.anomaly == "bandwidth_bps=1.1e+10" and fastest.anomaly is None


def test_what_is_slower_with_less_is_not_marked():
    assert not any(row.anomaly for row in rows(bandwidth_bps=(1e9, 11e9), latency_s=(0.0, 1.0), slow=(1.0, 2.0)))


def test_the_command_says_so(tmp_path, capsys):
    files.write(tmp_path / "chain.json", CHAIN)
    options = ["--fabric", "tree", "--workers", 4, "--bandwidth", "11,12Gbit", "--latency", 0]
    options += ["--in-flight", "any"]
    status, out, err = run(capsys, "sweep", tmp_path / "chain.json", *options)
    assert status == 0 and "faster with" in out and "bandwidth_bps=1.1e+10" in out
    assert "1 cell is slower than a cell with slower links" in err
