"""The bound "two-sided": the halves of message pairs before and after the end of a certain reduce-scatter.

All bytes that are scattered are also gathered, in equally many messages, so the work of the reduce-scatters determines
the work of the all-gathers. docs/bounds.md has the proof ("Two-sided").
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

#: If startup takes less than this fraction of the bound, the number of messages does not matter.
_DEAR = 0.005
#: The most sets in a certificate, and the most states to examine.
_MOST_SETS, _STATES = 256, 4_000_000
#: The relative length of the shortest intervals in which the moment may lie.
_SHORT = 5e-4
#: When floats become whole numbers, the longest time has up to 2**_BITS units.
_BITS = 57


class TwoSided(OfSets, frozen=True, tag="two_sided"):
    """A proof that for no moment, the halves of all pairs fit into the time before and after the moment."""

    most, quick = (24, 96), ()
    precision = (1e-3, 5e-4)

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterator[Proved]:
        """Find certificates if plans send pairs and starting a message takes long; find none without numba."""
        dear = problem.sends == "pairs" and 2 * problem.half > _DEAR * beat
        return super().find(problem, beat) if dear and _can_compile() else iter(())

    @classmethod
    def relaxation(cls, problem: Problem, sets: NestedSets) -> Relaxation:
        """Return the conditions for the halves of pairs before and after a moment."""
        return DividedHalves(sets, problem.half, _STATES)

    def proves(self, problem: Problem) -> float:
        """Return a time in which no plan can run an iteration.

        Raises `InputError` if an iteration may be that short, if plans may send any halves, or if numba is missing.
        """
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
    """A test of whether the pairs for these sets may fit into a given time; it examines a limited number of states.

    All times are whole numbers. Floats become multiples of a unit that is a tiny fraction of the sets' total time.
    """

    def __init__(self, sets: NestedSets, half_s: float, states: int) -> None:
        """Prepare the test; `half_s` is the time that a half takes to start."""
        from legato.schedule.bound.arguments.two_sided_states import Sets, places  # compiled on first use

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
        """Return whether the halves may fit before and after some moment c; if the test takes too long, return True."""
        from legato.schedule.bound.arguments.two_sided_states import follow

        whole = math.ceil((seconds + self.rounding * seconds) * self.scale)
        if whole >= 2 ** (_BITS + 2):
            return True
        half = self.sets.half
        first, last = int(self.sets.release[0]) + half, whole - int(self.sets.tail[0]) - half
        intervals = [(first, last)] if first <= last else []  # in which c may lie
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
