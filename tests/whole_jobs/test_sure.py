"""How sure predictions are: intervals of the measured steps' kinds."""

import runpy
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.jobs import LLAMA, MIXTURE, job

from legato.core.job import Mesh
from legato.whole_jobs.step import predict
from legato.whole_jobs.sure import LIKE, Kind
from legato.zoo.presets import machine_named

H100 = machine_named("h100")
FITTED = replace(H100, efficiency=0.5)


@pytest.mark.slow
def test_intervals_hold_for_measured_steps():
    """Of the 34 predicted rows of benchmarks/whole_jobs.py, which are among those that made the intervals."""
    measured = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "whole_jobs.py"))
    held = []
    for row in measured["rows"]():
        if row.fit:
            continue
        like = LIKE[(step := predict(row.job)).kind]
        held.append(step.seconds / (1 + like.fitted) <= row.measured_s <= step.seconds * (1 + like.fitted))
    assert sum(held) >= 0.75 * len(held)


def test_the_kind_of_a_step_is_what_it_looks_like():
    small = predict(job(LLAMA, Mesh(data=2), machine=H100, shard="parameters"))
    assert small.kind == Kind(sharded=True, mixture=False, long=False, small=True)
    large = replace(LLAMA, sequence=2**16, hidden=4096, heads=32, kv_heads=32, head_size=128, intermediate=16_384)
    assert predict(job(large, machine=H100)).kind == Kind(sharded=False, mixture=False, long=True, small=False)
    assert predict(job(MIXTURE, machine=H100)).kind.mixture


def test_a_default_efficiency_is_less_sure_than_a_fitted_one():
    default, fitted = (predict(job(LLAMA, machine=machine)).interval for machine in (H100, FITTED))
    assert default is not None and fitted is not None
    assert default.spread == default.like.preset > fitted.spread == default.like.fitted
    assert fitted.low_s * (1 + fitted.spread) == pytest.approx(fitted.high_s / (1 + fitted.spread))


def test_where_no_measured_step_is_alike_nothing_is_said():
    assert predict(job(MIXTURE, Mesh(data=2), machine=FITTED, shard="parameters")).interval is None
    kinds = Kind(False, True, False, False)
    assert LIKE[kinds].preset is None and LIKE[kinds].fitted > 0
