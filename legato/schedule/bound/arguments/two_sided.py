"""The bound "two-sided": halves of all-reduces in pairs, before and after the last gradients are scattered.

Everything that is scattered is gathered, in the same bytes and messages, so each pass depends on the other one.
docs/bounds.md has the proof ("Two-sided").
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import cache

from legato.core.errors import InputError
from legato.schedule.bound.arguments.nested import NestedSets, OfSets, Relaxation, halved, rounding
from legato.schedule.bound.problem import Problem, Proved

__all__ = ["DividedHalves", "TwoSided"]

_log = logging.getLogger("legato")

#: Below this fraction of the bound, a message is too cheap for the number of messages to matter.
_DEAR = 0.005
#: The most sets in a certificate, and the most states to go through.
_MOST_SETS, _STATES = 256, 4_000_000
#: The relative length of the shortest intervals of the moment.
_SHORT = 5e-4
#: How many parts the longest times in floats get, as a power of two.
_BITS = 57


class TwoSided(OfSets, frozen=True, tag="two_sided"):
    """Pairs of halves do not fit on both sides of any moment."""

    most, quick = (24, 96), ()
    precision = (1e-3, 5e-4)

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """For plans in pairs, where messages are dear; without numba, nothing."""
        dear = problem.sends == "pairs" and 2 * problem.half > _DEAR * beat
        return super().find(problem, beat) if dear and _can_compile() else iter(())

    @classmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """The halves of pairs."""
        return DividedHalves(sets, problem.half, _STATES)

    def proves(self, problem: Problem) -> float:
        """The time that is too short. Raises `InputError` if it may suffice, for any halves, or without numba."""
        if problem.sends == "halves":
            raise InputError("certificate: case 'two_sided' for halves (expected pairs or all-reduces)")
        if len(self.sets) > _MOST_SETS:
            raise InputError(f"certificate: {len(self.sets)} sets (expected at most {_MOST_SETS} for 'two_sided')")
        if not _can_compile():
            raise InputError("certificate: case 'two_sided' needs numba: pip install 'legato[flow]'")
        return super().proves(problem)


@cache
def _can_compile() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        _log.warning('the bound may be lower than with numba, which its argument "two-sided" needs: pip install numba')
        return False
    return True


class DividedHalves:
    """Tells whether pairs of halves with these sets may take some time, found in a limited number of states.

    It counts in whole numbers. Floats become parts of about the time that the sets take.
    """

    def __init__(self, sets: NestedSets, half_s: float, states: int) -> None:
        """`half_s` is what a half pays first."""
        from legato.schedule.bound.arguments.two_sided_states import Sets, places  # compiled when needed first

        self.scale: float = 1
        self.rounding = rounding(sets.work_s)
        if self.rounding:
            longest = float(sets.release_s[0] + sets.tail_s[0] + sets.work_s[-1]) + half_s
            self.scale = 2.0 ** (_BITS - math.frexp(longest)[1])
        times = (sets.release_s, sets.tail_s, halved(sets.work_s))
        release, tail, work = ((values * self.scale).astype("int64") for values in times)
        self.sets, self.left = Sets(release, tail, work, int(half_s * self.scale)), states
        self.place = places(len(work))

    def fits(self, seconds: float) -> bool:
        """Return whether halves may be divided among both sides of some moment c, or finding out takes too long."""
        from legato.schedule.bound.arguments.two_sided_states import follow

        whole = math.ceil((seconds + self.rounding * seconds) * self.scale)
        if whole >= 2 ** (_BITS + 2):
            return True
        half = self.sets.half
        first, last = int(self.sets.release[0]) + half, whole - int(self.sets.tail[0]) - half
        intervals = [(first, last)] if first <= last else []  # of c
        while intervals and self.left > 0:
            begin, end = intervals.pop()
            fits, cut, states = follow(whole, begin, end, self.sets, self.place, self.left)
            self.left -= states
            if cut or (fits and end - begin <= _SHORT * whole):
                return True
            if fits:
                middle = (begin + end) // 2
                intervals += [(begin, middle), (middle, end)]
        return bool(intervals)
