"""The time of everything that an op reaches, in graphs that are too large for a bit for every pair of ops.

Idea: cover the graph with chains of ops, in each of which an op reaches all before it.
Whatever else reaches an op of a chain then also reaches all before that one. So the ops
that an op reaches are a prefix of each chain, and one number per chain describes them.
Source: the chain compression of Jagadish (A Compression Technique to Materialize
Transitive Closure, ACM TODS 1990), with a greedy cover.

A network is a few branches wide, however deep it is, so an op reaches few chains. The
cover keeps it so. A chain goes on with the op that has the longest path after it, not
with a short end such as the gradient of a weight. An op that begins a branch goes on with
the chain of a branch that has ended, if it reaches all of it.

Where an op reaches more chains than there is memory for, only those with the longest
times are kept. The result is then too small, never too large: a release time or a tail
that is too small proves less, and nothing wrong.

Units: seconds, or any other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

__all__ = ["MOST_ENTRIES", "Cover", "reached_s"]

#: The most chains, of all ops together, for which the length of the prefix is kept. They take about 200 MB.
MOST_ENTRIES = 2**22
#: The chains that may be kept for each op in any case.
_LEAST_ENTRIES = 16


def reached_s(
    order: Sequence[int], neighbours: Sequence[Sequence[int]], duration_s: Sequence[float], starts: Iterable[list[int]]
) -> list[float]:
    """For each start, the seconds of its ops and of all ops reached from them along `neighbours`.

    In `order`, which has every op that can be reached, an op stands after its
    neighbours. The time is too small where some op reaches more chains than can be kept.
    """
    cover = Cover(order, neighbours, duration_s)
    return [cover.seconds(cover.joined(ops)) for ops in starts]


class Cover:
    """Chains that cover a graph, and for each op how much of each chain it reaches.

    `complete` says whether no chain had to be left out.
    """

    def __init__(self, order: Sequence[int], neighbours: Sequence[Sequence[int]], duration_s: Sequence[float]) -> None:
        self.complete = True
        self.most = max(_LEAST_ENTRIES, MOST_ENTRIES // max(1, len(order)))
        self.until_s: list[list[float]] = []  # by chain: the seconds of its first 0, 1, 2, ... ops
        self.last: list[int] = []  # by chain: its last op
        self.reached: dict[int, dict[int, int]] = {}  # by op: how many ops of which chains it reaches, with itself
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
        """Return the chain to extend with an op: a neighbour's, an ended branch's, or a new one."""
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
        """Return how many ops of which chains some ops reach together."""
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
        """The seconds of all these ops."""
        return sum(self.until_s[chain][count] for chain, count in reached.items())


def _heirs(order: Sequence[int], neighbours: Sequence[Sequence[int]]) -> tuple[dict[int, int], dict[int, int]]:
    """For each op, the most ops on a path that reaches it, and the op before it on such a path (itself if none)."""
    height, heir = dict.fromkeys(order, 1), {op: op for op in order}
    for op in reversed(order):
        for neighbour in neighbours[op]:
            if height[neighbour] <= height[op]:
                height[neighbour], heir[neighbour] = height[op] + 1, op
    return height, heir
