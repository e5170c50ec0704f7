"""Functions that all schedulers share: when tensors are ready and read, and how to make messages and plans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import msgspec

from legato.collectives import COLLECTIVES
from legato.core.cluster import UNDIVIDED, Cluster
from legato.core.errors import InputError, PlanError, TooLargeError
from legato.core.files import identity
from legato.core.plan import MOST_CHUNKS, Carrier, Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.basics.joined import ALIGNMENT

__all__ = [
    "check_partitions",
    "compose",
    "has_free_order",
    "in_halves",
    "in_turn",
    "is_runnable",
    "least_partition",
    "message_limit",
    "message_of",
    "moves_updates_only",
    "priorities",
    "ready_order",
    "release_times",
    "resolve_collective",
    "tails",
    "with_node_order",
]


def ready_order(workload: Workload) -> list[int]:
    """Return the indices of the tensors in the order in which the captured backward pass produces their gradients."""
    return sorted(range(len(workload.tensors)), key=lambda t: workload.tensors[t].ready_after)


def release_times(workload: Workload, order: Sequence[int] = ()) -> list[float]:
    """Return when each tensor's gradient is ready (seconds) if ops run in `order`, by default the captured order."""
    order = order or workload.phase_ops("backward")
    end = dict(zip(order, accumulate(workload.ops[i].duration_s for i in order), strict=True))
    return [end[tensor.ready_after] for tensor in workload.tensors]


def tails(workload: Workload, order: Sequence[int]) -> list[float]:
    """Return, by tensor, the seconds of computation from its first reader to the last op; 0 without a reader."""
    backwards = order[::-1]
    rest = dict(zip(backwards, accumulate(workload.ops[i].duration_s for i in backwards), strict=True))
    return [max((rest[r] for r in tensor.readers), default=0.0) for tensor in workload.tensors]


def priorities(workload: Workload) -> list[int]:
    """Return, for each tensor, the position of the first op that reads it; if no op does, the number of all ops.

    A tensor with a smaller number is more urgent.
    """
    place = {op: k for k, op in enumerate(workload.iteration_order())}
    return [min((place[r] for r in tensor.readers), default=len(place)) for tensor in workload.tensors]


def resolve_collective(cluster: Cluster, collective: str | None) -> str:
    """Return this collective, or the cluster's default if None; raise `InputError` if the cluster does not have it."""
    name = cluster.default_collective if collective is None else collective
    cluster.cost(name)
    return name


def in_halves(cluster: Cluster, collective: str | None, what: str) -> Cluster:
    """Return the cluster without the collectives that have no halves.

    Raises `PlanError` if the given collective has no halves, or if it is None and no collective of the cluster has
    halves. The error begins with `what`.
    """
    asked = cluster.in_halves if collective is None else [collective] if collective not in UNDIVIDED else []
    if not asked:
        known = ", ".join(name for name in COLLECTIVES if name not in UNDIVIDED)
        raise PlanError(f"{what}: {collective or cluster.default_collective} has no reduce-scatter (expected {known})")
    if len(cluster.in_halves) == len(cluster.collectives):
        return cluster
    kept = {name: cost for name, cost in cluster.collectives.items() if name in cluster.in_halves}
    depths = {name: costs for name, costs in cluster.depths.items() if name in kept}
    return msgspec.structs.replace(cluster, collectives=kept, depths=depths)


