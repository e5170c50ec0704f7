"""What all plans for parameter servers share: pushes before pulls, each slice at its server.

Where a slice is says `legato.core.placement`, for tensors in the order of their
creation. A workload does not know that; the order in which the forward pass
first reads them is the same for models that are built layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.cluster import Cluster
from legato.core.placement import Placement, place
from legato.core.plan import Kind, Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.compose import compose, known_collective, ready_order, urgency

__all__ = ["pull_seconds", "push_and_pull", "reading_order"]


def reading_order(workload: Workload) -> list[int]:
    """Indices of the tensors in the order in which the captured forward pass first reads them."""
    first_read = urgency(workload)
    return sorted(range(len(first_read)), key=lambda t: (first_read[t], t))


def pull_seconds(workload: Workload, cluster: Cluster, collective: str | None) -> list[float]:
    """For each tensor, the time of its pull as one message that has the network to itself.

    A pull is half of what the collective does (`legato.simulate.collective`).
    """
    cost = cluster.cost(known_collective(cluster, collective))
    return [cost.cost(tensor.nbytes) / 2 for tensor in workload.tensors]


def push_and_pull(
    scheduler: str,
    pulls: Sequence[int],
    workload: Workload,
    cluster: Cluster,
    collective: str | None,
    placement: Placement,
) -> Plan:
    """Pushes as gradients become ready, then pulls in the order given, a message a slice, with forward overlap.

    Raises `InputError` when the cluster has no servers, on a collective that it
    lacks, or on an unknown placement.
    """
    name, created = known_collective(cluster, collective), reading_order(workload)
    tensors = [workload.tensors[t] for t in created]
    pieces = dict(zip(created, place((t.nbytes for t in tensors), cluster.servers, placement), strict=True))
    orders: tuple[tuple[Kind, Sequence[int]], ...] = (("push", ready_order(workload)), ("pull", pulls))
    messages = [
        Message((Slice(workload.tensors[t].name, start, stop),), kind, name, server=server)
        for kind, order in orders
        for t in order
        for start, stop, server in pieces[t]
    ]
    return compose(scheduler, messages, workload, cluster, forward_overlap=True)
