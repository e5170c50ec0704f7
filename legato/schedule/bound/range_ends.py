"""Whether ranges of messages exist for nested sets: goes through the states of `ranges.py`; compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "Ranges", "fit"]

Floats = npt.NDArray[np.float64]

#: The most messages of a range that are counted; the last state is that of so many or more.
MOST = 48
_NEVER = -1.0
#: More than the rounding error of dozens of float additions, relative to the work of a set.
_ROUNDING = 1e-12


class Ranges(NamedTuple):
    """What the ranges of nested sets have to wait for, the innermost set first; all in seconds."""

    alpha_s: float
    release_s: Floats
    tail_s: Floats
    forward_s: Floats
    work_s: Floats
    before_s: Floats  # U(r) - r: the work that can have been done before a range, less the time until then
    alone_s: float  # the updates of the innermost set
    waits_s: Floats  # g: by work in steps, the least updates that wait if no more is complete
    step_s: float


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _end(seconds: float, ranges: Ranges, t: int, done_s: float) -> float:
    """When a message that leaves something of S(t) behind ends at the latest, after this much work."""
    step = min(max(int(done_s / ranges.step_s) + 1, 0), len(ranges.waits_s) - 1)
    return float(seconds - max(ranges.tail_s[t], ranges.forward_s[t] + ranges.waits_s[step]))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fit(seconds: float, ranges: Ranges, begin_s: float, least_s: float, most_s: float) -> bool:
    """Whether `seconds` may suffice if the range of S(1) begins at `begin_s` or later.

    Until it begins, the work is at most `most_s`; less the time until then, it is at most `least_s - begin_s`.
    """
    alpha_s, count = ranges.alpha_s, len(ranges.release_s)
    most = min(int(seconds / alpha_s) + 2, MOST)
    ends = np.full((count, count, most + 1), _NEVER)  # the latest ends, by i, j and the number of messages
    before, begins = ranges.before_s.copy(), ranges.release_s.copy()
    before[0], begins[0] = least_s - begin_s, begin_s
    for t in range(count):
        if t == 0:
            first = _end(seconds, ranges, 0, most_s)
            ends[0, 0, 1] = min(first, seconds - ranges.forward_s[0] - ranges.alone_s)
            ends[0, 0, 2] = _end(seconds, ranges, 0, before[0] + first - alpha_s)
        for j in range(t):  # an earlier begin
            for m in range(1, most + 1):
                after = min(m + 1, most)
                for i in range(t):
                    ends[t, j, after] = max(ends[t, j, after], ends[i, j, m])
        for i in range(t + 1):  # a later end
            for m in range(1, most + 1):
                latest = _NEVER
                for j in range(t):
                    latest = max(latest, ends[i, j, m])
                if latest >= 0:
                    after = min(m + 1, most)
                    end = _end(seconds, ranges, t, before[i] + latest - m * alpha_s)
                    ends[i, t, after] = max(ends[i, t, after], end)
        for i in range(t + 1):  # more messages before the last one
            for m in range(1, most):
                if ends[i, t, m] >= 0:
                    end = _end(seconds, ranges, t, before[i] + ends[i, t, m] - m * alpha_s)
                    ends[i, t, m + 1] = max(ends[i, t, m + 1], end)
            if ends[i, t, most] >= 0:
                ends[i, t, most] = seconds - max(ranges.tail_s[t], ranges.forward_s[t])
        fits = False
        for i in range(t + 1):
            for j in range(t + 1):
                for m in range(1, most + 1):
                    if ends[i, j, m] < begins[i] + m * alpha_s + ranges.work_s[t] * (1 - _ROUNDING):
                        ends[i, j, m] = _NEVER
                    else:
                        fits = True
        if not fits:
            return False
    return True
