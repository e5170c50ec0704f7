"""The bound "ranges": nested sets of tensors again, and when each of their messages can end at the latest.

The argument "nested" counts the messages of a range, and what has to follow the last one. But the
stream waits for every message: what this brings is updated after it, and so is all that comes later.

Let S(1), S(2), ... be sets inside each other, with r, q, f, B and U as in `nested.py`, and let g(x)
be the least time of the updates that wait if the tensors that are complete have at most x of work
(`waiting_updates.py`). Take a schedule of T seconds that sends all-reduces.

- *Ends.* A message of the range of S(t) ends at e, and x of work has been done before it. Something
  of S(t) is in this message or in a later one. So a tensor of S(t) is not complete before e, nor is
  anything that this message carries, and e is at most

      h(t, x) = min(T - q(t), T - f(t) - g(x)).

- *Before.* If the range begins at b, and the m messages of it before this one have ended by e', then
  x is at most U(b) + e' - b - m * alpha. U grows no faster than time, so any b' <= b does for U(b) - b.
- *Innermost.* Let the range of S(1) begin at b. Its first message ends by h(1, U(b)). If it is the
  only one, it carries all of S(1), whose updates then follow it. If not, the next ones end by
  h(1, U(b) + e' - b - m * alpha), and so on.
- *Outwards.* If the range of S(t) begins before that of S(t - 1), it has one message more at least, and
  begins at r(t) or later. If it ends later, it has one message more at least after the end e' of that
  of S(t - 1), and all of these end by h(t, x).
- *Work.* Between the begin and the end of the range of S(t) lie m * alpha + beta * B(t).

So there is a latest end for each i, j and m: the range of S(t) has m messages, begins with that of
S(i), and ends with that of S(j), for the least such i and j. If nothing is left for some S(t), no
schedule takes T. All of this grows with the ends of the ranges inside, so the latest ones are enough.
The begin b is not known. Intervals of it are tried: U counts until the end of an interval, U(b) - b
and the work from its begin on. An interval in which T might suffice is divided until it is short.
More than `MOST` messages count as so many, with ends at h(t, infinity). Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato.core.cluster import LinearCost
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.capacity import Capacity
from legato.schedule.bound.nested import Chain, SetsBound
from legato.schedule.bound.waiting_updates import WaitingUpdates, update_times

__all__ = ["ranges"]

#: Below this fraction of the bound, a message is too cheap for its end to matter.
_DEAR = 0.001
#: The most sets of a chain, the steps of g, and the length of an interval of begins relative to T.
_SETS, _STEPS, _SHORT = 64, 4096, 1e-3
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 1e-4, 1e-9


def ranges(workload: Workload, times: HeadsTails, line: LinearCost, *, beat_s: float) -> SetsBound | None:
    """The best of these bounds for plans of all-reduces on one stream, or None if none found is above `beat_s`."""
    if line.beta_s_per_byte <= 0 or line.alpha_s <= _DEAR * beat_s or not workload.phase_ops("optimizer"):
        return None
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends="all_reduces")
    best = None
    for order in chain.orders():
        sizes = chain.sizes(order, _SETS)
        problem = _Problem(workload, times, line, order.tolist(), sizes.tolist())
        short = longest_too_short(problem, beat_s, step=_STEP, exact=_EXACT)
        if short is not None:
            beat_s = short * (1 - _ROUNDING)
            best = SetsBound(beat_s, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


class _Problem:
    """The sets of one order, without the time to try."""

    def __init__(
        self, workload: Workload, times: HeadsTails, line: LinearCost, order: Sequence[int], sizes: Sequence[int]
    ) -> None:
        own, share = update_times(workload)
        nbytes, last = [tensor.nbytes for tensor in workload.tensors], np.array(sizes) - 1
        by_release = sorted(order, key=times.release_s.__getitem__)
        self.released = Capacity.of([times.release_s[t] for t in by_release], [nbytes[t] for t in by_release], line)
        self.total_s = line.beta_s_per_byte * sum(nbytes)
        forward = np.maximum(np.array(times.tail_s) - own, 0.0)
        release, tail, ahead = (
            np.minimum.accumulate(np.array(of)[order])[last] for of in (times.release_s, times.tail_s, forward)
        )
        work = np.cumsum(line.beta_s_per_byte * np.array(nbytes, dtype=np.float64)[order])[last]
        complete = np.arange(_STEPS + 2, dtype=np.float64) * (sum(nbytes) / _STEPS * (1 + _ROUNDING))
        before = np.array([self._until(moment) - moment for moment in release])
        alone = float(share[order[: sizes[0]]].sum())
        waits = WaitingUpdates(share, nbytes).least_s(complete)
        step = self.total_s / _STEPS
        self.arrays = line.alpha_s, release, tail, ahead, work, before, alone, waits, step  # the fields of a `Ranges`

    def _until(self, moment: float) -> float:
        return self.released.carried(moment) + _ROUNDING * self.total_s

    def fits(self, seconds: float) -> bool:
        """Whether ranges of messages may exist for an iteration of so many seconds."""
        from legato.schedule.bound.range_ends import Ranges, fit  # compiled when needed first

        of, seconds = Ranges(*self.arrays), seconds * (1 + _ROUNDING)
        left = [(float(of.release_s[0]), seconds)]
        while left:
            begin, end = left.pop()
            if fit(seconds, of, begin, self._until(begin), self._until(end)):
                if end - begin <= _SHORT * seconds:
                    return True
                middle = (begin + end) / 2
                left += [(middle, end), (begin, middle)]
        return False
