"""The bound "between": tensors that come late and are needed early, and all that fits neither before nor after them.

The first layers of a network have little to send, but only between the end of the
backward pass and the start of the forward pass. How much of the other tensors the
network can send before and after depends on its startup times; the rest has to go
between as well. `lower_bound.py` has the argument ("Between"). This file finds the sets
for which it proves most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.basics.coarse_to_fine import coarse_to_fine
from legato.schedule.basics.heads_tails import Detours, HeadsTails
from legato.schedule.bound.capacity import capacities

__all__ = ["Between", "between"]

#: How many sets to try, from either end, before refining around the best one.
_SETS = 16


class Between(NamedTuple):
    """No schedule takes less than `seconds`; the set that proves it, its least release time and least tail."""

    seconds: float
    tensors: tuple[int, ...]
    first_s: float
    last_s: float


def between(
    times: HeadsTails,
    nbytes: Sequence[int],
    line: LinearCost,
    all_reduce_only: bool,
    *,
    beat_s: float,
    detours: Detours | None = None,
) -> Between | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    `all_reduce_only` excludes schedules that send halves of all-reduces. `detours` is
    given where the order of computation is free. For every value of a release time or
    a tail, the set of all tensors with at least that value may be tried.
    """
    prover = _Prover(times, nbytes, line, all_reduce_only, beat_s, detours)
    best = None
    for end in (0, 1):
        sets = prover.sets(end)
        found = _best(len(sets), sets.__getitem__, prover)
        if found.seconds > beat_s:
            best, beat_s = found, found.seconds
    if detours:
        found = _best(len(sets), lambda k: prover.set_of(_latest(sets[k].tensors, times, nbytes, line)), prover)
        if found.seconds > beat_s:
            best = found
    return best


class _Set(NamedTuple):
    """The tensors from some place in an order on, their least release time and least tail, and their bytes."""

    order: Sequence[int]
    begin: int
    first_s: float
    last_s: float
    nbytes: int

    @property
    def tensors(self) -> Sequence[int]:
        return self.order[self.begin :]


def _best(count: int, set_at: Callable[[int], _Set], prover: _Prover) -> Between:
    best = set_at(coarse_to_fine(count, lambda k: prover.proves(set_at(k)), first=_SETS))
    return Between(prover.proves(best), tuple(sorted(best.tensors)), best.first_s, best.last_s)


def _latest(tensors: Sequence[int], times: HeadsTails, nbytes: Sequence[int], line: LinearCost) -> list[int]:
    """The tensors of a set that are ready no earlier than the one that would arrive last if all went at once."""
    release = times.release_s
    last = max(tensors, key=lambda t: release[t] + line.beta_s_per_byte * nbytes[t])
    return [t for t in tensors if release[t] >= release[last]]


class _Prover:
    """Computes the seconds that a set proves, or a value below zero if it proves no more than `beat_s`.

    What can be sent of the other tensors before the least release time h of a set
    belongs to tensors that are released before h, and these are the first ones in
    order of release. So one `Capacity` over all tensors serves all sets, and another
    one serves them from the other end of the period.
    """

    def __init__(
        self,
        times: HeadsTails,
        nbytes: Sequence[int],
        line: LinearCost,
        all_reduce_only: bool,
        beat_s: float,
        detours: Detours | None,
    ) -> None:
        self.nbytes, self.line, self.beat_s, self.detours = nbytes, line, beat_s, detours
        self.ends = times.release_s, times.tail_s
        self.orders = [sorted(range(len(nbytes)), key=near.__getitem__) for near in self.ends]
        self.capacities = capacities(self.ends, nbytes, line, all_reduce_only)
        self.total = sum(nbytes)

    def sets(self, end: int) -> list[_Set]:
        """For each value of a release time (end 0) or a tail (end 1), the tensors with at least that value."""
        near, far, order = self.ends[end], self.ends[1 - end], self.orders[end]
        own = list(accumulate(self.nbytes[t] for t in reversed(order)))[::-1]
        least = list(accumulate((far[t] for t in reversed(order)), min))[::-1]
        found = []
        for k, t in enumerate(order):
            if k == 0 or near[t] > near[order[k - 1]]:
                first, last = (near[t], least[k]) if end == 0 else (least[k], near[t])
                found.append(_Set(order, k, first, last, own[k]))
        return found

    def set_of(self, tensors: Sequence[int]) -> _Set:
        """The set of these tensors."""
        first, last = (min(near[t] for t in tensors) for near in self.ends)
        return _Set(tensors, 0, first, last, sum(self.nbytes[t] for t in tensors))

    def proves(self, of: _Set) -> float:
        """The seconds that a set proves."""
        first, last, own = of.first_s, of.last_s, of.nbytes
        work = self.line.beta_s_per_byte * (self.total - own)
        tensors = of.tensors if self.detours else ()
        inside = set(tensors)
        shared = self.detours.shared(tensors) if self.detours else 0
        detour = self.detours.least_s(shared, inside, 0.0) if self.detours else 0.0
        if max(first + work, detour) + self.line.cost(own) + last <= self.beat_s:  # even with all others between
            return -1.0
        before, after = (
            capacity.carried(until, of=bisect_left(capacity.release_s, until))
            for capacity, until in zip(self.capacities, (first, last), strict=True)
        )
        if self.detours:
            detour = self.detours.least_s(shared, inside, after)
        return max(first, first + work - before - after, detour) + self.line.cost(own) + last
