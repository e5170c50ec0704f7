"""The problem that bounds are proved about (release times, tails, cost of messages), and arguments for bounds.

All times are numbers: seconds in floats where bounds are looked for, and whole parts of a second, all rounded down,
where they are proved. If ops and messages take less time, no schedule takes longer. So what is proved about whole
parts holds for the workload, and whole numbers add up exactly ("Exact arithmetic" in docs/bounds.md).
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

#: More than the relative rounding error of thousands of float additions.
ROUNDING = 1e-9
#: Computation and one message with everything take less than 2 to the first power of parts, so that sums fit int64,
#: and an op less than 2 to the second one: less than a workload may have seconds.
_BITS, _OP_BITS = 58, 49


def cheapest_line(cluster: Cluster, nbytes: int, number: type = float, alpha: float | None = None) -> LinearCost:
    """The highest line below the costs of all collectives from 0 to `nbytes` bytes: it meets the least at both ends.

    Where costs are interpolated, it meets the least at `nbytes`, and else where it can. `alpha` makes it begin there.
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

    `every` has all ops, with optimizer ops as one worker runs them; `workload` is what the
    network sees: without optimizer ops if these are sharded. `release` and `tail` are by tensor.
    A half of an all-reduce pays `half` first, and then takes the `half_work` of its bytes.
    If it is exact, `part_s` has the seconds of a part.
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
        """Count in whole parts of a second if `exact`. `thorough`: look at more sets, and with all arguments."""
        check_shard(kind.shard)
        self.sharded = kind.shard != "none"
        if self.sharded and kind.sends == "all_reduces":
            raise InputError(f"sends: 'all_reduces' with shard {kind.shard!r} (expected halves or pairs)")
        self.kind, self.compute, self.thorough, self.exact = kind, compute, thorough, exact
        self.sends: Sends = "pairs" if self.sharded else kind.sends
        self.cluster = cluster.in_wire_format() if kind.wire else cluster
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
        """Seconds as a number of this problem: in whole parts, rounded down, if it is exact."""
        if not self.exact:
            return float(seconds)
        return math.floor(math.ldexp(seconds, self._bits) if isinstance(seconds, float) else seconds / self.part_s)

    def divided(self, product: float, by: float) -> float:
        """The quotient, rounded down in whole parts."""
        return product // by if self.exact else product / by

    def computation(self) -> float:
        """The time of an iteration in which communication is free."""
        if self.compute != "one":
            return heads_tails(self.every, self.compute, self.kind.order).compute_s
        return sum(op.duration_s for op in self.every.ops) if self.exact else self.every.compute_s

    def half_work(self, tensors: Iterable[int]) -> list[float]:
        """By tensor: what a half takes for its bytes, if messages have bytes of these ("Cost" in docs/bounds.md)."""
        sizes = [self.workload.tensors[t].nbytes for t in tensors]
        beta = cheapest_line(self.cluster, sum(sizes), self.number, self.alpha_s).beta_s_per_byte / 2
        work = [beta * nbytes for nbytes in sizes]
        return [*map(self.whole, work)] if self.exact else work

    def duration(self, phase: str) -> float:
        """The time of all ops of a phase."""
        return sum(op.duration_s for op in self.every.ops if op.phase == phase)

    def check_tensors(self, tensors: Sequence[int]) -> None:
        """Raise `InputError` unless these are some tensors of the workload, each once."""
        count = len(self.workload.tensors)
        if not tensors or len(set(tensors)) != len(tensors) or min(tensors) < 0 or max(tensors) >= count:
            raise InputError(f"certificate: tensors {tensors} (expected different indices below {count}, at least one)")


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="case"):
    """Why no schedule is faster: an argument of docs/bounds.md, and the tensors for which it holds."""

    @property
    def case(self) -> str:
        """The name of the argument."""
        return str(self.__struct_config__.tag)

    @classmethod
    def find(cls, problem: Problem, beat: float) -> Iterable[Proved]:
        """Certificates, perhaps none, that prove more than `beat`, or nearly."""
        raise NotImplementedError

    def proves(self, problem: Problem) -> float:
        """The least time of an iteration. Raises `InputError` if the argument does not hold for the problem."""
        raise NotImplementedError

    def proved(self, problem: Problem) -> Proved:
        """This certificate and what it proves."""
        return Proved(self.proves(problem), self)


class Proved(NamedTuple):
    """A time of which a certificate proves that no iteration takes less."""

    seconds: float
    certificate: Argument
