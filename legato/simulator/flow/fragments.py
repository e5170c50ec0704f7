"""The fragments of a plan's messages: the parts that travel independently.

Every byte is summed in one fragment and distributed in one. A message becomes one
fragment per parameter server that holds tensors of it (one, without servers),
and each of these is split further if the message's `depth` or the fabric's
`message_bytes` require it.

[Note: kinds of messages]
Every fabric has two operations: `reduce` (gradients become sums) and `distribute`
(sums reach all workers). `all_reduce` is both; on parameter servers it is a push
and a pull. `push` and `reduce_scatter` are the first, `pull` and `all_gather` the
second, on every fabric. Servers distribute all-reduced tensors in the order in
which the forward pass reads them, since the plan has no order for that; pulls
keep the plan's order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError
from legato.core.plan import Message, Slice

__all__ = ["DISTRIBUTING", "REDUCING", "Fragments", "fragment", "overlaps"]

REDUCING = ("all_reduce", "reduce_scatter", "push")
DISTRIBUTING = ("all_reduce", "all_gather", "pull")
_MOST_FRAGMENTS = 1_000_000


@dataclass(frozen=True)
class Fragments:
    """Fragments in the order in which they are sent. Arrays have one entry per fragment.

    `message` is the index of its message in the plan, `order` its place among the
    fragments (it decides between fragments that are ready at the same time),
    `server` its parameter server.
    """

    slices: tuple[tuple[Slice, ...], ...]
    message: NDArray[np.int64]
    server: NDArray[np.int64]

    @property
    def nbytes(self) -> NDArray[np.float64]:
        return np.array([sum(piece.nbytes for piece in slices) for slices in self.slices], dtype=float)

    @property
    def order(self) -> NDArray[np.int64]:
        return np.arange(len(self.slices))

    def __len__(self) -> int:
        return len(self.slices)


def fragment(
    messages: Iterable[tuple[int, Message]], placement: Mapping[str, int] | None, message_bytes: int | None
) -> Fragments:
    """Fragment messages, given with their indices in the plan.

    `placement` maps each tensor to its server; it is used if the message has no
    server. None means that there is one place only. Raises `InputError` on more
    than a million fragments.
    """
    slices: list[tuple[Slice, ...]] = []
    index: list[int] = []
    server: list[int] = []
    for i, message in messages:
        groups: dict[int, list[Slice]] = {}
        for piece in message.slices:
            where = 0
            if placement is not None:
                where = placement[piece.tensor] if message.server is None else message.server
            groups.setdefault(where, []).append(piece)
        for where, group in groups.items():
            nbytes = sum(piece.nbytes for piece in group)
            pieces = min(nbytes, max(message.depth, math.ceil(nbytes / message_bytes) if message_bytes else 1))
            if len(slices) + pieces > _MOST_FRAGMENTS:
                raise InputError(f"message_bytes: {message_bytes} makes more than {_MOST_FRAGMENTS:,} fragments")
            for part in _split(group, nbytes, pieces):
                slices.append(part)
                index.append(i)
                server.append(where)
    return Fragments(tuple(slices), np.array(index, dtype=np.int64), np.array(server, dtype=np.int64))


def _split(group: list[Slice], nbytes: int, pieces: int) -> Iterable[tuple[Slice, ...]]:
    """Split slices into equal pieces."""
    if pieces == 1:
        yield tuple(group)
        return
    at, queue = 0, list(reversed(group))
    for k in range(1, pieces + 1):
        until, part = nbytes * k // pieces, []
        while at < until:
            piece = queue.pop()
            stop = min(piece.stop, piece.start + until - at)
            part.append(Slice(piece.tensor, piece.start, stop))
            if stop < piece.stop:
                queue.append(Slice(piece.tensor, stop, piece.stop))
            at += stop - piece.start
        yield tuple(part)


def overlaps(first: Fragments, second: Fragments) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs (i, j) of fragments that share bytes: j distributes bytes that i sums."""
    held: dict[str, list[tuple[int, int, int]]] = {}
    for i, slices in enumerate(first.slices):
        for piece in slices:
            held.setdefault(piece.tensor, []).append((piece.start, piece.stop, i))
    pairs = {
        (i, j)
        for j, slices in enumerate(second.slices)
        for piece in slices
        for start, stop, i in held.get(piece.tensor, ())
        if start < piece.stop and piece.start < stop
    }
    array = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]
