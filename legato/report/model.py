"""The contents of a report as plain values, which any command can fill in."""

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
    """One scheduler's plan for one workload; `legato plan --json` prints it.

    `iteration_s` is the predicted iteration time, `lower_bound_s` a bound that
    no plan with such messages can beat, `gap = iteration_s / lower_bound_s - 1`. `plan_s` is the
    time that planning took, and `measured_s` the iteration time of a real run;
    both are None if unknown. A plan that is not `runnable` can only be simulated.
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
    measured_s: float | None = None
    runnable: bool = True
    rounded: float = 0.0

    def __post_init__(self) -> None:
        for field in ("iteration_s", "lower_bound_s", "plan_s", "measured_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected finite seconds, at least 0)")
        for field in ("gap", "overlap", "utilization"):
            if not math.isfinite(getattr(self, field)):
                raise InputError(f"{field}: {getattr(self, field)} (expected a finite number)")
        if not 0 <= self.rounded <= 1:
            raise InputError(f"rounded: {self.rounded} (expected a fraction, 0 to 1)")


class SweepRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cell of a sweep; `legato sweep --json` prints it.

    Times are in seconds. `speedup` is relative to the sweep's first fabric and
    scheduler on the same cluster. `anomaly` names less of one axis that is faster,
    such as `bandwidth_bps=1e+09` (`legato.sweep.anomalies`). Results that a cell does
    not have are None; if it has none at all, `error` says why.
    """

    workload: str
    fabric: str
    scheduler: str
    fidelity: str
    workers: int
    servers: int
    bandwidth_bps: float
    latency_s: float
    gpus_per_host: int = 1
    racks: int = 1
    spines: int = 1
    oversubscription: float = 1.0
    slow: float = 1.0
    slow_link: float = 1.0
    jitter: float = 0.0
    disturb: str = "none"
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


class ModelReport(msgspec.Struct, frozen=True):
    """Everything known about one workload; the page leaves out what is missing.

    `timelines` are predicted or measured, any number of them, and drawn in this
    order; a predicted and a measured one of the same name belong together.
    `advice` is one plain sentence. `plans` say which tensors are in the messages
    of the timeline that has the plan's scheduler as its name.
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
    """One page: a title, a section for each workload, and the plots of a sweep."""

    models: tuple[ModelReport, ...] = ()
    title: str = ""
    sweep: tuple[SweepRow, ...] = ()

    def __post_init__(self) -> None:
        if not (self.models or self.sweep):
            raise InputError("report: nothing to show (expected at least one workload or one row of a sweep)")
