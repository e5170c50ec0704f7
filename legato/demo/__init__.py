"""The demo, end to end: capture, calibrate, plan, train under DDP and under legato, compare.

This module does not need torch, but the worker processes that it starts do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato.core.errors import InputError
from legato.core.files import write_text
from legato.core.units import format_seconds
from legato.demo.result import ModelResult, ServerResult
from legato.report.html import write_report
from legato.report.model import ModelReport, Report, SchedulerRow
from legato.report.perfetto import write_perfetto
from legato.schedule.published.ddp import bucket_caps
from legato.testbed.launch import Advance, run_workers

__all__ = ["MODEL_NAMES", "run", "run_servers", "summary", "write_pictures"]

MODEL_NAMES = ("resnet-50", "gpt2-small")

#: With more than two workers, the largest relative difference of trained weights that count as equal.
#: With two workers they have to be equal bit for bit. See docs/runtime.md, "When are weights equal?".
TOLERANCE = 1e-2


def run(
    model: str, workers: int, steps: int, folder: Path, advance: Advance, bandwidth_bps: float | None = None
) -> ModelResult:
    """Run the demo for one model on `workers` local processes; `advance(stage, done, total)` reports progress.

    The processes talk over loopback or, with a bandwidth (bits per second), each
    runs in a host of `legato.testbed.hosts` whose link has this bandwidth.
    Raises `RankError` with the error message of the process that failed, and
    `InputError` if this machine cannot have such hosts.
    """
    if workers < 2:
        raise InputError(f"--workers {workers}: there is nothing to exchange (expected at least 2)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    module = ["legato.demo.worker", model, str(steps), str(folder)]
    run_workers(module, workers, folder / "workers.log", advance, bandwidth_bps)
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=ModelResult)


def run_servers(
    model: str, workers: int, servers: int, steps: int, folder: Path, advance: Advance, bandwidth_bps: float | None
) -> ServerResult:
    """Train one model on parameter servers with every order of pulls in turn; arguments and errors as in `run`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    module = ["legato.demo.parameter_server", model, str(steps), str(servers), str(folder)]
    run_workers(module, workers + servers, folder / "workers.log", advance, bandwidth_bps)
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=ServerResult)


def weights_equal(result: ModelResult) -> bool:
    """Compare bit for bit for two workers, where a sum has only one order; within the tolerance for more."""
    return result.max_relative_difference <= (0.0 if result.cluster.workers == 2 else TOLERANCE)


def summary(result: ModelResult, report: Path, trace: Path) -> dict[str, Any]:
    """Return what `legato demo --json` prints for one model."""
    return {
        "model": result.model,
        "weights_equal": weights_equal(result),
        "max_relative_difference": result.max_relative_difference,
        "ddp_s": result.ddp_s,
        "legato_s": result.legato_s,
        "predicted_s": result.best["iteration_s"],
        "lower_bound_s": result.best["lower_bound_s"],
        "scheduler": result.plan.scheduler,
        "report": str(report),
        "trace": str(trace),
    }


def rows(result: ModelResult) -> list[dict[str, Any]]:
    """Return the rows of the scheduler table, with measured times beside the predictions."""
    measured = {"ddp": result.ddp_s, result.plan.scheduler: result.legato_s}
    return [{**row, "measured_s": measured.get(row["scheduler"])} for row in result.rows]


def advice(result: ModelResult) -> str:
    """Return the recommendation: what was measured, and which buckets to use with stock DDP."""
    by_name = {row["scheduler"]: row for row in result.rows}
    ddp, merged = by_name["ddp"], by_name["merge-optimal"]
    caps = bucket_caps(result.merged)
    some = ", ".join(map(repr, caps[:4])) + (f", ... {len(caps)} in all" if len(caps) > 4 else "")
    return (
        f"Measured here: {format_seconds(result.legato_s)} per iteration with the plan {result.plan.scheduler}, "
        f"{format_seconds(result.ddp_s)} with DDP ({result.speedup:.2f}x). With stock DDP, "
        f"bucket_cap_mb_list=[{some}] (legato plan prints it) is predicted to give "
        f"{ddp['iteration_s'] / merged['iteration_s']:.2f}x."
    )


def write_pictures(results: Sequence[ModelResult], folder: Path) -> tuple[Path, Path]:
    """Write the report and the Perfetto trace of all models; returns their paths."""
    report, trace = folder / "report.html", folder / "trace.perfetto.json"
    models = [
        ModelReport(
            name=result.model,
            workload=result.workload,
            cluster=result.cluster,
            rows=tuple(SchedulerRow(**row) for row in rows(result)),
            timelines=tuple(sorted((*result.predicted, *result.measured), key=lambda t: (t.name != "ddp", t.name))),
            advice=advice(result),
        )
        for result in results
    ]
    write_report(report, Report(tuple(models), title="DDP and legato on this machine"))
    write_perfetto(trace, [timeline for model in models for timeline in model.timelines])
    write_text(folder / "summary.json", json.dumps([summary(r, report, trace) for r in results], indent=2) + "\n")
    return report, trace
