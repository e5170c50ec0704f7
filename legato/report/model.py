"""What a report is made of: plain values, so that any command can fill one in."""

from __future__ import annotations

import math

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["ModelReport", "Report", "SchedulerRow", "SweepRow"]


class SchedulerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One scheduler's plan for one workload; its JSON is what `legato plan --json` prints.

    `iteration_s` is predicted, `lower_bound_s` what no plan can beat, `gap =
    iteration_s / lower_bound_s - 1`; `plan_s` is the time planning took, None
    where nobody measured it; `measured_s` the iteration that really ran.
    Raises `InputError` where a number is not finite or a time is below zero.
    """

    scheduler: str
    iteration_s: float
    lower_bound_s: float
    gap: float
    overlap: float
    utilization: float
    num_messages: int
    plan_s: float | None
    measured_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("iteration_s", "lower_bound_s", "plan_s", "measured_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected finite seconds, at least 0)")
        for field in ("gap", "overlap", "utilization"):
            if not math.isfinite(getattr(self, field)):
                raise InputError(f"{field}: {getattr(self, field)} (expected a finite number)")


class SweepRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cell of a sweep; its JSON is what `legato sweep --json` prints.

    `speedup` is over the sweep's first fabric and scheduler on the same
    machines. What a cell could not give is None; where it gave nothing, `error`
    says why. Seconds, and bits per second.
    """

    workload: str
    fabric: str
    scheduler: str
    fidelity: str
    workers: int
    servers: int
    bandwidth_bps: float
    latency_s: float
    racks: int = 1
    oversubscription: float = 1.0
    slow: float = 1.0
    slow_link: float = 1.0
    jitter: float = 0.0
    iteration_s: float | None = None
    speedup: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    wall_s: float | None = None
    error: str | None = None


class ModelReport(msgspec.Struct, frozen=True):
    """What there is to show about one workload; what is missing is left out of the page.

    `timelines` are predicted and measured ones in any number, drawn in this
    order; a predicted and a measured one of the same name belong together.
    `advice` is one plain sentence; `plans`, by their schedulers' names, say
    which tensors are in the timelines' messages.
    """

    name: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    rows: tuple[SchedulerRow, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    advice: str = ""
    plans: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        if not (self.workload or self.rows or self.timelines):
            raise InputError(f"report of {self.name!r}: nothing to show (expected a workload, rows or timelines)")


class Report(msgspec.Struct, frozen=True):
    """One page: a title, a section for every workload, and the plots of a sweep."""

    models: tuple[ModelReport, ...] = ()
    title: str = ""
    sweep: tuple[SweepRow, ...] = ()

    def __post_init__(self) -> None:
        if not (self.models or self.sweep):
            raise InputError("report: no workload (expected at least one)")
