"""The bound "ends": the least time to send a set of tensors, counted from one end of the period or from both ends.

Gradients are sent in the order in which they become ready, and may be partitioned anywhere. A message takes a fixed
time to start, plus the work of its bytes. Backwards in time, tails play the role of release times. docs/bounds.md has
the proofs ("Release", "Tail", "Both").
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.schedule.basics.jackson import jackson
from legato.schedule.bound.problem import Argument, Problem, Proved
from legato.schedule.published.merge_optimal import earliest_finishes, merge_neighbours

__all__ = ["Capacity", "Ends", "HalvesCapacity", "counts", "finish"]

#: The end of the period from which time is counted.
End = Literal["release", "tail"]

#: How many late deliveries of Jackson's schedule to examine.
_TRIES = 6
#: How many of the best sets to examine from both ends.
_BOTH = 4
#: How many moments to try for both ends, and how often to refine the moments around the best one.
_MOMENTS, _REFINEMENTS = 16, 3


def finish(near: Sequence[float], tensors: Sequence[int], work: Sequence[float], first: float) -> float:
    """Return f, the earliest time at which these tensors can have been sent; each message costs `first` seconds.

    A message also takes the work of its bytes. `near` has the release times (or the tails) of all tensors of the
    workload; `work` has the work of the tensors in `tensors`.
    """
    return merge_neighbours(*_inward(near, tensors, work), LinearCost(first, 1))[0]


def _inward(near: Sequence[float], tensors: Sequence[int], work: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the times and the work of these tensors, in the order in which they become ready."""
    inward = sorted(range(len(tensors)), key=lambda k: near[tensors[k]])
    return [near[tensors[k]] for k in inward], [work[k] for k in inward]


class Ends(Argument, frozen=True, tag="ends"):
    """The time to send these tensors, counted from one end of the period, plus the least time at the other end.

    `at` names the end from which to count, or is a moment in seconds (the argument "Both"). With a moment, the bound is
    the moment plus the time to send all bytes that cannot have been sent before the moment.
    """

    tensors: tuple[int, ...]
    at: End | float

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Try promising sets from one end of the period; then try the best of these and all tensors from both ends."""
        certificates = [cls(tensors, end) for end, tensors in dict.fromkeys(_promising_sets(problem))]
        found = [certificate.proves(problem) for certificate in certificates]
        yield from map(Proved, found, certificates)
        best = sorted(range(len(found)), key=found.__getitem__, reverse=True)
        sets = [certificates[k].tensors for k in best if len(certificates[k].tensors) > 1]
        for tensors in dict.fromkeys([tuple(range(len(problem.workload.tensors))), *sets[:_BOTH]]):
            both = _Both.of(problem, tensors)
            low = both.released.release[0]
            high = max(both.released.finish[-1], low)
            for _ in range(_REFINEMENTS):
                moments = [low + (high - low) * k / _MOMENTS for k in range(_MOMENTS + 1)]
                proved = [*map(both.proves, moments)]
                k = proved.index(max(proved))
                low, high = moments[max(k - 1, 0)], moments[min(k + 1, _MOMENTS)]
            yield Proved(proved[k], cls(tensors, moments[k]))

    def proves(self, problem: Problem) -> float:
        """Return the time that "Release", "Tail" or "Both" of docs/bounds.md proves; `at` says which of the three.

        Raises `InputError` if the tensors or the moment are invalid.
        """
        problem.check_tensors(self.tensors)
        if not isinstance(self.at, str):
            if not (math.isfinite(self.at) and self.at >= 0):
                raise InputError(f"certificate: at {self.at} (expected finite seconds, at least 0)")
            return _Both.of(problem, self.tensors).proves(problem.whole(problem.number(self.at)))
        near, far = problem.release, problem.tail
        if self.at == "tail":
            near, far = far, near
        first = problem.half if problem.sends == "halves" else 2 * problem.half
        sent = finish(near, self.tensors, [2 * part for part in problem.half_work(self.tensors)], first)
        return sent + 2 * problem.half - first + min(far[t] for t in self.tensors)


class _Both(NamedTuple):
    """The functions U and V of docs/bounds.md for some tensors, and the allowance for rounding errors."""

    released: Capacity
    needed: Capacity
    rounding: float

    @classmethod
    def of(cls, problem: Problem, tensors: Sequence[int]) -> _Both:
        first = 2 * problem.half if problem.sends == "all_reduces" else problem.half
        work = [2 * part for part in problem.half_work(tensors)]
        released, needed = (_inward(near, tensors, work) for near in (problem.release, problem.tail))
        return cls(Capacity.of(*released, first), Capacity.of(*needed, first), problem.rounding)

    def proves(self, moment: float) -> float:
        # Rounded down by more than the float error: if a trace of another tensor is left, its whole delay counts.
        work = self.released.work[-1]
        left = work - self.released.carried(moment) - self.rounding * work
        return moment - self.released.first + self.needed.needed(left)


class Capacity(NamedTuple):
    """How much the network can carry, seen from one end of the period.

    `release` has an entry for each tensor; `finish[j]` is the time f for the first j tensors, and `work[j]` is their
    work. Each message takes `first` seconds in addition to the work of its bytes.
    """

    release: Sequence[float]
    finish: list[float]
    work: list[float]
    first: float

    @classmethod
    def of(cls, release: Sequence[float], work: Sequence[float], first: float) -> Capacity:
        """Return the capacity for these tensors; `release` must never decrease."""
        finish, _ = earliest_finishes(release, work, LinearCost(first, 1))
        return cls(release, finish, [*accumulate(work, initial=0)], first)

    def _start(self, j: int) -> float:
        """Return when the best message ending with tensor j can start, minus the work that is sent before it."""
        ready = self.release[j]
        i = bisect_right(self.finish, ready, hi=j + 1)  # one of two i is best, as in `merge_optimal.py`
        start = ready - self.work[i - 1] if i else math.inf
        return start if i > j else min(start, self.finish[i] - self.work[i])

    def carried(self, until: float) -> float:
        """Return the most work that can be done by this moment."""
        last = len(self.release)
        j = bisect_right(self.finish, until, hi=last + 1) - 1
        if j == last:
            return self.work[j]
        return max(self.work[j], min(until - self.first - self._start(j), self.work[j + 1]))

    def needed(self, work: float) -> float:
        """Return the earliest moment by which this much work can be done."""
        if work <= 0:
            return 0
        j = min(bisect_left(self.work, work), len(self.release)) - 1
        return self._start(j) + self.first + work


class HalvesCapacity:
    """How much the network can carry if a message is one half of an all-reduce, or both halves."""

    def __init__(self, release: Sequence[float], work: Sequence[float], half: float) -> None:
        """Prepare the capacity. Each half takes `half` seconds plus its `work`; `release` must not decrease."""
        self.begin, self.startup = release[0], 2 * half
        self.any = Capacity.of(release, [2 * part for part in work], half)
        self.one_kind = Capacity.of(release, work, half)

    def carried(self, until: float) -> float:
        """Return the most work that can be done by this moment."""
        both_kinds = until - self.begin - self.startup
        return min(self.any.carried(until), max(self.one_kind.carried(until), both_kinds))


def counts(most: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 11, 16 and so on, up to `most`."""
    count = 1.0
    while count < 2**0.5 * most:
        yield min(int(count), most)
        count *= 2**0.5


