"""The bound "sequences": the least time that any sequence of messages needs, found exactly for a relaxed schedule.

Where a message costs about as much as the computation between two messages, the number
of messages and their kinds decide everything. This bound follows all sequences of them
at once.

A schedule is a sequence of halves of all-reduces: reduce-scatters collect bytes,
all-gathers deliver them, and each takes at least alpha/2 + beta/2 * bytes. After each,
let x bytes be collected and y <= x delivered, and let u be the time that was not spent
on bytes: u grows by alpha/2 with every message, and by the time that the network waits.

- *Release.* When a reduce-scatter starts, everything that it or an earlier one collects
  has been computed. `release_times.py` has the least time R for x bytes.
- *Deadline.* When an all-gather ends at e, whatever has not been delivered before it has
  a tail of at most T - e. If that is r bytes, one of them has a tail of at least Q(r),
  the least limit that r bytes can keep.
- *Coverage.* Let L(1), L(2), ... be the tensors with a tail of at least a limit, for
  falling limits. Let k be the last one for which all of L(k) is collected: the message
  that completed it started after the least time for L(k) and x bytes. As long as this is
  k, all-gathers leave a tensor of L(k + 1) behind that is not collected. So the next
  all-gather after them ends at T minus the limit of L(k + 1) at the latest.
- *Updates.* What is complete before an all-gather has y bytes at most, so of the updates at least
  g(y) seconds come after its end (`waiting_updates.py`), and so does the forward pass from the
  first reader of what has not been delivered before it. So in the two arguments above, the least
  time of these forward ops, plus g(y), may stand for the tail. Then the limits are those of the
  forward ops alone.
- *Before.* The message that completes L(k) carries everything of it that earlier ones did
  not. What earlier ones carried was computed before the last of these began.
- *Alone.* All of L(k) cannot be collected before it could be if nothing else were sent: f of
  `merge_optimal.py` for its release times.
- *Pairs.* Where halves are sent in pairs, each with the same bytes, it matters which are under way,
  scattered but not gathered. If none is, x = y. If one is, the next all-gather delivers all of x.
  If two are, and x' bytes were collected before the second, then the first has x' - y bytes, the
  second one x - x', and an all-gather delivers either. Of more, the sizes are not followed; when
  one of three is gathered, the two others may have any. Each that is under way still has to pay alpha/2.
- *First.* One tensor of L(1), of n bytes, is not counted in x and y, so that no other
  bytes can take its place. When the first message with bytes of it starts, it has been
  computed, in addition to the x bytes that were collected. The work for it counts when
  L(1) is collected, and again when it is delivered, which is by the last all-gather after
  which nothing waits for L(1).

Amounts of bytes are rounded to levels: down where more bytes would need more time, and
up where time is counted from the work that has been done. A schedule of T seconds then
passes through states with the levels of x and y, with k, and with the k of the last
all-gather, and its u is at least the least one found for the state from the states
before it. If T is too short for any sequence to deliver everything, no schedule takes T.

Where every message is an all-reduce, x and y are the same, and a message takes
alpha + beta * bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.plan_kind import Sends
from legato.schedule.bound.release_times import Amounts, FixedReleaseTimes, Floats, ReleaseTimes
from legato.schedule.bound.waiting_updates import Updates, WaitingUpdates
from legato.schedule.published.merge_optimal import merge_neighbours

__all__ = ["Levels", "SequencesBound", "sequences"]

#: Below this fraction of the bound, a message is too cheap for the number of messages to matter.
_DEAR = 0.002
#: Floats count bytes exactly up to here.
_MOST_BYTES = 2**53
#: Levels of bytes and limits of tails: a coarse pass first, then a fine one, and a finer one where that is quick.
_COARSE, _FINE, _FINEST = (24, 6), (72, 12), (216, 12)
#: The same instead of the fine pass for pairs, which have more states.
_OF_PAIRS = (120, 6)
#: The relative precision of the bound, and the allowance for rounding errors.
_EXACT, _ROUNDING = 5e-4, 1e-9

#: Levels of bytes collected and of bytes delivered: from 0 and 1 to all. A level reaches up to the next one.
Levels = tuple[tuple[int, ...], tuple[int, ...]]


class SequencesBound(NamedTuple):
    """No schedule takes `seconds`; the tensors whose tails are the limits, where the first one is followed alone."""

    seconds: float
    tensors: tuple[int, ...]
    levels: Levels


def sequences(
    times: HeadsTails,
    nbytes: Sequence[int],
    line: LinearCost,
    sends: Sends,
    ready: ReleaseTimes,
    *,
    beat_s: float,
    updates: Updates | None = None,
) -> SequencesBound | None:
    """The best bound found, or None if that is not above `beat_s` seconds.

    Without `updates`, they count only as parts of tails.
    """
    if line.alpha_s <= _DEAR * beat_s or len(nbytes) < 2 or sum(nbytes) > _MOST_BYTES:
        return None
    waiting = None
    if updates is not None:
        waiting = _Waiting(np.array(times.tail_s), WaitingUpdates(updates.share_s, nbytes))
        times = times._replace(tail_s=updates.forward_s.tolist())
    best, firsts = None, list(dict.fromkeys(_firsts(times, nbytes, line)))
    quick = sends == "all_reduces" and isinstance(ready, FixedReleaseTimes)
    for levels, limits in (_COARSE, _FINEST if quick else _OF_PAIRS if sends == "pairs" else _FINE):
        for first in firsts:
            problem = _Problem(times, nbytes, line, sends, ready, levels, limits, first, waiting)
            short = longest_too_short(problem, beat_s, step=4 * _EXACT, exact=_EXACT)
            if short is not None:
                beat_s = short * (1 - _ROUNDING)
                best = SequencesBound(beat_s, problem.tensors, problem.levels)
        if not quick:
            firsts = [best.tensors[0] if best else firsts[0]]
    return best


def _firsts(times: HeadsTails, nbytes: Sequence[int], line: LinearCost) -> Iterator[int]:
    """The tensors to follow: the one that would take longest alone, and of those that are needed first, the largest."""
    release, tail, everything = times.release_s, times.tail_s, range(len(nbytes))
    yield max(everything, key=lambda t: release[t] + line.beta_s_per_byte * nbytes[t] + tail[t])
    yield max(everything, key=lambda t: (tail[t], nbytes[t]))


class _Waiting(NamedTuple):
    """Tails with all updates, and the updates apart."""

    tail_s: Floats
    updates: WaitingUpdates


class _Problem:
    """The relaxed problem for some levels of bytes and limits of tails, without the time to try.

    States of coverage: 0, nothing of the first tensor is collected; 1, some of it is; c, all of L(c - 1) is.
    """

    def __init__(
        self,
        times: HeadsTails,
        nbytes: Sequence[int],
        line: LinearCost,
        sends: Sends,
        ready: ReleaseTimes,
        levels: int,
        limits: int,
        first: int,
        waiting: _Waiting | None,
    ) -> None:
        """The tails are those without the updates that are `waiting`."""
        self.sends, self.tensors = sends, _marks(times, nbytes, first, limits)
        all_reduce_only = sends == "all_reduces"
        others, own = [t for t in range(len(nbytes)) if t != first], nbytes[first]
        needed = FixedReleaseTimes(times.tail_s, nbytes)
        self.levels = _levels(times, nbytes, others, ready, needed, all_reduce_only, levels)
        x, y = (np.array(of, dtype=np.int64) for of in self.levels)
        x_most, y_most = (np.append(of[1:] - 1, of[-1]) for of in (x, y))
        release = [ready.part_s(others, x), ready.least_s([first], x + own)]
        before: list[Floats] = [np.zeros((len(x), len(x)))] * 2
        for mark in self.tensors:
            covered = [t for t in others if times.tail_s[t] >= times.tail_s[mark]]
            carried = sum(nbytes[t] for t in covered)
            release.append(np.where(x_most < carried, np.inf, ready.least_s([first, *covered], x + own)))
            earlier = np.maximum(carried - (x_most[:, None] - x[None, :]), 0)
            before.append(ready.part_s(covered, earlier.ravel()).reshape(earlier.shape))
        share = 1.0 if all_reduce_only else 0.5
        s_per_byte = share * line.beta_s_per_byte
        self.arrays = (  # the fields of a `Relaxed`
            share * line.alpha_s,
            s_per_byte * own,
            s_per_byte * np.array([x, x_most]),
            s_per_byte * np.array([y, y_most]),
            np.array(release),
            np.array(before),
            self._finish_s(times, nbytes, LinearCost(share * line.alpha_s, s_per_byte)),
            self._after_s(np.array(times.tail_s), nbytes, waiting, y_most),
        )

    def _finish_s(self, times: HeadsTails, nbytes: Sequence[int], cost: LinearCost) -> Floats:
        """By coverage: when all of L(k) can be collected at the earliest, if nothing else is."""
        finish = [0.0, 0.0]
        for mark in self.tensors:
            covered = [t for t in range(len(nbytes)) if times.tail_s[t] >= times.tail_s[mark]]
            covered.sort(key=times.release_s.__getitem__)
            finished, _ = merge_neighbours([times.release_s[t] for t in covered], [nbytes[t] for t in covered], cost)
            finish.append(finished)
        return np.array(finish)

    def _after_s(self, tail_s: Floats, nbytes: Sequence[int], waiting: _Waiting | None, delivered: Amounts) -> Floats:
        """By level delivered before an all-gather, and coverage before it: the least time from its end on."""
        first = self.tensors[0]
        others = [t for t in range(len(nbytes)) if t != first]
        left = sum(nbytes[t] for t in others) - delivered
        missing = [tail_s >= tail_s[mark] for mark in self.tensors]  # one of L(k) is, by k

        def least(near: Floats) -> Floats:
            limits = [float(near[of].min()) for of in missing]
            found: Floats = np.maximum(
                FixedReleaseTimes(near.tolist(), nbytes).part_s(others, left)[:, None],
                np.array([limits[0], *limits, 0.0]),
            )
            return found

        after = least(tail_s)
        if waiting is None:
            return after
        updates = waiting.updates
        waits = np.repeat(
            updates.least_s((delivered + nbytes[first]).astype(np.float64))[:, None], after.shape[1], axis=1
        )
        waits[:, 0] = updates.least_s(delivered.astype(np.float64), never=[first])
        return np.maximum(least(waiting.tail_s), after + waits)

    def fits(self, seconds: float) -> bool:
        """Whether some sequence of messages takes at most this long."""
        # imported here because they are compiled when needed first
        from legato.schedule.bound.paired_states import fits_pairs
        from legato.schedule.bound.sequence_states import Relaxed, fits_all_reduces, fits_halves

        fits = {"all_reduces": fits_all_reduces, "pairs": fits_pairs, "halves": fits_halves}[self.sends]
        return bool(fits(seconds, Relaxed(*self.arrays)))


def _marks(times: HeadsTails, nbytes: Sequence[int], first: int, limits: int) -> tuple[int, ...]:
    """Tensors with falling tails: the first, then some that divide the rest."""
    tail, marks = times.tail_s, [first]
    for limit in np.linspace(tail[marks[0]], min(tail), limits)[1:]:
        lower = [t for t in range(len(nbytes)) if limit <= tail[t] < tail[marks[-1]]]
        if lower:
            marks.append(min(lower, key=tail.__getitem__))
    return tuple(marks)


def _levels(
    times: HeadsTails,
    nbytes: Sequence[int],
    others: Sequence[int],
    ready: ReleaseTimes,
    needed: FixedReleaseTimes,
    all_reduce_only: bool,
    count: int,
) -> Levels:
    """Half of the levels divide the bytes evenly, half the time in which these become ready or are needed."""
    total = sum(nbytes[t] for t in others)
    edges = [_jumps([(near[t], nbytes[t]) for t in others]) for near in times[:2]]
    collected = _chosen(np.minimum(edges[0] + 1, total), lambda amounts: ready.part_s(others, amounts), total, count)
    delivered = _chosen(total - edges[1], lambda amounts: needed.part_s(others, total - amounts), total, count)
    if all_reduce_only:
        collected = delivered = collected | delivered
    return tuple(sorted(collected)), tuple(sorted(delivered))


def _jumps(near: Sequence[tuple[float, int]]) -> Amounts:
    """The bytes before each tensor in the order of these times, and all bytes."""
    return np.cumsum([0, *(nbytes for _, nbytes in sorted(near))], dtype=np.int64)


def _chosen(jumps: Amounts, moments: Callable[[Amounts], Floats], total: int, count: int) -> set[int]:
    """Amounts that divide all bytes evenly, and amounts that divide the times `moments` evenly."""
    tried = np.unique(np.append(np.linspace(0, total, 16 * count).astype(np.int64), jumps))
    at = moments(tried)
    crossed = np.linspace(at.min(), at.max(), count - count // 2)
    beyond = at[None, :] > crossed[:, None] if at[-1] >= at[0] else at[None, :] <= crossed[:, None]
    evenly = np.linspace(0, total, count // 2 + 1).astype(np.int64)
    return {0, 1, total, *evenly.tolist(), *tried[beyond.argmax(axis=1)].tolist()}
