"""The total time of all ops that an op reaches, in graphs that are too large to store a bit for each pair of ops.

Idea: cover the graph with chains of ops. In a chain, each op reaches all earlier ops of the chain. So any op that
reaches an op of the chain also reaches all earlier ops of this chain. The ops that an op reaches are therefore a prefix
of each chain, so the lengths of these prefixes are enough to know all ops that it reaches.
Source: the chain compression of Jagadish (A Compression Technique to Materialize Transitive Closure, ACM TODS 1990),
with a greedy cover.

A neural network is only a few branches wide, however deep it is, so an op reaches few chains. The cover keeps the
number of chains small. If several ops could continue a chain, the cover takes the op from which the longest path
starts. So a chain does not continue with an op whose path ends soon, such as the gradient of a weight. An op that
begins a branch continues the chain of another branch if that branch has ended, and if the op reaches all ops of its
chain.

If an op reaches more chains than there is memory for, only the chains with the longest times are kept. The resulting
time is then too small, never too large. Bounds use these times as release times and tails; a release time or a tail
that is too small makes a bound weaker, but never wrong.

Units: seconds, or any other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

__all__ = ["MOST_ENTRIES", "Cover", "reached_s"]

#: The most prefix lengths to keep, counted over all ops and their chains. They take about 200 MB.
MOST_ENTRIES = 2**22
#: The number of chains that may be kept for each op in any case.
_LEAST_ENTRIES = 16


def reached_s(
    order: Sequence[int], neighbours: Sequence[Sequence[int]], duration_s: Sequence[float], starts: Iterable[list[int]]
) -> list[float]:
    """Return, for each list of ops in `starts`, the seconds of these ops and of all ops that they reach.

    An op reaches its `neighbours`, and all ops that they reach. `order` has every op that can be reached, each after
    its neighbours. A time is too small if some op reaches more chains than can be kept.
    """
    cover = Cover(order, neighbours, duration_s)
    return [cover.seconds(cover.joined(ops)) for ops in starts]


class Cover:
    """Chains that cover a graph, and how much of each chain every op reaches.

    `complete` is false if some chains had to be left out.
    """

    def __init__(self, order: Sequence[int], neighbours: Sequence[Sequence[int]], duration_s: Sequence[float]) -> None:
        self.complete = True
        self.most = max(_LEAST_ENTRIES, MOST_ENTRIES // max(1, len(order)))
        self.until_s: list[list[float]] = []  # by chain: the seconds of its first 0, 1, 2, ... ops
        self.last: list[int] = []  # by chain: its last op
        self.reached: dict[int, dict[int, int]] = {}  # by op and chain: how many ops it reaches, itself included
        height, heir = _heirs(order, neighbours)
        for op in order:
            reached = self.joined(neighbours[op])
            chain = self._chain(op, neighbours[op], reached, height, heir)
            self.until_s[chain].append(self.until_s[chain][-1] + duration_s[op])
            self.last[chain] = op
            reached[chain] = len(self.until_s[chain]) - 1
            self.reached[op] = reached

    def _chain(
        self, op: int, neighbours: Sequence[int], reached: dict[int, int], height: dict[int, int], heir: dict[int, int]
    ) -> int:
        """Return the chain to extend with an op: a neighbour's chain, the chain of an ended branch, or a new one."""
        for neighbour in neighbours:
            if heir[neighbour] == op:
                for chain, count in reached.items():
                    if self.last[chain] == neighbour and count == len(self.until_s[chain]) - 1:
                        return chain
        if any(height[op] * 2 > height[heir[neighbour]] for neighbour in neighbours):
            for chain, count in reached.items():
                if count == len(self.until_s[chain]) - 1 and heir[self.last[chain]] in self.reached:
                    return chain
        self.until_s.append([0])
        self.last.append(op)
        return len(self.last) - 1

    def joined(self, ops: Sequence[int]) -> dict[int, int]:
        """Return, for each chain, the number of its ops that are reached by at least one of these ops."""
        if not ops:
            return {}
        joined = self.reached[ops[0]].copy()
        for op in ops[1:]:
            for chain, count in self.reached[op].items():
                if count > joined.get(chain, 0):
                    joined[chain] = count
        if len(joined) <= self.most:
            return joined
        self.complete = False
        return dict(heapq.nlargest(self.most, joined.items(), key=lambda item: self.until_s[item[0]][item[1]]))

    def seconds(self, reached: dict[int, int]) -> float:
        """Return how many seconds all the reached ops take together."""
        return sum(self.until_s[chain][count] for chain, count in reached.items())


def _heirs(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, for each op, the number of ops on the longest path to the op, and the previous op on this path.

    If no other op reaches the op, the op itself is returned as the previous op.
    """
    height, heir = dict.fromkeys(order, 1), {op: op for op in order}
    for op in reversed(order):
        for neighbour in neighbours[op]:
            if height[neighbour] <= height[op]:
                height[neighbour], heir[neighbour] = height[op] + 1, op
    return height, heir
