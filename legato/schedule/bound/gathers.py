"""The bound "gathers": what is scattered beside the backward pass is gathered after it, in as many messages.

Where workers update their shards only, no parameters are gathered before some moment b: the end of the backward pass,
or, if all updates follow it, the least update of any of the tensors later. So reduce-scatters overlap with one pass
and all-gathers with the other one. Each side alone could be merged at its best, but both have the same messages.

Let S(1), S(2), ..., S(n) be sets inside each other, the innermost first, with r, q and B as in `nested.py`. Only
the bytes of S(n) count. As in `sides.py` ("Order"), these can be dealt out anew among the pairs of halves of any
schedule, so that each pair has a stretch of a line that ends with the bytes of S(1). It is of class t if the last
byte of its stretch is in S(t), but not in S(t - 1). Then it is scattered at r(t) or later, and gathered by T - q(t).

Number the pairs from the end of the line, let t(k) be the class of the k-th one, and let h(k) be the time that
the reduce-scatters of the first k pairs take, or their all-gathers: alpha/2 each, and beta/2 for each byte. The
reduce-scatters of the first j pairs begin at r(t(j)) or later. For j <= k, each of them ends before an all-gather
that ends by T - q(t(k)). The all-gathers of the first k pairs end by T - q(t(k)), too, and none begins before b or
r(t(j)). The network carries one of these halves at a time, so

    T >= max(b, r(t(1)) + h(1), ..., r(t(k)) + h(k)) + h(k) + q(t(k))     for each k.

A schedule of T seconds exists only if the line can be divided among pairs such that this holds for all of them. For a
given maximum, it is best to give each pair in turn as many bytes as it may have: the next one is then of a higher
class, with more time on both sides. So intervals of the maximum are followed side by side, each with the most work
that m pairs can have, for m = 1, 2, 3 and so on. In an interval, the maximum may be as large as its end, and counts as
its begin. It never falls from one pair to the next, so what was reached in a lower interval counts in the
higher ones, too. A pair must reach beyond its class, so there are n at most. Bisection finds the longest T that is
too short.

If tails rise as release times do, updates take no time, and everything is scattered before anything is gathered, the
inequalities are not only necessary, if the whole maximum counts for each k: reduce-scatters from the begin of the
line, and all-gathers from its end, take T seconds (`search/best_groups.py`). Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from legato.core.cluster import LinearCost
from legato.schedule.basics.heads_tails import HeadsTails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.nested import Chain, NestedSets, SetsBound

__all__ = ["Gathers", "gathers"]

#: The most sets of a chain.
_SETS = 1024
#: In how many intervals the maximum is followed.
_INTERVALS = 1024
#: The relative size of the first step of the bisection, its precision, and the allowance for rounding errors.
_STEP, _EXACT, _ROUNDING = 1e-3, 1e-5, 1e-9


def gathers(
    times: HeadsTails, nbytes: Sequence[int], line: LinearCost, *, from_s: float, beat_s: float
) -> SetsBound | None:
    """The best of these bounds, or None if none found is above `beat_s`.

    Nothing is gathered before `from_s`.
    """
    chain = Chain(times.release_s, times.tail_s, nbytes, line, sends="pairs")
    best = None
    for order in chain.orders():
        sizes = chain.sizes(order, _SETS)
        problem = Gathers(chain.sets(order, sizes), line.alpha_s / 2, from_s)
        short = longest_too_short(problem, beat_s, step=_STEP, exact=_EXACT)
        if short is not None:
            beat_s, best = short, SetsBound(short, tuple(order[: sizes[-1]].tolist()), tuple(sizes.tolist()))
    return best


class Gathers:
    """Whether pairs of halves with these sets may take some time, if nothing is gathered before `from_s`.

    A half pays `half_s` first. If they are `apart`, everything is scattered before anything is gathered.
    """

    def __init__(self, sets: NestedSets, half_s: float, from_s: float, *, apart: bool = False) -> None:
        self.release_s, self.tail_s, self.work_s = sets.release_s, sets.tail_s, sets.work_s / 2
        self.half_s, self.from_s, self.apart = half_s, from_s, apart
        self.moment_s = 0.0  # a maximum for which a time was long enough

    def fits(self, seconds: float) -> bool:
        """Whether the line can be divided among pairs."""
        limit, total = seconds * (1 + _ROUNDING), self.work_s[-1]
        until_s = limit - self.tail_s[-1] - total - self.half_s
        if until_s < self.from_s:
            return False
        edges = np.linspace(self.from_s, until_s, _INTERVALS + 1)
        begin, end = (edges, edges) if self.apart else (edges[:-1], edges[1:])
        of, work = np.zeros(len(begin), np.int64), np.full(len(begin), -1.0)
        for pairs in range(1, len(self.work_s) + 1):
            room = np.minimum(end - self.release_s[of], limit - begin - self.tail_s[of])
            work = np.maximum(work, room - pairs * self.half_s)
            if not self.apart:
                work = np.maximum.accumulate(work)  # the maximum may grow later
            if work.max() >= total:
                self.moment_s = float(begin[work.argmax()])
                return True
            before, of = of, np.searchsorted(self.work_s, work, side="right")
            if (of == before).all():
                return False
        return False
