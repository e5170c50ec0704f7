"""Whether a relaxed schedule of a given length exists: goes through the states of `sequences.py`; compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Relaxed", "begun", "fits_all_reduces", "fits_halves"]

Floats = npt.NDArray[np.float64]

_NEVER = 1e300
#: More than the rounding error of dozens of float additions, relative to the length that is tried.
_ROUNDING = 1e-12


class Relaxed(NamedTuple):
    """What every sequence of messages has to wait for, in seconds; `sequences.py` defines coverage."""

    alpha_s: float  # what a message (or half) pays first
    first_s: float  # its work for the first tensor
    collected_s: Floats  # by level: the work of the least and the most bytes at it, [2, levels]
    delivered_s: Floats  # the same for bytes delivered
    release_s: Floats  # by coverage and level: when its gradients are ready
    before_s: Floats  # by coverage, level and previous level: when what earlier messages carried was ready
    finish_s: Floats  # by coverage: when that can be collected at the earliest
    after_s: Floats  # by level delivered and coverage before an all-gather: the least time from its end on


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def begun(release_s: float, level: int, alpha_s: float) -> float:
    """When the previous message has paid alpha, if it carries what is ready then; level 0 has no previous message."""
    return release_s + alpha_s if level > 0 and release_s > 0.0 else 0.0


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fits_halves(seconds: float, relaxed: Relaxed) -> bool:
    """Messages are halves. A state is both levels, the coverage, and the coverage at the last all-gather."""
    alpha_s, first_s, x, y, release_s, before_s, finish_s, after_s = relaxed
    count, delivered, coverages = x.shape[1], y.shape[1], len(release_s)
    seconds *= 1 + _ROUNDING
    most = seconds - x[0, -1] - y[0, -1] - 2 * first_s
    least = np.full((count, delivered, coverages, coverages), _NEVER)
    covered = np.full((count, delivered, coverages, coverages), _NEVER)  # the least of all lower coverages except 0
    for i in range(count):
        for j in range(delivered):
            if y[0, j] > x[1, i]:
                break
            for c in range(coverages):
                for a in range(c + 1):
                    best = 0.0 if i == j == c == 0 else _NEVER
                    if (i > 0 or c > 0) and release_s[c, i] < seconds:
                        for p in range(i + 1):
                            if y[0, j] > x[1, p]:
                                continue
                            start = begun(before_s[c, i, p], p, alpha_s)
                            done = x[1, p] + y[1, j]
                            if a == 0 and (c > 0 or p < i):
                                spent = least[p, j, 0, 0]
                                if c > 0:
                                    spent = max(spent, max(release_s[1, p], start) - done)
                                best = min(best, max(spent, release_s[c, i] - done) + alpha_s)
                            if c > 0:
                                done += first_s * (1 + (a > 0))
                                spent = max(covered[p, j, c, a], start - done)
                                if p < i:
                                    spent = min(spent, least[p, j, c, a])
                                best = min(best, max(spent, release_s[c, i] - done) + alpha_s)
                        if c > 1:
                            best = max(best, finish_s[c] - x[1, i] - y[1, j] - first_s * (1 + (a > 0)))
                    if (j > 0 or a > 0) and (a < 2 or a == c):
                        until = seconds - x[0, i] - y[0, j] - alpha_s - first_s * ((c > 1) + (a > 1))
                        for p in range(j + 1):
                            for last in range(a + 1):
                                spent = least[i, p, c, last]
                                if (p < j or last < a) and spent <= until - after_s[p, last]:
                                    best = min(best, spent + alpha_s)
                    if best <= most:
                        least[i, j, c, a] = best
                    if 0 < c < coverages - 1:
                        covered[i, j, c + 1, a] = min(covered[i, j, c, a], least[i, j, c, a])
    return bool(least[-1, -1, -1, -1] < _NEVER)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fits_all_reduces(seconds: float, relaxed: Relaxed) -> bool:
    """Messages are all-reduces. A state is the level (of bytes collected and delivered) and the coverage."""
    alpha_s, first_s, x, _, release_s, before_s, finish_s, after_s = relaxed
    count, coverages = x.shape[1], len(release_s)
    seconds *= 1 + _ROUNDING
    least = np.full((count, coverages), _NEVER)
    least[0, 0] = 0.0
    for i in range(count):
        for c in range(coverages):
            if release_s[c, i] >= seconds or i == c == 0:
                continue
            best = _NEVER
            for p in range(i + 1):
                for last in range(c + 1 if p < i else c):
                    done = x[1, p] + first_s * (last > 0)
                    spent = max(least[p, last], release_s[c, i] - done)
                    if last < c and last == 0:
                        spent = max(spent, release_s[1, p] - done)
                    if last < c:
                        spent = max(spent, begun(before_s[c, i, p], p, alpha_s) - done)
                    spent = max(spent + alpha_s, finish_s[c] - x[1, i] - first_s)
                    end = spent + x[0, i] + first_s * (c > 1)
                    if end <= seconds - after_s[p, last]:
                        best = min(best, spent)
            least[i, c] = best
    return bool(least[-1, -1] < _NEVER)
