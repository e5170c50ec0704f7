"""What all schedulers share: when tensors are ready and read, and how messages and plans are made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from legato.core.cluster import Cluster
from legato.core.errors import TooLargeError
from legato.core.files import identity
from legato.core.plan import MOST_CHUNKS, Message, Plan, Slice
from legato.core.workload import Workload

__all__ = [
    "check_partitions",
    "compose",
    "is_runnable",
    "message_of",
    "priorities",
    "ready_order",
    "release_times",
    "resolve_collective",
]


def ready_order(workload: Workload) -> list[int]:
    """The indices of the tensors in the order in which the captured backward pass produces their gradients."""
    return sorted(range(len(workload.tensors)), key=lambda t: workload.tensors[t].ready_after)


def release_times(workload: Workload) -> list[float]:
    """For each tensor, when its gradient is ready (seconds); ops run on one stream in the captured order."""
    backward = workload.phase_ops("backward")
    end = dict(zip(backward, accumulate(workload.ops[i].duration_s for i in backward), strict=True))
    return [end[tensor.ready_after] for tensor in workload.tensors]


def priorities(workload: Workload) -> list[int]:
    """For each tensor, the position of its first reader in the iteration, or the end if nothing reads it.

    A smaller number is more urgent.
    """
    place = {op: k for k, op in enumerate(workload.iteration_order())}
    return [min((place[r] for r in tensor.readers), default=len(place)) for tensor in workload.tensors]


def resolve_collective(cluster: Cluster, collective: str | None) -> str:
    """The collective to use: the cluster's default for None. Raises `InputError` on one that the cluster lacks."""
    name = cluster.default_collective if collective is None else collective
    cluster.cost(name)
    return name


def check_partitions(workload: Workload, option: str, nbytes: int) -> None:
    """Raise `TooLargeError`, which names the option, if partitions of `nbytes` bytes are too many for a plan."""
    count = sum(-(-tensor.nbytes // nbytes) for tensor in workload.tensors)
    if count > MOST_CHUNKS:
        raise TooLargeError(f"{option}: {nbytes:,} makes {count:,} messages (expected at most {MOST_CHUNKS:,})")


def message_of(workload: Workload, tensors: Iterable[int], collective: str) -> Message:
    """One all-reduce of whole tensors (indices)."""
    chosen = [workload.tensors[t] for t in tensors]
    return Message(tuple(Slice(t.name, 0, t.nbytes) for t in chosen), collective=collective)


def is_runnable(plan: Plan) -> bool:
    """Whether the PyTorch runtime sends such messages: all-reduces, or halves in pairs with the same slices."""
    scattered = [message.slices for message in plan.messages if message.kind == "reduce_scatter"]
    gathered = [message.slices for message in plan.messages if message.kind == "all_gather"]
    kinds = {message.kind for message in plan.messages}
    return kinds <= {"all_reduce", "reduce_scatter", "all_gather"} and set(gathered) <= set(scattered)


def compose(
    scheduler: str,
    messages: Iterable[Message],
    workload: Workload,
    cluster: Cluster,
    *,
    forward_overlap: bool = False,
) -> Plan:
    """A plan of these messages that records the workload and the cluster it was made for."""
    return Plan(
        scheduler,
        tuple(messages),
        forward_overlap=forward_overlap,
        workload_id=identity(workload),
        cluster_id=identity(cluster),
    )
