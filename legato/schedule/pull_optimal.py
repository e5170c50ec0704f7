"""The best order of pulls for a worker that runs its ops in the captured order.

Idea: once all pushes are through, the network carries one pull after another
without a gap, and a pull that ends at e lets the iteration end no earlier than
at e + tail, the computation from its first reader on. Every order ends at the
largest of these, so the question is 1||L_max, for which the longest tail first
is exactly optimal (Jackson, 1955): the order in which the forward pass first
reads the parameters. Eager PyTorch runs its ops in the captured order, so there
no order of pulls behind pushes is better. `tic` and `tac` do not know the order
of ops; they see the graph alone, and are meant for executors that run whatever
is ready (TensorFlow).
Source: ours, as a yardstick for TicTac (Hashemi et al., SysML 2019).
Units: none; only the order of ops matters.
"""

from __future__ import annotations

from legato.core.cluster import Cluster
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.servers import push_and_pull, reading_order

__all__ = ["pull_optimal"]


def pull_optimal(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Pushes in ready order, pulls in reading order. Raises `InputError` without servers, or on an unknown setting."""
    return push_and_pull("pull-optimal", reading_order(workload), workload, cluster, collective, placement)
