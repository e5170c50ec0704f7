"""The release time and the tail of every tensor: the computation before and after its transfer.

A tensor's *release time* is the earliest moment at which its gradient can be ready
(Carlier, 1982, calls it the *head*). A tensor's *tail* is the least time from its arrival to the end of the period
(also called the delivery time). All times are in seconds.

                        release time                    tail
    one stream,         backward ops up to the op       optimizer ops that must wait for the arrival, and all
    captured order      that produces the gradient      forward ops from the first one that must wait
    one stream,         all ops on which the gradient   all ops that depend on the arrival,
    any order           depends, directly or not        directly or not
    unlimited           longest path to the gradient    longest path from the arrival

On one stream, a release time or a tail is the total time of a set of ops. If the workload has up to `_MOST_BITS` ops,
each set is an integer with one bit for each op. For more ops, `reach.py` finds the total times without these sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import getitem
from typing import Literal, NamedTuple

from legato.core.errors import TooLargeError, unknown_name
from legato.core.workload import Workload
from legato.schedule.basics.compose import release_times
from legato.schedule.basics.reach import reached_s
from legato.simulator.period import Compute, Period, check_compute

__all__ = ["HeadsTails", "Order", "check_size", "heads_tails"]

#: The most ops to plan for. With this number, a bound takes about a gigabyte and ten seconds.
_MOST_OPS = 2**20
#: Up to this number of ops, each op has a bit for each op on which it depends: 32 MiB if all ops form one chain.
_MOST_BITS = 2**14

#: The orders in which a worker may run its ops. "captured" keeps backward and forward ops in the order of the
#: workload, "any" keeps only their dependencies. In both cases, each optimizer op may run at its best time.
Order = Literal["captured", "any"]


def check_size(workload: Workload) -> None:
    """Raise `TooLargeError` if there are too many ops for release times and tails, which every bound needs."""
    if len(workload.ops) > _MOST_OPS:
        raise TooLargeError(f"ops: {len(workload.ops):,} (expected at most {_MOST_OPS:,} to plan for)")


class HeadsTails(NamedTuple):
    """The release time and the tail of each tensor, and the shortest possible period without communication."""

    release_s: list[float]
    tail_s: list[float]
    compute_s: float


def heads_tails(workload: Workload, compute: Compute, order: Order) -> HeadsTails:
    """Return release times and tails for workers with `compute` streams that run their ops in this order.

    The lists are computed once and cached with the workload, so do not change them. Raises `InputError` if `compute` or
    `order` is unknown, and `TooLargeError` if there are too many ops.
    """
    check_compute(compute)
    check_size(workload)
    if order not in ("captured", "any"):
        raise unknown_name("order", order, ("captured", "any"))
    kept: dict[tuple[Compute, Order], HeadsTails] = workload.__dict__.setdefault("heads_tails", {})
    if (compute, order) not in kept:
        kept[compute, order] = _heads_tails(workload, compute, order)
    return kept[compute, order]


def _heads_tails(workload: Workload, compute: Compute, order: Order) -> HeadsTails:
    period = Period.of(workload)
    if compute == "unlimited":
        return _longest_paths(period)
    if len(workload.ops) > _MOST_BITS:
        return _without_sets(period, order)
    weigh = _Weights(period.duration_s)
    after = _closures(reversed(period.topological), _successors(period))
    tails = [_union(after[r] for r in set(tensor.readers)) for tensor in workload.tensors]
    if order == "captured":
        heads = release_times(workload)
        forward = (1 << len(workload.phase_ops("forward"))) - 1  # forward ops have the lowest ids
        tails = [bits | forward & -(bits & forward & -(bits & forward)) for bits in tails]
    else:
        before = _closures(period.topological, period.waits)
        heads = [weigh.of(before[op]) for op in period.ready_op]
    return HeadsTails(heads, [weigh.of(bits) for bits in tails], workload.compute_s)


def _without_sets(period: Period, order: Order) -> HeadsTails:
    """Return what `heads_tails` returns for one stream, for any number of ops.

    Up to rounding, these times equal the times that are computed with sets. If `reached_s` returns less than the exact
    time of some ops, the release time or tail is too small, too.
    """
    workload, duration, successors = period.workload, period.duration_s, _successors(period)
    backward, updates = workload.phase_ops("backward"), workload.phase_ops("optimizer")
    readers = [list(set(tensor.readers)) for tensor in workload.tensors]
    if order == "any":
        heads = reached_s(backward, period.waits, duration, ([op] for op in period.ready_op))
        later = period.topological[: len(backward) - 1 : -1]
        return HeadsTails(heads, reached_s(later, successors, duration, readers), workload.compute_s)
    forward = len(workload.phase_ops("forward"))
    rest_s = [0, *accumulate(reversed(duration[:forward]))][::-1]  # by forward op, and 0 for the end
    first = [*range(forward), *[forward] * (len(duration) - forward)]  # by op: the first forward op that it reaches
    among: list[list[int]] = [[] for _ in duration]  # the updates that wait for an update
    for update in reversed(updates):
        first[update] = min((first[op] for op in successors[update]), default=forward)
        among[update] = [op for op in successors[update] if op >= updates[0]]
    own = [[op for op in ops if op >= forward] for ops in readers]
    updating_s = reached_s(updates[::-1], among, duration, own)
    begun_s = (rest_s[min((first[op] for op in ops), default=forward)] for ops in readers)
    tails = [sum(both) for both in zip(begun_s, updating_s, strict=True)]
    return HeadsTails(release_times(workload), tails, workload.compute_s)


def _longest_paths(period: Period) -> HeadsTails:
    duration, successors = period.duration_s, _successors(period)
    end, rest = [0.0] * len(duration), [0.0] * len(duration)
    for i in period.topological:
        ready = max((end[period.ready_op[t]] for t in period.reads[i]), default=0)
        end[i] = duration[i] + max((end[op] for op in period.waits[i]), default=ready)
        end[i] = max(end[i], duration[i] + ready)
    for i in reversed(period.topological):
        rest[i] = duration[i] + max((rest[op] for op in successors[i]), default=0)
    tails = [max((rest[r] for r in tensor.readers), default=0) for tensor in period.workload.tensors]
    return HeadsTails([end[op] for op in period.ready_op], tails, max(end))


def _successors(period: Period) -> list[list[int]]:
    successors: list[list[int]] = [[] for _ in period.waits]
    for i, waits in enumerate(period.waits):
        for op in waits:
            successors[op].append(i)
    return successors


def _closures(order: Iterable[int], neighbours: list[list[int]]) -> list[int]:
    """Return the closure of each op under `neighbours`, as bits; `order` has an op's neighbours before the op."""
    closure = [0] * len(neighbours)
    for i in order:
        closure[i] = 1 << i | _union(closure[op] for op in neighbours[i])
    return closure


def _union(sets: Iterable[int]) -> int:
    bits = 0
    for other in sets:
        bits |= other
    return bits


class _Weights:
    """The total durations of sets of ops. A set is given as bits; for each eight ops, a table has all 256 sums."""

    def __init__(self, duration_s: list[float]) -> None:
        self.tables: list[list[float]] = []
        for k in range(0, len(duration_s), 8):
            sums: list[float] = [0]
            for weight in duration_s[k : k + 8]:
                sums += [total + weight for total in sums]
            self.tables.append(sums)
        self.found: dict[int, float] = {}

    def of(self, bits: int) -> float:
        """Return how many seconds all ops in the set take together."""
        if bits not in self.found:
            self.found[bits] = sum(map(getitem, self.tables, bits.to_bytes(len(self.tables), "little")))
        return self.found[bits]
