"""The 43 measured steps of benchmarks/whole_jobs.py, with the constants that the presets have."""

import runpy
import statistics
from pathlib import Path

import pytest

measured = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "whole_jobs.py"))
ROWS = measured["rows"]()
ERRORS = {row.label + row.family: row.error() for row in ROWS if not row.fit}


def test_nine_rows_fit_and_the_others_are_predicted():
    assert len(ROWS) == 43 and sum(row.fit for row in ROWS) == 9
    assert len(ERRORS) == 34
    errors = [abs(error) for error in ERRORS.values()]
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.12


def test_ratios_of_layouts():
    errors = measured["ratios"](ROWS)
    assert statistics.median(errors) < 0.03
    assert sum(error <= 0.08 for error in errors) > 0.9 * len(errors)


def test_the_presets_have_the_fitted_constants():
    """A golden section around each constant that a preset has finds no better one within 0.2%."""
    for machine in ("a100", "h100", "h100-500w", "b200"):
        chosen = [row for row in ROWS if row.fit and row.job.machine.name == machine and row.job.model.experts == 1]
        own = chosen[0].job.machine.efficiency
        losses = [
            sum(measured["on"](row, efficiency=own * factor).error() ** 2 for row in chosen)
            for factor in (0.996, 1.0, 1.004)
        ]
        assert losses[1] <= min(losses), machine


def test_schedules_of_one_job():
    """torchtitan's Llama 3 405B on 512 GPUs: 128 tokens/s interleaved, 100 under 1F1B; predicted 4% too high."""
    assert measured["schedules_ratio"]() == pytest.approx(1.28, rel=0.05)
