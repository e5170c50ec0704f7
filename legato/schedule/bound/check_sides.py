"""Checks a bound of the case "sides": proves that halves in pairs do not fit on both sides of any moment.

It counts in whole numbers of 2**-42 of the claimed seconds. What a schedule has to wait for is rounded
down, and what it can have done is rounded up. `sides.py` has the argument.

Before and after are treated alike here. A state is the class of the last pairs, where their halves are, how many
halves are on each side, and the most work that can be on each side. Both together must be all the work so far. Of
states that differ in this work alone, those that leave no amount out between them are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError, TooLargeError
from legato.core.workload import Workload
from legato.schedule.bound.lower_bound import Certificate
from legato.schedule.bound.walk import Walk

__all__ = ["check_sides"]

#: The claimed time in units, the most sets, and the most halves: a message takes a 400th of the time, or more.
_CLAIMED, _SETS, _HALVES = 2**42, 256, 800
#: The shortest interval of moments, how many are followed at once, and the most states after a set, and of all sets.
_SHORT, _AT_ONCE, _AFTER_A_SET, _STATES = _CLAIMED >> 13, 16, 2**17, 50_000_000
#: Where the halves of a pair may be: one on each side, both before the moment, or both after it.
_EACH, _BEFORE, _AFTER = 1, 2, 4
#: By set of these, on each side: the halves of one pair of each, and twice the part of a byte's work that may be there.
_PAIRS = np.array([[(k & _EACH) + 2 * (k // side & 1) for k in range(8)] for side in (_BEFORE, _AFTER)])
_PARTS = np.minimum(_PAIRS, 2)

Array = np.ndarray[Any, np.dtype[Any]]


def check_sides(workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate) -> Fraction:
    """The claimed seconds. Raises `InputError` if halves may fit in this time, `TooLargeError` on too many states."""
    sizes, tensors = certificate.sets, certificate.tensors
    if len(sizes) > _SETS:
        raise InputError(f"certificate: case 'sides' with {len(sizes)} sets (expected at most {_SETS})")
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    if claimed <= 0 or _Sets(workload, cluster, walk, claimed, [tensors[:size] for size in sizes]).fit():
        raise InputError(f"bound: halves on both sides of a moment may take {float(claimed)} s")
    return claimed


class _States(NamedTuple):
    """Some states after a set, one in each place."""

    interval: Array  # the number of that in which the moment lies
    of: Array  # the class of the last pairs
    where: Array  # and where their halves are
    halves: Array  # by side
    work: Array  # the most of it, by side

    def only(self, chosen: Array) -> _States:
        return _States(*(value[..., chosen] for value in self))


class _Sets:
    def __init__(
        self, workload: Workload, cluster: Cluster, walk: Walk, claimed: Fraction, sets: Sequence[tuple[int, ...]]
    ) -> None:
        nbytes = [tensor.nbytes for tensor in workload.tensors]
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha, total = min(a for a, _ in costs), sum(nbytes)
        slope = (min(a + b * total for a, b in costs) - alpha) / total
        self.unit = claimed / _CLAIMED
        near = [[Fraction(min(map(of, tensors)), walk.scale) for tensors in sets] for of in (walk.release, walk.tail)]
        work = [slope * sum(nbytes[t] for t in tensors) for tensors in sets]
        self.near = np.array([[*map(self.down, of)] for of in near])  # release times, and tails
        self.work = np.array([*map(self.down, work)])
        self.more = np.array([self.down(b - a) + 1 for a, b in pairwise([Fraction(0), *work])])
        room = claimed - near[0][-1] - near[1][-1] - work[-1]
        if room > alpha / 2 * _HALVES:
            raise InputError(f"certificate: case 'sides' where {_HALVES} halves take less than {float(room)} s")
        self.most = int(room // (alpha / 2)) if room > 0 else 0
        self.paid = np.array([self.down(alpha / 2 * k) for k in range(self.most + 1)])
        self.left = _STATES

    def down(self, seconds: Fraction) -> int:
        """In units, rounded down."""
        return int(seconds // self.unit)

    def fit(self) -> bool:
        """Whether all halves may fit, wherever the moment is."""
        if self.most < 2:
            return False
        begin, end = int(self.near[0, 0] + self.paid[1]), _CLAIMED - int(self.near[1, 0] + self.paid[1])
        todo = [(begin, end)] if begin <= end else []
        while todo:
            now = todo[-_AT_ONCE:]
            del todo[-_AT_ONCE:]
            for k in self._fitting(np.array(now).T):
                begin, end = now[k]
                if end - begin <= _SHORT:
                    return True
                todo += [(begin, (begin + end) // 2), ((begin + end) // 2, end)]
        return False

    def _fitting(self, intervals: Array) -> list[int]:
        """Those of these intervals in which all halves may fit."""
        room = np.array([intervals[1], _CLAIMED - intervals[0]])  # on each side, wherever the moment is
        states = self._first(room)
        for t in range(len(self.work)):
            states = self._joined(self._with(states, t, room) if t else states, t)
            self.left -= len(states.of)
            if self.left < 0 or len(states.of) > _AFTER_A_SET:
                half = intervals.shape[1] // 2
                if self.left < 0 or not half:
                    raise TooLargeError(f"certificate: {len(self.work)} sets with too many states of halves to follow")
                return self._fitting(intervals[:, :half]) + [half + k for k in self._fitting(intervals[:, half:])]
        return [*map(int, np.unique(states.interval))]

    def _limit(self, room: Array, states: _States) -> Array:
        """The most work on each side, for the last pairs and all that come after them in the line."""
        limit: Array = room[:, states.interval] - self.near[:, states.of] - self.paid[states.halves]
        return limit

    def _within(self, room: Array, states: _States, t: int) -> _States:
        """The states that keep to the limits of the last pairs, with all that these sets have."""
        states = states.only(states.halves.sum(axis=0) <= self.most)
        limit = np.where(_PARTS[:, states.where] > 0, self._limit(room, states), _CLAIMED)
        states = states._replace(work=np.minimum(states.work, limit))
        return states.only((states.work.sum(axis=0) >= self.work[t]) & (states.work >= 0).all(axis=0))

    def _first(self, room: Array) -> _States:
        """The innermost set: one pair that is scattered before the moment, and perhaps others after it."""
        count = room.shape[1]
        where = np.repeat([_EACH, _EACH | _AFTER], count)
        work = _PARTS[:, where] * self.more[0] // 2 + 1
        of = np.zeros(2 * count, np.int64)
        return self._within(room, _States(np.tile(np.arange(count), 2), of, where, _PAIRS[:, where], work), 0)

    def _with(self, states: _States, t: int, room: Array) -> _States:
        """With what this set has beyond the one inside it: all in the last pairs, or some in new ones of its class."""
        free = 2 * (self._limit(room, states) - states.work)
        found = []
        for new in range(7):  # with all of 1, 2 and 4, there would only be more halves than with 2 and 4
            own = _PARTS[:, new][:, None]
            extra = np.maximum(
                _PARTS[:, states.where] - own, 0
            )  # twice what a byte gains here by being in the last pairs
            gain = np.minimum(extra * self.more[t], np.where(own == 1, free // 2 + 1, free))
            work = states.work + (own * self.more[t] + np.where(extra > 0, gain, 0)) // 2 + 1
            now = states._replace(work=work, halves=states.halves + _PAIRS[:, new][:, None])
            if new:
                now = now._replace(of=np.full(len(states.of), t), where=np.full(len(states.of), new))
            found.append(self._within(room, now, t))
        return _States(*(np.concatenate(values, axis=-1) for values in zip(*found, strict=True)))

    def _joined(self, states: _States, t: int) -> _States:
        """The states without those that others make needless; the amounts before the moment in place of states."""
        size = self.most + 1
        key = ((states.interval * len(self.work) + states.of) * 8 + states.where) * size * size
        key += states.halves[0] * size + states.halves[1]
        low, high = np.maximum(self.work[t] - states.work[1], 0), states.work[0]
        order = np.lexsort((low, key))
        key, low, high = key[order], low[order], high[order]
        keys, rank = np.unique(key, return_inverse=True)
        low, reach = low + rank * 2 * _CLAIMED, np.maximum.accumulate(high + rank * 2 * _CLAIMED)
        first = np.flatnonzero(np.append(True, low[1:] > reach[:-1])[: len(low)])
        last = np.append(first[1:], len(low))[: len(first)] - 1
        low, reach, rank = low[first], reach[last], rank[first]
        joined = states.only(order[first])
        amount = rank * 2 * _CLAIMED
        joined = joined._replace(work=np.array([reach - amount, self.work[t] - (low - amount)]))
        needless = np.zeros(len(first), np.bool_)
        for fewer in ((1, 1), (2, 0), (0, 2)):
            fewer_key = keys[rank] - fewer[0] * size - fewer[1]
            at = np.searchsorted(keys, fewer_key).clip(max=len(keys) - 1)
            shift = (at - rank) * 2 * _CLAIMED
            piece = np.searchsorted(low, low + shift, side="right") - 1
            enough = (joined.halves >= np.array(fewer)[:, None]).all(axis=0) & (keys[at] == fewer_key)
            needless |= enough & (piece >= 0) & (rank[piece] == at) & (reach[piece] >= reach + shift)
        return joined.only(~needless)
