"""The pairs of halves that the bound "sides" asks for: where it is exact, they are the best ones.

`bound/sides.py` divides all bytes, in the order in which they are ready, among pairs of halves, on both sides of the
moment at which the last gradients are scattered. Here T is the least time for which it finds a way to do so.
The states on this way say where each pair begins and ends. Before the moment, pairs are scattered
in order, and those that have both halves there are gathered at once. After it, they are gathered the other way
round. For a chain of layers and one collective, this is the optimum for given tails, up to the precision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.bound.nested import Chain, NestedSets
from legato.schedule.bound.side_states import AFTER, BEFORE, BOTH, Floats, Followed, follow, places
from legato.schedule.bound.sides import TwoSides
from legato.schedule.search.groups_in_halves import Arranged, Groups, groups_between
from legato.schedule.search.paired_period import PairedPeriod

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
    period.budget.wait(_load())  # takes seconds on its first use on a machine
    problem = TwoSides(sets, line.alpha_s / 2, _STATES, exact=_EXACT)
    least_s = _least_s(problem, low_s, high_s)
    if least_s is None:
        return None
    pairs = _pairs(sets, least_s * (1 + _EXACT), problem.moment_s, line.alpha_s / 2)
    if not pairs:
        return None
    # the chain begins with what is ready last, and groups with what is ready first
    cuts = [round(work_s / line.beta_s_per_byte) for work_s in accumulate(pair.work_s for pair in pairs)]
    between = groups_between(workload, order.tolist(), cuts[:-1], partition)
    kept = [(group, pair.kind) for group, pair in zip(between, pairs, strict=True) if group][::-1]
    groups, kinds = [group for group, _ in kept], [kind for _, kind in kept]
    arranged = period.in_order(groups, [*_halves(kinds)])
    return (groups, arranged) if arranged.seconds < math.inf else None


def _load() -> float:
    """Load the compiled states, or compile them on first use; returns the seconds that this took."""
    began, one = time.perf_counter(), np.ones(1)
    follow(9.0, 2.0, 3.0, 0.5, one, one, one, places(1), 99)
    return time.perf_counter() - began


def _least_s(problem: TwoSides, low_s: float, high_s: float) -> float | None:
    """The least time between these two for which there are pairs, or None."""
    found, moment_s, trial = None, 0.0, low_s * (1 + _EXACT)  # the bound is often the optimum
    while low_s * (1 + _EXACT) <= trial < high_s and problem.left > 0:
        if not problem.fits(trial):
            low_s = trial
        else:
            high_s = trial
            if problem.known:
                found, moment_s = trial, problem.moment_s
        trial = (low_s + high_s) / 2
    problem.moment_s = moment_s
    return found


class _Pair(NamedTuple):
    """Where the halves of a pair are, and its work on both sides together."""

    kind: int
    work_s: float


class _Step(NamedTuple):
    """What one more set adds: to the state before it, as in `follow`, perhaps new pairs."""

    state: tuple[int, ...]
    new: int  # the kinds of the new pairs
    done_s: float  # the work before the moment so far
    more_s: float  # what the set adds on both sides,
    before_s: float  # and before the moment


def _pairs(sets: NestedSets, seconds: float, moment_s: float, half_s: float) -> list[_Pair]:
    """The pairs of a schedule of so many seconds, from the one that is scattered last; none if they are too many."""
    arrays = sets.release_s, sets.tail_s, sets.work_s
    followed = follow(seconds, moment_s, moment_s, half_s, *arrays, places(len(sets.work_s)), _STATES)
    if followed.cut or not followed.fits:
        return []
    kinds, work_s, last = [BOTH], [0.0], [0]
    for t, step in enumerate(_steps(followed, np.diff(sets.work_s, prepend=0.0))):
        more_s, before_s = step.more_s, step.before_s
        if step.new:
            of, _, before, after = step.state
            room = moment_s - sets.release_s[of] - before * half_s - step.done_s
            after_s = sets.work_s[t] - more_s - step.done_s
            room_after = seconds - moment_s - sets.tail_s[of] - after * half_s - after_s
            old, kept_s = last[-1], _kept_s(step, kinds[last[-1]], float(room), float(room_after))
            work_s[old] += kept_s
            more_s, before_s = more_s - kept_s, before_s - _BEFORE[kinds[old]] * kept_s
            last = [*range(len(kinds), len(kinds) + step.new.bit_count())]
            kinds += [kind for kind in _BEFORE if step.new & kind]
            work_s += [0.0] * len(last)
        for k, own_s in zip(last, _divided(more_s, before_s, [_BEFORE[kinds[k]] for k in last]), strict=True):
            work_s[k] += own_s
    return [*map(_Pair, kinds, work_s)]


def _kept_s(step: _Step, kind: int, room_s: float, room_after_s: float) -> float:
    """How much of the work of a set still goes to the pair before the new ones: as much as there is room for."""
    share, most = _BEFORE[kind], step.more_s
    if share > 0:
        most = min(most, room_s / share)
    if share < 1:
        most = min(most, room_after_s / (1 - share))
    if step.new in _BEFORE and _BEFORE[step.new] != share:
        most = min(most, (step.before_s - _BEFORE[step.new] * step.more_s) / (share - _BEFORE[step.new]))
    return max(most, 0.0)


def _divided(more_s: float, before_s: float, shares: Sequence[float]) -> list[float]:
    """Divide work among one pair, or two, of which these shares are before the moment, to get `before_s` there."""
    if len(shares) == 1:
        return [more_s]
    part = (before_s - shares[1] * more_s) / (shares[0] - shares[1])
    part = min(max(part, 0.0), more_s)
    return [part, more_s - part]


def _steps(followed: Followed, more_s: Floats) -> list[_Step]:
    """One way through the states, with the fewest halves, by set."""
    ends = [0, *followed.ends.tolist()]
    states = [tuple(state) for state in followed.states.tolist()]
    intervals = [*zip(followed.least_s.tolist(), followed.most_s.tolist(), strict=True)]
    at = min(range(ends[-2], ends[-1]), key=lambda s: (states[s][2] + states[s][3], states[s]))
    until_s, steps = sum(intervals[at]) / 2, []
    for t in reversed(range(len(ends) - 1)):
        found = []
        for s in range(ends[t - 1], ends[t]) if t else range(1):
            state, (low_s, high_s) = (states[s], intervals[s]) if t else ((0, BOTH, 1, 1), (0.0, 0.0))
            new = _new_kinds(state, states[at], t)
            if new is not None:
                shares = [_BEFORE[kind] for kind in _BEFORE if (state[1] | new if new else state[1]) & kind]
                least_s, most_s = until_s - max(shares) * more_s[t], until_s - min(shares) * more_s[t]
                done_s = min(max((least_s + most_s) / 2, low_s), high_s)
                off_s = max(least_s - done_s, done_s - most_s, 0.0)
                found.append((off_s, s, _Step(state, new, done_s, float(more_s[t]), until_s - done_s)))
        _, at, step = min(found)
        until_s = step.done_s
        steps.append(step)
    return steps[::-1]


def _new_kinds(before: tuple[int, ...], state: tuple[int, ...], t: int) -> int | None:
    """The kinds of the new pairs with which set t leads from one state to another, if it can."""
    if before == state:
        return 0
    new = state[1] & ~BOTH if t == 0 else state[1]
    paid = (new & BOTH) + (new & BEFORE), (new & BOTH) + (new & AFTER) // 2
    return new if state[0] == t and (before[2] + paid[0], before[3] + paid[1]) == state[2:] else None


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
