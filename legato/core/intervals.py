"""Unions of intervals of time: how long something runs, and how long it runs while something else does not."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

__all__ = ["Intervals"]

#: Smaller differences of times are rounding errors: the finest times in a trace are nanoseconds.
_ROUNDING_S = 1e-12


class Intervals:
    """The union of intervals (start, end), in seconds; `parts` has it as sorted, disjoint intervals."""

    def __init__(self, intervals: Iterable[tuple[float, float]] = ()) -> None:
        self.parts: list[tuple[float, float]] = []
        for start, end in sorted(intervals):
            if self.parts and start <= self.parts[-1][1]:
                if end > self.parts[-1][1]:
                    self.parts[-1] = (self.parts[-1][0], end)
            else:
                self.parts.append((start, end))
        self._ends = [end for _, end in self.parts]

    def __or__(self, other: Intervals) -> Intervals:
        """Return the union with other intervals."""
        return Intervals([*self.parts, *other.parts])

    @property
    def seconds(self) -> float:
        """Return the total time."""
        return math.fsum(end - start for start, end in self.parts)

    def beyond(self, other: Intervals) -> float:
        """Return the seconds that only these intervals cover; communication beyond computation is *exposed*."""
        found = (self | other).seconds - other.seconds
        return found if found > _ROUNDING_S else 0.0

    def overlap(self, other: Intervals) -> float:
        """Return the time that both cover, divided by the shorter total time (0 if one is empty).

        If these intervals, the other ones or both run at every moment, this is TicTac's coefficient alpha. The overlap
        is never below 0 or above 1.
        """
        n, c = self.seconds, other.seconds
        both = n + c - min((self | other).seconds, n + c)
        return both / min(n, c) if min(n, c) > 0 else 0.0

    def within(self, begin: float, end: float) -> Intervals:
        """Return the part of these intervals between two moments."""
        found = []
        for k in range(bisect.bisect_right(self._ends, begin), len(self.parts)):
            start, stop = self.parts[k]
            if start >= end:
                break
            found.append((max(start, begin), min(stop, end)))
        return Intervals(found)
