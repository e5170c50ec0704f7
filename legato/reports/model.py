"""The contents of a report as plain values, which any command can fill in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.measurement import Measurement
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = [
    "Breakdown",
    "BreakdownChart",
    "MemoryPoint",
    "ModelReport",
    "Report",
    "SchedulerRow",
    "SweepRow",
    "TextTable",
    "are_jobs",
    "save",
]


class SchedulerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One scheduler's plan for one workload; `legato plan --json` prints it.

    `iteration_s` is the predicted iteration time, `lower_bound_s` a bound that
    no plan with such messages can beat, `gap = iteration_s / lower_bound_s - 1`. `plan_s` is the
    time that planning took, or None if unknown. A plan that is not `runnable` can only be simulated.
    `rounded` is the fraction of the gradients' bytes that travel in a wire format.
    Raises `InputError` if a number is not finite, a time is negative, or a fraction is not from 0 to 1.
    """

    scheduler: str
    iteration_s: float
    lower_bound_s: float
    gap: float
    overlap: float
    utilization: float
    num_messages: int
    plan_s: float | None
    runnable: bool = True
    rounded: float = 0.0

    def __post_init__(self) -> None:
        for field in ("iteration_s", "lower_bound_s", "plan_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected finite seconds, at least 0)")
        for field in ("gap", "overlap", "utilization"):
            if not math.isfinite(getattr(self, field)):
                raise InputError(f"{field}: {getattr(self, field)} (expected a finite number)")
        if not 0 <= self.rounded <= 1:
            raise InputError(f"rounded: {self.rounded} (expected a fraction, 0 to 1)")


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a sweep.

    `axes` has the values of the axes of sweeps (`core/axes.py`), by field. Times are in seconds.
    `speedup` is relative to the sweep's first fabric and
    scheduler on the same cluster. `anomaly` names less of one axis that is faster,
    such as `bandwidth_bps=1e+09` (`legato.sweeps.anomalies`). Results that a cell does
    not have are None; if it has none at all, `error` says why.
    """

    workload: str
    fabric: str
    scheduler: str
    fidelity: str
    axes: dict[str, Any]
    iteration_s: float | None = None
    speedup: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    wall_s: float | None = None
    anomaly: str | None = None
    error: str | None = None

    @property
    def parts(self) -> dict[str, float]:
        """The iteration, as there is nothing to divide it into; nothing for a cell without a result."""
        return {} if self.iteration_s is None else {"iteration": self.iteration_s}

    @property
    def columns(self) -> dict[str, Any]:
        """The row as `legato sweep --json` prints it, with each axis as a field."""
        parts = (
            (self.axes if name == "axes" else {name: value}) for name, value in msgspec.structs.asdict(self).items()
        )
        return {name: value for part in parts for name, value in part.items()}


class TextTable(msgspec.Struct, frozen=True):
    """A table of text, which a console and a page show alike: a title, the heads of its columns, and rows of cells."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class MemoryPoint(msgspec.Struct, frozen=True):
    """A way to train that takes `seconds` and `nbytes` on each GPU; none takes less than `bound_s` in that memory."""

    name: str
    nbytes: int
    seconds: float
    bound_s: float | None
    chosen: bool


class Breakdown(msgspec.Struct, frozen=True):
    """A predicted step of a job in words: the `seconds` of the step and of its `parts` (`report/breakdowns.py`).

    `facts` stand after the name, `note` after the time. Raises `InputError` if the parts are not the step.
    """

    name: str
    seconds: float
    parts: dict[str, float]
    facts: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        total = sum(self.parts.values())
        same = math.isclose(total, self.seconds, rel_tol=1e-6)
        if not (same and 0 < total < math.inf and min(self.parts.values()) >= 0):
            raise InputError(f"parts of {self.name!r}: {total} s (expected {self.seconds} s, none below 0)")


class BreakdownChart(msgspec.Struct, frozen=True):
    """Steps to compare, at least one, drawn in this order; `hint` says in sentences what is drawn."""

    title: str
    hint: str
    bars: tuple[Breakdown, ...]


class ModelReport(msgspec.Struct, frozen=True):
    """Everything known about one workload; the page leaves out what is missing.

    `timelines` are predicted or measured, any number of them, and drawn in this
    order; a predicted and a measured one of the same name belong together. A
    measured one is one iteration of many: `measured` has the times to compare.
    `advice` is one plain sentence. `told` is what a command has said, in tables and
    lines, and `asides` what else it said; the page then says nothing of its own
    about which plan is best. `verdict` is its first sentence, and `code` the lines to
    try. `computation` says what the times of the workload's ops include besides computation. With `points`, the page
    draws time over memory, and timelines begin with the forward pass. `breakdowns` are charts of steps of a whole
    job, of which the headline tells the first. `plans` say which tensors are in the messages of the timeline that has
    the plan's scheduler as its name.
    """

    name: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    rows: tuple[SchedulerRow, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    advice: str = ""
    plans: tuple[Plan, ...] = ()
    measured: Measurement | None = None
    told: tuple[TextTable | str, ...] = ()
    asides: tuple[str, ...] = ()
    verdict: str = ""
    code: str = ""
    computation: str = ""
    points: tuple[MemoryPoint, ...] = ()
    breakdowns: tuple[BreakdownChart, ...] = ()

    def __post_init__(self) -> None:
        if not (self.workload or self.rows or self.timelines or self.measured or self.told):
            raise InputError(f"report of {self.name!r}: nothing to show (expected a workload, rows or timelines)")

    @property
    def network(self) -> str:
        """The network in words, as it was when something was measured or predicted, or several; "" if unknown."""
        said = [timeline.network for timeline in self.timelines if timeline.network]
        return self.measured.network if self.measured else "; ".join(dict.fromkeys(said))


def are_jobs(timelines: Sequence[Timeline]) -> bool:
    """Return whether the timelines show jobs that share a network, or GPUs of a job, instead of plans of one job."""
    return bool(timelines) and all(timeline.whole or timeline.name == timeline.job for timeline in timelines)


def save(model: ModelReport, folder: Path) -> None:
    """Write every part of the report to a file of its own, from which `legato report FOLDER` makes the same page.

    Raises `FileError`.
    """
    parts: dict[str, msgspec.Struct | None] = {
        "workload": model.workload,
        "cluster": model.cluster,
        "measured": model.measured,
    }
    parts |= {f"{plan.scheduler}.plan": plan for plan in model.plans}
    parts |= {f"{timeline.name}.{timeline.source}": timeline for timeline in model.timelines}
    for name, part in parts.items():
        if part is not None:
            files.write(folder / f"{name}.json", part)


class Report(msgspec.Struct, frozen=True):
    """One page: a title, a section for each workload, and the plots of a sweep."""

    models: tuple[ModelReport, ...] = ()
    title: str = ""
    sweep: tuple[SweepRow, ...] = ()

    def __post_init__(self) -> None:
        if not (self.models or self.sweep):
            raise InputError("report: nothing to show (expected at least one workload or one row of a sweep)")