def _promising_sets(problem: Problem) -> Iterator[tuple[End, tuple[int, ...]]]:
    """Yield pairs (end, set of tensors), first for networks with expensive bytes, then with expensive startups.

    The first family comes from the latest deliveries of Jackson's schedule. Suppose that a tensor with tail q arrives
    at C, and that from `begin` to C the network is never idle and sends only tensors with tails of at least q. The
    tensor is late because of the tensors with release time >= begin and tail >= q. In the second family, a set has the
    1, 2, 3, 4, 6, 8, 11, 16 (and so on) tensors with the longest tails, or with the latest release times.
    """
    release, tail = problem.release, problem.tail
    everything = range(len(release))
    pieces = jackson(release, [2 * part for part in problem.half_work(everything)], tail)
    last = {job: k for k, (job, _, _) in enumerate(pieces)}
    for late in heapq.nlargest(_TRIES, everything, key=lambda t: pieces[last[t]][2] + tail[t]):
        begin, least = _stretch(pieces, last[late], tail), tail[late]
        both = tuple(t for t in everything if release[t] >= begin and tail[t] >= least)
        yield "release", both
        yield "release", tuple(t for t in everything if tail[t] >= least)
        yield "tail", both
        yield "tail", tuple(t for t in everything if release[t] >= begin)
    by_tail, by_release = (sorted(everything, key=times.__getitem__, reverse=True) for times in (tail, release))
    for count in counts(len(release)):
        yield "release", tuple(sorted(by_tail[:count]))
        yield "tail", tuple(sorted(by_release[:count]))


def _stretch(pieces: Sequence[tuple[int, float, float]], k: int, tail: Sequence[float]) -> float:
    """Return the start of the longest busy interval that ends with piece k and has no piece with a shorter tail."""
    shortest = tail[pieces[k][0]]
    while k > 0 and pieces[k - 1][2] == pieces[k][1] and tail[pieces[k - 1][0]] >= shortest:
        k -= 1
    return pieces[k][1]
