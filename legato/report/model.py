"""What a report is made of: plain values, so that any command can fill one in."""

from __future__ import annotations

import math

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["ModelReport", "Report", "SchedulerRow"]


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


class ModelReport(msgspec.Struct, frozen=True):
    """What there is to show about one workload; what is missing is left out of the page.

    `timelines` are predicted and measured ones in any number, drawn in this
    order; a predicted and a measured one of the same name belong together.
    `advice` is one plain sentence.
    """

    name: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    rows: tuple[SchedulerRow, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    advice: str = ""

    def __post_init__(self) -> None:
        if not (self.workload or self.rows or self.timelines):
            raise InputError(f"report of {self.name!r}: nothing to show (expected a workload, rows or timelines)")


class Report(msgspec.Struct, frozen=True):
    """One page: a title and a section for every workload."""

    models: tuple[ModelReport, ...]
    title: str = ""

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("report: no workload (expected at least one)")
