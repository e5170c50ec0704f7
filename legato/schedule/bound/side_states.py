"""How pairs of halves may be divided among both sides of a moment: goes through the states of `sides.py`; compiled by
numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["AFTER", "BEFORE", "BOTH", "Floats", "Followed", "follow", "places"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

#: Where the halves of a pair are: one before and one after the moment, both before it, or both after it.
BOTH, BEFORE, AFTER = 1, 2, 4
#: The most halves that are counted.
_HALVES = 64
#: More than the rounding error of dozens of float additions, relative to the length that is tried.
_ROUNDING = 1e-9


class Followed(NamedTuple):
    """What was found on the way through the states."""

    fits: bool  # whether the time may suffice
    cut: bool  # whether there were more states or halves than allowed; then it may
    states: int  # how many there were


def places(count: int) -> Places:
    """The memory that `follow` needs for so many sets: 13 MB for 96."""
    return np.full(count * 8 * (_HALVES + 1) ** 2, -1, np.int32)


def follow(
    seconds: float,
    begin_s: float,
    end_s: float,
    half_s: float,
    release_s: Floats,
    tail_s: Floats,
    work_s: Floats,
    place: Places,
    limit: int,
) -> Followed:
    """The states, about `limit` at most, of a schedule of some seconds whose moment is between `begin_s` and `end_s`.

    A half pays `half_s` first. The rest is by set, the innermost first. `place` is from `places`.
    """
    most = (seconds * (1 + _ROUNDING) - release_s[-1] - tail_s[-1] - work_s[-1]) / half_s + _ROUNDING
    if not 2 <= most < _HALVES + 1:
        return Followed(most > 2, most > 2, 0)
    cut, left, made = _follow(seconds, begin_s, end_s, half_s, int(most), release_s, tail_s, work_s, place, limit)
    return Followed(bool(cut or left), bool(cut), int(made))


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _least_before(kinds: int) -> float:
    """The least part of the work of a byte that is before the moment."""
    return 0.0 if kinds & AFTER else 0.5 if kinds & BOTH else 1.0


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _most_before(kinds: int) -> float:
    return 1.0 if kinds & BEFORE else 0.5 if kinds & BOTH else 0.0


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _divided(more: float, left: float, share: float, own: float, before: bool) -> float:
    """The work before the moment of `more` work, of which as much as there is room for goes to the pairs before.

    `left` is this room on one side of the moment, and `share` and `own` the parts before it of the work of a byte of
    the pairs before and the new ones.
    """
    if not before:
        part = min(max(left / (1 - share), 0.0), more) if share < own else 0.0
    else:
        part = min(max(left / share, 0.0), more) if share > own else 0.0
    return share * part + own * (more - part)


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _longer(values: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    """The same values, with room for more."""
    longer = np.empty((room, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _without_needless(states: Ints, least: Floats, most: Floats, place: Places, last: int, made: int) -> int:
    """Drop those of the states from `last` on that others with fewer halves make needless; returns their end."""
    size = _HALVES + 1
    keys, useful = np.empty(made - last, np.int64), np.ones(made - last, np.bool_)
    for s in range(last, made):
        keys[s - last] = key = ((states[s, 0] * 8 + states[s, 1]) * size + states[s, 2]) * size + states[s, 3]
        for fewer_before, fewer_after in ((1, 1), (2, 0), (0, 2)):
            if states[s, 2] >= fewer_before and states[s, 3] >= fewer_after:
                at = place[key - fewer_before * size - fewer_after]
                if at >= 0 and least[at] <= least[s] and most[at] >= most[s]:
                    useful[s - last] = False
    kept = last
    for s in range(last, made):
        place[keys[s - last]] = -1
        if useful[s - last]:
            states[kept] = states[s]
            least[kept], most[kept] = least[s], most[s]
            kept += 1
    return kept


@numba.njit(cache=True)  # type: ignore[untyped-decorator]
def _follow(
    seconds: float,
    begin_s: float,
    end_s: float,
    half_s: float,
    halves: int,
    release_s: Floats,
    tail_s: Floats,
    work_s: Floats,
    place: Places,
    limit: int,
) -> tuple[bool, int, int]:
    """Whether there were too many states, how many the last set has, and how many there were."""
    count, size, slack, cut = len(work_s), _HALVES + 1, _ROUNDING * seconds, False
    room = 1024
    states, least, most = np.empty((room, 4), np.int64), np.empty(room), np.empty(room)
    first, made = 0, 0  # the states of the set before, and all
    for t in range(count):
        more = work_s[t] - (work_s[t - 1] if t else 0.0)
        last = made
        for s in range(first, max(last, first + 1)):
            of, kinds, before, after, low, high = 0, BOTH, 1, 1, 0.0, 0.0
            if t:
                of, kinds, before, after = states[s, 0], states[s, 1], states[s, 2], states[s, 3]
                low, high = least[s], most[s]
            for new in range(7):
                if t == 0 and new != 0 and new != AFTER:
                    continue
                now_of, now_kinds, now_before, now_after = of, kinds, before, after
                lower, upper = low + _least_before(kinds) * more, high + _most_before(kinds) * more
                if new:  # as many bytes as move the limit still go to the pairs before, if these allow it
                    left = end_s - release_s[of] - before * half_s - high
                    upper = high + _divided(more, left, _most_before(kinds), _most_before(new), True)
                    left = seconds - begin_s - tail_s[of] - after * half_s - (work_s[t] - more - low)
                    lower = low + _divided(more, left, _least_before(kinds), _least_before(new), False)
                    now_of, now_kinds = t, new | kinds if t == 0 else new
                    now_before += (new & BOTH) + (new & BEFORE)
                    now_after += (new & BOTH) + (new & AFTER) // 2
                if now_before + now_after > halves:
                    continue
                if now_kinds & (BOTH | BEFORE):
                    upper = min(upper, end_s - release_s[now_of] - now_before * half_s)
                if now_kinds & (BOTH | AFTER):
                    lower = max(lower, work_s[t] - (seconds - begin_s - tail_s[now_of] - now_after * half_s))
                if lower > upper + slack:
                    continue
                key = ((now_of * 8 + now_kinds) * size + now_before) * size + now_after
                at = place[key]
                if at >= 0:
                    least[at], most[at] = min(least[at], lower), max(most[at], upper)
                    continue
                if made == room:
                    room *= 2
                    states, least, most = _longer(states, room), _longer(least, room), _longer(most, room)
                place[key] = made
                states[made, 0], states[made, 1], states[made, 2], states[made, 3] = (
                    now_of,
                    now_kinds,
                    now_before,
                    now_after,
                )
                least[made], most[made] = lower, upper
                made += 1
        kept = _without_needless(states, least, most, place, last, made)
        first, made = last, kept
        cut = made > limit
        if made == first or cut:
            break
    return cut, made - first, made
