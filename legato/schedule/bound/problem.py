"""The problem that bounds are about (release times, tails, cost of messages), and the interface of arguments.

To find bounds, times are seconds in floats. To prove bounds, times are whole numbers of ticks (small parts of a
second), rounded down. With such times, no schedule takes longer than with the exact times. So a proof with ticks
holds for the workload, and whole numbers add up exactly ("Exact arithmetic" in docs/bounds.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import numpy as np

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.sharded import check_shard, with_sharded_updates, without_updates
from legato.schedule.bound.plan_kind import PlanKind, Sends
from legato.simulator.period import Compute

__all__ = ["ROUNDING", "Argument", "Problem", "Proved", "cheapest_line"]

#: A relative tolerance that is larger than the rounding error of thousands of float additions.
ROUNDING = 1e-9
#: Computation plus one message with everything takes less than 2**_BITS ticks, so sums fit into int64. A single op
#: takes less than 2**_OP_BITS ticks, which is below the most seconds that a workload may have.
_BITS, _OP_BITS = 58, 49


def cheapest_line(cluster: Cluster, nbytes: int, number: type = float, alpha: float | None = None) -> LinearCost:
    """Return the highest line that stays below the costs of all collectives from 0 to `nbytes` bytes.

    The line meets the cheapest cost at 0 and at `nbytes`. If costs are interpolated, the line always meets the cheapest
    cost at `nbytes`, but may lie below the cheapest cost at 0. If `alpha` is given, it is the line's value at 0.
    """
    costs = cluster.least_costs()
    sizes = [number(x) for cost in costs for x, _ in cost.points if x < nbytes]

    def least(size: float) -> Any:
        return min(cost.above_floor(size, number) for cost in costs)

    if alpha is None:
        alpha, end = least(number(0)), least(number(nbytes))
        rates = ((end - least(size)) / (nbytes - size) for size in sizes)
        alpha = min([alpha, *(max(number(0), end - rate * nbytes) for rate in rates)])
    return LinearCost(alpha, max(number(0), min((least(size) - alpha) / size for size in [*sizes, nbytes])))


class Problem:
    """A workload on a cluster, for plans of one kind.

    `every` is the workload with all ops; under sharded plans, its optimizer ops take the time to update one worker's
    shard. `workload` is the same, but under sharded plans it has no optimizer ops. `release` and `tail` are indexed by
    tensor. A reduce-scatter or an all-gather (half of an all-reduce) takes the time `half` to start, plus the time
    `half_work` for its bytes. In exact problems, `part_s` is the length of a tick in seconds.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        compute: Compute,
        kind: PlanKind,
        *,
        thorough: bool = True,
        exact: bool = False,
    ) -> None:
        """Count in ticks if `exact`. If `thorough`, use all arguments, and let each argument look at more sets."""
        check_shard(kind.shard)
        self.sharded = kind.shard != "none"
        if self.sharded and kind.sends == "all_reduces":
            raise InputError(f"sends: 'all_reduces' with shard {kind.shard!r} (expected halves or pairs)")
        self.cluster, self.kind, self.compute, self.thorough, self.exact = cluster, kind, compute, thorough, exact
        self.sends: Sends = "pairs" if self.sharded else kind.sends
        self.every = with_sharded_updates(workload, cluster.workers) if self.sharded else workload
        self.dtype = np.int64 if exact else np.float64
        self.number: type = Fraction if exact else float
        self.rounding = 0 if exact else ROUNDING
        if exact:
            longest_s = workload.compute_s + cheapest_line(self.cluster, workload.nbytes).cost(workload.nbytes)
            longest_op_s = max(op.duration_s for op in self.every.ops)
            self._bits = min(_BITS - math.frexp(longest_s)[1], _OP_BITS - math.frexp(longest_op_s)[1])
            self.part_s = Fraction(2) ** -self._bits
            ops = (msgspec.structs.replace(op, duration_s=self.whole(op.duration_s)) for op in self.every.ops)
            self.every = msgspec.structs.replace(self.every, ops=tuple(ops))
        self.alpha_s = cheapest_line(self.cluster, workload.nbytes, self.number).alpha_s
        self.half = self.whole(self.alpha_s / 2)
        self.workload = without_updates(self.every) if self.sharded else self.every
        times = heads_tails(self.workload, compute, kind.order)
        self.release, self.tail = times.release_s, times.tail_s

    def whole(self, seconds: float | Fraction) -> float:
        """Return seconds as a number of this problem: in ticks, rounded down, if the problem is exact."""
        if not self.exact:
            return float(seconds)
        return math.floor(math.ldexp(seconds, self._bits) if isinstance(seconds, float) else seconds / self.part_s)

    def divided(self, product: float, by: float) -> float:
        """Return the quotient, rounded down to ticks if the problem is exact."""
        return product // by if self.exact else product / by

    def computation(self) -> float:
        """Return the time of an iteration if communication is free."""
        if self.compute != "one":
            return heads_tails(self.every, self.compute, self.kind.order).compute_s
        return sum(op.duration_s for op in self.every.ops) if self.exact else self.every.compute_s

    def half_work(self, tensors: Iterable[int]) -> list[float]:
        """Return, for each tensor, the time of half an all-reduce without its startup ("Cost" in docs/bounds.md)."""
        sizes = [self.workload.tensors[t].nbytes for t in tensors]
        beta = cheapest_line(self.cluster, sum(sizes), self.number, self.alpha_s).beta_s_per_byte / 2
        work = [beta * nbytes for nbytes in sizes]
        return [*map(self.whole, work)] if self.exact else work

    def duration(self, phase: str) -> float:
        """Return the total time of all ops of a phase."""
        return sum(op.duration_s for op in self.every.ops if op.phase == phase)

    def check_tensors(self, tensors: Sequence[int]) -> None:
        """Raise `InputError` unless these are different indices of tensors of the workload, and at least one."""
        count = len(self.workload.tensors)
        if not tensors or len(set(tensors)) != len(tensors) or min(tensors) < 0 or max(tensors) >= count:
            raise InputError(f"certificate: tensors {tensors} (expected different indices below {count}, at least one)")


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="case"):
    """One of the arguments of docs/bounds.md, which prove bounds for all schedules, and the tensors that it uses."""

    @property
    def case(self) -> str:
        """The name of the argument."""
        return str(self.__struct_config__.tag)

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterable[Proved]:
        """Find certificates that prove a time longer than `beat`, or only a little shorter; there may be none."""
        raise NotImplementedError

    def proves(self, problem: Problem) -> float:
        """Return a time that no iteration beats. Raises `InputError` if the argument does not hold for the problem."""
        raise NotImplementedError

    def proved(self, problem: Problem) -> Proved:
        """Return this certificate together with the time that it proves."""
        return Proved(self.proves(problem), self)


class Proved(NamedTuple):
    """A certificate, and the time that no iteration can beat according to it."""

    seconds: float
    certificate: Argument
