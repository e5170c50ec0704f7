"""How much a network can carry before a moment, given release times and the cost of messages.

Gradients are sent in the order of their release, partitioned anywhere, in messages that cost alpha + beta * n.
Backwards in time, tails are release times. docs/bounds.md has the argument. Units: seconds and bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.published.merge_optimal import earliest_finishes

__all__ = ["Capacity", "HalvesCapacity", "capacities"]


class Capacity(NamedTuple):
    """What the network can carry from one end of the period: release times, f, and work of the first j tensors."""

    release_s: list[float]
    finish_s: list[float]
    work_s: list[float]
    alpha_s: float

    @classmethod
    def of(cls, release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost) -> Capacity:
        """The capacity for tensors whose `release_s` never decreases."""
        finish, _ = earliest_finishes(release_s, nbytes, cost)
        work = [cost.beta_s_per_byte * total for total in accumulate(nbytes, initial=0)]
        return cls(list(release_s), finish, work, cost.alpha_s)

    def _start(self, j: int) -> float:
        """The least (start - work before it) of a message that ends with bytes of tensor j."""
        ready = self.release_s[j]
        i = bisect_right(self.finish_s, ready, hi=j + 1)  # as in `merge_optimal.py`, one of two is best
        start = ready - self.work_s[i - 1] if i else inf
        return start if i > j else min(start, self.finish_s[i] - self.work_s[i])

    def carried(self, until_s: float) -> float:
        """The most seconds of work (beta times bytes) that can be done by then."""
        last = len(self.release_s)
        j = bisect_right(self.finish_s, until_s, hi=last + 1) - 1
        if j == last:
            return self.work_s[j]
        return max(self.work_s[j], min(until_s - self.alpha_s - self._start(j), self.work_s[j + 1]))

    def needed(self, work_s: float) -> float:
        """The earliest moment by which this much work can be done."""
        if work_s <= 0:
            return 0.0
        j = min(bisect_left(self.work_s, work_s), len(self.release_s)) - 1
        return self._start(j) + self.alpha_s + work_s


class HalvesCapacity:
    """The same where a message is a half of an all-reduce, or both halves."""

    def __init__(self, release_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost) -> None:
        """`release_s` must not decrease; `cost` is that of an all-reduce."""
        half_alpha, beta = cost.alpha_s / 2, cost.beta_s_per_byte
        self.release_s, self.alpha_s = list(release_s), cost.alpha_s
        self.any = Capacity.of(release_s, nbytes, LinearCost(half_alpha, beta))
        self.one_kind = Capacity.of(release_s, nbytes, LinearCost(half_alpha, beta / 2))

    def carried(self, until_s: float) -> float:
        """The same as `Capacity.carried`."""
        both_kinds = until_s - self.release_s[0] - self.alpha_s
        return min(self.any.carried(until_s), max(self.one_kind.carried(until_s), both_kinds))


def capacities(
    ends: Iterable[Sequence[float]], nbytes: Sequence[int], cost: LinearCost, all_reduce_only: bool
) -> list[Capacity | HalvesCapacity]:
    """One capacity from each end of the period, given release times and tails by tensor."""
    found = []
    for near in ends:
        order = sorted(range(len(near)), key=near.__getitem__)
        make = Capacity.of if all_reduce_only else HalvesCapacity
        found.append(make([near[t] for t in order], [nbytes[t] for t in order], cost))
    return found
