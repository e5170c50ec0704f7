"""The bound "sides": halves of all-reduces in pairs, before and after the last gradients are scattered.

What is scattered is gathered, in as many bytes and messages. So what goes beside the backward pass and what
goes beside the forward pass depend on each other, and each side has its own limit.

Let S(1), S(2), ... be sets inside each other, with r, q and B as in `nested.py`. Let what S(t) has beyond
S(t - 1) count as ready at r(t) and needed q(t) before the end. No tensor is ready later or needed earlier by
this, so what is proved holds. Take a schedule of T seconds whose messages are pairs, a reduce-scatter and an
all-gather of the same bytes (an all-reduce is a pair of halves without a gap).

- *Order.* Line up all bytes, those of S(1) last, then those of S(2) before them, and so on: release times and
  tails rise. A pair can carry all bytes up to some place: those that are ready when it begins, and not needed
  before it ends. Sort the pairs by this place and deal the bytes out anew, in their order, as many to each pair as
  before. The pairs up to some place had at most the bytes up to it, so each still carries only what it can.
  Now each pair has a stretch of bytes. It is of *class* t if the last byte of its stretch is beyond S(t - 1), but
  in S(t): it begins at r(t) or later, and ends q(t) before the end or earlier.
- *Moment.* Let c be the moment at which the last pair (class 1) is scattered. Any other pair is
  scattered before c and gathered after it, or both are before c, or both after it. Each half takes
  alpha/2 + beta/2 * bytes.
- *Before.* Take the halves before c of a pair of class t and of all pairs after it in the line. None begins
  before r(t), so they take c - r(t) together at most.
- *After.* Those after c end by T - q(t), so they take T - q(t) - c together at most.

A schedule of T seconds exists only if the line can be divided among pairs such that these hold. Go through
the sets from the innermost one. A state is the class of the last pair so far, on which sides its halves are, and
how many halves are before and after c. The work before c lies in an interval; the rest of beta * B(t) is after c.
If bytes are added to a pair with one half on each side, half of their work is before c, otherwise all or nothing.
Several pairs of one class share its limits, so they count as one of each kind, and bytes may go to any of them.
If no state is left, no schedule takes T.

All intervals that lead to a state are joined. A state is left out if another one with fewer halves has all of
its interval. The moment c is not known. Intervals of it are tried: the limit before c is that of their end, the one
after c that of their begin. An interval in which T might suffice is divided until it is short.

If tails rise as release times do and there are no updates, the inequalities are not only necessary: the
halves before c, in the order of the line, each gathered at once if it is gathered there, and those after c backwards,
take T seconds (`search/best_pairs.py`). Then the bound is the optimum of plans in pairs, but for joined intervals.
Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.nested import Chain, NestedSets, SetsBound

__all__ = ["TwoSides", "sides"]

#: Below this fraction of the bound, a message is too cheap for the number of messages to matter.
_DEAR = 0.005
#: The most sets of a chain: first few, then more.
_SETS = (24, 96)
#: The most states to go through.
_STATES = 4_000_000
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 5e-4, 1e-9


def sides(times: HeadsTails, nbytes: Sequence[int], line: LinearCost, *, beat_s: float) -> SetsBound | None:
    """The best of these bounds for plans in pairs, or None if none found is above `beat_s`."""
    if line.alpha_s <= _DEAR * beat_s:
        return None
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends="pairs")
    best = None
    for most in _SETS:
        for order in chain.orders():
            sizes = chain.sizes(order, most)
            problem = TwoSides(chain.sets(order, sizes), line.alpha_s / 2, _STATES)
            short = longest_too_short(problem, beat_s, step=_STEP, exact=_EXACT)
            if short is not None:
                beat_s = short * (1 - _ROUNDING)
                best = SetsBound(beat_s, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


class TwoSides:
    """Whether pairs of halves with these sets may take some time, found in at most so many states."""

    def __init__(self, sets: NestedSets, half_s: float, states: int, *, exact: float = _EXACT) -> None:
        """`half_s` is what a half pays first; `exact` is the length of an interval of c relative to the time."""
        self.sets, self.half_s, self.left, self.exact = sets, half_s, states, exact
        self.moment_s = 0.0  # c, where a time was long enough

    def fits(self, seconds: float) -> bool:
        """Whether halves may be divided among both sides of some moment. True, too, if no states are left."""
        from legato.schedule.bound.side_states import follow  # compiled when needed first

        sets = self.sets
        first, last = float(sets.release_s[0]) + self.half_s, seconds - float(sets.tail_s[0]) - self.half_s
        intervals = [(first, last)] if first <= last else []
        while intervals and self.left > 0:
            begin, end = intervals.pop()
            followed = follow(seconds, begin, end, self.half_s, sets.release_s, sets.tail_s, sets.work_s)
            self.left -= len(followed.least_s)
            if followed.fits:
                self.moment_s = end
                if end - begin <= self.exact * seconds:
                    return True
                middle = (begin + end) / 2
                intervals += [(begin, middle), (middle, end)]
        return self.left <= 0
