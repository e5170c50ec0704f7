"""Plans for parameter servers: pushes, then pulls in a random order or in the best one.

All schedulers for parameter servers share `push_and_pull`: pushes in ready order,
then pulls in the scheduler's order, each slice at its server. `legato.core.placement`
decides where a slice is, for tensors in the order of their creation. A workload does
not know that order; the order in which the forward pass first reads the tensors is
the same for models that are built layer by layer.

`random` is what TensorFlow does and what TicTac is measured against (Hashemi, Abdu
Jyothi, Campbell, SysML 2019, section 2.2). All transfers of an iteration are
requested when the graph starts, and arrive in any order; in 1,000 iterations of
ResNet-50 no order was seen twice. Deviation: a plan is one order, the same for all
workers and iterations. With `plan=None` the runtime draws a new one for each worker
and iteration.

`pull-optimal` is the best order of pulls for a worker that runs its ops in the
captured order. Once all pushes are through, the network carries one pull after
another without a gap. A pull that ends at e lets the iteration end no earlier than
at e + tail, with the computation from its first reader on as its tail. Every order
ends at the largest of these sums, so the problem is 1 || L_max, for which the
longest tail first is exactly optimal (Jackson, 1955): the order in which the forward
pass first reads the parameters. Eager PyTorch runs its ops in the captured order, so
no order of pulls after pushes is better there. `tic` and `tac` see only the graph,
not the order of ops, and are meant for executors that run whatever is ready
(TensorFlow). Source: ours, as a yardstick for TicTac.

Units: seconds and bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from legato.core.cluster import Cluster
from legato.core.placement import Placement, place
from legato.core.plan import Kind, Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, priorities, ready_order, resolve_collective

__all__ = ["pull_optimal", "pull_seconds", "push_and_pull", "random_pulls", "reading_order"]


def reading_order(workload: Workload) -> list[int]:
    """The indices of the tensors in the order in which the captured forward pass first reads them."""
    first_read = priorities(workload)
    return sorted(range(len(first_read)), key=lambda t: (first_read[t], t))


def pull_seconds(workload: Workload, cluster: Cluster, collective: str | None) -> list[float]:
    """For each tensor, the seconds of its pull as one message alone on the network.

    A pull is half of what the collective does (`legato.simulator.collective`).
    """
    cost = cluster.cost(resolve_collective(cluster, collective))
    return [cost.cost(tensor.nbytes) / 2 for tensor in workload.tensors]


def push_and_pull(
    scheduler: str,
    pulls: Sequence[int],
    workload: Workload,
    cluster: Cluster,
    collective: str | None,
    placement: Placement,
) -> Plan:
    """Push gradients as they become ready, then pull in this order, one message per slice, with forward overlap.

    Raises `InputError` when the cluster has no servers, on a collective that it
    lacks, or on an unknown placement.
    """
    name, created = resolve_collective(cluster, collective), reading_order(workload)
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


def random_pulls(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    placement: Placement = "round-robin",
    seed: int = 0,
) -> Plan:
    """Push in ready order, pull in an order shuffled by `seed`. Raises `InputError` as `tic` does."""
    order = list(range(len(workload.tensors)))
    random.Random(seed).shuffle(order)
    plan = push_and_pull("random", order, workload, cluster, collective, placement)
    return msgspec.structs.replace(plan, carrier="unordered")


def pull_optimal(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Push in ready order, pull in reading order. Raises `InputError` without servers, or on an unknown setting."""
    return push_and_pull("pull-optimal", reading_order(workload), workload, cluster, collective, placement)
