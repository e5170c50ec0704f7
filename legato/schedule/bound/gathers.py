"""The bound "gathers": what is scattered beside the backward pass is gathered after it, in as many messages.

docs/bounds.md ("Gathers") has the proof, for plans whose optimizer is sharded. Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.nested import Chain, NestedSets, SetsBound

__all__ = ["Gathers", "gathers"]

#: The most sets of a chain.
_SETS = 1024
#: In how many intervals the maximum is followed.
_INTERVALS = 1024
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 1e-5, 1e-9


def gathers(
    times: HeadsTails, nbytes: Sequence[int], line: LinearCost, *, from_s: float, beat_s: float
) -> SetsBound | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    Nothing is gathered before `from_s`.
    """
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends="pairs")
    best = None
    for order in chain.orders():
        sizes = chain.sizes(order, _SETS)
        problem = Gathers(chain.sets(order, sizes), line.alpha_s / 2, from_s)
        short = longest_too_short(problem, beat_s, step=_STEP, exact=_EXACT)
        if short is not None:
            beat_s, best = short, SetsBound(short, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


class Gathers:
    """Whether pairs of halves with these sets may take some time, if nothing is gathered before `from_s`.

    A half pays `half_s` first. If they are `apart`, everything is scattered before anything is gathered.
    """

    def __init__(self, sets: NestedSets, half_s: float, from_s: float, *, apart: bool = False) -> None:
        self.release_s, self.tail_s, self.work_s = sets.release_s, sets.tail_s, sets.work_s / 2
        self.half_s, self.from_s, self.apart = half_s, from_s, apart
        self.moment_s = 0.0  # a maximum for which a time was long enough

    def fits(self, seconds: float) -> bool:
        """Whether the line can be divided among pairs."""
        limit, total = seconds * (1 + _ROUNDING), self.work_s[-1]
        until_s = limit - self.tail_s[-1] - total - self.half_s
        if until_s < self.from_s:
            return False
        edges = np.linspace(self.from_s, until_s, _INTERVALS + 1)
        begin, end = (edges, edges) if self.apart else (edges[:-1], edges[1:])
        of, work = np.zeros(len(begin), np.int64), np.full(len(begin), -1.0)
        for pairs in range(1, len(self.work_s) + 1):
            room = np.minimum(end - self.release_s[of], limit - begin - self.tail_s[of])
            work = np.maximum(work, room - pairs * self.half_s)
            if not self.apart:
                work = np.maximum.accumulate(work)  # the maximum may grow later
            if work.max() >= total:
                self.moment_s = float(begin[work.argmax()])
                return True
            before, of = of, np.searchsorted(self.work_s, work, side="right")
            if (of == before).all():
                return False
        return False
