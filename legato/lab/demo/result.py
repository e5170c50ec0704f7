"""The results that ranks of the demo return to the command that started them."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["STAGES", "ModelResult", "measured_names"]

#: The stages that are reported as progress, in order.
STAGES = ("capture", "calibrate", "plan", "train, DDP and legato")


def measured_names(plan: Plan) -> tuple[str, str]:
    """Return the names of the two trainings, with DDP and with the plan; they differ even if the plan is DDP's own."""
    return "ddp", plan.scheduler if plan.carrier == "legato" else "ddp in legato's runtime"


class ModelResult(msgspec.Struct, frozen=True):
    """The result of the demo for one model; `rows` are the rows that `legato plan` predicts.

    `ddp_blocks_s` and `legato_blocks_s` have the seconds per iteration of each timed block of steps.
    """

    model: str
    workload: Workload
    cluster: Cluster
    fit_error: float
    worst_fit_error: float
    rows: list[dict[str, Any]]
    predicted: list[Timeline]
    measured: list[Timeline]
    plan: Plan
    merged: Plan
    ddp_blocks_s: list[float]
    legato_blocks_s: list[float]
    max_relative_difference: float
    steps: int

    @property
    def ddp_s(self) -> float:
        """Return the median seconds per iteration with DDP."""
        return statistics.median(self.ddp_blocks_s)

    @property
    def legato_s(self) -> float:
        """Return the median seconds per iteration with the plan."""
        return statistics.median(self.legato_blocks_s)

    @property
    def best(self) -> dict[str, Any]:
        """Return the row of the plan that the training used."""
        return next(row for row in self.rows if row["scheduler"] == self.plan.scheduler)
