"""Checks a bound of the case "gathers": proves that pairs of halves do not fit if nothing is gathered before a moment.

It counts in whole numbers of 2**-60 of the claimed seconds. What a schedule has to wait for is rounded
down, and what it can have done is rounded up. `gathers.py` has the argument. Here the intervals of the maximum are
gone through one after another, each with all numbers of pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate, count

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.bound.lower_bound import Certificate
from legato.schedule.bound.walk import Walk

__all__ = ["check_gathers"]

#: The claimed time in units, the most sets, and in how many intervals the maximum is followed.
_CLAIMED, _SETS, _INTERVALS = 2**60, 1024, 1024


def check_gathers(
    workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate, from_s: Fraction
) -> Fraction:
    """The claimed seconds, where nothing is gathered before `from_s`. Raises `InputError` if pairs may fit."""
    if len(certificate.sets) > _SETS:
        raise InputError(f"certificate: case 'gathers' with {len(certificate.sets)} sets (expected at most {_SETS})")
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    if claimed <= 0 or _Sets(workload, cluster, walk, claimed, certificate).fit(from_s):
        raise InputError(f"bound: what is scattered and then gathered may take {float(claimed)} s")
    return claimed


class _Sets:
    def __init__(
        self, workload: Workload, cluster: Cluster, walk: Walk, claimed: Fraction, certificate: Certificate
    ) -> None:
        nbytes = [tensor.nbytes for tensor in workload.tensors]
        costs = [(Fraction(cost.alpha_s), Fraction(cost.beta_s_per_byte)) for cost in cluster.least_costs()]
        alpha, total = min(a for a, _ in costs), sum(nbytes)
        slope = (min(a + b * total for a, b in costs) - alpha) / total
        self.unit = claimed / _CLAIMED
        near = [[*accumulate(map(of, certificate.tensors), min)] for of in (walk.release, walk.tail)]
        self.release, self.tail = (
            [self.down(Fraction(least[size - 1], walk.scale)) for size in certificate.sets] for least in near
        )
        until = [*accumulate(nbytes[t] for t in certificate.tensors)]
        self.work = [self.down(slope / 2 * until[size - 1]) for size in certificate.sets]
        self.half = self.down(alpha / 2)

    def down(self, seconds: Fraction) -> int:
        """In units, rounded down."""
        return int(seconds // self.unit)

    def fit(self, from_s: Fraction) -> bool:
        """Whether the halves may fit, whatever the maximum is."""
        begin = self.down(from_s)
        room = _CLAIMED - self.tail[-1] - self.work[-1] - self.half - begin
        if room < 0:
            return False
        most = [-1]  # by number of pairs: their work, if the maximum is not beyond the interval
        for k in range(_INTERVALS):
            low, high = begin + room * k // _INTERVALS, begin + room * (k + 1) // _INTERVALS + 1
            for pairs in count(1):
                of = bisect_right(self.work, most[pairs - 1])
                free = min(high - self.release[of], _CLAIMED - low - self.tail[of]) - pairs * self.half
                work = max(free, most[pairs - 1])
                if work >= self.work[-1]:
                    return True
                if pairs < len(most):
                    most[pairs] = max(work, most[pairs])
                elif work > most[-1]:
                    most.append(work)
                else:
                    break  # more pairs have no more
        return False
