"""Whether a relaxed schedule of halves in pairs exists: goes through the states of `sequences.py`; compiled by numba.

A state has both levels, the coverage, the coverage at the last all-gather, and which pairs are under way:
scattered, but not gathered.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from legato.schedule.bound.sequence_states import Relaxed, begun

__all__ = ["fits_pairs"]

Floats = npt.NDArray[np.float64]

_NEVER = 1e300
#: More than the rounding error of dozens of float additions, relative to the length that is tried.
_ROUNDING = 1e-12
#: Pairs under way: none, one, two of known sizes, two of any sizes, and more.
_NONE, _ONE, _TWO, _ANY_TWO, _MORE = range(5)
_PAIRS = np.array([0, 1, 2, 2, 3])


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def fits_pairs(seconds: float, relaxed: Relaxed) -> bool:
    """Messages are halves, each pair with the same bytes."""
    alpha_s, first_s, x, y, release_s, _, finish_s, after_s = relaxed
    count, delivered, coverages = x.shape[1], y.shape[1], len(release_s)
    seconds *= 1 + _ROUNDING
    most = seconds - x[0, -1] - y[0, -1] - 2 * first_s
    least = np.full((len(_PAIRS), count, delivered, coverages, coverages), _NEVER)
    least[_NONE, 0, 0, 0, 0] = 0.0
    covered = np.full(least.shape, _NEVER)  # the least of all lower coverages except 0
    now = np.empty(len(_PAIRS))
    second = np.empty((delivered, count, coverages, coverages))  # two pairs, by the level before the second one
    for i in range(count):
        second[:] = _NEVER
        for j in range(delivered):
            if y[0, j] > x[1, i]:
                break
            for c in range(coverages):
                for a in range(c + 1):
                    if i == j == c == 0:
                        continue
                    now[:] = _NEVER
                    closed = a == c and x[0, i] <= y[1, j] * (1 + _ROUNDING)
                    until = seconds - x[0, i] - y[0, j] - alpha_s - first_s * ((c > 1) + (a > 1))
                    gathers = a < 2 or a == c
                    if gathers and (j > 0 or a > 0):
                        _gather(now, least, second, x, y, after_s, i, j, c, a, until, closed)
                        now += alpha_s
                    if (i > 0 or c > 0) and release_s[c, i] < seconds:
                        done = x[1, i] + y[1, j] + first_s * (1 + (a > 0))
                        finish = finish_s[c] - done if c > 1 else 0.0
                        _scatter(now, least, covered, second, relaxed, i, j, c, a, finish)
                    if i > 0 or c > 0:
                        limit = until - after_s[j, a] if gathers else -_NEVER
                        for _ in range(2):
                            _change_nothing(now, second, x, y, i, j, c, a, limit, closed, alpha_s)
                    for kind in range(len(_PAIRS)):
                        if now[kind] + _PAIRS[kind] * alpha_s <= most:
                            least[kind, i, j, c, a] = now[kind]
                        if 0 < c < coverages - 1:
                            lower = covered[kind, i, j, c, a]
                            covered[kind, i, j, c + 1, a] = min(lower, least[kind, i, j, c, a])
    return bool(least[_NONE, -1, -1, -1, -1] < _NEVER)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _gather(
    now: Floats,
    least: Floats,
    second: Floats,
    x: Floats,
    y: Floats,
    after_s: Floats,
    i: int,
    j: int,
    c: int,
    a: int,
    until: float,
    closed: bool,
) -> None:
    """All-gathers that lead here, without alpha."""
    for p in range(j + 1):
        for last in range(a + 1):
            if p == j and last == a:
                continue
            limit = until - after_s[p, last]
            if closed and least[_ONE, i, p, c, last] <= limit:
                now[_NONE] = min(now[_NONE], least[_ONE, i, p, c, last])
            if least[_ANY_TWO, i, p, c, last] <= limit:
                now[_ONE] = min(now[_ONE], least[_ANY_TWO, i, p, c, last])
            if least[_MORE, i, p, c, last] <= limit:
                now[_ANY_TWO] = min(now[_ANY_TWO], least[_MORE, i, p, c, last])
                now[_MORE] = min(now[_MORE], least[_MORE, i, p, c, last])
            if least[_TWO, i, p, c, last] <= limit and least[_TWO, i, p, c, last] < now[_ONE]:
                now[_ONE] = min(now[_ONE], _one_of_two(second[p, :, c, last], x, y, i, p, j, limit))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _one_of_two(second: Floats, x: Floats, y: Floats, i: int, p: int, j: int, limit: float) -> float:
    """The least of those where one of two pairs takes what is delivered from level p to level j."""
    best, slack = _NEVER, _ROUNDING * x[1, -1]
    for k in range(i + 1):
        if second[k] <= limit and second[k] < best:
            later = x[0, i] - x[1, k] <= y[1, j] - y[0, p] + slack and x[1, i] - x[0, k] >= y[0, j] - y[1, p] - slack
            earlier = x[0, k] <= y[1, j] + slack and x[1, k] >= y[0, j] - slack
            if later or earlier:
                best = second[k]
    return best


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _scatter(
    now: Floats,
    least: Floats,
    covered: Floats,
    second: Floats,
    relaxed: Relaxed,
    i: int,
    j: int,
    c: int,
    a: int,
    finish: float,
) -> None:
    """Reduce-scatters that lead here; none ends before `finish`."""
    alpha_s, first_s, x, y, release_s, before_s, _, _ = relaxed
    for p in range(i + 1):
        if y[0, j] > x[1, p]:
            continue
        start, done = begun(before_s[c, i, p], p, alpha_s), x[1, p] + y[1, j]
        for kind in range(len(_PAIRS)):
            best = _NEVER
            if a == 0 and (c > 0 or p < i):
                spent = least[kind, p, j, 0, 0]
                if c > 0:
                    spent = max(spent, max(release_s[1, p], start) - done)
                best = max(spent, release_s[c, i] - done) + alpha_s
            if c > 0:
                own = done + first_s * (1 + (a > 0))
                spent = max(covered[kind, p, j, c, a], start - own)
                if p < i:
                    spent = min(spent, least[kind, p, j, c, a])
                best = min(best, max(spent, release_s[c, i] - own) + alpha_s)
            best = max(best, finish)
            if kind == _ONE:
                second[j, p, c, a] = best
            after = min(kind + 1, _TWO) if kind < _TWO else _MORE
            now[after] = min(now[after], best)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _change_nothing(
    now: Floats,
    second: Floats,
    x: Floats,
    y: Floats,
    i: int,
    j: int,
    c: int,
    a: int,
    limit: float,
    closed: bool,
    alpha_s: float,
) -> None:
    """All-gathers and reduce-scatters that only change which pairs are under way."""
    if now[_MORE] <= limit:
        now[_ANY_TWO] = min(now[_ANY_TWO], now[_MORE] + alpha_s)
    if now[_ANY_TWO] <= limit:
        now[_ONE] = min(now[_ONE], now[_ANY_TWO] + alpha_s)
    if now[_TWO] <= limit:
        now[_ONE] = min(now[_ONE], _one_of_two(second[j, :, c, a], x, y, i, j, j, limit) + alpha_s)
    if closed and now[_ONE] <= limit:
        now[_NONE] = min(now[_NONE], now[_ONE] + alpha_s)
    now[_ONE] = min(now[_ONE], now[_NONE] + alpha_s)
    second[j, i, c, a] = min(second[j, i, c, a], now[_ONE] + alpha_s)
    now[_TWO] = min(now[_TWO], second[j, i, c, a])
    now[_MORE] = min(now[_MORE], min(now[_TWO], now[_ANY_TWO]) + alpha_s)
