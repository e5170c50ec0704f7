"""DeAR: divide every all-reduce into its halves, one during the backward pass and one before the forward pass.

Idea: a reduce-scatter needs only the gradient, and nothing needs its result except
the all-gather that completes the all-reduce. So gradients are reduced and scattered
during the backward pass, and gathered in forward order just before the next forward
pass reads them. Communication overlaps with both passes, without priorities and
without an additional startup time.
Paper: DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce
Pipelining (Zhang, Shi, Chu, Wang, Li, Liu, ICDCS 2023), with the tensor fusion of its
code: in forward order, fill buffers to less than 25 MiB.
Units: bytes.

Deviations:
- DeAR never divides a module. Here a group is filled tensor by tensor, in the order
  in which the forward pass reads them.
- DeAR launches an all-gather when the forward pass begins with the group before it. A
  plan has no such event: the next all-gather goes out when the one before has ended,
  which is never later.
- DeAR tunes its buffer size during training (Bayesian optimisation); here it is an
  option.
"""

from __future__ import annotations

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import (
    compose,
    in_halves,
    in_turn,
    message_limit,
    message_of,
    priorities,
    resolve_collective,
)

__all__ = ["BUFFER_BYTES", "dear"]

#: DeAR's default fusion buffer.
BUFFER_BYTES = 25 * 2**20


def dear(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    max_message_bytes: int | None = None,
) -> Plan:
    """Send two messages per group, all reduce-scatters before the first all-gather, with forward overlap.

    A group holds less than `buffer_bytes` and at most `max_message_bytes`, or one tensor;
    `buffer_bytes=1` turns fusion off. Raises `InputError` when `buffer_bytes` is below 1
    or the limit below 16 bytes, or on a collective the cluster lacks, and `PlanError` on
    one that has no halves, or if the cluster has no other; by default, it is the first one that has.
    """
    name = resolve_collective(in_halves(cluster, collective, "dear"), collective)
    most = message_limit(max_message_bytes)
    if buffer_bytes < 1:
        raise InputError(f"buffer_bytes: {buffer_bytes} (expected at least 1)")
    groups = _groups(workload, min(buffer_bytes - 1, most))
    # A group is complete with its last gradient; groups complete at the same op go in backward order.
    complete = [max(workload.tensors[t].ready_after for t in group) for group in groups]
    backward = sorted(range(len(groups)), key=lambda g: (complete[g], -g))
    reduced = [message_of(workload, group, name) for group in groups]
    messages = [msgspec.structs.replace(reduced[g], kind="reduce_scatter") for g in backward]
    messages += [msgspec.structs.replace(message, kind="all_gather") for message in reduced]
    return compose("dear", messages, workload, cluster, forward_overlap=True)


def _groups(workload: Workload, most: float) -> list[list[int]]:
    """Groups of tensors, one per buffer of at most `most` bytes, in the order in which the forward pass reads them."""
    place = priorities(workload)
    return in_turn(workload, sorted(range(len(place)), key=place.__getitem__), most)
