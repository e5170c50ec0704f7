"""Blocks of neighbouring tensors, so that a search has at most a few thousand blocks to send, not every tensor.

The time of a search grows with the number of tensors, or with its square. But if a model has 100,000 tensors, each
message holds hundreds of tensors, and it does not matter which of two neighbours in ready order ends a message. So
tensors that become ready one after another form blocks of about equal size, and the search plans for blocks. A block is
ready when its last tensor is ready, and as urgent as its most urgent tensor. A block can be partitioned, as a tensor
can. In a model with few tensors, each block has a single tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legato.core.plan import Slice
from legato.core.workload import Workload
from legato.schedule.basics.compose import in_turn
from legato.schedule.basics.joined import Joined

__all__ = ["Blocks", "too_many_tensors"]

#: Up to this number, tensors are planned for one by one; more tensors form about this number of blocks.
MOST_BLOCKS = 4096


def too_many_tensors(count: int) -> bool:
    """Return whether there are too many tensors to plan without blocks."""
    return count > MOST_BLOCKS


class Blocks:
    """Blocks of tensors: their release times, tails and bytes by index, as `Instance` needs them."""

    def __init__(self, workload: Workload, release_s: Sequence[float], tail_s: Sequence[float]) -> None:
        """Form the blocks; `release_s` and `tail_s` are indexed by tensor."""
        self.members = _members(workload, release_s)
        self.release_s = [max(release_s[t] for t in block) for block in self.members]
        self.tail_s = [max(tail_s[t] for t in block) for block in self.members]
        self._joined = [Joined([workload.tensors[t] for t in block]) for block in self.members]
        self.nbytes = [joined.nbytes for joined in self._joined]

    def slices(self, pieces: Iterable[tuple[int, int, int]]) -> tuple[Slice, ...]:
        """Return the slices of tensors that pieces of blocks contain; a piece is (block, first byte, number of bytes).

        Pieces are aligned, so a very small piece may have no slices.
        """
        found: list[Slice] = []
        for block, start, nbytes in pieces:
            joined = self._joined[block]
            found += joined.slices(self._cut(joined, start), self._cut(joined, start + nbytes))
        return tuple(found)

    @staticmethod
    def _cut(joined: Joined, at: int) -> int:
        return at if at == joined.nbytes else joined.aligned(at)


def _members(workload: Workload, release_s: Sequence[float]) -> list[list[int]]:
    """Return the tensors (indices) of each block."""
    count = len(workload.tensors)
    if not too_many_tensors(count):
        return [[t] for t in range(count)]
    return in_turn(workload, sorted(range(count), key=release_s.__getitem__), workload.nbytes / MOST_BLOCKS)
