"""Pulls in a random order: what TensorFlow does, and what TicTac is measured against.

Idea: none. The transfers of an iteration are requested when the graph is
started, all at once, and arrive in any order; in 1,000 iterations of ResNet-50
no order was seen twice.
Paper: TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019), section 2.2.
Deviation: a plan is one order, the same for all workers and iterations. With
`plan=None` the runtime draws a new one for each worker and iteration.
"""

from __future__ import annotations

import random

from legato.core.cluster import Cluster
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.servers import push_and_pull

__all__ = ["random_pulls"]


def random_pulls(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    placement: Placement = "round-robin",
    seed: int = 0,
) -> Plan:
    """Pushes in ready order, pulls shuffled by `seed`. Raises `InputError` as `tic` does."""
    order = list(range(len(workload.tensors)))
    random.Random(seed).shuffle(order)
    return push_and_pull("random", order, workload, cluster, collective, placement)
