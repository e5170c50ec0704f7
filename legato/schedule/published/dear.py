"""DeAR: divide every all-reduce into a reduce-scatter during the backward pass and an all-gather for the forward pass.

Idea: a reduce-scatter needs only the gradient, and nothing needs its result except the all-gather that completes the
all-reduce. So gradients are reduced and scattered during the backward pass. The reduced gradients are gathered in
forward order, just before the next forward pass reads them. Communication overlaps with both passes, without priorities
and without an additional startup time.
Paper: DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining (Zhang, Shi, Chu, Wang, Li,
Liu, ICDCS 2023), with the tensor fusion of the authors' code, which fills each buffer to less than 25 MiB in forward
order.
Units: bytes.

Deviations:
- DeAR never divides a module. Here a group is filled tensor by tensor, in the order in which the forward pass reads the
  tensors.
- DeAR launches an all-gather when the forward pass reaches the previous group. A plan has no such event: each
  all-gather starts when the previous all-gather has ended, which is never later than in DeAR.
- DeAR tunes its buffer size during training (Bayesian optimisation); here it is an option.
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
    """Return a plan that sends every group twice: all reduce-scatters, then all all-gathers, with forward overlap.

    Several tensors form a group if they have less than `buffer_bytes` and at most `max_message_bytes` together;
    `buffer_bytes=1` turns fusion off. The default `collective` is the cluster's first one that can be sent in these two
    halves. Raises `InputError` if `buffer_bytes` is below 1, `max_message_bytes` is below 16, or the cluster lacks the
    collective. Raises `PlanError` if the collective, or every collective of the cluster, cannot be sent in halves.
    """
    name = resolve_collective(in_halves(cluster, collective, "dear"), collective)
    most = message_limit(max_message_bytes)
    if buffer_bytes < 1:
        raise InputError(f"buffer_bytes: {buffer_bytes} (expected at least 1)")
    groups = _groups(workload, min(buffer_bytes - 1, most))
    # A group is complete with its last gradient. Groups that are complete at the same op are sent in backward order.
    complete = [max(workload.tensors[t].ready_after for t in group) for group in groups]
    backward = sorted(range(len(groups)), key=lambda g: (complete[g], -g))
    reduced = [message_of(workload, group, name) for group in groups]
    messages = [msgspec.structs.replace(reduced[g], kind="reduce_scatter") for g in backward]
    messages += [msgspec.structs.replace(message, kind="all_gather") for message in reduced]
    return compose("dear", messages, workload, forward_overlap=True)


def _groups(workload: Workload, most: float) -> list[list[int]]:
    """Return groups of tensors of at most `most` bytes, in the order in which the forward pass reads the tensors."""
    place = priorities(workload)
    return in_turn(workload, sorted(range(len(place)), key=place.__getitem__), most)
