"""Checks a bound of the case "sequences": that no sequence of messages takes so little time.

The states of `sequences.py`, in whole numbers: of 2**-48 of the seconds that are
claimed, with everything that a schedule has to wait for rounded down, so that
rounding can only let more schedules pass. Shares nothing with the search: what
must have been computed is found by going through sets of ops, and states are
followed for all bytes handed out at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.bound import Certificate

__all__ = ["Walk", "check_sequences"]

#: What is claimed, in units; far above it, and still a number that can be added to others.
_CLAIMED, _NEVER = 2**48, 2**60

Array = np.ndarray[Any, np.dtype[Any]]


class Walk(Protocol):
    """What is known of ops and tensors, in whole numbers of `1 / scale` seconds."""

    duration: list[int]
    scale: int
    reorders: bool

    def head(self, t: int) -> int: ...
    def tail(self, t: int) -> int: ...
    def needs(self, t: int) -> set[int]: ...


def check_sequences(
    workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate, whole: bool
) -> Fraction:
    """The seconds that are claimed. Raises `InputError` if a sequence of messages may take no longer."""
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    total = sum(tensor.nbytes for tensor in workload.tensors)
    for levels in certificate.levels:
        if levels[:2] != (0, 1) or levels[-1] != total or any(b <= a for a, b in pairwise(levels)):
            raise InputError(f"certificate: levels of bytes (expected 0, 1, and more of them up to {total})")
    if whole and certificate.levels[0] != certificate.levels[1]:
        raise InputError("certificate: bytes collected and handed out at different levels by all-reduces")
    if any(walk.tail(b) >= walk.tail(a) for a, b in pairwise(certificate.tensors)):
        raise InputError("certificate: tensors (expected falling tails)")
    if claimed <= 0 or _Relaxed(workload, cluster, walk, claimed, certificate, whole).fits():
        raise InputError(f"bound: a sequence of messages may take {float(claimed)} s")
    return claimed


class _Relaxed:
    """All that a schedule has to wait for, in units, and the states that it passes through.

    Coverage, as in `sequences.py`: 0, nothing of the first tensor is collected; 1, some of it; c, L(c - 1).
    """

    def __init__(
        self, workload: Workload, cluster: Cluster, walk: Walk, claimed: Fraction, certificate: Certificate, whole: bool
    ) -> None:
        self.nbytes = [tensor.nbytes for tensor in workload.tensors]
        self.walk, self.whole = walk, whole
        self.unit = claimed * walk.scale / _CLAIMED
        self.duration = [self.down(seconds) for seconds in walk.duration]
        self.producer = [tensor.ready_after for tensor in workload.tensors]
        self.needs = {op: walk.needs(t) for t, op in enumerate(self.producer)} if walk.reorders else {}
        self.head = {op: sum(walk.duration[i] for i in needs) for op, needs in self.needs.items()}
        everything, total = list(range(len(self.nbytes))), sum(self.nbytes)
        tail = [walk.tail(t) for t in everything]
        x, y = certificate.levels
        x_most, y_most = ([*(level - 1 for level in levels[1:]), total] for levels in (x, y))
        self._price(cluster, (x, x_most, y, y_most), walk.scale)

        first = certificate.tensors[0]
        rest = total - self.nbytes[first]
        late = np.array(x) > rest
        release = [np.where(late, _NEVER, self.ready([], everything, x)), self.ready([first], everything, x)]
        before = [np.zeros((len(x), len(x)), np.int64)] * 2
        for mark in certificate.tensors:
            covered = [t for t in everything if tail[t] >= tail[mark]]
            own = sum(self.nbytes[t] for t in covered)
            release.append(np.where(np.array(x_most) < own, _NEVER, self.ready(covered, everything, x)))
            earlier = [max(own - most + level, 0) for most in x_most for level in x]
            before.append(self.ready([], covered, earlier).reshape(len(x), len(x)))
        self.release, self.before = np.array(release), np.array(before)
        joined = self.ready([first], everything, [min(level, rest) + total - rest for level in x])
        self.alone = np.where(late, _NEVER, joined)
        self.left = _in_turn([self.down(s) for s in tail], self.nbytes, [total - most for most in y_most])
        self.limit = np.array([*(self.down(tail[mark]) for mark in certificate.tensors), 0])

    def down(self, value: int | Fraction) -> int:
        """In units, rounded down."""
        return int(value // self.unit)

    def _price(self, cluster: Cluster, levels: Sequence[Sequence[int]], scale: int) -> None:
        """What messages pay first, and the work of the least and of the most bytes of every level, that rounded up."""
        total = sum(self.nbytes)
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha = min(a for a, _ in costs)
        slope = (min(a + b * total for a, b in costs) - alpha) / total
        share = Fraction(scale, 1 if self.whole else 2)
        self.alpha = self.down(alpha * share)
        least_x, most_x, least_y, most_y = (np.array([self.down(slope * share * n) for n in of]) for of in levels)
        self.x, self.y = (least_x, most_x + (most_x > 0)), (least_y, most_y + (most_y > 0))

    def ready(self, required: Sequence[int], tensors: Sequence[int], amounts: Sequence[int]) -> Array:
        """The least time until the required tensors and so many bytes of some are computed, by amount."""
        if not self.walk.reorders:
            heads = [self.down(self.walk.head(t)) for t in tensors]
            least = max((self.down(self.walk.head(t)) for t in required), default=0)
            return np.maximum(_in_turn(heads, [self.nbytes[t] for t in tensors], amounts), least)
        return self._in_any_order(required, tensors, amounts)

    def _in_any_order(self, required: Sequence[int], tensors: Sequence[int], amounts: Sequence[int]) -> Array:
        """For every op that may need most of all that run, the others that make most bytes for their time."""
        given = set[int]().union(*(self.needs[self.producer[t]] for t in required))
        made: dict[int, int] = {}
        for t in tensors:
            made[self.producer[t]] = made.get(self.producer[t], 0) + self.nbytes[t]
        needs = {op: _bits(self.needs[op]) for op in made}
        by_price = sorted(made, key=lambda op: Fraction(self.duration[op], made[op]))
        asked, place = np.unique(np.array(amounts), return_inverse=True)
        least = self._filled(given, made, [], needs, asked)
        for deepest in made:
            run = given | self.needs[deepest]
            bits = _bits(run)
            others = [op for op in by_price if self.head[op] <= self.head[deepest] and needs[op] & ~bits]
            least = np.minimum(least, self._filled(run, made, others, needs, asked))
        return np.minimum.accumulate(least[::-1])[::-1][place]

    def _filled(
        self, run: set[int], made: dict[int, int], others: Sequence[int], needs: dict[int, int], amounts: Array
    ) -> Array:
        """Seconds for these ops, and as much of others, in their order, as it takes for so many bytes."""
        bits = _bits(run)
        done = sum(of for op, of in made.items() if not needs[op] & ~bits)
        until = [*accumulate((made[op] for op in others), initial=done)]
        seconds = [*accumulate((self.duration[op] for op in others), initial=sum(self.duration[i] for i in run))]
        least = np.full(len(amounts), _NEVER)
        for k, amount in enumerate(amounts.tolist()):
            item = bisect_left(until, amount)
            if item == 0:
                least[k] = seconds[0]
            elif item < len(until):
                op = others[item - 1]
                least[k] = seconds[item - 1] + self.duration[op] * (amount - until[item - 1]) // made[op]
        return least

    def fits(self) -> bool:
        """Whether everything can be handed out in time."""
        handed, limits = (1, 1) if self.whole else (len(self.y[0]), len(self.limit))
        least = np.full((len(self.x[0]), handed, len(self.release), limits), _NEVER)
        least[0, 0, 0, 0] = 0
        for i in range(1, len(least)):
            for c, release in enumerate(self.release[:, i]):
                if release < _CLAIMED:
                    (self._all_reduces if self.whole else self._halves)(least, i, c)
        return bool((least[-1, -1, -1] < _NEVER).any())

    def _collected(self, least: Array, i: int, c: int, waits: Array) -> Array:
        """The least times after a message to level i and coverage c, by the level and all else before it.

        `waits`: the most work that may have been done, by the level before, and what it is told apart by.
        """
        spent = least[: i + 1].copy()
        spent[i, :, c:] = _NEVER  # it would change nothing
        spent[:i, :, c + 1 :] = _NEVER
        if c:
            spent[:, :, 0] = np.maximum(spent[:, :, 0], (self.alone[: i + 1, None] - waits)[:, :, None])
            began = np.where(self.before[c, i, : i + 1] > 0, self.before[c, i, : i + 1] + self.alpha, 0)
            began[0] = 0
            spent[:, :, :c] = np.maximum(spent[:, :, :c], (began[:, None] - waits)[:, :, None, None])
        released: Array = np.maximum(spent, (self.release[c, i] - waits)[:, :, None, None])
        return released + self.alpha

    def _halves(self, least: Array, i: int, c: int) -> None:
        """All states with level i collected and coverage c, from those before."""
        least_x, most_x = self.x
        least_y, most_y = self.y
        top = max(c - 1, 0)
        spent = self._collected(least, i, c, most_x[: i + 1, None] + most_y[None, :])
        spent = np.where((least_y[None, :] > most_x[: i + 1, None])[:, :, None, None], _NEVER, spent).min(axis=(0, 2))
        for j in range(len(least_y)):
            if least_y[j] > most_x[i]:
                break
            least[i, j, c, : top + 1] = spent[j, : top + 1]
            if j:
                earlier = least[i, : j + 1, c, : top + 1].copy()
                earlier[j, top] = _NEVER
                end = earlier + self.alpha + least_x[i] + least_y[j]
                late = end > _CLAIMED - np.maximum(self.left[: j + 1, None], self.limit[None, : top + 1])
                handed = np.where(late, _NEVER, earlier + self.alpha).min()
                least[i, j, c, top] = min(least[i, j, c, top], handed)
        least[i, :, c] = np.minimum(least[i, :, c], _NEVER)

    def _all_reduces(self, least: Array, i: int, c: int) -> None:
        least_x, most_x = self.x
        spent = self._collected(least, i, c, most_x[: i + 1, None])[:, 0, : c + 1, 0]
        limit = self.limit[np.maximum(np.arange(c + 1) - 1, 0)]
        late = spent + least_x[i] > _CLAIMED - np.maximum(self.left[: i + 1, None], limit[None, :])
        least[i, 0, c, 0] = np.where(late, _NEVER, spent).min()


def _in_turn(near: Sequence[int], nbytes: Sequence[int], amounts: Sequence[int]) -> Array:
    """When so many bytes are there, each tensor of them at a moment of its own, by amount."""
    order = sorted(range(len(near)), key=near.__getitem__)
    until = np.cumsum(np.array([nbytes[t] for t in order]))
    moments = np.array([*(near[t] for t in order), _NEVER])
    return np.where(np.array(amounts) > 0, moments[np.searchsorted(until, amounts)], 0)


def _bits(ops: set[int]) -> int:
    return sum(1 << op for op in ops)
