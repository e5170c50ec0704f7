"""The results that the ranks of a demo return to the command that started them."""

from __future__ import annotations

from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload

__all__ = ["SERVER_STAGES", "STAGES", "ModelResult", "ServerResult", "ServerRow"]

#: The stages that are reported as progress, in order.
STAGES = ("capture", "calibrate", "plan", "train, DDP and legato")


class ModelResult(msgspec.Struct, frozen=True):
    """The result for one model. Times are in seconds per iteration; `rows` are those of `legato plan`."""

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
        """The measured speedup of legato over DDP."""
        return self.ddp_s / self.legato_s


#: The stages of the demo with parameter servers.
SERVER_STAGES = ("capture", "calibrate", "plan", "train, every order and DDP")


class ServerRow(msgspec.Struct, frozen=True):
    """One order of pulls in the demo. Seconds per iteration; `out_of_order` is a fraction of the transfers.

    `predicted_s` is simulated on the network that the calibrated all-reduce implies.
    """

    order: str
    iteration_s: float
    waited_s: float
    predicted_s: float
    out_of_order: float
    iterations: int
    max_relative_difference: float


class ServerResult(msgspec.Struct, frozen=True):
    """The result for one model on parameter servers."""

    model: str
    workload: Workload
    workers: int
    servers: int
    rows: list[ServerRow]
