"""The states of `two_sided.py`: how many halves of pairs of messages may be before and after a certain moment.

Numba compiles this module. All times are whole numbers, and are rounded so that no possible state is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Sets", "follow", "places"]

Ints = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]

#: Where the halves of a pair are: one before and one after the moment, both before it, or both after it.
BOTH, BEFORE, AFTER = 1, 2, 4
#: The largest number of halves that is counted.
_HALVES = 64


class State(NamedTuple):
    """The facts about the pairs placed so far that limit where the other bytes may be placed."""

    pair_class: int  # class of the last pairs
    kinds: int  # where their halves are
    before: int  # how many halves of all pairs are before the moment
    after: int
    least: int  # least work before the moment
    most: int


class Sets(NamedTuple):
    """By set, innermost first: the least release time, the least tail, and the time of one half with all its bytes."""

    release: Ints
    tail: Ints
    work: Ints
    half: int  # the time that a half takes to start


class Added(NamedTuple):
    """A set, and the bytes that it adds to the set inside it."""

    pair_class: int
    more: int  # the work of a half of the added bytes
    total: int  # the work of both halves of all its bytes
    before: int  # the time for pairs of its class on each side
    after: int


def places(count: int) -> Places:
    """Return the array that `follow` needs to search this number of sets (13 MB for 96 sets)."""
    return np.full(count * 8 * (_HALVES + 1) ** 2, -1, np.int32)


def follow(seconds: int, begin: int, end: int, sets: Sets, place: Places, limit: int) -> tuple[bool, bool, int]:
    """Return whether a schedule of `seconds` may have its moment from `begin` to `end`, and two facts about the search.

    The two facts are whether the search gave up, and its number of states. The search gives up at about `limit` states,
    or if there are too many halves; it then returns that the schedule may exist. `place` comes from `places`.
    """
    room = seconds - int(sets.release[-1]) - int(sets.tail[-1]) - 2 * int(sets.work[-1])
    if room < 2 * sets.half or room >= (_HALVES + 1) * sets.half:
        fits = room >= 2 * sets.half
        return fits, fits, 0
    cut, left, made = _follow(room // sets.half, (end, seconds - begin), sets, place, limit)
    return bool(cut or left), bool(cut), int(made)


@numba.njit(cache=True)
def _most_before(kinds: int) -> int:
    """Return how many of a byte's two halves can be before the moment, if its pair is of one of these kinds."""
    return 2 if kinds & BEFORE else 1 if kinds & BOTH else 0


@numba.njit(cache=True)
def _most_after(kinds: int) -> int:
    return 2 if kinds & AFTER else 1 if kinds & BOTH else 0


@numba.njit(cache=True)
def _divided(more: int, left: int, share: int, own: int) -> int:
    """Return the most time that the halves of the added bytes can take on one side of the moment.

    One half of all added bytes takes `more`. Earlier pairs carry the added bytes that fit into the time `left` on this
    side, and new pairs carry all others. Of a byte's two halves, up to `share` are on this side in an earlier pair, and
    up to `own` in a new pair.
    """
    if share <= own:
        return own * more
    moved = min(max(left, 0), share * more)
    return moved + own * more - (own * moved >> (share - 1))


@numba.njit(cache=True)
def _longer(values: Ints, room: int) -> Ints:
    """Return the same values in a longer array."""
    longer = np.empty((room, *values.shape[1:]), values.dtype)
    longer[: len(values)] = values
    return longer


@numba.njit(cache=True)
def _key(pair_class: int, kinds: int, before: int, after: int) -> int:
    """Return a number that identifies states with this class, these kinds, and these numbers of halves."""
    return ((pair_class * 8 + kinds) * (_HALVES + 1) + before) * (_HALVES + 1) + after


