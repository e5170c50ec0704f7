"""The contents of a report as plain values, which any command can create."""

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
from legato.core.table import Table
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
    "are_jobs",
    "save",
]


class SchedulerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One scheduler's plan for one workload; `legato plan --json` prints it.

    `iteration_s` is the predicted iteration time. No plan with the same kind of messages can be faster than
    `lower_bound_s`, and `gap = iteration_s / lower_bound_s - 1`. `plan_s` is the time that planning took, or None if
    unknown. A plan that is not `runnable` can only be simulated.

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

    def __post_init__(self) -> None:
        for field in ("iteration_s", "lower_bound_s", "plan_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected finite seconds, at least 0)")
        for field in ("gap", "overlap", "utilization"):
            if not math.isfinite(getattr(self, field)):
                raise InputError(f"{field}: {getattr(self, field)} (expected a finite number)")


class SweepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of a sweep.

    `axes` has the values of the axes of sweeps (`core/axes.py`), by field. Times are in seconds. `speedup` is relative
    to the sweep's first fabric and scheduler on the same cluster. Results that a cell does not have are None; if it has
    no results at all, `error` says why.
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
    error: str | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Return the time of the whole iteration as one part, or no parts for a cell without a result."""
        return {} if self.iteration_s is None else {"iteration": self.iteration_s}

    @property
    def columns(self) -> dict[str, Any]:
        """Return the row as `legato sweep --json` prints it, with each axis as a field."""
        parts = (
            (self.axes if name == "axes" else {name: value}) for name, value in msgspec.structs.asdict(self).items()
        )
        return {name: value for part in parts for name, value in part.items()}


class MemoryPoint(msgspec.Struct, frozen=True):
    """The `seconds` per step and the memory per GPU of a way to train; with this memory, none beats `bound_s`."""

    name: str
    nbytes: int
    seconds: float
    bound_s: float | None
    chosen: bool


class Breakdown(msgspec.Struct, frozen=True):
    """A predicted step of a job: the `seconds` of the step and of each of its `parts` (`reports/breakdowns.py`).

    A page writes `facts` after the step's name, and `note` after its time. Raises `InputError` if the parts do not add
    up to the step.
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
    """A chart with one bar for each step, in the order of `bars`; `hint` explains the chart in sentences."""

    title: str
    hint: str
    bars: tuple[Breakdown, ...]


class ModelReport(msgspec.Struct, frozen=True):
    """Everything known about one workload; the page leaves out what is missing.

    `timelines` are predicted or measured, and are drawn in this order. A predicted and a measured timeline of the same
    name belong together. A measured timeline shows one iteration; `measured` has the times of many iterations of each
    plan, which the page compares. `advice` is one sentence. `told` has the tables and lines that a command has printed
    as its verdict, and `asides` has the command's notes. If `told` is not empty, the page adds no verdict of its own.
    `verdict` is the command's first sentence, and `code` has the lines of code to try. `computation` says what the
    times of the workload's ops include besides computation. If there are `points`, the page draws them as time over
    memory, and timelines begin with the forward pass. `breakdowns` are charts of steps of a whole job; the headline
    describes the first step. A timeline may be named after the scheduler of a plan in `plans`; then this plan tells
    which tensors the timeline's messages contain.
    """

    name: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    rows: tuple[SchedulerRow, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    advice: str = ""
    plans: tuple[Plan, ...] = ()
    measured: Measurement | None = None
    told: tuple[Table | str, ...] = ()
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
        """Return in words the network (or networks) of the measurement or of the timelines; "" if unknown."""
        said = [timeline.network for timeline in self.timelines if timeline.network]
        return self.measured.network if self.measured else "; ".join(dict.fromkeys(said))


def are_jobs(timelines: Sequence[Timeline]) -> bool:
    """Return whether the timelines show several jobs or the GPUs of one job; otherwise they show plans of one job."""
    return bool(timelines) and all(timeline.whole or timeline.name == timeline.job for timeline in timelines)


def save(model: ModelReport, folder: Path) -> None:
    """Write every part of the report to a separate file; `legato report FOLDER` makes the same page from the files.

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
