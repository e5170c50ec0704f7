"""What the ranks of a demo hand back to the command that started them."""

from __future__ import annotations

from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["STAGES", "ModelResult"]

#: What there is to wait for, in order.
STAGES = ("capture", "calibrate", "plan", "train, DDP and legato")


class ModelResult(msgspec.Struct, frozen=True):
    """One model's part of the demo. Times in seconds an iteration; `rows` as `legato plan` gives them."""

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
    ddp_s: float
    legato_s: float
    max_relative_difference: float
    steps: int

    @property
    def best(self) -> dict[str, Any]:
        """The row of the plan that was trained with."""
        return next(row for row in self.rows if row["scheduler"] == self.plan.scheduler)

    @property
    def speedup(self) -> float:
        """Of legato over DDP, measured."""
        return self.ddp_s / self.legato_s
