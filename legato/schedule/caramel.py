"""Caramel: compute, merge and send so that every gradient has the widest window.

Idea: a gradient can travel between the op that produces it and the first op that
reads it. Four parts widen these windows or use them better; each can be
switched off:

- *serialization* (4.1, `caramel_order.py`): run the backward pass in the order
  that makes gradients ready early. The result is the plan's `op_order`.
- *batching* (4.2, `caramel_batches.py`): merge small gradients.
- *scheduling* (4.3, `caramel_transfers.py`): pack the messages beside the
  backward pass, then the forward pass. The forward pass no longer waits for the
  last message.
- *depth* (4.4): cut a message into chunks that are sent and added up in turn.

Paper: Caramel (Hashemi, Jyothi, Campbell, MLSys 2020); the flags are those of
its `ARModel` (section 5). Its time oracle, the minimum of several runs for each
op, is what a captured `Workload` holds. Without any part this is `fifo`.
Units: seconds and bytes.

Deviations:
- One network model for all: the cluster's linear cost. The paper fits one, to
  64 B and 4 MB.
- The plan has no clock: of the packing's times, the order remains, and every
  message goes out as early as that allows.
- The paper gives no formula for the depth, only that it goes from 1 to 8 with
  the size and the threshold of the batcher. Here no chunk is smaller than the
  threshold, and of the depths that this leaves the cheapest is taken
  (`legato.simulate.pipelining`): without a cost of reduction, that is 1.
"""

from __future__ import annotations

import math
from itertools import accumulate

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Message, Plan
from legato.core.workload import Workload
from legato.schedule.caramel_batches import batches, threshold_bytes
from legato.schedule.caramel_order import serialized_order, update_order
from legato.schedule.caramel_transfers import pack
from legato.schedule.compose import compose, known_collective, whole
from legato.simulate.pipelining import message_s

__all__ = ["MAX_DEPTH", "adaptive_depth", "caramel"]

MAX_DEPTH = 8


def caramel(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    serialization: bool = True,
    batching: bool = True,
    scheduling: bool = True,
    depth: bool = True,
    threshold: float | None = None,
) -> Plan:
    """Caramel's plan; forward overlap is part of scheduling.

    `threshold` is the size in bytes up to which gradients are batched, 1.5
    alpha/beta by default. The plan has an `op_order` if serialization finds
    another than the workload's own. Raises `InputError` on a negative
    threshold or on a collective the cluster lacks.
    """
    name = known_collective(cluster, collective)
    cost = cluster.cost(name)
    limit = threshold_bytes(cost) if threshold is None else threshold
    if not limit >= 0:
        raise InputError(f"threshold: {limit} bytes (expected at least 0)")
    captured = workload.iteration_order()
    order = serialized_order(workload, update_order(workload)) if serialization else captured
    ready = _ready_times(workload, order)
    tensors = _by_readiness(workload, order)
    groups = [[t] for t in tensors]
    if batching:
        sizes = [workload.tensors[t].nbytes for t in tensors]
        groups = [[tensors[k] for k in batch] for batch in batches([ready[t] for t in tensors], sizes, cost, limit)]
    messages = [whole(workload, group, name) for group in groups]
    if depth:
        messages = [msgspec.structs.replace(m, depth=adaptive_depth(m.nbytes, cluster, name, limit)) for m in messages]
    if scheduling:
        messages = _scheduled(messages, groups, workload, cluster, order, ready)
    plan = compose("caramel", messages, workload, cluster, forward_overlap=scheduling)
    return msgspec.structs.replace(plan, op_order=order if order != captured else ())


def adaptive_depth(nbytes: int, cluster: Cluster, collective: str, threshold: float) -> int:
    """Chunks of at least `threshold` bytes, at most `MAX_DEPTH`: the number that makes the message cheapest.

    1 where that cannot be priced: a cluster that was measured at no depth, or
    a collective without one.
    """
    return min(
        (d for d in range(1, MAX_DEPTH + 1) if d == 1 or nbytes >= d * threshold),
        key=lambda d: message_s(cluster, collective, d, nbytes),
    )


def _scheduled(
    messages: list[Message],
    groups: list[list[int]],
    workload: Workload,
    cluster: Cluster,
    order: tuple[int, ...],
    ready: list[float],
) -> list[Message]:
    """The messages in the order that the packing gives them."""
    after = _after_arrival(workload, order)
    backward = math.fsum(workload.ops[i].duration_s for i in workload.phase_ops("backward"))
    packing = pack(
        [max(ready[t] for t in group) for group in groups],
        [max(after[t] for t in group) for group in groups],
        [message_s(cluster, m.collective, m.depth, m.nbytes) for m in messages],
        [m.nbytes for m in messages],
        backward,
        workload.compute_s - backward,
    )
    return [messages[m] for m in packing.order]


def _by_readiness(workload: Workload, order: tuple[int, ...]) -> list[int]:
    """The tensors in the order in which their gradients become ready; those of one op as the workload has them."""
    place = {op: k for k, op in enumerate(order)}
    return sorted(range(len(workload.tensors)), key=lambda t: place[workload.tensors[t].ready_after])


def _ready_times(workload: Workload, order: tuple[int, ...]) -> list[float]:
    """By tensor: when its gradient is ready if nothing waits."""
    end = dict(zip(order, accumulate(workload.ops[i].duration_s for i in order), strict=True))
    return [end[tensor.ready_after] for tensor in workload.tensors]


def _after_arrival(workload: Workload, order: tuple[int, ...]) -> list[float]:
    """By tensor: computation from its first reader to the end if nothing waits; 0 if nothing reads it."""
    backwards = order[::-1]
    rest = dict(zip(backwards, accumulate(workload.ops[i].duration_s for i in backwards), strict=True))
    return [max((rest[r] for r in tensor.readers), default=0.0) for tensor in workload.tensors]
