"""Checks a bound of the case "whole": in every order in which its tensors arrive, the stream waits for so long.

It counts in whole numbers of 2**-48 of the claimed seconds. What a schedule has to wait for is
rounded down, and what it can have done is rounded up. It finds what the network can carry from the
recurrence of `merge_optimal.py` as it is written, and asks, for each set of the tensors, whether
a schedule of the claimed time can get there. `whole.py` has the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.bound.check_sequences import Walk
from legato.schedule.bound.lower_bound import Certificate
from legato.schedule.bound.plan_kind import Sends

__all__ = ["check_whole"]

#: The claimed time in units, and the most tensors: there are 3**10 pairs of sets of so many.
_CLAIMED, _MOST = 2**48, 10

Array = np.ndarray[Any, np.dtype[Any]]


def check_whole(workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate, sends: Sends) -> Fraction:
    """The claimed seconds. Raises `InputError` if the tensors may arrive such that an iteration takes less."""
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    if walk.compute_setting != "one" or len(certificate.tensors) > _MOST:
        count = len(certificate.tensors)
        raise InputError(f"certificate: case 'whole' with {count} tensors (expected at most {_MOST}, on one stream)")
    if claimed <= 0 or _Stream(workload, cluster, walk, claimed, certificate.tensors, sends).fits():
        raise InputError(f"bound: an iteration may take less than {float(claimed)} s as whole tensors arrive")
    return claimed


class _Stream:
    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        walk: Walk,
        claimed: Fraction,
        large: tuple[int, ...],
        sends: Sends,
    ) -> None:
        self.large, count = large, len(workload.tensors)
        self.unit = claimed * walk.scale / _CLAIMED
        nbytes = [tensor.nbytes for tensor in workload.tensors]
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha = min(a for a, _ in costs)
        slope = (min(a + b * sum(nbytes) for a, b in costs) - alpha) / sum(nbytes)
        self.alpha = self.down(alpha * walk.scale / (2 if sends == "halves" else 1))
        self.once = self.alpha if sends == "halves" else 0
        self.last = self.down(alpha * walk.scale / (1 if sends == "all_reduces" else 2))
        self.work = [self.down(slope * walk.scale * n) for n in nbytes]
        self.release = [self.down(walk.release(t)) for t in range(count)]
        self.forward = [self.down(walk.forward(t)) for t in range(count)]
        self.share = [0] * count
        forward, updates = 0, 0
        for op, (phase, seconds) in enumerate(zip(walk.phase, walk.duration, strict=True)):
            read = [t for t, tensor in enumerate(workload.tensors) if op in tensor.readers]
            forward += seconds if phase == "forward" else 0
            if phase == "optimizer" and read:
                updates += seconds
                for t in read:
                    self.share[t] += self.down(Fraction(seconds * nbytes[t], sum(nbytes[r] for r in read))) + 1
        self.passes = self.down(forward)
        self.left = self.passes + self.down(updates)
        self._others([t for t in range(count) if t not in large])

    def down(self, value: int | Fraction) -> int:
        """In units, rounded down."""
        return int(value // self.unit)

    def _others(self, others: Sequence[int]) -> None:
        """What has to arrive of the others before forward ops, and how long their updates are."""
        needed, allowed, before = [], [], 0
        for t in sorted(others, key=self.forward.__getitem__, reverse=True):
            needed.append(before)
            allowed.append(self.passes - self.forward[t])
            before += self.work[t]
        self.needed, self.allowed = np.array([*needed, before]), np.array([*allowed, self.passes])
        self.rest = others
        dear = sorted((t for t in others if self.work[t]), key=lambda t: Fraction(self.share[t], self.work[t]))[::-1]
        self.free = sum(self.work[t] for t in dear if self.share[t] > self.work[t])
        nothing = sum(self.share[t] for t in others if not self.work[t])
        self.edges = np.cumsum([0, *(self.work[t] for t in dear)])
        self.until = nothing + np.cumsum([0, *(self.share[t] for t in dear)])

    def _updates(self, work: Array) -> Array:
        """The most time of updates of this much work of the others, rounded up to whole tensors or in parts."""
        k = np.clip(np.searchsorted(self.edges, work), 1, max(len(self.edges) - 1, 1))
        if len(self.edges) == 1:
            return np.full(len(work), self.until[0])
        lower, upper = self.edges[k - 1], self.edges[k]
        part = (work - lower) / (upper - lower)  # floats, to a part in 2**52 of a tensor
        done = self.until[k - 1] + np.ceil((self.until[k] - self.until[k - 1]) * np.minimum(part, 1.0)).astype(np.int64)
        return np.asarray(done + 2, dtype=np.int64)

    def fits(self) -> bool:
        """Whether all can have arrived such that nothing proves the claimed time."""
        full = (1 << len(self.large)) - 1
        networks = [_Network(self, mask) for mask in range(full + 1)]
        reached = {0}
        for mask in range(full):
            for after in range(mask + 1, full + 1) if mask in reached else ():
                if after & mask == mask and self._proves(networks[mask], networks[after]) < _CLAIMED:
                    reached.add(after)
        return full in reached

    def _proves(self, before: _Network, after: _Network) -> int:
        missing = max(self.forward[t] for t in self.large if t not in before.inside)
        end = np.maximum(self.once + after.alone, self.once + after.time_for(after.own + self.needed))
        already = before.own + self.needed
        end = np.where(already > 0, np.maximum(end, self.once + self.last + before.time_for(already)), end)
        room = np.minimum(
            after.done_by(end - self.once) - after.own, before.done_by(end - self.once - self.last) - before.own
        )
        updated = self._updates(np.maximum(room, max(self.free, 0)))
        done = sum(self.share[t] for t in before.inside) + updated + np.minimum(self.allowed, self.passes - missing)
        return int((end + self.left - done).min())


class _Network:
    """What the network can carry of some of the tensors and all others, in order of their release."""

    def __init__(self, stream: _Stream, mask: int) -> None:
        self.inside = {t for k, t in enumerate(stream.large) if mask >> k & 1}
        self.alpha, self.own = stream.alpha, sum(stream.work[t] for t in self.inside)
        self.begun, self.sent = self._carried(stream, [*stream.rest, *self.inside])
        begun, sent = self._carried(stream, self.inside)
        self.alone = int(begun[-1] + self.alpha + sent[-1]) if self.inside else 0

    def _carried(self, stream: _Stream, tensors: Iterable[int]) -> tuple[Array, Array]:
        """By tensor, the least (start of a message that ends with it) - (work before it); and the work, from 0 on."""
        order = sorted(tensors, key=stream.release.__getitem__)
        sent = np.cumsum([0, *(stream.work[t] for t in order)])
        finish, begun = np.zeros(len(order) + 1, np.int64), np.zeros(len(order), np.int64)
        for j, t in enumerate(order):
            begun[j] = (np.maximum(finish[: j + 1], stream.release[t]) - sent[: j + 1]).min()
            finish[j + 1] = begun[j] + self.alpha + sent[j + 1]
        return begun, sent

    def time_for(self, work: Array) -> Array:
        """The least time for each amount of work."""
        if not len(self.begun):
            return np.zeros(len(work), np.int64)
        j = np.clip(np.searchsorted(self.sent, work) - 1, 0, len(self.begun) - 1)
        return np.where(work > 0, self.begun[j] + self.alpha + work, 0)

    def done_by(self, moments: Array) -> Array:
        """The most work by each moment, rounded up."""
        if not len(self.begun):
            return np.zeros(len(moments), np.int64)
        possible = np.minimum(moments[:, None] - self.alpha - self.begun, self.sent[1:])
        most: Array = np.maximum(possible.max(axis=1), 0) + len(self.sent)
        return most
