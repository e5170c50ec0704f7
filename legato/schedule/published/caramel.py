"""Caramel: compute, merge and send so that every gradient has the widest possible window for its transfer.

A gradient can be sent between the op that produces it and the first op that reads it. Four parts of Caramel widen these
windows or use them better, and each part can be switched off. With all parts off, Caramel plans as `fifo` does.

*Serialization* (section 4.1, `op_order.py`) runs the backward pass in an order that makes gradients ready early.
Serialization sets the plan's `op_order`.

*Batching* (4.2) merges small gradients, since a small message is mostly overhead. A gradient below a threshold joins
the current batch. The batch is sent when it exceeds the threshold, or when the network has nothing else to do. So a
batch holds gradients that become ready at nearly the same time, and no gradient waits for another one while the network
is idle.

*Scheduling* (4.3, "greedy 2D bin packing") packs the messages into the backward pass and the next forward pass, which
no longer waits for the last message. A message may be sent after the last of its gradients is ready, and before the
first of its gradients is read. The largest messages are placed first. If a message fits into the backward pass, it is
sent there, as early as its gradients allow. Otherwise, if it fits into the forward pass, it is sent there, as late as
its readers allow. A message that fits in neither pass extends past the end of the backward pass, or begins before the
forward pass, whichever lengthens the iteration less (the backward pass if both are equal).

    computation | backward pass ......... |<- added time ->| forward pass ........ |
    network       | a |  | b || c |         | d  ||    e   |      | f ||   g   |
                  ^ release                                       deadline ^

*Depth* (4.4) divides a message into chunks, so that one chunk is sent while another is added up.

Paper: Caramel (Hashemi, Abdu Jyothi, Godfrey, Campbell, 2020). The flags are from the paper's `ARModel` (section 5).
Caramel's time oracle takes the minimum of several runs of each op, and a captured `Workload` holds these minima.
Units: seconds and bytes.

Deviations:
- All parts use the same network model, the cluster's linear cost. The paper fits a linear model to messages of 64 B and
  4 MB.
- The paper does not say what happens to an open batch when a large gradient becomes ready. Here the batch stays open,
  since the large gradient keeps the network busy.
- The bins of the paper are intervals of time. Here each message uses the whole network while it is sent. The paper does
  not say where in its window a message is placed.
- A plan has no clock. The plan keeps the order that the packing finds, and every message is sent as early as this order
  allows.
- The paper gives no formula for the depth; it says only that the depth ranges from 1 to 8, depending on the size and
  the batcher's threshold. Here no chunk is smaller than the threshold, and the cheapest of the remaining depths is
  taken (`legato.simulator.pipelining`). If adding up costs nothing, the depth is 1.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import itemgetter, sub
from typing import NamedTuple

import msgspec

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_limit, message_of, release_times, resolve_collective, tails
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.simulator.pipelining import message_s

__all__ = ["MAX_DEPTH", "Packing", "adaptive_depth", "batches", "caramel", "pack", "threshold_bytes"]


MAX_DEPTH = 8
#: The most busy intervals in a block. A search skips a block, or goes through all of its intervals.
_BLOCK = 64
#: A relative tolerance that is larger than the rounding error of a few float additions.
_ROUNDING = 1e-12


def caramel(  # noqa: PLR0913
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    serialization: bool = True,
    batching: bool = True,
    scheduling: bool = True,
    depth: bool = True,
    threshold: float | None = None,
    max_message_bytes: int | None = None,
) -> Plan:
    """Return Caramel's plan, which has forward overlap if `scheduling` is on.

    `threshold` is the size in bytes up to which gradients are batched, by default 1.5 alpha/beta. The plan has an
    `op_order` if serialization finds an order that differs from the captured one. A batch is sent before it exceeds
    `max_message_bytes`; a larger gradient is a message of its own. Raises `InputError` if the threshold is negative,
    the limit is below 16 bytes, or the cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    cost = cluster.cost(name)
    limit = threshold_bytes(cost) if threshold is None else threshold
    if not limit >= 0:
        raise InputError(f"threshold: {limit} bytes (expected at least 0)")
    captured = workload.iteration_order()
    order = serialized_order(workload, update_order(workload)) if serialization else captured
    ready = release_times(workload, order)
    tensors = _ready_order(workload, order)
    groups = [[t] for t in tensors]
    if batching:
        sizes = [workload.tensors[t].nbytes for t in tensors]
        found = batches([ready[t] for t in tensors], sizes, cost, limit, most)
        groups = [[tensors[k] for k in batch] for batch in found]
    messages = [message_of(workload, group, name) for group in groups]
    if depth:
        messages = [msgspec.structs.replace(m, depth=adaptive_depth(m.nbytes, cluster, name, limit)) for m in messages]
    if scheduling:
        messages = _scheduled(messages, groups, workload, cluster, order, ready)
    plan = compose("caramel", messages, workload, forward_overlap=scheduling)
    return msgspec.structs.replace(plan, op_order=order if order != captured else ())


