"""Checks a bound of the case "sequences": proves that no sequence of messages takes so little time.

It follows the states of `sequences.py` in whole numbers of 2**-48 of the claimed seconds.
Everything that a schedule has to wait for is rounded down, so rounding can only let more
schedules pass. It shares nothing with the search: it finds what must have been computed
by going through sets of ops, and follows the states for all delivered bytes at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.bound.check_pairs import pairs_fit
from legato.schedule.bound.lower_bound import Certificate
from legato.schedule.bound.plan_kind import Sends
from legato.schedule.bound.waiting_updates import WHOLE

__all__ = ["Walk", "check_sequences"]

#: The claimed time in units; and a number far above it that can still be added to others.
_CLAIMED, _NEVER = 2**48, 2**60

Array = np.ndarray[Any, np.dtype[Any]]


class Walk(Protocol):
    """Durations of ops, and release times and tails of tensors, in whole numbers of `1 / scale` seconds."""

    duration: list[int]
    scale: int
    reorders: bool

    @property
    def phase(self) -> Sequence[str]: ...
    @property
    def compute_setting(self) -> str: ...
    def release(self, t: int) -> int: ...
    def tail(self, t: int) -> int: ...
    def forward(self, t: int) -> int: ...
    def needs(self, t: int) -> set[int]: ...


def check_sequences(
    workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate, sends: Sends
) -> Fraction:
    """The claimed seconds. Raises `InputError` if some sequence of messages may take no longer."""
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    total = sum(tensor.nbytes for tensor in workload.tensors) - workload.tensors[certificate.tensors[0]].nbytes
    for levels in certificate.levels:
        if levels[:2] != (0, 1) or levels[-1] != total or any(b <= a for a, b in pairwise(levels)):
            raise InputError(f"certificate: levels of bytes (expected 0, 1 and rising numbers up to {total})")
    if sends == "all_reduces" and certificate.levels[0] != certificate.levels[1]:
        raise InputError("certificate: bytes collected and delivered at different levels by all-reduces")
    later = _later(walk)
    if any(later(b) >= later(a) for a, b in pairwise(certificate.tensors)):
        raise InputError("certificate: tensors (expected falling tails)")
    if claimed <= 0 or _Relaxed(workload, cluster, walk, claimed, certificate, sends).fits():
        raise InputError(f"bound: a sequence of messages may take {float(claimed)} s")
    return claimed


class _Relaxed:
    """Everything that a schedule has to wait for, in units, and the states that it passes through.

    Coverage, as in `sequences.py`: 0, nothing of the first tensor is collected; 1, some of it; c, L(c - 1).
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        walk: Walk,
        claimed: Fraction,
        certificate: Certificate,
        sends: Sends,
    ) -> None:
        self.nbytes = [tensor.nbytes for tensor in workload.tensors]
        self.walk, self.sends, self.all_reduce_only = walk, sends, sends == "all_reduces"
        self.claimed, self.never = _CLAIMED, _NEVER
        self.unit = claimed * walk.scale / _CLAIMED
        self.duration = [self.down(seconds) for seconds in walk.duration]
        self.producer = [tensor.ready_after for tensor in workload.tensors]
        self.needs = {op: walk.needs(t) for t, op in enumerate(self.producer)} if walk.reorders else {}
        self.release_s = {op: sum(walk.duration[i] for i in needs) for op, needs in self.needs.items()}
        first, own = certificate.tensors[0], self.nbytes[certificate.tensors[0]]
        others = [t for t in range(len(self.nbytes)) if t != first]
        tail, later = ([*map(of, range(len(self.nbytes)))] for of in (walk.tail, _later(walk)))
        x, y = certificate.levels
        x_most, y_most = ([*(level - 1 for level in levels[1:]), levels[-1]] for levels in (x, y))
        self.levels = x, x_most, y, y_most
        self._price(cluster, self.levels, own, walk.scale)

        everything, joined = [first, *others], [level + own for level in x]
        release = [self.ready([], others, x), self.ready([first], everything, joined)]
        before = [np.zeros((len(x), len(x)), np.int64)] * 2
        for mark in certificate.tensors:
            covered = [t for t in others if later[t] >= later[mark]]
            carried = sum(self.nbytes[t] for t in covered)
            at = self.ready([first, *covered], everything, joined)
            release.append(np.where(np.array(x_most) < carried, _NEVER, at))
            earlier = [max(carried - most + level, 0) for most in x_most for level in x]
            before.append(self.ready([], covered, earlier).reshape(len(x), len(x)))
        self.release, self.before = np.array(release), np.array(before)
        self.finish = [0, 0]
        for mark in certificate.tensors:
            alone = ((self.down(walk.release(t)), self.nbytes[t]) for t in range(len(later)) if later[t] >= later[mark])
            self.finish.append(self._alone(sorted(alone)))
        self.after = self._after(tail, later, certificate.tensors, y_most)
        if _updating(walk):
            waits = np.repeat(self._updates(workload, [most + own for most in y_most])[:, None], len(release), axis=1)
            waits[:, 0] = self._updates(workload, y_most, never=first)
            self.after = np.maximum(self.after, self._after(later, later, certificate.tensors, y_most) + waits)

    def _alone(self, ready: Sequence[tuple[int, int]]) -> int:
        """When all of these (release time, bytes) can be collected at the earliest."""
        sent = np.array([0, *accumulate(self.down(self.price * nbytes) for _, nbytes in ready)])
        finish = np.zeros(len(ready) + 1, np.int64)
        for j, (at, _) in enumerate(ready):
            start = (np.maximum(finish[: j + 1], at) - sent[: j + 1]).min()
            finish[j + 1] = start + self.alpha + sent[j + 1]
        return int(finish[-1])

    def _after(self, of: list[int], later: list[int], marks: Sequence[int], delivered: Sequence[int]) -> Array:
        """By level delivered and coverage before an all-gather: the least of these times of what is left after it."""
        others = [t for t in range(len(of)) if t != marks[0]]
        near, nbytes = [self.down(of[t]) for t in others], [self.nbytes[t] for t in others]
        left = _in_turn(near, nbytes, [sum(nbytes) - most for most in delivered])
        limits = [min(self.down(of[t]) for t in range(len(of)) if later[t] >= later[mark]) for mark in marks]
        least: Array = np.maximum(left[:, None], np.array([limits[0], *limits, 0]))
        return least

    def _updates(self, workload: Workload, complete: Sequence[int], never: int | None = None) -> Array:
        """For each amount of bytes, the least time of the updates that wait if complete tensors have no more.

        For each set of the tensors with the largest shares, the others fill what is left in parts.
        """
        shares = [0] * len(self.nbytes)
        for op, phase in enumerate(self.walk.phase):
            if phase == "optimizer":
                read = [t for t, tensor in enumerate(workload.tensors) if op in tensor.readers]
                total = sum(self.nbytes[t] for t in read)
                for t in read:
                    shares[t] += self.duration[op] * self.nbytes[t] // total
        may = sorted((t for t in range(len(shares)) if t != never), key=lambda t: shares[t], reverse=True)
        whole, parts = may[:WHOLE], may[WHOLE:]
        parts.sort(key=lambda t: Fraction(shares[t], self.nbytes[t]), reverse=True)
        until = [*accumulate((self.nbytes[t] for t in parts), initial=0)]
        seconds = [*accumulate((shares[t] for t in parts), initial=0)]
        sets = {0: 0}  # the most time by bytes
        for t in whole:
            for nbytes, done in [*sets.items()]:
                sets[nbytes + self.nbytes[t]] = max(sets.get(nbytes + self.nbytes[t], 0), done + shares[t])
        most, kept = -1, []
        for nbytes, done in sorted(sets.items()):
            if done > most:
                most = done
                kept.append((nbytes, done))
        waiting = []
        for amount in complete:
            best = 0
            for nbytes, done in kept:
                if nbytes <= amount:
                    k = bisect_left(until, amount - nbytes, hi=len(until) - 1)
                    more = seconds[k]
                    if until[k] > amount - nbytes:  # a part of the last one, rounded up
                        t = parts[k - 1]
                        more = seconds[k - 1] - (-shares[t] * (amount - nbytes - until[k - 1]) // self.nbytes[t])
                    best = max(best, done + more)
            waiting.append(sum(shares) - best)
        return np.array(waiting)

    def down(self, value: int | Fraction) -> int:
        """In units, rounded down."""
        return int(value // self.unit)

    def _price(self, cluster: Cluster, levels: Sequence[Sequence[int]], own: int, scale: int) -> None:
        """Set alpha, the work for the first tensor, and the work of the least and most bytes of every level.

        The work of the most bytes is rounded up.
        """
        total = sum(self.nbytes)
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha = min(a for a, _ in costs)
        slope = (min(a + b * total for a, b in costs) - alpha) / total
        share = Fraction(scale, 1 if self.all_reduce_only else 2)
        self.alpha, self.first = self.down(alpha * share), self.down(slope * share * own)
        self.price = slope * share
        least_x, most_x, least_y, most_y = (np.array([self.down(slope * share * n) for n in of]) for of in levels)
        self.x, self.y = (least_x, most_x + (most_x > 0)), (least_y, most_y + (most_y > 0))

    def ready(self, required: Sequence[int], tensors: Sequence[int], amounts: Sequence[int]) -> Array:
        """For each amount, the least time until the required tensors and this many bytes of `tensors` are computed."""
        if not self.walk.reorders:
            heads = [self.down(self.walk.release(t)) for t in tensors]
            least = max((self.down(self.walk.release(t)) for t in required), default=0)
            return np.maximum(_in_turn(heads, [self.nbytes[t] for t in tensors], amounts), least)
        return self._in_any_order(required, tensors, amounts)

    def _in_any_order(self, required: Sequence[int], tensors: Sequence[int], amounts: Sequence[int]) -> Array:
        """The least over the op that needs most of all that run; the others make the most bytes for their time."""
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
            others = [op for op in by_price if self.release_s[op] <= self.release_s[deepest] and needs[op] & ~bits]
            least = np.minimum(least, self._filled(run, made, others, needs, asked))
        return np.minimum.accumulate(least[::-1])[::-1][place]

    def _filled(
        self, run: set[int], made: dict[int, int], others: Sequence[int], needs: dict[int, int], amounts: Array
    ) -> Array:
        """For each amount, the time of these ops, and of as much of the others, in order, as the bytes need."""
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
        """Whether everything can be delivered in time."""
        if self.sends == "pairs":
            return pairs_fit(self)
        delivered, limits = (1, 1) if self.all_reduce_only else (len(self.y[0]), len(self.release))
        least = np.full((len(self.x[0]), delivered, len(self.release), limits), _NEVER)
        least[0, 0, 0, 0] = 0
        for i in range(len(least)):
            for c, release in enumerate(self.release[:, i]):
                if release < _CLAIMED and (i or c):
                    (self._all_reduces if self.all_reduce_only else self._halves)(least, i, c)
        return bool(least[-1, -1, -1, -1] < _NEVER)

    def collected(self, least: Array, i: int, c: int, done: Array) -> Array:
        """The least times after a message to level i and coverage c, for every state before it.

        `done` is the most work that may have been done, also by state.
        """
        spent = least[: i + 1].copy()
        spent[i, :, c:] = _NEVER  # such a message would change nothing
        spent[:i, :, c + 1 :] = _NEVER
        if c:
            spent[:, :, 0] = np.maximum(spent[:, :, 0], self.release[1, : i + 1, None, None] - done[:, :, 0])
            began = np.where(self.before[c, i, : i + 1] > 0, self.before[c, i, : i + 1] + self.alpha, 0)
            began[0] = 0
            spent[:, :, :c] = np.maximum(spent[:, :, :c], began[:, None, None, None] - done[:, :, :c])
        released: Array = np.maximum(spent, self.release[c, i] - done)
        return released + self.alpha

    def _halves(self, least: Array, i: int, c: int) -> None:
        """Find all states with level i collected and coverage c from the states before them."""
        (least_x, most_x), (least_y, most_y) = self.x, self.y
        kinds = range(len(self.release))
        own = np.array([[(self.first + 1) * ((before > 0) + (last > 0)) for last in kinds] for before in kinds])
        spent = self.collected(least, i, c, (most_x[: i + 1, None] + most_y)[:, :, None, None] + own)
        spent = np.where((least_y > most_x[: i + 1, None])[:, :, None, None], _NEVER, spent).min(axis=(0, 2))
        for j in range(len(least_y)):
            if least_y[j] > most_x[i]:
                break
            least[i, j, c, : c + 1] = spent[j, : c + 1]
            if c > 1:
                done = most_x[i] + most_y[j] + (self.first + 1) * (1 + (np.arange(c + 1) > 0))
                least[i, j, c, : c + 1] = np.maximum(least[i, j, c, : c + 1], self.finish[c] - done)
            for a in sorted({0, min(c, 1), c}):
                if j or a:
                    earlier = least[i, : j + 1, c, : a + 1].copy()
                    earlier[j, a] = _NEVER
                    end = earlier + self.alpha + least_x[i] + least_y[j] + self.first * ((c > 1) + (a > 1))
                    late = end > _CLAIMED - self.after[: j + 1, : a + 1]
                    delivered = np.where(late, _NEVER, earlier + self.alpha).min()
                    least[i, j, c, a] = min(least[i, j, c, a], delivered)
        least[i, :, c] = np.minimum(least[i, :, c], _NEVER)

    def _all_reduces(self, least: Array, i: int, c: int) -> None:
        """The same for all-reduces, where everything that is collected is delivered."""
        least_x, most_x = self.x
        own = np.where(np.arange(len(self.release)) > 0, self.first + 1, 0)[None, None, :, None]
        spent = self.collected(least, i, c, most_x[: i + 1, None, None, None] + own)[:, 0, : c + 1, 0]
        spent = np.maximum(spent, self.finish[c] - most_x[i] - self.first - 1)
        end = spent + least_x[i] + self.first * (c > 1)
        late = end > _CLAIMED - self.after[: i + 1, : c + 1]
        least[i, 0, c, 0] = min(np.where(late, _NEVER, spent).min(), _NEVER)


def _updating(walk: Walk) -> bool:
    return walk.compute_setting == "one" and "optimizer" in walk.phase


def _later(walk: Walk) -> Callable[[int], int]:
    """What the limits are those of: tails, or the forward ops of tails where updates count apart."""
    return walk.forward if _updating(walk) else walk.tail


def _in_turn(near: Sequence[int], nbytes: Sequence[int], amounts: Sequence[int]) -> Array:
    """For each amount, when this many bytes are ready, with a fixed time for each tensor."""
    order = sorted(range(len(near)), key=near.__getitem__)
    until = np.cumsum(np.array([nbytes[t] for t in order]))
    moments = np.array([*(near[t] for t in order), _NEVER])
    return np.where(np.array(amounts) > 0, moments[np.searchsorted(until, amounts)], 0)


def _bits(ops: set[int]) -> int:
    return sum(1 << op for op in ops)
