"""The demo, end to end: capture, calibrate, plan, train with DDP and with legato, and compare.

This module does not need torch, but the worker processes that it starts do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.files import write_text
from legato.core.measurement import MeasuredPlan, Measurement
from legato.core.text import count, percent
from legato.core.units import format_seconds
from legato.lab.demo.result import ModelResult, measured_names
from legato.lab.testbed.launch import Advance, run_workers
from legato.reports.doubts import doubts
from legato.reports.html import write_report
from legato.reports.model import ModelReport, Report, SchedulerRow, save
from legato.reports.perfetto import write_perfetto
from legato.schedule.compare import SAME, better_buckets

__all__ = ["MODEL_NAMES", "NEXT", "report_of", "run", "summary", "verdict", "write_pictures"]

MODEL_NAMES = ("resnet-50", "gpt2-small")

#: The advice on what to do next with the user's own model.
NEXT = (
    "With your own model: `model, optimizer = legato.distribute(model, optimizer)` after DDP in your training\n"
    "script, or first `legato capture FILE.py:FUNCTION -o w.json` and `legato plan w.json --scheduler all` to see\n"
    "what it would save on your network."
)

#: With more than two workers, trained weights count as equal up to this relative difference. With two workers, they
#: must be equal bit for bit. See docs/runtime.md, "When are weights equal?".
TOLERANCE = 1e-2


def run(
    model: str, workers: int, steps: int, folder: Path, advance: Advance, bandwidth_bps: float | None = None
) -> ModelResult:
    """Run the demo for one model on `workers` local processes; `advance(stage, done, total)` reports progress.

    Without a bandwidth, the processes communicate over loopback. With a bandwidth (bits per second),
    each process runs in a host of `legato.lab.testbed.hosts` whose link has this bandwidth.
    Raises `RankError` with the error message of the process that failed, and
    `InputError` if this machine cannot have such hosts.
    """
    if workers < 2:
        raise InputError(f"--workers {workers}: there is nothing to exchange (expected at least 2)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    module = ["legato.lab.demo.worker", model, str(steps), str(folder)]
    run_workers(module, workers, folder / "workers.log", advance, bandwidth_bps)
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=ModelResult)


def weights_equal(result: ModelResult) -> bool:
    """Return whether the trained weights are equal.

    With two workers, the weights must be equal bit for bit, because a sum of two has only one order. With more workers,
    small differences are allowed.
    """
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


def verdict(result: ModelResult) -> list[str]:
    """Return sentences about the gain, the distance to the bound, and the error of the prediction."""
    chosen = result.best
    gain = result.ddp_s / result.legato_s
    bound_s, predicted_s = chosen["lower_bound_s"], chosen["iteration_s"]
    step = f"a step took {format_seconds(result.legato_s)} instead of {format_seconds(result.ddp_s)}"
    if gain > 1 + SAME:
        won = f"{result.model}: legato trained {gain:.2f}x as fast as DDP: {step}."
    elif gain < 1 - SAME:
        won = f"{result.model}: legato was slower than DDP ({gain:.2f}x): {step}."
    else:
        won = f"{result.model}: legato was as fast as DDP: a step took {format_seconds(result.legato_s)}."
    spare = max(0.0, 1 - bound_s / result.legato_s)
    off = percent(predicted_s / result.legato_s - 1, signed=True)
    return [
        won,
        f"  The prediction was {format_seconds(predicted_s)} ({off}).",
        f"  No plan can take less than {format_seconds(bound_s)}, so at most {percent(spare, 0)} of the step is "
        "left to gain.",
    ]


def rows(result: ModelResult) -> list[dict[str, Any]]:
    """Return the rows of the scheduler table, with measured times next to the predictions."""
    measured = dict(zip(measured_names(result.plan), (result.ddp_s, result.legato_s), strict=True))
    return [{**row, "measured_s": measured.get(row["scheduler"])} for row in result.rows]


def advice(result: ModelResult) -> str:
    """Return sentences that compare DDP with legato (measured, predicted) and with better bucket sizes (predicted)."""
    predicted_s = {row["scheduler"]: row["iteration_s"] for row in result.rows}
    ours = measured_names(result.plan)[1]
    sentences = [
        f"Measured: {_compared(ours, result.legato_s, result.ddp_s)}.",
        f"Predicted: {_compared(result.plan.scheduler, predicted_s[result.plan.scheduler], predicted_s['ddp'])}.",
    ]
    caps = better_buckets(predicted_s["ddp"], predicted_s["merge-optimal"], result.merged)
    if caps:
        some = ", ".join(map(repr, caps[:4])) + (f", ... {len(caps)} in all" if len(caps) > 4 else "")
        sentences.append(
            f"Predicted for stock DDP with bucket_cap_mb_list=[{some}] (legato plan prints it): "
            f"{predicted_s['ddp'] / predicted_s['merge-optimal']:.2f}x."
        )
    return " ".join(sentences)


def _compared(name: str, seconds: float, ddp_s: float) -> str:
    """Return a phrase that compares two times per iteration, both measured or both predicted."""
    if name == "ddp":
        return f"{format_seconds(ddp_s)} per iteration with DDP, and no plan is more than {percent(SAME)} faster"
    return (
        f"{format_seconds(seconds)} per iteration with {name}, {format_seconds(ddp_s)} with DDP: {ddp_s / seconds:.2f}x"
    )


def result_doubts(result: ModelResult) -> list[str]:
    """Return reasons not to trust the measurement."""
    names = measured_names(result.plan)
    bound_s = result.best["lower_bound_s"]
    measured = dict(zip(names, (result.ddp_blocks_s, result.legato_blocks_s), strict=True))
    return doubts(measured, dict.fromkeys(names, bound_s))


def report_of(result: ModelResult, link: str) -> ModelReport:
    """Return one model's section of the page; `link` describes the links between workers in words."""
    names = measured_names(result.plan)
    predicted = {row["scheduler"]: row for row in result.rows}
    network = f"{count(result.cluster.workers, 'worker')}, {link}"
    plans = []
    for name, seconds in zip(names, (result.ddp_blocks_s, result.legato_blocks_s), strict=True):
        row = predicted.get(name)
        known = {} if row is None else {key: row[key] for key in ("lower_bound_s", "num_messages")}
        plans.append(MeasuredPlan.of(name, seconds, predicted_s=None if row is None else row["iteration_s"], **known))
    timelines = sorted((*result.predicted, *result.measured), key=lambda t: (t.name != "ddp", t.name))
    return ModelReport(
        name=result.model,
        workload=result.workload,
        cluster=result.cluster,
        rows=tuple(SchedulerRow(**row) for row in result.rows),
        timelines=tuple(replace(t, job=result.model, network=network) for t in timelines),
        advice=advice(result),
        plans=(result.plan,),
        measured=Measurement(result.model, network, tuple(plans), tuple(result_doubts(result))),
    )


def write_pictures(results: Sequence[ModelResult], folder: Path, link: str) -> tuple[Path, Path]:
    """Write the report and the Perfetto trace of all models, and return their paths.

    The workload, plans and other data of each model's report are also written, to the model's own folder. `link`
    describes the links between workers in words.
    """
    report, trace = folder / "report.html", folder / "trace.perfetto.json"
    models = [report_of(result, link) for result in results]
    for model in models:
        save(model, folder / model.name)
    write_report(report, Report(tuple(models), title="Training under DDP and under a plan of legato, on this machine"))
    write_perfetto(trace, [timeline for model in models for timeline in model.timelines])
    write_text(folder / "summary.json", json.dumps([summary(r, report, trace) for r in results], indent=2) + "\n")
    return report, trace
