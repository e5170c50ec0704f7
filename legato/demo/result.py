"""What the ranks of a demo hand back to the command that started them."""

from __future__ import annotations

from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["SERVER_STAGES", "STAGES", "ModelResult", "ServerResult", "ServerRow"]

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


#: What there is to wait for with parameter servers.
SERVER_STAGES = ("capture", "calibrate", "plan", "train, every order and DDP")


class ServerRow(msgspec.Struct, frozen=True):
    """One order of pulls in the demo. Seconds an iteration; `out_of_order` is a part of the transfers.

    `predicted_s` is the simulator's, whose network is the calibrated all-reduce's.
    """

    order: str
    iteration_s: float
    waited_s: float
    predicted_s: float
    out_of_order: float
    iterations: int
    max_relative_difference: float


class ServerResult(msgspec.Struct, frozen=True):
    """The demo's part about parameter servers."""

    model: str
    workload: Workload
    workers: int
    servers: int
    rows: list[ServerRow]
