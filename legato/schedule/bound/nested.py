"""The bound "nested": sets of tensors, each inside the next, and the messages between the first and last byte of each.

What is ready last is needed first, so sets lie inside each other, and so do the stretches of time in which they can
be sent, each of a whole number of messages. docs/bounds.md ("Nested") has the proof. Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.cluster import LinearCost
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.capacity import Capacity, HalvesCapacity, capacities
from legato.schedule.bound.plan_kind import Sends
from legato.schedule.bound.waiting_updates import update_times

__all__ = ["Chain", "NestedSets", "SetsBound", "nested"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: The most sets of a chain.
_SETS = 128
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 1e-7, 1e-9


class SetsBound(NamedTuple):
    """No schedule takes `seconds`; the first `sets[0]`, `sets[1]`, ... of these tensors are the sets that prove it."""

    seconds: float
    tensors: tuple[int, ...]
    sets: tuple[int, ...]


class NestedSets(NamedTuple):
    """What the sets of a chain have to wait for, the innermost first; all in seconds.

    `message_s` is what each message pays first, and `once_s` what is paid once. `updates_s`
    has what takes the place of beta * B(t) + q(j) where updates count, without f(j), by i
    and t; `innermost_s` the same for j = 1, and `alone_s`, by t, for one message.
    `both_ends` is how many messages two new ends need.
    """

    release_s: Floats
    tail_s: Floats
    forward_s: Floats
    work_s: Floats
    updates_s: Floats
    innermost_s: Floats
    alone_s: Floats
    message_s: float
    once_s: float
    both_ends: int

    def fits(self, seconds: float) -> bool:
        """Whether i, j and m can be chosen for every set such that no inequality is hurt."""
        return sum(1 for _ in self.messages(seconds)) == len(self.release_s)

    def messages(self, seconds: float) -> Iterator[Floats]:
        """For each set, the time that its messages pay first at least, by i and j; ends where `seconds` is too short.

        Each table is overwritten by the next one.
        """
        count, limit = len(self.release_s), seconds * (1 + _ROUNDING) - self.once_s
        ends = self.release_s[:, None] + self.tail_s
        updated = self.release_s[:, None] + self.forward_s
        paid = np.full((count, count), np.inf)
        for t in range(count):
            if t == 0:
                paid[0, 0] = self.message_s
            else:
                inside = paid[:t, :t]
                paid[t, :t], paid[:t, t] = inside.min(axis=0) + self.message_s, inside.min(axis=1) + self.message_s
                paid[t, t] = inside.min() + self.both_ends * self.message_s
            now = paid[: t + 1, : t + 1]
            updates = np.repeat(self.updates_s[: t + 1, t, None], t + 1, axis=1)
            updates[:, 0] = self.innermost_s[: t + 1, t]
            updates[0, 0] = min(self.alone_s[t], self.message_s + updates[0, 0])
            after = np.maximum(ends[: t + 1, : t + 1] + self.work_s[t], updated[: t + 1, : t + 1] + updates)
            now[now + after > limit] = np.inf
            if not np.isfinite(now).any():
                return
            yield now


def nested(
    workload: Workload,
    times: HeadsTails,
    line: LinearCost,
    sends: Sends,
    *,
    beat_s: float,
    one_stream: bool = True,
    most: int = _SETS,
) -> SetsBound | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    Updates count only on `one_stream`. A chain has at most `most` sets.
    """
    best = None
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    updating = None
    if one_stream and line.beta_s_per_byte > 0 and workload.phase_ops("optimizer"):
        released, _ = capacities((times.release_s, times.tail_s), nbytes, line, sends == "all_reduces")
        updating = _Updating(*update_times(workload), released)
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends=sends, updating=updating)
    for order in chain.orders():
        sizes = chain.sizes(order, most)
        short = longest_too_short(chain.sets(order, sizes), beat_s, step=_STEP, exact=_EXACT)
        if short is not None:
            beat_s, best = short, SetsBound(short, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


class _Updating(NamedTuple):
    """By tensor, the time of all updates that wait for it, or more; its share of those that read it; and U."""

    own_s: Floats
    share_s: Floats
    released: Capacity | HalvesCapacity


class Chain:
    """Chains of nested sets: the first tensors of some order, more and more of them."""

    def __init__(
        self,
        release_s: Sequence[float],
        tail_s: Sequence[float],
        nbytes: Sequence[int],
        line: LinearCost,
        *,
        sends: Sends,
        updating: _Updating | None = None,
    ) -> None:
        """`release_s`, `tail_s` and `nbytes` are by tensor. Without `updating`, updates do not count."""
        self.release_s, self.tail_s, self.updating = np.array(release_s), np.array(tail_s), updating
        self.work_s = line.beta_s_per_byte * np.array(nbytes, dtype=np.float64)
        self.message_s = line.alpha_s * (0.5 if sends == "halves" else 1.0)
        self.both_ends = 1 if sends == "pairs" else 2
        self.once_s = line.alpha_s - self.message_s

    def orders(self) -> list[Ints]:
        """By falling release time, and by falling tail."""
        release, tail = -self.release_s, -self.tail_s
        by_release, by_tail = np.lexsort((tail, release)), np.lexsort((release, tail))
        return [by_release] if (by_release == by_tail).all() else [by_release, by_tail]

    def sizes(self, order: Ints, most: int) -> Ints:
        """How many tensors the sets have: each as many as its r and q allow, evenly chosen by time and bytes."""
        near = np.minimum.accumulate(np.array([self.release_s[order], self.tail_s[order]]), axis=1)
        sizes = np.flatnonzero(np.append((near[:, 1:] < near[:, :-1]).any(axis=0), True)) + 1
        if len(sizes) <= most:
            return sizes
        passed = (near[:, :1] - near[:, sizes - 1]) / np.maximum(near[:, :1], np.finfo(float).tiny)
        work = np.cumsum(self.work_s[order])
        at = passed.sum(axis=0) + work[sizes - 1] / max(work[-1], np.finfo(float).tiny)
        return np.unique(sizes[np.searchsorted(at, np.linspace(at[0], at[-1], most)).clip(max=len(sizes) - 1)])

    def sets(self, order: Ints, sizes: Ints, *, strict: bool = False) -> NestedSets:
        """The sets of these sizes.

        If `strict`, what a set has beyond the one inside it counts as ready with the last
        and needed with the first of it, so that nothing is late where r and q change between.
        """
        last, updating = sizes - 1, self.updating
        at = np.append(0, sizes[:-1]) if strict else last
        release, tail = (np.minimum.accumulate(of[order])[at] for of in (self.release_s, self.tail_s))
        work, total = np.cumsum(self.work_s[order])[last], float(self.work_s.sum())
        forward, alone = tail, work
        later = innermost = np.tile(work, (len(work), 1))
        if updating is not None:
            forward = np.minimum.accumulate(np.maximum(self.tail_s - updating.own_s, 0.0)[order])[last]
            before = np.array([updating.released.carried(moment) for moment in release]) + _ROUNDING * total
            capped = np.minimum(updating.share_s, self.work_s)
            left, least = total - before[:, None] - work, float(self.work_s[order[: sizes[0]]].min())
            innermost = later + self._least(capped, left + least * (1 - _ROUNDING))
            later = later + self._least(capped, left)
            alone = work + np.maximum(self._least(updating.share_s, work), self._least(capped, total - before[0]))
        paid = self.message_s, self.once_s, self.both_ends
        return NestedSets(release, tail, forward, work, later, innermost, alone, *paid)

    def _least(self, seconds: Floats, work: Floats) -> Floats:
        """The least seconds, given by tensor, of tensors with this much work."""
        order = np.argsort(seconds / self.work_s, kind="stable")
        edges, until = (np.cumsum(np.append(0.0, of[order])) for of in (self.work_s, seconds))
        found: Floats = np.interp(work, edges, until)
        return found