@numba.njit(cache=True)
def _without_needless(states: Ints, place: Places, last: int, made: int) -> int:
    """Drop states from `last` on if a state with fewer halves allows as much; return how many states are left."""
    keys, useful = np.empty(made - last, np.int64), np.ones(made - last, np.bool_)
    for s in range(last, made):
        pair_class, kinds, before, after = states[s, 0], states[s, 1], states[s, 2], states[s, 3]
        least, most = states[s, 4], states[s, 5]
        keys[s - last] = _key(pair_class, kinds, before, after)
        for fewer_before, fewer_after in ((1, 1), (2, 0), (0, 2)):
            if before >= fewer_before and after >= fewer_after:
                at = place[_key(pair_class, kinds, before - fewer_before, after - fewer_after)]
                if at >= 0 and states[at, 4] <= least and states[at, 5] >= most:
                    useful[s - last] = False
    kept = last
    for s in range(last, made):
        place[keys[s - last]] = -1
        if useful[s - last]:
            states[kept] = states[s]
            kept += 1
    return kept


@numba.njit(cache=True, inline="always")
def _with_set(state: State, limits: tuple[int, int], added: Added, new: int, half: int) -> State:
    """Return the state after the next set, for which new pairs of the kinds `new` are placed (none if 0).

    No schedule has the resulting state if its `least` is above its `most`. `limits` has the time that the earlier pairs
    may take before the moment, and after it.
    """
    pair_class, kinds, before, after, least, most = state
    if new:  # earlier pairs take as many of the added bytes as their limits allow
        left = limits[0] - before * half - most
        most += _divided(added.more, left, _most_before(kinds), _most_before(new))
        left = limits[1] - after * half - (added.total - 2 * added.more - least)
        least += 2 * added.more - _divided(added.more, left, _most_after(kinds), _most_after(new))
        kinds = new | kinds if added.pair_class == 0 else new
        pair_class, limits = added.pair_class, (added.before, added.after)
        before += (new & BOTH) + (new & BEFORE)
        after += (new & BOTH) + (new & AFTER) // 2
    else:
        most += _most_before(kinds) * added.more
        least += (2 - _most_after(kinds)) * added.more
    if kinds & (BOTH | BEFORE):
        most = min(most, limits[0] - before * half)
    if kinds & (BOTH | AFTER):
        least = max(least, added.total - (limits[1] - after * half))
    return State(pair_class, kinds, before, after, least, most)


@numba.njit(cache=True)
def _follow(halves: int, room: tuple[int, int], sets: Sets, place: Places, limit: int) -> tuple[bool, int, int]:
    """Return whether there were too many states, how many states the last set has, and how many there are in all.

    `room` has two times: the most that a schedule has before the moment, and the most that it has after the moment.
    """
    release, tail, work, half = sets
    states = np.empty((1024, 6), np.int64)
    states[0] = np.array([0, BOTH, 1, 1, 0, 0])
    cut, first, made = False, 0, 1  # too many states?; first state of the previous set; all states
    for t in range(len(work)):
        last, more = made, work[t] - (work[t - 1] if t else 0)
        added = Added(t, more, 2 * work[t], room[0] - release[t], room[1] - tail[t])
        for s in range(first, last):
            state = State(states[s, 0], states[s, 1], states[s, 2], states[s, 3], states[s, 4], states[s, 5])
            limits = room[0] - release[state.pair_class], room[1] - tail[state.pair_class]
            for new in range(7):
                if t == 0 and new != 0 and new != AFTER:
                    continue
                now = _with_set(state, limits, added, new, half)
                if now.least > now.most or now.before + now.after > halves:
                    continue
                key = _key(now.pair_class, now.kinds, now.before, now.after)
                at = place[key]
                if at >= 0:
                    states[at, 4], states[at, 5] = min(states[at, 4], now.least), max(states[at, 5], now.most)
                    continue
                if made == len(states):
                    states = _longer(states, 2 * made)
                place[key] = made
                states[made, 0], states[made, 1], states[made, 2] = now.pair_class, now.kinds, now.before
                states[made, 3], states[made, 4], states[made, 5] = now.after, now.least, now.most
                made += 1
        made, first = _without_needless(states, place, last, made), last
        cut = made > limit
        if made == first or cut:
            break
    return cut, made - first, made
