"""Plans for parameter servers: pushes, then pulls in a random order or in the best order.

All schedulers for parameter servers share `push_and_pull`, which pushes slices of tensors in ready order, and then
pulls them in the scheduler's order. `legato.core.placement` chooses the server of each slice, for tensors in the order
of their creation. A workload does not record the order of creation. In its place, legato uses the order in which the
forward pass first reads the tensors, which is the same for models that are built layer by layer.

`random` is TensorFlow's behaviour, and the baseline of TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019, section
2.2). All transfers of an iteration are requested when the graph starts, and arrive in any order; in 1,000 iterations of
ResNet-50, no order occurred twice. Deviation: a plan has a single order for all workers and iterations. With
`plan="random"`, the runtime draws a new order for each worker and iteration.

`pull-optimal` is the best order of pulls for a worker that runs its ops in the captured order. Once all pushes have
arrived, the network carries one pull after another without a gap. If a pull ends at e, the iteration ends at e + tail
or later. The tail is the computation from the first reader of the pulled parameter on. An iteration ends at the largest
e + tail of all pulls, so the problem is to minimize the largest lateness on one machine (1 || L_max). The exact optimum
is to pull the parameter with the longest tail first (Jackson, 1955), which is the order in which the forward pass first
reads the parameters. Eager PyTorch runs its ops in the captured order, so for eager PyTorch no order of pulls after the
pushes is better. `tic` and `tac` see only the graph, not the order of ops, and are meant for executors that run
whatever is ready (TensorFlow). Source: legato's own scheduler, with which TicTac's can be compared.

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
    """Return the indices of the tensors in the order in which the captured forward pass first reads them."""
    first_read = priorities(workload)
    return sorted(range(len(first_read)), key=lambda t: (first_read[t], t))


def pull_seconds(workload: Workload, cluster: Cluster, collective: str | None) -> list[float]:
    """Return, for each tensor, the seconds of its pull as a single message while nothing else is on the network.

    A pull costs half as much as the collective (`legato.simulator.collective`).
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
    """Return a plan with forward overlap: messages of one slice, pushed in ready order, then pulled in this order.

    Raises `InputError` if the cluster has no servers or lacks the collective, or if the placement is unknown.
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
    return compose(scheduler, messages, workload, forward_overlap=True)


def random_pulls(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    placement: Placement = "round-robin",
    seed: int = 0,
) -> Plan:
    """Return a plan that pushes in ready order and pulls in a random order, which depends on `seed`.

    Raises `InputError` as `push_and_pull` does.
    """
    order = list(range(len(workload.tensors)))
    random.Random(seed).shuffle(order)
    plan = push_and_pull("random", order, workload, cluster, collective, placement)
    return msgspec.structs.replace(plan, carrier="unordered")


def pull_optimal(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Return a plan that pushes in ready order and pulls in reading order. Raises `InputError` as `push_and_pull`."""
    return push_and_pull("pull-optimal", reading_order(workload), workload, cluster, collective, placement)
