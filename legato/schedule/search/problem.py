"""The task of a search: the workload, the cluster, the limits of the search, and the plans that are allowed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from legato.core.cluster import Cluster
from legato.core.plan import Plan, Shard
from legato.core.workload import Workload
from legato.schedule.basics.compose import has_free_order, message_limit, resolve_collective
from legato.schedule.search.blocks import too_many_tensors
from legato.schedule.search.budget import Budget
from legato.schedule.search.collectives import Collectives

__all__ = ["Problem", "Solve"]

_log = logging.getLogger("legato")


@dataclass(frozen=True)
class Problem:
    """The arguments of the scheduler `legato` (documented there), and values derived from these arguments."""

    workload: Workload
    cluster: Cluster
    collective: str | None
    gap: float
    work: float
    limit_s: float
    rounds: int
    seed: int
    max_message_bytes: int | None
    shard: Shard

    @cached_property
    def most(self) -> float:
        """The most bytes that a message may have."""
        return message_limit(self.max_message_bytes)

    @cached_property
    def collectives(self) -> Collectives:
        name = self.collective
        names = tuple(self.cluster.collectives) if name is None else (resolve_collective(self.cluster, name),)
        return Collectives(self.cluster, names, self.most)

    @property
    def free_order(self) -> bool:
        """Return whether ops other than optimizer ops may move."""
        return has_free_order(self.workload)

    @property
    def large(self) -> bool:
        return too_many_tensors(len(self.workload.tensors))

    def budget(self, fraction: float = 1.0) -> Budget:
        """Return a budget with this fraction of the work that the whole search may do."""
        return Budget(self.work * fraction, self.limit_s)

    def warn_if_cut(self, budget: Budget) -> None:
        if budget.cut:
            _log.warning("the search for a plan was ended after %g s: another run may find another plan", self.limit_s)


#: A function that finds the best plan. Modules that turn one problem into others get it as an argument, which avoids
#: circular imports.
Solve = Callable[[Problem], Plan]
