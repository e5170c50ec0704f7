"""Tensors that come late and are needed early, squeezed by what fits neither before nor after them.

The first layers of a network have little to send, but between the end of the
backward pass and the start of the forward pass. What the network could send of
the other tensors before and after depends on its startup times; the rest goes
between as well. `lower_bound.py` has the argument ("Between"); this file finds the
sets for which it proves most.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import Detours, HeadsTails
from legato.schedule.basics.jackson import highest
from legato.schedule.bound.capacity import windows

__all__ = ["Squeezed", "squeezed"]

#: How many sets to try, from either end, before looking closer around the best.
_SETS = 16


class Squeezed(NamedTuple):
    """No schedule takes less than `seconds`; the set that proves it, its least head and its least tail."""

    seconds: float
    tensors: tuple[int, ...]
    first_s: float
    last_s: float


def squeezed(
    known: HeadsTails,
    nbytes: Sequence[int],
    line: LinearCost,
    whole: bool,
    *,
    beat_s: float,
    detours: Detours | None = None,
) -> Squeezed | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    `whole`: all-reduces are not sent in halves; `detours` where the order
    of computation is free. Tried are the sets of all
    tensors with a tail, or a head, of at least so much.
    """
    prover = _Prover(known, nbytes, line, whole, beat_s, detours)
    best = None
    for near, order in zip(prover.ends, prover.orders, strict=True):
        sets = [order[k:] for k, t in enumerate(order) if k == 0 or near[t] > near[order[k - 1]]]
        found = _best(sets, prover)
        if found.seconds > beat_s:
            best, beat_s = found, found.seconds
    if detours:
        found = _best([_latest(tensors, known, nbytes, line) for tensors in sets], prover)
        if found.seconds > beat_s:
            best = found
    return best


def _best(sets: Sequence[Sequence[int]], prover: _Prover) -> Squeezed:
    return prover(sets[highest(len(sets), lambda k: prover(sets[k]).seconds, first=_SETS)])


def _latest(tensors: Sequence[int], known: HeadsTails, nbytes: Sequence[int], line: LinearCost) -> list[int]:
    """Those of a set that are not ready before the one that is there last if all go at once, that one included."""
    head = known.head_s
    last = max(tensors, key=lambda t: head[t] + line.beta_s_per_byte * nbytes[t])
    return [t for t in tensors if head[t] >= head[last]]


class _Prover:
    """What a set proves; no more than an estimate from above where that is not worth knowing.

    What can be sent of the others before the least head h of a set: they have
    smaller heads, as all before the first of the set in order of head have. So
    one `Window` over all tensors serves all sets, and one from the other end.
    """

    def __init__(
        self,
        known: HeadsTails,
        nbytes: Sequence[int],
        line: LinearCost,
        whole: bool,
        beat_s: float,
        detours: Detours | None,
    ) -> None:
        self.nbytes, self.line, self.beat_s, self.detours = nbytes, line, beat_s, detours
        self.ends = known.head_s, known.tail_s
        self.orders = [sorted(range(len(nbytes)), key=near.__getitem__) for near in self.ends]
        self.windows = windows(self.ends, nbytes, line, whole)
        self.total = sum(nbytes)

    def __call__(self, tensors: Sequence[int]) -> Squeezed:
        first, last = (min(near[t] for t in tensors) for near in self.ends)
        own = sum(self.nbytes[t] for t in tensors)
        work = self.line.beta_s_per_byte * (self.total - own)
        inside = set(tensors) if self.detours else set[int]()
        shared = self.detours.shared(tensors) if self.detours else 0
        detour = self.detours.least_s(shared, inside, 0.0) if self.detours else 0.0
        if max(first + work, detour) + self.line.cost(own) + last <= self.beat_s:  # with all of the others between
            return Squeezed(-1.0, (), first, last)
        before, after = (
            window.carried(until, of=bisect_left(window.near_s, until))
            for window, until in zip(self.windows, (first, last), strict=True)
        )
        if self.detours:
            detour = self.detours.least_s(shared, inside, after)
        begin = max(first, first + work - before - after, detour)
        return Squeezed(begin + self.line.cost(own) + last, tuple(sorted(tensors)), first, last)