def check_partitions(workload: Workload, option: str, nbytes: float) -> None:
    """Raise `TooLargeError` about `option` if partitions of `nbytes` bytes make too many messages for a plan."""
    if nbytes == math.inf:
        return
    nbytes = int(nbytes)
    count = sum(-(-tensor.nbytes // nbytes) for tensor in workload.tensors)
    if count > MOST_CHUNKS:
        raise TooLargeError(f"{option}: {nbytes:,} makes {count:,} messages (expected at most {MOST_CHUNKS:,})")


def message_limit(max_message_bytes: int | None) -> float:
    """Return the most bytes that a message of several tensors may have; None means no limit.

    Raises `InputError` if the limit is below 16 bytes, because partitions must be multiples of 16 bytes.
    """
    if max_message_bytes is None:
        return math.inf
    if max_message_bytes < ALIGNMENT:
        raise InputError(f"max_message_bytes: {max_message_bytes} (expected at least {ALIGNMENT})")
    return max_message_bytes


def least_partition(option: str, nbytes: int, most: float) -> tuple[str, int]:
    """Return the size of a partition in bytes, and the name of the option that sets it.

    The scheduler's own option sets the size, unless `max_message_bytes` is lower.
    """
    return (option, nbytes) if nbytes <= most else ("max_message_bytes", int(most) // ALIGNMENT * ALIGNMENT)


def in_turn(workload: Workload, tensors: Iterable[int], most: float) -> list[list[int]]:
    """Group neighbouring tensors (indices) into groups of at most `most` bytes; a larger tensor has its own group."""
    groups: list[list[int]] = []
    held = 0
    for t in tensors:
        nbytes = workload.tensors[t].nbytes
        if groups and held + nbytes <= most:
            groups[-1].append(t)
            held += nbytes
        else:
            groups.append([t])
            held = nbytes
    return groups


def message_of(workload: Workload, tensors: Iterable[int], collective: str) -> Message:
    """Return one all-reduce of whole tensors (indices)."""
    chosen = [workload.tensors[t] for t in tensors]
    return Message(tuple(Slice(t.name, 0, t.nbytes) for t in chosen), collective=collective)


def is_runnable(plan: Plan, workload: Workload) -> bool:
    """Return whether the PyTorch runtime can execute the plan as predicted.

    The runtime sends all-reduces, or their halves in pairs with the same slices. The runtime runs ops in the captured
    order, except for the nodes inside a graph of a compiled model, which can run in any order.
    """
    return gathers_what_it_scatters(plan) and (not plan.op_order or _moves_nodes_only(plan.op_order, workload))


def gathers_what_it_scatters(plan: Plan) -> bool:
    """Return whether a plan sends only all-reduces, or their halves in pairs with the same slices."""
    scattered = {message.slices for message in plan.messages if message.kind == "reduce_scatter"}
    gathered = {message.slices for message in plan.messages if message.kind == "all_gather"}
    kinds = {message.kind for message in plan.messages}
    return kinds <= {"all_reduce", "reduce_scatter", "all_gather"} and gathered <= scattered


def moves_updates_only(plan: Plan, workload: Workload) -> bool:
    """Return whether the plan orders the ops, and keeps all ops except optimizer ops in the captured order."""
    return bool(plan.op_order) and _without_updates(plan.op_order, workload) == _captured(workload)


def has_free_order(workload: Workload) -> bool:
    """Return whether the runtime can reorder the workload's ops, as it can for a compiled model."""
    return any(op.graph for op in workload.ops)


def _moves_nodes_only(op_order: Iterable[int], workload: Workload) -> bool:
    """Return whether all ops that move are optimizer ops, or nodes that move within their own graph."""
    ops = workload.ops

    def stretches(order: Iterable[int]) -> list[int | str]:
        return [key for key, _ in groupby(order, lambda i: ops[i].graph or i)]

    captured, chosen = _captured(workload), _without_updates(op_order, workload)
    if chosen == captured:
        return True
    nodes = [op.name for op in ops if op.graph]  # a graph that runs twice in a pass runs in the same order
    return stretches(chosen) == stretches(captured) and len(set(nodes)) == len(nodes)


def _captured(workload: Workload) -> list[int]:
    return [*workload.phase_ops("backward"), *workload.phase_ops("forward")]


def _without_updates(op_order: Iterable[int], workload: Workload) -> list[int]:
    return [i for i in op_order if workload.ops[i].phase != "optimizer"]


def with_node_order(plan: Plan, workload: Workload) -> Plan:
    """Return the plan; if it is runnable and changes the order of graphs' nodes, add their names in the new order."""
    nodes = [i for i in plan.op_order if workload.ops[i].graph]
    if nodes == [i for i in workload.iteration_order() if workload.ops[i].graph] or not is_runnable(plan, workload):
        return plan
    return msgspec.structs.replace(plan, node_order=tuple(workload.ops[i].name for i in nodes))


def compose(
    scheduler: str,
    messages: Iterable[Message],
    workload: Workload,
    *,
    forward_overlap: bool = False,
    carrier: Carrier = "legato",
) -> Plan:
    """Return a plan with these messages, and record the workload in the plan."""
    return Plan(
        scheduler,
        tuple(messages),
        forward_overlap=forward_overlap,
        workload_id=identity(workload),
        carrier=carrier,
    )