def _ready_order(workload: Workload, order: tuple[int, ...]) -> list[int]:
    """Return the tensors in the order in which gradients become ready; ties keep the workload's order."""
    place = {op: k for k, op in enumerate(order)}
    return sorted(range(len(workload.tensors)), key=lambda t: place[workload.tensors[t].ready_after])


def threshold_bytes(cost: LinearCost) -> float:
    """Return the least x with f(2x) / (2 f(x)) > 0.8, where f is the cost: 1.5 alpha / beta.

    The result is 0 if startup costs nothing, and infinite if only startup costs anything. If f(x) is the least cost of
    a message (its floor), the result is (1.6 floor - alpha) / (2 beta). For a cost that follows measured sizes, f is
    the line through them.
    """
    cost = cost.line
    if cost.startup_s == 0:
        return 0.0
    if cost.beta_s_per_byte == 0:
        return math.inf
    above = 1.5 * cost.alpha_s / cost.beta_s_per_byte
    if cost.alpha_s + cost.beta_s_per_byte * above >= cost.floor_s:
        return above
    return (1.6 * cost.floor_s - cost.alpha_s) / (2 * cost.beta_s_per_byte)


def batches(
    release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost, threshold: float, most: float = math.inf
) -> list[list[int]]:
    """Return groups of gradients (indices), one group per message, in the order in which they are sent.

    `release_s` must not decrease. A gradient larger than `threshold` bytes is a group of its own, and no group of
    several gradients has more than `most` bytes. Raises `ValueError` if the sequences differ in length.
    """
    if len(release_s) != len(nbytes):
        raise ValueError(f"{len(release_s)} release times and {len(nbytes)} sizes (expected equal numbers)")
    sent: list[list[int]] = []
    idle = 0.0  # when the network has sent all of `sent`

    def send(group: list[int]) -> None:
        nonlocal idle
        idle = max(idle, release_s[group[-1]]) + cost.cost(sum(nbytes[k] for k in group))
        sent.append(group)

    batch: list[int] = []
    size = 0
    for k, ready in enumerate(release_s):
        if batch and max(idle, release_s[batch[-1]]) < ready:
            send(batch)
            batch, size = [], 0
        if nbytes[k] > threshold:
            send([k])
            continue
        if batch and size + nbytes[k] > most:
            send(batch)
            batch, size = [], 0
        batch.append(k)
        size += nbytes[k]
        if size > threshold:
            send(batch)
            batch, size = [], 0
    if batch:
        send(batch)
    return sent


