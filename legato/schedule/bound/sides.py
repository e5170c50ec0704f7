"""The bound "sides": halves of all-reduces in pairs, before and after the last gradients are scattered.

What is scattered is gathered, in as many bytes and messages, so what goes beside each pass depends on the other one.
docs/bounds.md ("Sides") has the proof. Units: seconds and bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.nested import Chain, NestedSets, SetsBound

__all__ = ["TwoSides", "sides"]

_log = logging.getLogger("legato")

#: Below this fraction of the bound, a message is too cheap for the number of messages to matter.
_DEAR = 0.005
#: The most sets of a chain: first few, then more.
_SETS = (24, 96)
#: The most states to go through.
_STATES = 4_000_000
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 5e-4, 1e-9


def sides(times: HeadsTails, nbytes: Sequence[int], line: LinearCost, *, beat_s: float) -> SetsBound | None:
    """The best of these bounds for plans in pairs, or None if none found is above `beat_s`, or without numba."""
    if line.alpha_s <= _DEAR * beat_s or not _can_compile():
        return None
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends="pairs")
    best = None
    for most in _SETS:
        for order in chain.orders():
            sizes = chain.sizes(order, most)
            problem = TwoSides(chain.sets(order, sizes), line.alpha_s / 2, _STATES)
            short = longest_too_short(problem, beat_s, step=_STEP, exact=_EXACT)
            if short is not None:
                beat_s = short * (1 - _ROUNDING)
                best = SetsBound(beat_s, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


@cache
def _can_compile() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        _log.warning('the bound may be lower than with numba, which its argument "sides" needs: pip install numba')
        return False
    return True


class TwoSides:
    """Whether pairs of halves with these sets may take some time, found in at most so many states."""

    def __init__(self, sets: NestedSets, half_s: float, states: int) -> None:
        """`half_s` is what a half pays first."""
        self.sets, self.half_s, self.left = sets, half_s, states
        self.place: npt.NDArray[np.int32] | None = None

    def fits(self, seconds: float) -> bool:
        """Whether halves may be divided among both sides of some moment c; true, too, where this takes too long."""
        from legato.schedule.bound.side_states import follow, places  # compiled when needed first

        sets = self.sets
        if self.place is None:
            self.place = places(len(sets.work_s))
        first, last = float(sets.release_s[0]) + self.half_s, seconds - float(sets.tail_s[0]) - self.half_s
        intervals = [(first, last)] if first <= last else []  # of c
        while intervals and self.left > 0:
            begin, end = intervals.pop()
            arrays = sets.release_s, sets.tail_s, sets.work_s
            followed = follow(seconds, begin, end, self.half_s, *arrays, self.place, self.left)
            self.left -= followed.states
            if followed.cut or (followed.fits and end - begin <= _EXACT * seconds):
                return True
            if followed.fits:
                middle = (begin + end) / 2
                intervals += [(begin, middle), (middle, end)]
        return bool(intervals)
