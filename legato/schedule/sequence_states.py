"""Whether a relaxed schedule of some seconds exists: the states of `sequences.py`, one after another, compiled.

Arguments, all in seconds: what a message (or half) pays first; the work of the
least and the most bytes of each level, collected and handed out; by coverage and
level, when the gradients for it are ready; by coverage, level and level before,
when what earlier messages of it carried was ready; by level before, when the
first tensor is ready as well; the tail of what is left, by level handed out, and
by limit.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["fits_halves", "fits_whole"]

Floats = npt.NDArray[np.float64]

_NEVER = 1e300
#: Far more than the rounding of some dozen float additions, relative to the seconds that are tried.
_ROUNDING = 1e-12


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fits_halves(
    seconds: float,
    alpha_s: float,
    x: Floats,
    y: Floats,
    release_s: Floats,
    before_s: Floats,
    alone_s: Floats,
    left_s: Floats,
    limit_s: Floats,
) -> bool:
    """Messages are halves of all-reduces. States: both levels, the coverage, and that of the last second half."""
    count, handed, coverages = x.shape[1], y.shape[1], len(release_s)
    seconds *= 1 + _ROUNDING
    most = seconds - x[0, -1] - y[0, -1]
    least = np.full((count, handed, coverages, coverages - 1), _NEVER)
    covered = np.full((count, handed, coverages, coverages - 1), _NEVER)  # the least of lower coverages but 0
    for i in range(count):
        for j in range(handed):
            if y[0, j] > x[1, i]:
                break
            for c in range(coverages):
                top = max(c - 1, 0)
                for a in range(top + 1):
                    best = 0.0 if i == j == c == 0 else _NEVER
                    if i > 0 and release_s[c, i] < seconds:
                        for p in range(i + 1):
                            if y[0, j] > x[1, p]:
                                continue
                            done = x[1, p] + y[1, j]
                            spent = least[p, j, c, a] if p < i else _NEVER
                            if c > 0:
                                earlier = covered[p, j, c, a]
                                if a == 0:
                                    earlier = min(earlier, max(least[p, j, 0, 0], alone_s[p] - done))
                                if p > 0 and before_s[c, i, p] > 0.0:
                                    earlier = max(earlier, before_s[c, i, p] + alpha_s - done)
                                spent = min(spent, earlier)
                            best = min(best, max(spent, release_s[c, i] - done) + alpha_s)
                    if j > 0 and a == top:
                        until = seconds - x[0, i] - y[0, j] - alpha_s
                        for p in range(j + 1):
                            for last in range(a + 1):
                                spent = least[i, p, c, last]
                                if (p < j or last < a) and spent <= until - max(left_s[p], limit_s[last]):
                                    best = min(best, spent + alpha_s)
                    if best <= most:
                        least[i, j, c, a] = best
                    if c > 0 and c + 1 < coverages:
                        covered[i, j, c + 1, a] = min(covered[i, j, c, a], least[i, j, c, a])
    return bool(least[-1, -1, -1].min() < _NEVER)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fits_whole(
    seconds: float,
    alpha_s: float,
    x: Floats,
    y: Floats,
    release_s: Floats,
    before_s: Floats,
    alone_s: Floats,
    left_s: Floats,
    limit_s: Floats,
) -> bool:
    """Messages are all-reduces. States: the level, of bytes collected and handed out, and the coverage."""
    count, coverages = x.shape[1], len(release_s)
    seconds *= 1 + _ROUNDING
    least = np.full((count, coverages), _NEVER)
    least[0, 0] = 0.0
    for i in range(1, count):
        for c in range(coverages):
            if release_s[c, i] >= seconds:
                continue
            best = _NEVER
            for p in range(i + 1):
                for last in range(c + 1 if p < i else c):
                    spent = max(least[p, last], release_s[c, i] - x[1, p])
                    if last < c and last == 0:
                        spent = max(spent, alone_s[p] - x[1, p])
                    if last < c and p > 0 and before_s[c, i, p] > 0.0:
                        spent = max(spent, before_s[c, i, p] + alpha_s - x[1, p])
                    spent += alpha_s
                    if spent + x[0, i] <= seconds - max(left_s[p], limit_s[max(last - 1, 0)]):
                        best = min(best, spent)
            least[i, c] = best
    return bool(least[-1, -1] < _NEVER)