def adaptive_depth(nbytes: int, cluster: Cluster, collective: str, threshold: float) -> int:
    """Return the cheapest number of chunks for a message: at most `MAX_DEPTH`, with `threshold` or more bytes each.

    The result is 1 if the cluster has no cost for more chunks, because more chunks were not measured, or because the
    collective cannot be pipelined.
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
    """Return the messages in the order that the packing finds."""
    after = tails(workload, order)
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


class Packing(NamedTuple):
    """The order in which messages (indices) are sent, and an upper bound on the time that they add to the iteration."""

    order: list[int]
    added_s: float


def pack(
    release_s: Sequence[float],
    tail_s: Sequence[float],
    send_s: Sequence[float],
    nbytes: Sequence[int],
    backward_s: float,
    forward_s: float,
) -> Packing:
    """Place every message in the backward pass or in the forward pass, and return the packing.

    For each message, `release_s` is when it may be sent, `tail_s` is the computation from its first reader to the end
    of the iteration, and `send_s` is its time on the network. `backward_s` and `forward_s` are the lengths of the two
    passes if nothing waits. Equally large messages are placed in the order given. Raises `ValueError` if the sequences
    differ in length.

    Seen backwards in time, the forward pass looks like a backward pass with the tails as release times. So `_Pass`
    serves both passes. "Forward pass" here includes all computation after the backward pass, also optimizer ops.
    """
    backward, forward = _Pass(backward_s), _Pass(forward_s)
    messages = list(zip(release_s, tail_s, send_s, nbytes, strict=True))
    unassigned = []
    for m in sorted(range(len(messages)), key=lambda m: -messages[m][3]):
        head, tail, send, _ = messages[m]
        for lane, release in ((backward, head), (forward, tail)):
            start = lane.earliest(release, send)
            if start + send <= lane.length_s:
                lane.place(m, start, send)
                break
        else:
            unassigned.append(m)
    for m in unassigned:
        head, tail, send, _ = messages[m]
        after, before = backward.earliest(head, send), forward.earliest(tail, send)
        if backward.added_s(after + send) <= forward.added_s(before + send):
            backward.place(m, after, send)
        else:
            forward.place(m, before, send)
    return Packing(backward.order() + forward.order()[::-1], backward.beyond_s + forward.beyond_s)


class _Pass:
    """The network during one pass: the messages that it carries, and how far they extend beyond the end of the pass."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self.beyond_s = 0.0
        self.blocks: list[list[tuple[float, float]]] = []  # busy intervals in time order, with gaps between them
        self.widest_s: list[float] = []  # by block: a limit on the gaps before its intervals; gaps only shrink
        self.placed: list[tuple[float, float, int]] = []  # start, end, message

    def earliest(self, release_s: float, send_s: float) -> float:
        """Return the first time at which a message fits."""
        start = release_s
        b, at = self._find(release_s)
        if at and self.blocks[b][at - 1][1] > start:
            start = self.blocks[b][at - 1][1]
        while b < len(self.blocks):
            block = self.blocks[b]
            end = block[-1][1]
            if at == 0 and self.widest_s[b] + _ROUNDING * end < send_s:
                start = end
            else:
                if at == 0 and start > release_s:  # `start` is the end of the previous interval
                    self.widest_s[b] = max(map(sub, map(itemgetter(0), block), [start, *map(itemgetter(1), block)]))
                while at < len(block) and start + send_s > block[at][0]:
                    start = block[at][1]
                    at += 1
                if at < len(block):
                    return start
            b, at = b + 1, 0
        return start

    def added_s(self, end_s: float) -> float:
        """Return how much a message that ends at this time lengthens the iteration."""
        return max(0.0, end_s - self.length_s - self.beyond_s)

    def place(self, message: int, start_s: float, send_s: float) -> None:
        """Place a message at a time where it fits, and join busy intervals if it fills the gap between them."""
        end = start_s + send_s
        self.beyond_s += self.added_s(end)
        insort(self.placed, (start_s, end, message))
        b, at = self._find(start_s)
        if not self.blocks:
            self.blocks, self.widest_s = [[]], [math.inf]
        block = self.blocks[b]
        after, k = (block, at) if at < len(block) or b + 1 == len(self.blocks) else (self.blocks[b + 1], 0)
        if k < len(after) and after[k][0] <= end:
            end = max(end, after.pop(k)[1])
        if at and block[at - 1][1] >= start_s:
            at -= 1
            start_s = block.pop(at)[0]
        block.insert(at, (start_s, end))
        if not after:
            del self.blocks[b + 1], self.widest_s[b + 1]
        if len(block) > _BLOCK:
            middle = len(block) // 2
            self.blocks[b : b + 1] = [block[:middle], block[middle:]]
            self.widest_s.insert(b, self.widest_s[b])

    def _find(self, moment_s: float) -> tuple[int, int]:
        """Return the position (block, index) of the first interval that begins at or after this time.

        If the block has no such interval, the index is the number of its intervals.
        """
        b = max(0, bisect_left(self.blocks, (moment_s,), key=itemgetter(0)) - 1)
        return b, bisect_left(self.blocks[b], (moment_s,)) if self.blocks else 0

    def order(self) -> list[int]:
        """Return the messages in time order."""
        return [message for _, _, message in self.placed]
