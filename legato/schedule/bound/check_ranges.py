"""Checks a bound of the case "ranges": proves that no ranges of messages for nested sets take so little time.

It counts in whole numbers of 2**-48 of the claimed seconds. What a schedule has to wait for is rounded
down, and what it can have done is rounded up. `ranges.py` has the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.bound.check_sequences import Walk
from legato.schedule.bound.lower_bound import Certificate
from legato.schedule.bound.waiting_updates import WHOLE

__all__ = ["check_ranges"]

#: The claimed time in units, the most messages that are counted, and the most sets.
_CLAIMED, _MOST, _SETS = 2**48, 48, 256
#: The amounts of work for which waiting updates are known, and the shortest interval of begins.
_STEPS, _SHORT = 4096, _CLAIMED >> 13
_NEVER = -(2**60)

Array = np.ndarray[Any, np.dtype[Any]]


def check_ranges(workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate) -> Fraction:
    """The claimed seconds. Raises `InputError` if ranges of messages may take no longer."""
    sizes, tensors = certificate.sets, certificate.tensors
    if walk.compute_setting != "one" or len(sizes) > _SETS:
        raise InputError(f"certificate: case 'ranges' with {len(sizes)} sets (expected at most {_SETS}, on one stream)")
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    if claimed <= 0 or _Sets(workload, cluster, walk, claimed, [tensors[:size] for size in sizes]).fit():
        raise InputError(f"bound: ranges of messages may take {float(claimed)} s")
    return claimed


class _Sets:
    def __init__(
        self, workload: Workload, cluster: Cluster, walk: Walk, claimed: Fraction, sets: Sequence[tuple[int, ...]]
    ) -> None:
        nbytes = [tensor.nbytes for tensor in workload.tensors]
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha, total = min(a for a, _ in costs), sum(nbytes)
        slope = (min(a + b * total for a, b in costs) - alpha) / total
        self.unit, self.walk = claimed * walk.scale / _CLAIMED, walk
        self.price = slope * walk.scale / self.unit  # of a byte, in units
        self.alpha = self.down(alpha * walk.scale)
        near = [(self.down(walk.release(t)), int(self.price * nbytes[t])) for t in range(len(nbytes))]
        self._carry(sorted(near))
        self.release, self.tail, self.forward = (
            np.array([self.down(min(map(of, tensors))) for tensors in sets])
            for of in (walk.release, walk.tail, walk.forward)
        )
        self.work = np.array([int(self.price * sum(nbytes[t] for t in tensors)) for tensors in sets])
        self.before = self.done_by(self.release) - self.release
        shares = self._shares(workload)
        self.alone = sum(shares[t] for t in sets[0])
        amounts = np.array([total * k // _STEPS for k in range(_STEPS + 1)])  # whole bytes
        self.waits = _waiting(shares, nbytes, amounts)
        self.step = -int(-self.price * total // _STEPS)

    def down(self, value: int | Fraction) -> int:
        """In units, rounded down."""
        return int(value // self.unit)

    def _carry(self, near: Sequence[tuple[int, int]]) -> None:
        """By tensor: the work until it, and the least (start of a message that ends with it) - (work before it)."""
        self.sent = np.cumsum([0, *(work for _, work in near)])
        finish, self.begun = np.zeros(len(near) + 1, np.int64), np.zeros(len(near), np.int64)
        for j, (release, _) in enumerate(near):
            self.begun[j] = (np.maximum(finish[: j + 1], release) - self.sent[: j + 1]).min()
            finish[j + 1] = self.begun[j] + self.alpha + self.sent[j + 1]

    def done_by(self, moments: Array) -> Array:
        """The most work by each moment, rounded up."""
        possible = np.minimum(moments[:, None] - self.alpha - self.begun, self.sent[1:])
        most: Array = np.maximum(possible.max(axis=1), 0) + len(self.sent)
        return most

    def _shares(self, workload: Workload) -> list[int]:
        """By tensor, its share of the updates that read it."""
        shares = [0] * len(workload.tensors)
        for op, phase in enumerate(self.walk.phase):
            if phase == "optimizer":
                read = [t for t, tensor in enumerate(workload.tensors) if op in tensor.readers]
                total = sum(workload.tensors[t].nbytes for t in read)
                for t in read:
                    shares[t] += self.down(Fraction(self.walk.duration[op] * workload.tensors[t].nbytes, total))
        return shares

    def fit(self) -> bool:
        """Whether ranges of messages may exist, wherever that of the innermost set begins."""
        left = [(int(self.release[0]), _CLAIMED)]
        while left:
            begin, end = left.pop()
            if self._fit_from(begin, end):
                if end - begin <= _SHORT:
                    return True
                middle = (begin + end) // 2
                left += [(middle, end), (begin, middle)]
        return False

    def _end(self, t: int, done: Array) -> Array:
        """When a message that leaves something of a set behind ends at the latest, after this much work."""
        step = np.clip(-(-done // self.step), 0, _STEPS)
        end: Array = _CLAIMED - np.maximum(self.tail[t], self.forward[t] + self.waits[step])
        return end

    def _fit_from(self, begin: int, until: int) -> bool:
        """Whether they may exist if the range of the innermost set begins in this time."""
        by_begin, by_until = self.done_by(np.array([begin, until]))
        before, begins = self.before.copy(), self.release.copy()
        before[0], begins[0] = by_begin - begin, begin
        most = min(_CLAIMED // max(self.alpha, 1) + 2, _MOST)
        paid, count = np.arange(most + 1) * self.alpha, len(self.release)
        ends = np.full((count, count, most + 1), _NEVER)
        first = self._end(0, by_until)
        ends[0, 0, 1] = min(first, _CLAIMED - self.forward[0] - self.alone)
        ends[0, 0, 2] = self._end(0, before[0] + first - self.alpha)
        for t in range(count):
            ends[t, :t] = _one_more(ends[:t, :t].max(axis=0, initial=_NEVER))
            latest = ends[: t + 1, :t].max(axis=1, initial=_NEVER)
            own = np.where(latest >= 0, self._end(t, before[: t + 1, None] + latest - paid), _NEVER)
            ends[: t + 1, t] = np.maximum(ends[: t + 1, t], _one_more(own))
            for m in range(1, most):
                end = self._end(t, before[: t + 1] + ends[: t + 1, t, m] - paid[m])
                end = np.where(ends[: t + 1, t, m] >= 0, end, _NEVER)
                ends[: t + 1, t, m + 1] = np.maximum(ends[: t + 1, t, m + 1], end)
            never = ends[: t + 1, t, most] < 0
            ends[: t + 1, t, most] = np.where(never, _NEVER, _CLAIMED - max(self.tail[t], self.forward[t]))
            needed = begins[: t + 1, None, None] + paid + self.work[t]
            now = ends[: t + 1, : t + 1]
            now[(now < needed) | (np.arange(most + 1) == 0)] = _NEVER
            if (now < 0).all():
                return False
        return True


def _one_more(ends: Array) -> Array:
    """The ends with one message more; the last state is that of so many or more."""
    more = np.full(ends.shape, _NEVER)
    more[..., 1:] = ends[..., :-1]
    more[..., -1] = np.maximum(more[..., -1], ends[..., -1])
    return more


def _waiting(shares: Sequence[int], nbytes: Sequence[int], complete: Array) -> Array:
    """For each amount of bytes, the least time of the updates that wait if complete tensors have no more.

    For each set of the tensors with the largest shares, the others fill what is left in parts, rounded up.
    """
    by_share = sorted(range(len(shares)), key=shares.__getitem__, reverse=True)
    whole, parts = by_share[:WHOLE], by_share[WHOLE:]
    parts.sort(key=lambda t: Fraction(shares[t], nbytes[t]), reverse=True)
    until = np.cumsum([0, *(nbytes[t] for t in parts)])
    seconds = np.cumsum([0, *(shares[t] for t in parts)])
    sets = {(0, 0)}
    for t in whole:
        sets |= {(size + nbytes[t], done + shares[t]) for size, done in sets}
    best = np.zeros(len(complete), np.int64)
    for size, done in sets:
        left = complete - size
        k = np.clip(np.searchsorted(until, left), 1, max(len(until) - 1, 1))
        more = np.zeros(len(complete), np.int64)
        if parts:
            part = np.minimum((left - until[k - 1]) / (until[k] - until[k - 1]), 1.0)  # to a part in 2**52
            more = seconds[k - 1] + np.ceil((seconds[k] - seconds[k - 1]) * part).astype(np.int64) + 2
        best = np.maximum(best, np.where(left >= 0, done + more, 0))
    waiting: Array = np.maximum(sum(shares) - best, 0)
    return waiting
