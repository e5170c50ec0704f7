"""The best contents for messages of given sizes: the ready bytes that are needed first.

If sizes and order of messages are fixed, a message can start as soon as the previous message has ended and enough bytes
are ready. The start of a message does not depend on *which* bytes were sent earlier. The only choice is which ready
bytes a message takes, so that no byte arrives too late. The tail of a byte is the time that the iteration still needs
after the byte's arrival. Sending the ready bytes with the longest tail first is optimal (by an exchange argument, as
for Jackson's preemptive schedule).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.search.budget import Budget
from legato.schedule.search.collectives import CheapestCollective

__all__ = ["Filled", "Instance", "Piece", "fill"]

#: The work to fill messages, for each tensor and each message.
_FILL_S = 1.5e-6


class Piece(NamedTuple):
    """The `nbytes` bytes of a tensor (by index) from `start` on."""

    tensor: int
    start: int
    nbytes: int


class Filled(NamedTuple):
    """The pieces of each message, and the largest sum of a piece's arrival and its tail (seconds)."""

    seconds: float
    messages: list[list[Piece]]


class Instance(NamedTuple):
    """The bytes to send, by tensor (or block of tensors); `whole_below` means the same as in `fill`."""

    release_s: list[float]
    tail_s: list[float]
    nbytes: list[int]
    collectives: CheapestCollective
    bound_s: float
    budget: Budget
    whole_below: int | None = None

    def cost(self, nbytes: int) -> float:
        return self.collectives.seconds(nbytes)

    def arrival_s(self, filled: Filled) -> list[float]:
        """Return when each tensor has arrived."""
        arrival_s = [0.0] * len(self.nbytes)
        now = 0.0
        for pieces in filled.messages:
            now = max(now, *[self.release_s[t] for t, _, _ in pieces]) + self.cost(sum([n for _, _, n in pieces]))
            for t, _, _ in pieces:
                arrival_s[t] = now
        return arrival_s

    def fill(self, sizes: Sequence[int], first_come: int = 0, not_before_s: Sequence[float] = ()) -> Filled:
        self.budget.spend(_FILL_S * (len(self.nbytes) + len(sizes)))
        return fill(
            sizes,
            self.release_s,
            self.tail_s,
            self.nbytes,
            self.cost,
            first_come=first_come,
            not_before_s=not_before_s,
            whole_below=self.whole_below,
        )


def fill(
    sizes: Sequence[int],
    release_s: Sequence[float],
    tail_s: Sequence[float],
    nbytes: Sequence[int],
    cost: Callable[[int], float],
    *,
    first_come: int = 0,
    not_before_s: Sequence[float] = (),
    whole_below: int | None = None,
) -> Filled:
    """Fill messages of these sizes. The alignment of partitions, and `whole_below`, may change the sizes.

    `sizes` (the bytes of the messages, in order) must add up to the bytes of all tensors. `release_s`, `tail_s` and
    `nbytes` are indexed by tensor; `cost` gives the seconds of a message from its bytes. The first `first_come`
    messages do not take the bytes with the longest tail, but those that were ready first. This completes more tensors
    early, although some bytes arrive later. Message k starts no earlier than `not_before_s[k]`, so it can take all
    bytes that are ready at this time.

    With `whole_below`, every tensor lies in one piece of memory when all messages have arrived (`legato.core.layout`).
    Tensors with fewer than `whole_below` bytes are not partitioned, so a message ends at the nearest border between
    tensors. A message is divided if it would have the ends of two partitioned tensors, or the beginnings of two
    partitioned tensors. A piece from the middle of a tensor is a message of its own.
    """
    arriving = sorted(range(len(nbytes)), key=release_s.__getitem__, reverse=True)
    urgent: list[tuple[float, int]] = []
    sent = [0] * len(nbytes)
    out = _Outbox(tail_s, nbytes, cost, one_piece=whole_below is not None)
    arrived = asked = given = 0
    for k, size in enumerate(sizes):
        if k == first_come:
            urgent = [(-tail_s[t], t) for _, t in urgent]
            heapq.heapify(urgent)
        asked += size
        if not_before_s:
            out.now = max(out.now, not_before_s[k])
        while arriving and (arrived < asked or release_s[arriving[-1]] <= out.now):
            t = arriving.pop()
            arrived += nbytes[t]
            out.now = max(out.now, release_s[t])
            heapq.heappush(urgent, (release_s[t] if k < first_come else -tail_s[t], t))
        while urgent and given < asked:
            t = urgent[0][1]
            divides = nbytes[t] >= (whole_below or 0)
            take = _take(nbytes[t] - sent[t], asked - given, divides=divides, first=not out.message)
            if take == 0:
                break
            out.put(Piece(t, sent[t], take))
            sent[t] += take
            given += take
            if sent[t] == nbytes[t]:
                heapq.heappop(urgent)
        out.close()
    for _, t in sorted(urgent):  # what the alignment of partitions has left over
        out.put(Piece(t, sent[t], nbytes[t] - sent[t]))
    out.close()
    return Filled(out.late, out.messages)


def _take(left: int, wanted: int, *, divides: bool, first: bool) -> int:
    """Return how many of a tensor's `left` bytes go into a message that has space for `wanted` bytes.

    With `divides`, the tensor may be partitioned. Otherwise the tensor is taken whole if at least half of it fits, or
    if it is the `first` tensor in the message.
    """
    if wanted >= left:
        return left
    if divides:
        return wanted - wanted % ALIGNMENT
    return left if first or 2 * wanted >= left else 0


class _Outbox:
    """The messages filled so far, the time when the network has sent them, and the largest sum of arrival and tail."""

    def __init__(
        self, tail_s: Sequence[float], nbytes: Sequence[int], cost: Callable[[int], float], *, one_piece: bool
    ) -> None:
        self.tail_s, self.nbytes, self.cost, self.one_piece = tail_s, nbytes, cost, one_piece
        self.messages: list[list[Piece]] = []
        self.message: list[Piece] = []
        self.begun_before = self.left_unfinished = False  # whether the open message has a piece like this
        self.now = self.late = 0.0

    def put(self, piece: Piece) -> None:
        before, after = piece.start > 0, piece.start + piece.nbytes < self.nbytes[piece.tensor]
        if self.one_piece and ((before and (self.begun_before or after)) or (after and self.left_unfinished)):
            self.close()
        self.message.append(piece)
        self.begun_before |= before
        self.left_unfinished |= after
        if self.one_piece and before and after:  # such a piece is a message of its own
            self.close()

    def close(self) -> None:
        if self.message:
            self.messages.append(self.message)
            self.now += self.cost(sum([nbytes for _, _, nbytes in self.message]))
            self.late = max(self.late, self.now + max([self.tail_s[tensor] for tensor, _, _ in self.message]))
        self.message, self.begun_before, self.left_unfinished = [], False, False
