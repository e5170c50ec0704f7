"""The bound "whole": the stream waits for tensors that can only be updated when they are complete.

A tensor that is a good part of all bytes travels for long, and its update, which is long, too,
comes after its last byte. Meanwhile the stream has only the updates of other tensors to do, and
forward ops that need none of what is missing. In which order the large tensors arrive decides
how long it is idle.

Take some tensors W. Let A be those of W that have arrived before some moment y, at which others of
them, B, arrive with one message. Of the tensors outside of W, let s bytes be complete before this
message. Until y, the stream has done at most all backward ops, the updates of A, those of s bytes
outside of W, and of the forward ops what needs neither the rest of W, nor a tensor outside of it
that is not complete. What is left comes after y:

    T >= y + updates of all tensors and forward pass - u(A) - g(s) - v(s).

- g(s): the most time of updates of s bytes outside of W, by shares (`waiting_updates.py`), also of
  parts of tensors.
- v(s): the forward pass less the time of the ops that need the largest of what is missing. All
  others with as long a time must be complete for more, which takes some bytes.
- y: A, B and s bytes have travelled by then, and A and s bytes before the last message, which
  pays alpha (alpha/2 where halves may be sent, also in pairs). A and B alone need f(A and B), as
  in "release".

y grows by beta a byte at least. If g grew faster, for the first bytes, all of those count as
complete. So only the s at which v grows have to be tried. As W arrives, A goes from the empty set to
W in steps; the least, over all such paths, of the largest T on it, is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from legato.core.cluster import LinearCost
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.capacity import Capacity
from legato.schedule.bound.plan_kind import Sends
from legato.schedule.bound.waiting_updates import Updates

__all__ = ["WholeBound", "whole"]

#: The most tensors of W, and the most steps of v.
_LARGE, _STEPS = 6, 64
#: Where the largest of these takes less than this fraction of the bound, updates are as good as divisible.
_DEAR = 0.002
_ROUNDING = 1e-9


class WholeBound(NamedTuple):
    """No schedule takes less than `seconds`; the tensors W that prove it."""

    seconds: float
    tensors: tuple[int, ...]


def whole(
    workload: Workload,
    times: HeadsTails,
    updates: Updates,
    line: LinearCost,
    sends: Sends,
    *,
    beat_s: float,
) -> WholeBound | None:
    """The bound for the tensors with the longest updates, or None if it is not above `beat_s`."""
    share = updates.share_s
    if line.beta_s_per_byte <= 0 or float(share.max()) < _DEAR * beat_s:
        return None
    large = sorted(range(len(share)), key=lambda t: -share[t])[:_LARGE]
    seconds = _Stream(workload, times, line, sends, large, updates).least_s(beat_s)
    return WholeBound(seconds, tuple(large)) if seconds > beat_s else None


class _Stream:
    """What the stream can have done when tensors of W arrive. Sets of them are bit masks."""

    def __init__(
        self,
        workload: Workload,
        times: HeadsTails,
        line: LinearCost,
        sends: Sends,
        large: Sequence[int],
        updates: Updates,
    ) -> None:
        share, self.forward_s = updates.share_s, updates.forward_s
        self.release_s, self.large, self.share = np.array(times.release_s), large, share
        self.work_s = line.beta_s_per_byte * np.array([float(tensor.nbytes) for tensor in workload.tensors])
        self.nbytes = [tensor.nbytes for tensor in workload.tensors]
        self.cost = LinearCost(line.alpha_s * (0.5 if sends == "halves" else 1.0), line.beta_s_per_byte)
        self.once_s = line.alpha_s - self.cost.alpha_s
        self.last_s = line.alpha_s * (1.0 if sends == "all_reduces" else 0.5)  # what the last message pays first
        ops = workload.ops
        self.pass_s = sum(ops[op].duration_s for op in workload.phase_ops("forward"))
        self.left_s = self.pass_s + float(share.sum())  # updates that read nothing may run at any time
        inside = set(large)
        self.others = np.array([t for t in range(len(share)) if t not in inside], dtype=np.int64)
        self.by_release = sorted(range(len(share)), key=times.release_s.__getitem__)
        self._steps()
        rate = self.share[self.others] / self.work_s[self.others]
        order = self.others[np.argsort(-rate, kind="stable")]
        self.edges, self.until = (np.cumsum(np.append(0.0, of[order])) for of in (self.work_s, self.share))
        self.free_s = float(self.work_s[self.others][rate > 1].sum())

    def _steps(self) -> None:
        """The work for other tensors that has to be done for each time of forward ops, both rising."""
        order = self.others[np.argsort(-self.forward_s[self.others], kind="stable")]
        needed = np.cumsum(np.append(0.0, self.work_s[order]))
        allowed = self.pass_s - np.append(self.forward_s[order], 0.0)
        if len(order) > _STEPS:  # some of the needs, each with what the last one before the next allows
            kept = np.unique(np.linspace(0, len(order), _STEPS).astype(np.int64))
            needed, allowed = needed[kept], allowed[np.append(kept[1:] - 1, len(order))]
        self.needed_s, self.allowed_s = needed, allowed

    def least_s(self, beat_s: float) -> float:
        """The least, over all orders in which W arrives, of the largest time that they prove."""
        full = (1 << len(self.large)) - 1
        least = [np.inf] * (full + 1)
        least[0] = beat_s
        capacities = [self._capacity(self._inside(mask)) for mask in range(full + 1)]
        for mask in range(full):
            left = full ^ mask
            arriving = left
            while arriving:  # all subsets of what is left
                after = mask | arriving
                if least[mask] < least[after]:
                    proved = self._proves(mask, after, capacities[mask], capacities[after])
                    least[after] = min(least[after], max(least[mask], proved))
                arriving = (arriving - 1) & left
        return float(least[full])

    def _inside(self, mask: int) -> set[int]:
        return {t for k, t in enumerate(self.large) if mask >> k & 1}

    def _capacity(self, inside: set[int], *, others: bool = True) -> Capacity:
        """What the network can carry of some of W, with or without the other tensors."""
        outside = set(self.large) - inside
        chosen = [t for t in self.by_release if t in inside or (others and t not in outside)]
        return Capacity.of([float(self.release_s[t]) for t in chosen], [self.nbytes[t] for t in chosen], self.cost)

    def _proves(self, mask: int, after: int, before_it: Capacity, with_it: Capacity) -> float:
        """The seconds that the arrival of all up to `after` proves, where those of `mask` are there."""
        inside, arrived = self._inside(mask), self._inside(after)
        missing = max(float(self.forward_s[t]) for t in self.large if t not in inside)
        own, both = (float(sum(self.work_s[t] for t in of)) for of in (inside, arrived))
        alone = self.once_s + self._capacity(arrived, others=False).needed(both)
        done = float(sum(self.share[t] for t in inside))
        best = np.inf
        for needed, allowed in zip(self.needed_s, self.allowed_s, strict=True):
            least = max(alone, self.once_s + with_it.needed((both + needed) * (1 - _ROUNDING)))
            if own + needed > 0:
                least = max(least, self.once_s + self.last_s + before_it.needed((own + needed) * (1 - _ROUNDING)))
            more = min(
                with_it.carried(least - self.once_s) - both,
                before_it.carried(least - self.once_s - self.last_s) - own,
            )
            updated = float(np.interp(max(more, self.free_s, 0.0), self.edges, self.until))
            best = min(best, least + self.left_s - done - updated - min(allowed, self.pass_s - missing))
            if allowed >= self.pass_s - missing:
                break
        return best * (1 - _ROUNDING)
