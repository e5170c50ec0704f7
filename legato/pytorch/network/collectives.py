"""Collectives that consist of sends and receives, in chunks, on one thread.

`legato.collectives` defines the rounds of each collective. This module runs these rounds on one flat tensor, in place,
over the point-to-point operations of a gloo backend. If a message is split into `depth` chunks, the network and the
processor are busy at the same time (Caramel, sections 4.4 and 5). One chunk is sent as soon as its sums are complete,
while the next chunk is added up. `legato.simulator.pipelining` predicts the cost.

[Note: receives first] gloo moves bytes when both ends have posted the transfer, so all receives of a message are posted
before its first send. Summands are received into scratch memory. Results are received directly into their place in the
tensor. A received result overwrites nothing that still has to be sent. A result includes this rank's summand, so the
summand must have been sent before the result could arrive.

[Note: tags] A rank numbers the rounds and chunks of all its messages consecutively. All ranks run the same messages in
the same order, so both ends of a transfer have the same number, and no other transfer in flight has this number.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from legato.collectives import COLLECTIVES
from legato.collectives.rounds import Step, Transfer, steps
from legato.core.plan import Kind

__all__ = ["Collectives"]

_TAGS = 2**30


class Collectives:
    """One rank's part in collectives over a gloo backend. All ranks must run the same collectives in the same order."""

    def __init__(self, gloo: Any, timeout: timedelta) -> None:
        self._gloo = gloo
        self._timeout_s = timeout.total_seconds()
        self._next_tag = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def carry_out(self, tensor: Tensor, kind: Kind, collective: str, depth: int) -> None:
        """Sum a flat tensor over all ranks, in place, or run only the reduce-scatter or all-gather of this all-reduce.

        `kind` is `all_reduce`, `reduce_scatter` or `all_gather`; `depth` is the number of chunks. After a
        reduce_scatter, each rank holds the sum of its own parts; an all_gather of the same collective, depth and wire
        format completes the all-reduce. Returns when this rank has finished its transfers and additions. Raises
        `RuntimeError` if a peer is gone, or does not respond within the process group's timeout.
        """
        algorithm, ranks = COLLECTIVES[collective], self._gloo.size()
        parts, (reduce, distribute) = algorithm.rounds(ranks).parts, steps(algorithm, self._gloo.rank(), ranks)
        if kind == "all_gather":
            reduce = ()
        elif kind == "reduce_scatter":
            distribute = ()
        chunks = [_part(tensor, c, c + 1, depth) for c in range(depth)]
        deadline = time.monotonic() + self._timeout_s
        run = _MessageRun(self._gloo, chunks, parts, self._next_tag, deadline)
        self._next_tag = (self._next_tag + depth * (len(reduce) + len(distribute))) % _TAGS
        run.run(reduce, distribute, self._scratch_for(tensor, reduce, chunks, parts))

    def _scratch_for(self, tensor: Tensor, rounds: Sequence[Step], chunks: list[Tensor], parts: int) -> Tensor:
        needed = sum(
            _part(chunk, taken.start, taken.stop, parts).nbytes
            for step in rounds
            for taken in step.receives
            for chunk in chunks
        )
        if self._scratch.nbytes < needed:
            self._scratch = torch.empty(-(-needed // 16) * 16, dtype=torch.uint8)
        return self._scratch.view(tensor.dtype) if needed else tensor[:0]


class _MessageRun:
    """The transfers of one message. Round r of chunk c is called a *turn*."""

    def __init__(self, gloo: Any, chunks: list[Tensor], parts: int, first_tag: int, deadline: float) -> None:
        self._gloo, self._chunks, self._parts = gloo, chunks, parts
        self._first_tag, self._deadline = first_tag, deadline
        self._rounds: list[Step] = []
        self._sends: dict[tuple[int, int], list[Any]] = {}  # by round and chunk
        self._receives: dict[tuple[int, int], list[tuple[Any, Transfer, Tensor | None]]] = {}

    def run(self, reduce: Sequence[Step], distribute: Sequence[Step], scratch: Tensor) -> None:
        self._rounds = [*reduce, *distribute]
        turns = [(r, c) for r in range(len(self._rounds)) for c in range(len(self._chunks))]
        for r, c in turns:
            scratch = self._expect(r, c, scratch if r < len(reduce) else None)
        for turn in turns[: len(self._chunks)]:
            self._send(*turn)
        for r, c in turns:
            self._finish(r, c)
            if r + 1 < len(self._rounds):
                self._send(r + 1, c)
        for works in self._sends.values():
            self._wait_all(works)

    def _expect(self, r: int, c: int, scratch: Tensor | None) -> Tensor:
        """Post the receives of round r of chunk c, and return the unused scratch memory."""
        posted = self._receives[r, c] = []
        left = scratch if scratch is not None else self._chunks[0][:0]
        for taken in self._rounds[r].receives:
            place = self._place(c, taken)
            if not place.numel():
                continue
            into = None
            if scratch is not None:
                into, left = left[: place.numel()], left[place.numel() :]
            work = self._gloo.recv([place if into is None else into], taken.peer, self._tag(r, c))
            posted.append((work, taken, into))
        return left

    def _send(self, r: int, c: int) -> None:
        self._sends[r, c] = [
            self._gloo.send([place], given.peer, self._tag(r, c))
            for given in self._rounds[r].sends
            if (place := self._place(c, given)).numel()
        ]

    def _finish(self, r: int, c: int) -> None:
        """Wait for the receives of round r of chunk c, and add the received summands to this rank's data."""
        if self._rounds[r].overwrites:
            self._wait_all(self._sends.pop((r, c)))
        for work, taken, into in self._receives.pop((r, c)):
            self._wait_all([work])
            if into is not None:
                self._place(c, taken).add_(into)

    def _wait_all(self, works: list[Any]) -> None:
        for work in works:
            left = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
            if not work.wait(left):
                raise RuntimeError("the transfer was aborted")

    def _place(self, c: int, transfer: Transfer) -> Tensor:
        return _part(self._chunks[c], transfer.start, transfer.stop, self._parts)

    def _tag(self, r: int, c: int) -> int:
        return (self._first_tag + r * len(self._chunks) + c) % _TAGS


def _part(tensor: Tensor, start: int, stop: int, parts: int) -> Tensor:
    """Return parts `start` to `stop` (exclusive) of a flat tensor, which has `parts` parts of nearly equal size."""
    n = tensor.numel()
    return tensor[n * start // parts : n * stop // parts]
