"""Lay tensors end to end to partition them as a single tensor, and divide messages that exceed a limit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from legato.core.plan import Message, Slice
from legato.core.workload import Tensor

__all__ = ["ALIGNMENT", "Joined", "divided"]

#: Tensors are partitioned at multiples of this many bytes, so that no element of any dtype is divided.
ALIGNMENT = 16


class Joined:
    """A group of tensors that are laid end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        *self.starts, self.nbytes = accumulate((tensor.nbytes for tensor in tensors), initial=0)

    def aligned(self, at: int) -> int:
        """Return the largest offset up to `at` where a tensor may be partitioned."""
        start = self.starts[bisect_right(self.starts, at) - 1]
        return start + (at - start) // ALIGNMENT * ALIGNMENT

    def slices(self, start: int, stop: int) -> tuple[Slice, ...]:
        """Return bytes `start` to `stop` of the group as slices of its tensors."""
        found = []
        k = bisect_right(self.starts, start) - 1
        while start < stop:
            begin, tensor = self.starts[k], self.tensors[k]
            end = min(stop, begin + tensor.nbytes)
            found.append(Slice(tensor.name, start - begin, end - begin))
            start, k = end, k + 1
        return tuple(found)


def divided(messages: Iterable[Message], most: float) -> list[Message]:
    """Divide each message that is larger than `most` bytes into consecutive messages, and return all messages.

    Tensors are partitioned where necessary. All parts of a message but the last hold `most` bytes, or less by up to
    `ALIGNMENT` bytes. `most` is at least `ALIGNMENT`.
    """
    found: list[Message] = []
    for message in messages:
        if message.nbytes <= most:
            found.append(message)
            continue
        parts: list[list[Slice]] = [[]]
        left = int(most)
        for piece in message.slices:
            start = piece.start
            while start < piece.stop:
                stop = min(piece.stop, start + left)
                if stop < piece.stop:
                    stop = start + (stop - start) // ALIGNMENT * ALIGNMENT
                if stop > start:
                    parts[-1].append(Slice(piece.tensor, start, stop))
                    left -= stop - start
                if stop < piece.stop:
                    parts.append([])
                    left = int(most)
                start = stop
        found += [msgspec.structs.replace(message, slices=tuple(part)) for part in parts if part]
    return found
