"""The bound "sides": halves of all-reduces in pairs, before and after the last gradients are scattered.

What is scattered is gathered, in as many bytes and messages. So what goes beside the backward pass and what
goes beside the forward pass depend on each other, and each side has its own limit.

Let S(1), S(2), ..., S(n) be sets inside each other, the innermost first, with r, q and B as in `nested.py`. Only
the bytes of S(n) count. Those that S(t) has beyond S(t - 1) count as ready at r(t), and as needed q(t) before the
end. This makes no byte ready later or needed earlier, so it rules out no schedule. Take a schedule of T seconds
whose messages are pairs: a reduce-scatter, and later an all-gather of the same bytes. An all-reduce is such a pair,
too: its first half and its second one, with nothing between them. A half with b of these bytes takes alpha/2 +
beta/2 * b at least, and the network carries one half at a time. Pairs without such bytes are left out.

- *Order.* Line up all bytes: those of S(1) come last in the line, before them what S(2) has beyond S(1), and so on.
  Then release times and tails rise along the line. So there is a place for each pair up to which it could carry all
  bytes: those that are ready when it begins, and not needed before it ends. Sort the pairs by their places and deal
  the bytes out anew, from the begin of the line, as many to each pair as it had. The pairs up to some place never had
  bytes beyond it, so each pair still carries only what it can. Now each pair has a stretch of the line. The pair is
  of *class* t if the last byte of its stretch is in S(t), but not in S(t - 1). Then it begins at r(t) or later, and
  ends q(t) before the end or earlier. The last pair in the line is of class 1.
- *Moment.* Let c be the moment at which the first pair of class 1 has been scattered. Each half lies before c or after
  it. This pair has one half on each side, and other pairs of class 1 have both halves after c. A pair of
  another class has one half on each side, or both before c, or both after it.
- *Before.* Take the halves before c of a pair of class t and of all pairs after it in the line. Their classes are t
  at most, so none begins before r(t), and together they take c - r(t) at most.
- *After.* The halves of these pairs after c end by T - q(t), so together they take T - q(t) - c at most.
- *Number.* All halves lie between r(n) and T - q(n), so there are (T - r(n) - q(n) - beta * B(n)) / (alpha/2) at most.

A schedule of T seconds exists only if the line can be divided among pairs such that this holds for all of them. Go
through the sets from the innermost one, so from the end of the line to its begin. A state is the class of the pairs
that came last, on which sides their halves are, and how many halves are before c and after it, of all pairs so far.
The work before c lies in an interval; the rest of beta * B(t) is after c. The bytes that S(t) has beyond S(t - 1) go
to the pairs that came last, or from some point on to new pairs, of class t. A pair with one half on each side has half
of the work of its bytes before c, any other one all of it or none. Pairs of the same class have the same limits.
So one of each kind stands for all of these, and any of them may take the bytes. If no state is left after some set,
no schedule takes T.

States that are alike but for their work are joined, with one interval around those of all. A state is left out if
another one, with fewer halves and else alike, has all of its interval. The moment c is not known, so intervals of it
are tried: the limit before c is that of their end, the one after c that of their begin. An interval in which T might
suffice is divided until it is short.

If tails rise as release times do and there are no updates, the inequalities are not only necessary: the
halves before c, in the order of the line, each gathered at once if it is gathered there, and those after c backwards,
take T seconds (`search/best_pairs.py`). Then the bound is the optimum of plans in pairs of one collective, up to its
precision and what joined intervals leave out.
Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
        self.known = True  # the last answer; there were not too many halves or states
        self.place: npt.NDArray[np.int32] | None = None

    def fits(self, seconds: float) -> bool:
        """Whether halves may be divided among both sides of some moment; true, too, where it is not `known`."""
        from legato.schedule.bound.side_states import follow, places  # compiled when needed first

        sets = self.sets
        arrays = sets.release_s, sets.tail_s, sets.work_s
        if self.place is None:
            self.place = places(len(sets.work_s))
        self.known = True
        first, last = float(sets.release_s[0]) + self.half_s, seconds - float(sets.tail_s[0]) - self.half_s
        intervals = [(first, last)] if first <= last else []
        while intervals and self.left > 0:
            begin, end = intervals.pop()
            followed = follow(seconds, begin, end, self.half_s, *arrays, self.place, self.left)
            self.left -= len(followed.least_s)
            if followed.cut:
                self.known = False
                return True
            if followed.fits:
                self.moment_s = end
                if end - begin <= self.exact * seconds:
                    return True
                middle = (begin + end) / 2
                intervals += [(begin, middle), (middle, end)]
        self.known = self.left > 0 or not intervals
        return not self.known
