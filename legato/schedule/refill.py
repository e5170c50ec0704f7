"""For messages of given sizes, what to put into them: whatever is ready and needed first.

With sizes and order of messages fixed, a message can start as soon as the one
before has ended and enough bytes are ready; that moment does not depend on
*which* bytes went out earlier. What remains is to deal ready bytes out to the
messages so that none arrives too late, and there the earliest deadline is
always a best choice (exchange argument, as for Jackson's preemptive schedule):
of the ready bytes, those with the longest tail go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Piece", "Refilled", "refill"]

#: Tensors are cut at multiples of so many bytes, so that no element of any dtype is cut in two.
ALIGNMENT = 16


class Piece(NamedTuple):
    """`nbytes` bytes of a tensor (by index), from `start` on."""

    tensor: int
    start: int
    nbytes: int


class Refilled(NamedTuple):
    """The pieces of each message, and the latest arrival plus tail (seconds)."""

    seconds: float
    messages: list[list[Piece]]


def refill(
    sizes: Sequence[int],
    ready_s: Sequence[float],
    tail_s: Sequence[float],
    nbytes: Sequence[int],
    cost: Callable[[int], float],
    *,
    first_come: int = 0,
) -> Refilled:
    """Fill messages of these sizes, which are kept but for the alignment of cuts.

    `sizes` (bytes of the messages, in order) add up to those of all tensors;
    `ready_s`, `tail_s` and `nbytes` are by tensor, `cost` is the seconds of a
    message by its bytes. The first `first_come` messages take what became ready
    first instead, which completes more tensors early, if it costs lateness.
    """
    arriving = sorted(range(len(nbytes)), key=ready_s.__getitem__, reverse=True)
    urgent: list[tuple[float, int]] = []
    sent = [0] * len(nbytes)
    messages: list[list[Piece]] = []
    arrived = asked = given = 0
    now = late = 0.0
    for k, size in enumerate(sizes):
        if k == first_come:
            urgent = [(-tail_s[t], t) for _, t in urgent]
            heapq.heapify(urgent)
        asked += size
        while arriving and (arrived < asked or ready_s[arriving[-1]] <= now):
            t = arriving.pop()
            arrived += nbytes[t]
            now = max(now, ready_s[t])
            heapq.heappush(urgent, (ready_s[t] if k < first_come else -tail_s[t], t))
        message: list[Piece] = []
        before = given
        while urgent and given < asked:
            t = urgent[0][1]
            left = nbytes[t] - sent[t]
            take = min(left, asked - given)
            if take < left:
                take -= take % ALIGNMENT
                if take == 0:
                    break
            message.append(Piece(t, sent[t], take))
            sent[t] += take
            given += take
            if sent[t] == nbytes[t]:
                heapq.heappop(urgent)
        if message:
            messages.append(message)
            now += cost(given - before)
            late = max(late, now + max(tail_s[piece.tensor] for piece in message))
    rest = [Piece(t, sent[t], nbytes[t] - sent[t]) for _, t in sorted(urgent)]
    if rest:  # of cuts that were moved to their alignment
        messages.append(rest)
        now += cost(sum(piece.nbytes for piece in rest))
        late = max(late, now + max(tail_s[piece.tensor] for piece in rest))
    return Refilled(late, messages)
