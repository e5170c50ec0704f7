"""Tensors that come late and are needed early, squeezed by what fits neither before nor after them.

The first layers of a network have little to send, but between the end of the
backward pass and the start of the forward pass. What the network could send of
the other tensors before and after depends on its startup times; the rest goes
between as well. `bound.py` has the argument ("Between"); this file finds the
sets for which it proves most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.schedule.heads_tails import Detours, HeadsTails
from legato.schedule.window import Window

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
    fees: float,
    *,
    beat_s: float,
    detours: Detours | None = None,
) -> Squeezed | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    `fees` is 1 where all-reduces go whole, else 1/2; `detours` where the order
    of computation is free. Tried are the sets of all
    tensors with a tail, or a head, of at least so much.
    """
    prover = _Prover(known, nbytes, line, fees, beat_s, detours)
    best = None
    for near, order in zip(prover.ends, prover.orders, strict=True):
        starts = [k for k, t in enumerate(order) if k == 0 or near[t] > near[order[k - 1]]]
        found = _highest([tuple(sorted(order[k:])) for k in starts], prover)
        if found is not None and found.seconds > beat_s:
            best, beat_s = found, found.seconds
    return best


def _highest(sets: Sequence[tuple[int, ...]], prover: _Prover) -> Squeezed | None:
    """Every so many sets, then closer and closer around the best."""
    step = -(-len(sets) // _SETS)
    tried = {k: prover(sets[k]) for k in range(0, len(sets), step)}
    while True:
        top = max(tried, key=lambda k: tried[k].seconds)
        if step == 1:
            return tried[top]
        step = -(-step // 2)
        for k in (top - step, top + step):
            if 0 <= k < len(sets) and k not in tried:
                tried[k] = prover(sets[k])


class _Prover:
    """What a set proves; no more than an estimate from above where that is not worth knowing."""

    def __init__(
        self,
        known: HeadsTails,
        nbytes: Sequence[int],
        line: LinearCost,
        fees: float,
        beat_s: float,
        detours: Detours | None,
    ) -> None:
        self.nbytes, self.line, self.beat_s, self.detours = nbytes, line, beat_s, detours
        self.fee = LinearCost(line.alpha_s * fees, line.beta_s_per_byte)
        self.ends = known.head_s, known.tail_s
        self.orders = [sorted(range(len(nbytes)), key=near.__getitem__) for near in self.ends]
        self.total = sum(nbytes)

    def __call__(self, tensors: tuple[int, ...]) -> Squeezed:
        first, last = (min(near[t] for t in tensors) for near in self.ends)
        own, inside = sum(self.nbytes[t] for t in tensors), set(tensors)
        work = self.line.beta_s_per_byte * (self.total - own)
        detour = self.detours.least_s(inside, 0.0) if self.detours else 0.0
        if max(first + work, detour) + self.line.cost(own) + last <= self.beat_s:  # with all of the others between
            return Squeezed(-1.0, tensors, first, last)
        before, after = (self._outside(end, inside, until) for end, until in enumerate((first, last)))
        if self.detours:
            detour = self.detours.least_s(inside, after)
        begin = max(first, first + work - before - after, detour)
        return Squeezed(begin + self.line.cost(own) + last, tensors, first, last)

    def _outside(self, end: int, inside: set[int], until_s: float) -> float:
        """The most work for other tensors that can be done by then, from the start of the period or from its end."""
        near = self.ends[end]
        others = [t for t in self.orders[end] if t not in inside]
        if not others:
            return 0.0
        return Window.of([near[t] for t in others], [self.nbytes[t] for t in others], self.fee).carried(until_s)
