"""The pairs of halves that the bound "sides" asks for: where it is exact, they are the best ones.

`bound/sides.py` divides all bytes, in the order in which they are ready, among pairs of halves, on both sides of the
moment at which the last gradients are scattered. Here T is the least time for which it finds a way to do so.
The states on this way say where each pair begins and ends. Before the moment, pairs are scattered
in order, and those that have both halves there are gathered at once. After it, they are gathered the other way
round. For a chain of layers and one collective, this is the optimum for given tails, up to the precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.basics.joined import Joined
from legato.schedule.bound.nested import Chain, NestedSets
from legato.schedule.bound.side_states import AFTER, BEFORE, BOTH, Floats, Followed, follow
from legato.schedule.bound.sides import TwoSides
from legato.schedule.search.groups_in_halves import Arranged, Groups
from legato.schedule.search.paired_period import PairedPeriod
from legato.simulator.period import Period

__all__ = ["best_pairs"]

#: The most sets of a chain, and the most states to go through: some tenths of a second. Like bounds, they are no part
#: of the budget.
_SETS, _STATES = 64, 2_000_000
#: The relative precision of the least time, and of the moment.
_EXACT = 1e-3
#: Which part of the work of a byte is before the moment, by where the halves of its pair are.
_BEFORE = {BOTH: 0.5, BEFORE: 1.0, AFTER: 0.0}


def best_pairs(period: PairedPeriod, low_s: float, high_s: float, *, partition: bool) -> tuple[Groups, Arranged] | None:
    """Pairs for the least time between these two, or None if there are none for less than `high_s`.

    Without `partition`, no tensor is in several of them.
    """
    workload = period.workload
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    alpha_s = 2 * period.half_s(0)
    line = LinearCost(alpha_s, (2 * period.half_s(workload.nbytes) - alpha_s) / workload.nbytes)
    if line.alpha_s <= 0 or line.beta_s_per_byte <= 0:
        return None
    chain = Chain(period.release_s, period.tail_s, nbytes, line, sends="pairs")
    order = chain.orders()[0]
    sets = chain.sets(order, chain.sizes(order, _SETS), strict=True)
    problem = TwoSides(sets, line.alpha_s / 2, _STATES, exact=_EXACT)
    least_s = _least_s(problem, low_s, high_s)
    if least_s is None:
        return None
    pairs = _pairs(sets, least_s * (1 + _EXACT), problem.moment_s, line.alpha_s / 2)
    # the chain begins with what is ready last, and groups with what is ready first
    tensors = order.tolist()
    joined, tensor_id = Joined([workload.tensors[t] for t in tensors]), Period.of(workload).tensor_id
    cuts = [0, *(round(work_s / line.beta_s_per_byte) for work_s in accumulate(pair.work_s for pair in pairs))]
    cuts = [_border(joined, at, partition) for at in cuts[:-1]] + [joined.nbytes]
    groups: Groups = []
    kinds: list[int] = []
    for pair, (start, stop) in zip(pairs, pairwise(cuts), strict=True):
        if start < stop:
            slices = joined.slices(start, stop)
            groups.insert(0, [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in slices])
            kinds.insert(0, pair.kind)
    arranged = period.in_order(groups, [*_halves(kinds)])
    return (groups, arranged) if arranged.seconds < math.inf else None


def _least_s(problem: TwoSides, low_s: float, high_s: float) -> float | None:
    """The least time between these two for which there are pairs, or None."""
    found, moment_s, trial = None, 0.0, low_s * (1 + _EXACT)  # the bound is often the optimum
    while low_s * (1 + _EXACT) <= trial < high_s and problem.left > 0:
        if problem.fits(trial) and problem.left > 0:
            found, high_s, moment_s = trial, trial, problem.moment_s
        else:
            low_s = trial
        trial = (low_s + high_s) / 2
    problem.moment_s = moment_s
    return found


class _Pair(NamedTuple):
    """Where the halves of a pair are, and its work on both sides together."""

    kind: int
    work_s: float


def _pairs(sets: NestedSets, seconds: float, moment_s: float, half_s: float) -> list[_Pair]:
    """The pairs of a schedule of so many seconds, from the one that is scattered last."""
    arrays = sets.release_s, sets.tail_s, sets.work_s
    followed = follow(seconds, moment_s, moment_s, half_s, *arrays)
    steps = _steps(followed, np.diff(sets.work_s, prepend=0.0))
    kinds, work = [BOTH], [0.0]
    own = [0]  # the pairs of the last class
    for t, (state, new, before_s, done_s) in enumerate(steps):
        more = sets.work_s[t] - (sets.work_s[t - 1] if t else 0.0)
        old, used = own, 0.0
        if new:
            own = [len(kinds) + k for k in range(new.bit_count())]
            kinds += [kind for kind in (BOTH, BEFORE, AFTER) if new & kind]
            work += [0.0] * len(own)
        if new:
            # as much as the limits of the pairs before allow still goes to them
            of, _, halves_before, halves_after = state
            share = _BEFORE[kinds[old[-1]]]
            room = [more]
            if share > 0:
                room.append((moment_s - sets.release_s[of] - halves_before * half_s - done_s) / share)
            if share < 1:
                after_s = (sets.work_s[t - 1] if t else 0.0) - done_s
                left = seconds - moment_s - sets.tail_s[of] - halves_after * half_s - after_s
                room.append(left / (1 - share))
            used = max(0.0, min(room))
            rest = _BEFORE[kinds[own[0]]]
            if len(own) == 1 and rest != share and more:
                used = min(used, max(0.0, (before_s - rest * more) / (share - rest)))
            work[old[-1]] += used
            before_s -= share * used
        _divide(more - used, before_s, own, kinds, work)
    return [_Pair(kind, work_s) for kind, work_s in zip(kinds, work, strict=True)]


def _divide(more: float, before_s: float, own: Sequence[int], kinds: Sequence[int], work: list[float]) -> None:
    """Divide work among pairs of one class such that so much of it is before the moment."""
    if len(own) == 1:
        work[own[0]] += more
        return
    first, second = (_BEFORE[kinds[k]] for k in own[:2])
    part = min(max(before_s - second * more, 0.0) / (first - second), more) if first > second else 0.0
    if first < second:
        part = min(max(second * more - before_s, 0.0) / (second - first), more)
    work[own[0]] += part
    work[own[1]] += more - part


def _steps(followed: Followed, more_s: Floats) -> list[tuple[tuple[int, ...], int, float, float]]:
    """By set: the state before it, the kinds of the pairs that begin with it, the work that it adds before the moment,
    and the work there before it.
    """
    ends = [0, *followed.ends.tolist()]
    least, most = followed.least_s, followed.most_s
    states = [tuple(state) for state in followed.states.tolist()]
    at = min(range(ends[-2], ends[-1]), key=lambda s: (states[s][2] + states[s][3], states[s]))
    done_s = (least[at] + most[at]) / 2
    steps = []
    for t in reversed(range(len(more_s))):
        found = min(_before(states, ends, t, at, done_s, least, most, float(more_s[t])))
        _, new, at, earlier_s = found
        before = states[at] if t else (0, BOTH, 1, 1)
        steps.append((before, new, done_s - earlier_s, earlier_s))
        done_s = earlier_s
    return steps[::-1]


def _before(
    states: Sequence[tuple[int, ...]],
    ends: Sequence[int],
    t: int,
    at: int,
    done_s: float,
    least: Floats,
    most: Floats,
    more_s: float,
) -> Iterator[tuple[float, int, int, float]]:
    """States that may come before this one: how far from it, with which new kinds, and the work before the moment."""
    of, kinds, before, after = states[at]
    earlier = range(ends[t - 1], ends[t]) if t else range(1)
    for s in earlier:
        last = states[s] if t else (0, BOTH, 1, 1)
        low, high = (least[s], most[s]) if t else (0.0, 0.0)
        if last == states[at]:
            new = 0
        elif of != t or not kinds or (t == 0 and kinds == BOTH):
            continue
        else:
            new = kinds & ~BOTH if t == 0 else kinds
            paid = (new & BOTH) + (new & BEFORE), (new & BOTH) + (new & AFTER) // 2
            if (last[2] + paid[0], last[3] + paid[1]) != (before, after):
                continue
        shares = [_BEFORE[kind] for kind in _BEFORE if (new or kinds) & kind or (new and last[1] & kind)]
        fits = done_s - max(shares) * more_s, done_s - min(shares) * more_s
        earlier_s = min(max((fits[0] + fits[1]) / 2, low), high)
        off = max(fits[0] - earlier_s, earlier_s - fits[1], 0.0)
        yield off, new, s, float(earlier_s)


def _border(joined: Joined, at: int, partition: bool) -> int:
    """The nearest offset up to which a pair may have bytes."""
    if partition:
        return joined.aligned(min(max(at, 0), joined.nbytes))
    return min((*joined.starts, joined.nbytes), key=lambda start: abs(start - at))


def _halves(kinds: Sequence[int]) -> Iterator[int]:
    """The order of the halves of groups, the one that is ready first first."""
    count = len(kinds)
    for k, kind in enumerate(kinds):
        if kind != AFTER:
            yield k
        if kind == BEFORE:
            yield k + count
    for k, kind in reversed([*enumerate(kinds)]):
        if kind == AFTER:
            yield k
        if kind != BEFORE:
            yield k + count
