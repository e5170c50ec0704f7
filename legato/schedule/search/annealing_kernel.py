"""The inner loop of `annealing.py`: random changes to a schedule of halves, and the time that it takes.

A schedule says for every gradient which half collects it (a reduce-scatter) and which
one delivers it (an all-gather), by their positions in the sequence. Its time is computed
from scratch, in one pass over the gradients, one over the ops, and one over the halves. A
change is made to a copy. Where it leaves a gradient delivered before it is collected, the
gradient's other half follows to the nearest place where it can be. A half without
gradients is removed.

numba compiles it on first use and keeps the result on disk.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST", "AnnealingInstance", "Halves", "anneal", "iteration_s"]

#: The most halves that a schedule can have.
MOST = 64
#: The kinds of change, as cumulative probabilities.
_MOVES_HALF, _DIVIDES, _MERGES, _MOVES_RUN, _MOVES_BORDER = 0.12, 0.24, 0.32, 0.43, 0.76
#: The probability that a moved half goes anywhere, not just past its neighbour, and that a try makes two changes.
_FAR, _TWICE = 0.2, 0.2
#: The probabilities that both halves of the same gradients are moved.
_BOTH_OF_RUN, _BOTH_AT_BORDER, _BOTH_OF_STRETCH = 0.2, 0.4, 0.65


class AnnealingInstance(NamedTuple):
    """What has to be sent and what it costs. Gradients stand in an order in which they can be made."""

    nbytes: NDArray[np.float64]  # by gradient
    tail_s: NDArray[np.float64]  # by gradient: the computation from its first reader on
    orders: NDArray[np.int64]  # as they stand, by falling tail, and both reversed: [4, gradients]
    op: NDArray[np.int64]  # by gradient: the op that makes it
    duration_s: NDArray[np.float64]  # by op; each op stands after those that it waits for
    waits_from: NDArray[np.int64]  # by op, and the end: where its part of `waits` begins
    waits: NDArray[np.int64]
    compute_s: float  # of the iteration
    alpha_s: float  # of a half
    s_per_byte: float
    floor_s: float


class Halves(NamedTuple):
    """A schedule: a sequence of halves of all-reduces."""

    place: NDArray[np.int64]  # positions of the halves that collect and deliver a gradient: [2, gradients]
    first: NDArray[np.bool_]  # by position: whether this half collects
    number: NDArray[np.int64]  # the number of halves, in an array of one


@numba.njit(cache=True)
def iteration_s(instance, halves):  # type: ignore[no-untyped-def]
    """Seconds of an iteration; infinite if a gradient is delivered before it is collected."""
    count = halves.number[0]
    nbytes, tail, computed = np.zeros(count), np.zeros(count), np.zeros(count)
    needed = np.full(len(instance.duration_s), count)  # by op: the first half that needs it
    for i in range(len(instance.nbytes)):
        first, second, op = halves.place[0, i], halves.place[1, i], instance.op[i]
        if first > second:
            return np.inf
        nbytes[first] += instance.nbytes[i]
        nbytes[second] += instance.nbytes[i]
        tail[second] = max(tail[second], instance.tail_s[i])
        needed[op] = min(needed[op], first)
    for op in range(len(needed) - 1, -1, -1):
        first = needed[op]
        computed[first] += instance.duration_s[op]
        for k in range(instance.waits_from[op], instance.waits_from[op + 1]):
            needed[instance.waits[k]] = min(needed[instance.waits[k]], first)
    done = now = 0.0
    late = instance.compute_s
    for k in range(count):
        if halves.first[k]:
            done += computed[k]
            now = max(now, done)
        now += max(instance.floor_s, instance.alpha_s + instance.s_per_byte * nbytes[k])
        if not halves.first[k]:
            late = max(late, now + tail[k])
    return late


@numba.njit(cache=True)
def anneal(instance, now, best, heats, rng):  # type: ignore[no-untyped-def]
    """Try one change for each of the `heats`: the lateness in seconds that is accepted about every third time.

    `now` becomes the schedule that was accepted last, `best` the best one seen.
    """
    trial = Halves(now.place.copy(), now.first.copy(), now.number.copy())
    current, least = iteration_s(instance, now), iteration_s(instance, best)
    for heat in heats:
        _copy(now, trial)
        if not _change(instance, trial, rng) or (rng.random() < _TWICE and not _change(instance, trial, rng)):
            continue
        seconds = iteration_s(instance, trial)
        if seconds <= current or (heat > 0 and rng.random() < np.exp((current - seconds) / heat)):
            current = seconds
            _copy(trial, now)
            if seconds < least:
                least = seconds
                _copy(trial, best)


@numba.njit(cache=True)
def _copy(halves, into):  # type: ignore[no-untyped-def]
    into.place[:] = halves.place
    into.first[:] = halves.first
    into.number[0] = halves.number[0]


@numba.njit(cache=True)
def _change(instance, halves, rng):  # type: ignore[no-untyped-def]
    """Make a random change; returns whether the result is a schedule."""
    count, chance = halves.number[0], rng.random()
    half = int(rng.random() * count)
    side = 0 if halves.first[half] else 1
    if chance < _MOVES_HALF:
        to = int(rng.random() * count) if rng.random() < _FAR else half + (1 if rng.random() < 0.5 else -1)
        if to == half or not 0 <= to < count:
            return False
        _move_half(halves, half, to)
        side = 0 if rng.random() < 0.5 else 1
    elif chance < _DIVIDES:
        if count == MOST:
            return False
        to = int(rng.random() * (count + 1))
        _insert(halves, to, halves.first[half])
        share = rng.random() if rng.random() < 0.5 else rng.random() ** 3
        _move_run(instance, halves, side, half + (to <= half), to, share, rng)
    elif chance < _MOVES_RUN:
        to = _alike(halves, half, rng)
        if to < 0:
            return False
        share = 1.0 if chance < _MERGES else rng.random() ** 3
        _move_run(instance, halves, side, half, to, share, rng)
    else:
        side = 0 if rng.random() < 0.5 else 1
        if chance < _MOVES_BORDER:
            _move_border(instance, halves, side, rng)
        else:
            _move_stretch(instance, halves, side, rng)
    if not _follow(halves, side):
        return False
    _drop_empty(halves)
    return True


@numba.njit(cache=True)
def _move_half(halves, half, to):  # type: ignore[no-untyped-def]
    """Move a half to another position; those in between make room."""
    step = 1 if to > half else -1
    moved = halves.first[half]
    for k in range(half, to, step):
        halves.first[k] = halves.first[k + step]
    halves.first[to] = moved
    low, high = min(half, to), max(half, to)
    for side in range(2):
        for i in range(halves.place.shape[1]):
            k = halves.place[side, i]
            if k == half:
                halves.place[side, i] = to
            elif low <= k <= high:
                halves.place[side, i] = k - step


@numba.njit(cache=True)
def _insert(halves, at, first):  # type: ignore[no-untyped-def]
    """Insert a half without gradients."""
    for k in range(halves.number[0], at, -1):
        halves.first[k] = halves.first[k - 1]
    halves.first[at] = first
    halves.number[0] += 1
    for side in range(2):
        for i in range(halves.place.shape[1]):
            halves.place[side, i] += halves.place[side, i] >= at


@numba.njit(cache=True)
def _any(halves, first, without, rng):  # type: ignore[no-untyped-def]
    """A random half of this kind, other than `without`; -1 if there is none."""
    found, seen = -1, 0
    for k in range(halves.number[0]):
        if halves.first[k] == first and k != without:
            seen += 1
            if rng.random() * seen < 1:
                found = k
    return found


@numba.njit(cache=True)
def _alike(halves, half, rng):  # type: ignore[no-untyped-def]
    """Another half of the same kind, either one of the nearest or any; -1 if there is none."""
    if rng.random() < 0.5:
        return _any(halves, halves.first[half], half, rng)
    step = 1 if rng.random() < 0.5 else -1
    for way in (step, -step):
        k = half + way
        while 0 <= k < halves.number[0]:
            if halves.first[k] == halves.first[half]:
                return k
            k += way
    return -1


@numba.njit(cache=True)
def _move_run(instance, halves, side, half, to, share, rng):  # type: ignore[no-untyped-def]
    """Move the first share of a half, in some order, to another; sometimes move the other halves, too."""
    left = 1 + int(np.sum(halves.place[side] == half) * share)
    other = _any(halves, side == 1, -1, rng) if rng.random() < _BOTH_OF_RUN else -1
    for i in instance.orders[int(rng.random() * 4)]:
        if halves.place[side, i] == half and left > 0:
            left -= 1
            halves.place[side, i] = to
            if other >= 0:
                halves.place[1 - side, i] = other


@numba.njit(cache=True)
def _move_border(instance, halves, side, rng):  # type: ignore[no-untyped-def]
    """Where neighbours in some order go with different halves, let more of them go with the first one's half."""
    order, both = instance.orders[int(rng.random() * 4)], rng.random() < _BOTH_AT_BORDER
    mine, other = halves.place[side], halves.place[1 - side]
    border = _run_end(order, mine, other, both, int(rng.random() * len(order)))
    if border == len(order):
        return
    length, before = _run_end(order, mine, other, both, border) - border, order[border - 1]
    for i in order[border : border + 1 + int(length * rng.random() ** 3)]:
        mine[i] = mine[before]
        if both:
            other[i] = other[before]


