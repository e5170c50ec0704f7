"""The fragments of a plan's messages: the parts that are sent independently.

Every byte is summed in one fragment and distributed in one fragment. A message has one fragment for each parameter
server that holds some of its tensors (or one fragment without servers). Fragments are split further if the message's
`depth` or the fabric's `message_bytes` require it.

[Note: kinds of messages] Every fabric has two operations: `reduce` (gradients become sums) and `distribute` (sums reach
all workers). On every fabric, `push` and `reduce_scatter` mean `reduce`, and `pull` and `all_gather` mean `distribute`.
`all_reduce` means both; on parameter servers it is a push and a pull. Servers distribute all-reduced tensors in the
order in which the forward pass reads them, since the plan has no order for this. Pulls keep the plan's order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import TooLargeError
from legato.core.plan import MOST_CHUNKS, Message, Slice

__all__ = ["DISTRIBUTING", "REDUCING", "Fragments", "fragment", "num_fragments", "overlaps"]

REDUCING = ("all_reduce", "reduce_scatter", "push")
DISTRIBUTING = ("all_reduce", "all_gather", "pull")


@dataclass(frozen=True)
class Fragments:
    """Fragments in the order in which they are sent. Arrays have one entry per fragment.

    `message` is the index of a fragment's message in the plan, and `server` is its parameter server. `order` is the
    fragment's place among all fragments: of fragments that are ready at the same time, the first is sent first.
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
    """Return the fragments of messages, which are given with their indices in the plan.

    If a message has no server, `placement` maps each tensor to its server. If `placement` is None, messages are not
    divided by server. Raises `TooLargeError` on more than a million fragments.
    """
    groups = list(_groups(messages, placement, message_bytes))
    _check_number(groups, message_bytes)
    slices = tuple(part for group in groups for part in _split(group.slices, group.nbytes, group.pieces))
    pieces = [group.pieces for group in groups]
    message = np.repeat(np.array([group.message for group in groups], dtype=np.int64), pieces)
    return Fragments(slices, message, np.repeat(np.array([group.server for group in groups], dtype=np.int64), pieces))


def num_fragments(
    messages: Iterable[tuple[int, Message]], placement: Mapping[str, int] | None, message_bytes: int | None
) -> int:
    """Return the number of fragments of messages. Arguments and errors are as in `fragment`."""
    groups = list(_groups(messages, placement, message_bytes))
    _check_number(groups, message_bytes)
    return sum(group.pieces for group in groups)


class _Group(NamedTuple):
    """The slices of a message that go to one server, and the number of fragments into which they are split."""

    message: int
    server: int
    slices: list[Slice]
    nbytes: int
    pieces: int


def _groups(
    messages: Iterable[tuple[int, Message]], placement: Mapping[str, int] | None, message_bytes: int | None
) -> Iterable[_Group]:
    for i, message in messages:
        by_server: dict[int, list[Slice]] = {}
        for piece in message.slices:
            where = 0
            if placement is not None:
                where = placement[piece.tensor] if message.server is None else message.server
            by_server.setdefault(where, []).append(piece)
        for where, group in by_server.items():
            nbytes = sum(piece.nbytes for piece in group)
            pieces = min(nbytes, max(message.depth, -(-nbytes // message_bytes) if message_bytes else 1))
            yield _Group(i, where, group, nbytes, pieces)


def _check_number(groups: Sequence[_Group], message_bytes: int | None) -> None:
    count = sum(group.pieces for group in groups)
    if count > MOST_CHUNKS:
        why = "the depth of messages" if message_bytes is None else f"message_bytes: {message_bytes}"
        raise TooLargeError(f"{why} makes {count:,} fragments (expected at most {MOST_CHUNKS:,})")


def _split(group: list[Slice], nbytes: int, pieces: int) -> Iterable[tuple[Slice, ...]]:
    """Yield the slices split into equal pieces."""
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
    """Return the pairs (i, j) of fragments in which j distributes bytes that i sums.

    The fragments of `first` sum every byte exactly once. So a tensor's fragments do not overlap, and can be sorted by
    their first bytes.
    """
    held: dict[str, list[tuple[int, int, int]]] = {}
    for i, slices in enumerate(first.slices):
        for piece in slices:
            held.setdefault(piece.tensor, []).append((piece.start, piece.stop, i))
    for summed in held.values():
        summed.sort()
    pairs = set()
    for j, slices in enumerate(second.slices):
        for piece in slices:
            summed = held.get(piece.tensor, [])
            k = bisect_right(summed, piece.start, key=_stop)
            while k < len(summed) and summed[k][0] < piece.stop:
                pairs.add((summed[k][2], j))
                k += 1
    array = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _stop(summed: tuple[int, int, int]) -> int:
    return summed[1]
