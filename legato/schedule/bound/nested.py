"""The bound "nested": sets of tensors, each inside the next, and the messages between the first and last byte of each.

What is ready last is needed first. So the tensors that are ready after some moment, and
needed before some other one, form sets that lie inside each other, and so do the stretches
of time in which they can be sent. Each stretch holds a whole number of messages.

Let S(1), S(2), ..., S(n) be such sets, the innermost first; r, q and f the least release
time of a set, its least tail, and the least computation of the forward pass from a first
reader on; B its bytes. The messages from the first to the last one that carry bytes of
S(t) are its range; the range of S(t) begins no later and ends no earlier than that of
S(t - 1).

- *Range.* Let the range of S(t) begin with the first message of S(i), and end with the
  last one of S(j), for the least such i and j. Then it starts at r(i) at the earliest and
  ends at T - q(j) at the latest. It has m messages: one more for each time that a range
  began earlier than the one inside it, and for each time that it ended later. So

      T >= r(i) + m * alpha + beta * B(t) + q(j).

- *Updates.* Let U be the most work that can be done before r(i) (`capacity.py`; U grows no
  faster than time), and let g(b) be the least time of the updates of tensors that have b
  bytes or more. A tensor of which anything is in the last message of the range, or in a
  later one, is updated after it. One of these is of S(j), and is sent within the range; let
  c(j) be the least bytes of a tensor of S(j). If the range does w >= beta * B(t) of work,
  the tensors that are complete before its last message have (U + w) / beta - c(j) bytes at
  most, so

      T >= r(i) + m * alpha + w + f(j) + g(bytes of all - (U + w) / beta + c(j)).

  This is least for the smallest w if g is replaced by G, which grows by beta a byte where g
  grows faster. If the range of S(t) is that of S(1), it may be one message, which carries
  all of S(t), and no byte of it has arrived before:

      T >= r(1) + alpha + beta * B(t) + f(1) + max(g(B(t)), G(bytes of all - U / beta)).

  Or it has one message more, and the least of both counts. Here c(j) is used for j = 1, and
  0 for the others.

Where halves of all-reduces may be sent, the innermost range has two of them, and every
other range one more at least for each of its new ends: alpha/2 stands for alpha, and
another alpha/2 is added once. If halves are sent in pairs, both of a pair with bytes of S(t)
are in the range of S(t). Where this begins earlier or ends later than the one inside it, the
half that does belongs to a pair without bytes of S(t - 1). So a range has one pair more, at
alpha, if it has one new end or two, since both may be of the same pair.

A schedule of T seconds exists only if, from the innermost set outwards, i, j and m can be
chosen such that these hold for every set. For given i and j, the least m is the best, so one
number for each is enough (a table of n * n). Bisection finds the longest T that is too
short. Units: seconds and bytes.

If tails rise as release times do, all messages are all-reduces of one collective, and there
are no updates, the inequalities are not only necessary: messages from each of the chosen r to
the next, and from each of the chosen T - q to the next, each filled with what is ready and
needed first, take T seconds (`search/nested_messages.py`). Then the bound is
the optimum, up to its precision, unless there are more than `_SETS` sets.
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