@numba.njit(cache=True)
def _run_end(order, mine, other, both, start):  # type: ignore[no-untyped-def]
    """The end of the run of gradients in an order that go with the same half, or both halves, as the first one."""
    i = order[start]
    for k in range(start + 1, len(order)):
        j = order[k]
        if mine[j] != mine[i] or (both and other[j] != other[i]):
            return k
    return len(order)


@numba.njit(cache=True)
def _move_stretch(instance, halves, side, rng):  # type: ignore[no-untyped-def]
    """Let some neighbours, in ready order or by tail, go with one random half, or with two."""
    order, both = instance.orders[int(rng.random() * 2)], rng.random() < _BOTH_OF_STRETCH
    to, other = _any(halves, side == 0, -1, rng), _any(halves, side == 1, -1, rng)
    start = int(rng.random() * len(order))
    for i in order[start : start + 1 + int(len(order) * rng.random() ** 4)]:
        halves.place[side, i] = to
        if both:
            halves.place[1 - side, i] = other


@numba.njit(cache=True)
def _follow(halves, side):  # type: ignore[no-untyped-def]
    """Move the other halves of gradients that `side` moved past them; returns whether that is possible."""
    for i in range(halves.place.shape[1]):
        if halves.place[0, i] > halves.place[1, i]:
            k, step = halves.place[side, i], 1 if side == 0 else -1
            while 0 <= k < halves.number[0] and halves.first[k] == (side == 0):
                k += step
            if not 0 <= k < halves.number[0]:
                return False
            halves.place[1 - side, i] = k
    return True


@numba.njit(cache=True)
def _drop_empty(halves):  # type: ignore[no-untyped-def]
    """Remove halves without gradients."""
    used = np.zeros(halves.number[0], np.int64)
    for place in halves.place.flat:
        used[place] = 1
    if used.all():
        return
    halves.number[0] = 0
    for k in range(len(used)):
        if used[k]:
            used[k] = halves.number[0]
            halves.first[used[k]] = halves.first[k]
            halves.number[0] += 1
    for side in range(2):
        for i in range(halves.place.shape[1]):
            halves.place[side, i] = used[halves.place[side, i]]
