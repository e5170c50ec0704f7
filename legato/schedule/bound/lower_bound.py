"""A time that no schedule can beat, and the set of tensors that proves it.

Every set of tensors gives a valid bound, by each of the arguments of docs/bounds.md. A few dozen promising sets are
tried, so the bound may miss the best one, but it never claims too much. `check.py` proves a bound again from its
certificate alone, in exact arithmetic.
"""

from __future__ import annotations

import heapq
import html
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Shard
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import HeadsTails, Order, heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.sharded import check_shard, with_sharded_updates, without_updates
from legato.schedule.bound.capacity import Capacity
from legato.schedule.bound.gathers import gathers
from legato.schedule.bound.nested import SetsBound, nested
from legato.schedule.bound.plan_kind import PlanKind, Sends, check_sends, wider_kinds
from legato.schedule.bound.sides import sides
from legato.schedule.published.merge_optimal import merge_neighbours
from legato.simulator.collective import LEAST_PACE
from legato.simulator.period import Compute, Period

__all__ = ["Bound", "Certificate", "cheapest_line", "lower_bound"]

#: How many late deliveries of Jackson's schedule to examine.
_TRIES = 6
#: How many of the best sets to examine from both ends.
_BOTH = 4
#: How many moments to try for "both", and how often to refine around the best one.
_MOMENTS, _REFINEMENTS = 16, 3
#: With more tensors, wider kinds of plans are not looked at thoroughly but for what they send, or not at all.
_FEW_TENSORS, _MOST_TENSORS = 64, 4096
#: The most nested sets where the bound is not thorough.
_FEW_SETS = 32
#: More than the relative rounding error of thousands of float additions.
_ROUNDING = 1e-9


Case = Literal[
    "compute",
    "processor",
    "release",
    "tail",
    "both",
    "nested",
    "sides",
    "update",
    "step",
    "gathers",
]


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why no schedule is faster: the indices S of the critical tensors, and the time that they take.

    `case` names the argument above that gives the bound; S is empty with "compute",
    where computation alone takes as long, and with "processor". Three times follow one
    another and add up to the bound, in seconds: `before_s`, the computation before the
    first tensor of S is ready; `network_s`, the
    network with its unavoidable waits; and `after_s`, the time after. `moment_s` is the
    m of "both". With "nested", "sides" and "gathers", the first `sets[0]`, `sets[1]`, ... of its S are the sets.
    `op` is the optimizer op of "update". The times of updates are part of `network_s`.
    `kind` is a wider kind of plans for which this is proved, or None where it is the one asked for. With
    `at_floors`, every message counts as much as the smallest one.
    """

    case: Case
    tensors: tuple[int, ...]
    before_s: float
    network_s: float
    after_s: float
    moment_s: float = 0.0
    sets: tuple[int, ...] = ()
    op: int = -1
    kind: PlanKind | None = None
    at_floors: bool = False


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No schedule takes less than `seconds` for one iteration."""

    seconds: float
    certificate: Certificate

    def __str__(self) -> str:
        return f"no schedule takes less than {format_seconds(self.seconds)} (certificate: {self.certificate.case!r})"

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        return f"<p>{html.escape(str(self))}</p>"


def lower_bound(
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
    wire: bool = False,
    thorough: bool = True,
) -> Bound:
    """The largest of the bounds above over the sets tried.

    It holds for every plan that `legato.simulator.collective` accepts under the same
    `compute` and `shard`, and with an `op_order` that `order` allows. It is sharper where it
    holds only for plans that send nothing but all-reduces (`sends="all_reduces"`), or these
    and reduce-scatters and all-gathers in pairs with the same slices (`"pairs"`), as all sharded
    plans do. With `shard`
    and `step_last`, it holds only for plans whose optimizer ops all follow the backward pass. It holds for
    plans with messages in a wire format (`Message.wire`) only with `wire`. Without
    `thorough`, or without numba, it leaves out "sides", which takes longest to find; if not `thorough`, "nested"
    tries fewer sets. What holds for a wider kind of plans (`wider_kinds`) holds for this one, too, so it is never
    less than for these, if it is thorough and there are at most 64 tensors, or 4,096 and the kinds differ in `sends`
    only. Raises `InputError` on an unknown setting, and `TooLargeError` on too many ops.
    """
    check_sends(sends)
    if shard != "none" and sends == "all_reduces":
        raise InputError(f"sends: 'all_reduces' with shard {shard!r} (expected halves or pairs)")
    own = PlanKind(order, sends, shard, step_last, wire)
    best = _of_kind(workload, cluster, compute, own, thorough)
    kinds = wider_kinds(own) if thorough and len(workload.tensors) <= _MOST_TENSORS else [own]
    for kind, at_floors in itertools.product(kinds, (False, True) if cluster.has_floors else (False,)):
        costs = cluster.at_floors() if at_floors else cluster
        near = kind == own._replace(sends=kind.sends) or len(workload.tensors) <= _FEW_TENSORS
        near = near and kind.wire == wire and not at_floors
        arguments = (workload, costs, compute, kind, thorough and near)
        if (kind, at_floors) != (own, False) and _of_kind(*arguments, best.seconds).seconds > best.seconds:
            # Once more from the beginning, as for plans of this kind: from another start, the result differs slightly.
            found = max((_of_kind(*arguments), best), key=lambda bound: bound.seconds)
            best = _proved(found, kind, at_floors) if found is not best else best
    return best


def _proved(bound: Bound, kind: PlanKind, at_floors: bool) -> Bound:
    certificate = msgspec.structs.replace(bound.certificate, kind=kind, at_floors=at_floors)
    return msgspec.structs.replace(bound, certificate=certificate)


def _of_kind(
    workload: Workload, cluster: Cluster, compute: Compute, kind: PlanKind, thorough: bool, beat_s: float = 0.0
) -> Bound:
    """What is proved for plans of this kind, without floors; if that is not above `beat_s`, just this."""
    order, sends, shard, _, wire = kind
    if wire:
        cluster = cluster.in_wire_format()
    if shard != "none":
        return _sharded(workload, cluster, compute, kind, thorough, beat_s)
    times, all_reduce_only = heads_tails(workload, compute, order), sends == "all_reduces"
    line = cheapest_line(cluster, workload.nbytes)
    nothing = Bound(times.compute_s, Certificate("compute", (), times.compute_s, 0.0, 0.0))
    if cluster.contention is not None and compute == "one":
        nothing = _processor(workload, cluster, times.compute_s)
    nothing = _at_least(nothing, beat_s)
    sets = dict.fromkeys(_promising_sets(workload, cluster, times))  # in order, each once
    bounds = [_one_end(case, tensors, workload, cluster, times, sends) for case, tensors in sets]
    bounds.sort(key=lambda bound: bound.seconds, reverse=True)
    best = [bound.certificate.tensors for bound in bounds if len(bound.certificate.tensors) > 1]
    for tensors in dict.fromkeys([tuple(range(len(workload.tensors))), *best[:_BOTH]]):
        bounds.append(_both_ends(tensors, workload, cluster, times, all_reduce_only))
    found = max([nothing, *bounds], key=lambda bound: bound.seconds)
    first, last_s = min(times.release_s), min(times.tail_s)
    most = {} if thorough else {"most": _FEW_SETS}
    chain = nested(workload, times, line, sends, beat_s=found.seconds, one_stream=compute == "one", **most)
    if chain is not None:
        found = _of_sets("nested", chain, first, last_s)
    if thorough and sends == "pairs":
        divided = sides(times, [tensor.nbytes for tensor in workload.tensors], line, beat_s=found.seconds)
        if divided is not None:
            found = _of_sets("sides", divided, first, last_s)
    return found


def _sharded(
    workload: Workload,
    cluster: Cluster,
    compute: Compute,
    kind: PlanKind,
    thorough: bool,
    beat_s: float,
) -> Bound:
    """What holds without the optimizer ops, and what their shards add ("Shards", "Update" and "Step")."""
    order, _, shard, step_last, _ = kind
    check_shard(shard)
    plain, whole = without_updates(workload), with_sharded_updates(workload, cluster.workers)
    found = [_of_kind(plain, cluster, compute, PlanKind(order, "pairs"), thorough, beat_s)]
    compute_s = whole.compute_s if compute == "one" else heads_tails(whole, compute, order).compute_s
    found.append(Bound(compute_s, Certificate("compute", (), compute_s, 0.0, 0.0)))
    if cluster.contention is not None and compute == "one":
        found.append(_processor(whole, cluster, compute_s))
    times, reads = heads_tails(plain, compute, order), Period.of(workload).reads
    beat_s = max(bound.seconds for bound in found)
    updates = ((op, tuple(sorted(reads[op]))) for op in workload.phase_ops("optimizer") if reads[op])
    found += (
        _update(op, tensors, whole, cluster, times)
        for op, tensors in updates
        if _alone_s(op, tensors, whole, cluster, times) > beat_s
    )
    if compute == "one":
        found += _steps(whole, cluster, times, step_last)
    best = max(found, key=lambda bound: bound.seconds)
    if compute == "one":
        best = _gathers(whole, cluster, times, step_last, best)
    return best


def _at_least(bound: Bound, seconds: float) -> Bound:
    """The bound, raised to so many seconds, which it does not prove."""
    return bound if bound.seconds >= seconds else msgspec.structs.replace(bound, seconds=seconds)


def _alone_s(op: int, tensors: tuple[int, ...], workload: Workload, cluster: Cluster, times: HeadsTails) -> float:
    """What `_update` proves at most: all tensors in one message, ready with the last and needed with the first."""
    nbytes = sum(workload.tensors[t].nbytes for t in tensors)
    release_s, tail_s = (max(near[t] for t in tensors) for near in (times.release_s, times.tail_s))
    return release_s + cheapest_line(cluster, nbytes).cost(nbytes) + workload.ops[op].duration_s + tail_s


def _update(op: int, tensors: tuple[int, ...], workload: Workload, cluster: Cluster, times: HeadsTails) -> Bound:
    """What the tensors of one optimizer op prove with the argument "update"."""
    line = cheapest_line(cluster, sum(workload.tensors[t].nbytes for t in tensors))
    half = LinearCost(line.alpha_s / 2, line.beta_s_per_byte / 2)
    ends = []
    for near in (times.release_s, times.tail_s):
        inward = sorted(tensors, key=near.__getitem__)
        ends.append(merge_neighbours([near[t] for t in inward], [workload.tensors[t].nbytes for t in inward], half)[0])
    seconds = ends[0] + workload.ops[op].duration_s + ends[1]
    first, last = (min(near[t] for t in tensors) for near in (times.release_s, times.tail_s))
    return Bound(seconds, Certificate("update", tensors, first, seconds - first - last, last, op=op))


def _steps(workload: Workload, cluster: Cluster, times: HeadsTails, step_last: bool) -> Iterator[Bound]:
    """What sets of the tensors with the longest tails prove with the argument "step"."""
    backward_s = _backward_s(workload)
    by_tail = sorted(range(len(workload.tensors)), key=times.tail_s.__getitem__, reverse=True)
    for count in _counts(len(by_tail)):
        inward = by_tail[:count][::-1]
        update_s = _least_update_s(workload, inward) if step_last else 0.0
        sizes = [workload.tensors[t].nbytes for t in inward]
        line = cheapest_line(cluster, sum(sizes))
        half = LinearCost(line.alpha_s / 2, line.beta_s_per_byte / 2)
        gathered_s, _ = merge_neighbours([times.tail_s[t] for t in inward], sizes, half)
        by_release = sorted(inward, key=times.release_s.__getitem__)
        released = [times.release_s[t] for t in by_release]
        scattered_s, _ = merge_neighbours(released, [workload.tensors[t].nbytes for t in by_release], half)
        last = times.tail_s[inward[0]]
        busy = max(backward_s, scattered_s) + half.cost(sum(sizes)) + last
        seconds = max(backward_s + update_s + gathered_s, busy)
        yield _certified("step", seconds, tuple(sorted(inward)), backward_s, last)


def _gathers(workload: Workload, cluster: Cluster, times: HeadsTails, step_last: bool, best: Bound) -> Bound:
    """What nested sets prove with the argument "gathers", or the best bound so far."""
    from_s = _backward_s(workload)
    if step_last:
        from_s += _least_update_s(workload, range(len(workload.tensors)))
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    found = gathers(times, nbytes, cheapest_line(cluster, workload.nbytes), from_s=from_s, beat_s=best.seconds)
    return best if found is None else _of_sets("gathers", found, min(times.release_s), min(times.tail_s))


def _backward_s(workload: Workload) -> float:
    return sum(workload.ops[op].duration_s for op in workload.phase_ops("backward"))


def _least_update_s(workload: Workload, tensors: Iterable[int]) -> float:
    """The least time that the updates of one of these tensors take."""
    updates = Period.of(workload).updates
    return min(sum(workload.ops[op].duration_s for op in updates[t]) for t in tensors)


def _counts(most: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 11, 16 and so on, up to `most`."""
    count = 1.0
    while count < 2**0.5 * most:
        yield min(int(count), most)
        count *= 2**0.5


def _processor(workload: Workload, cluster: Cluster, compute_s: float) -> Bound:
    """What computation, packing, and the processor's work for messages prove together."""
    assert cluster.contention is not None
    line, overhead = cheapest_line(cluster, workload.nbytes), cluster.contention.overhead
    taken = 1 - LEAST_PACE
    busy_s = min(overhead.alpha_s, taken * line.alpha_s) + workload.nbytes * (
        min(overhead.beta_s_per_byte, taken * line.beta_s_per_byte) + cluster.contention.pack_s_per_byte
    )
    return Bound(compute_s + busy_s, Certificate("processor", (), compute_s, busy_s, 0.0))


def _of_sets(case: Case, bound: SetsBound, before_s: float, after_s: float) -> Bound:
    found = _certified(case, bound.seconds, bound.tensors, before_s, after_s)
    return msgspec.structs.replace(found, certificate=msgspec.structs.replace(found.certificate, sets=bound.sets))


def _certified(case: Case, seconds: float, tensors: tuple[int, ...], before_s: float, after_s: float) -> Bound:
    return Bound(seconds, Certificate(case, tensors, before_s, seconds - before_s - after_s, after_s))


def _both_ends(
    tensors: tuple[int, ...], workload: Workload, cluster: Cluster, times: HeadsTails, all_reduce_only: bool
) -> Bound:
    """What S proves with the argument "both", for the best of some moments."""
    line = cheapest_line(cluster, sum(workload.tensors[t].nbytes for t in tensors))
    half = LinearCost(line.alpha_s * (1.0 if all_reduce_only else 0.5), line.beta_s_per_byte)
    capacities = []
    for near in (times.release_s, times.tail_s):
        inward = sorted(tensors, key=near.__getitem__)
        capacities.append(Capacity.of([near[t] for t in inward], [workload.tensors[t].nbytes for t in inward], half))
    released, needed = capacities
    work, first, last = released.work_s[-1], released.release_s[0], needed.release_s[0]

    def proves(moment: float) -> float:
        # Rounded down by more than the error of floats: a trace of one more tensor would count its whole delay.
        return moment - half.alpha_s + needed.needed(work - released.carried(moment) - _ROUNDING * work)

    low, high = first, max(released.finish_s[-1], first)
    for _ in range(_REFINEMENTS):
        moments = [low + (high - low) * k / _MOMENTS for k in range(_MOMENTS + 1)]
        k = max(range(len(moments)), key=lambda i: proves(moments[i]))
        low, high = moments[max(k - 1, 0)], moments[min(k + 1, _MOMENTS)]
    seconds = proves(moments[k])
    return Bound(seconds, Certificate("both", tuple(sorted(tensors)), first, seconds - first - last, last, moments[k]))


def _one_end(
    case: Literal["release", "tail"],
    tensors: tuple[int, ...],
    workload: Workload,
    cluster: Cluster,
    times: HeadsTails,
    sends: Sends,
) -> Bound:
    """What S proves with the argument "release", or with "tail", which is the same backwards in time."""
    near, far = (times.release_s, times.tail_s) if case == "release" else (times.tail_s, times.release_s)
    inward = sorted(tensors, key=lambda t: near[t])
    sizes = [workload.tensors[t].nbytes for t in inward]
    line = cheapest_line(cluster, sum(sizes))
    first_s = line.alpha_s * (0.5 if sends == "halves" else 1.0)
    arrival, _ = merge_neighbours([near[t] for t in inward], sizes, LinearCost(first_s, line.beta_s_per_byte))
    first, last = near[inward[0]], min(far[t] for t in tensors)
    network = arrival + line.alpha_s - first_s - first
    before, after = (first, last) if case == "release" else (last, first)
    return Bound(before + network + after, Certificate(case, tuple(sorted(tensors)), before, network, after))


def cheapest_line(cluster: Cluster, nbytes: int) -> LinearCost:
    """The highest line below the costs of all collectives from 0 to `nbytes` bytes: it meets the least at both ends."""
    costs = cluster.least_costs()
    alpha = min(cost.alpha_s for cost in costs)
    return LinearCost(alpha, (min(cost.cost(nbytes) for cost in costs) - alpha) / nbytes)


def _promising_sets(
    workload: Workload, cluster: Cluster, times: HeadsTails
) -> Iterator[tuple[Literal["release", "tail"], tuple[int, ...]]]:
    """Pairs (case, S) worth trying: one family for expensive bytes, one for expensive startup times.

    The first family comes from the latest deliveries of Jackson's schedule. Take a
    tensor delivered at C + q, after a stretch of time from `begin` to C in which the
    network was never idle and sent nothing with a shorter tail. It is late because of
    the tensors with release time >= begin and tail >= q. The second family is the
    tensors with the longest tails, or the latest release times: 1, 2, 3, 4, 6, 8, 11,
    16 and so on of them.
    """
    release, tail = times.release_s, times.tail_s
    everything = range(len(release))
    slope = cheapest_line(cluster, workload.nbytes).beta_s_per_byte
    pieces = jackson(release, [slope * tensor.nbytes for tensor in workload.tensors], tail)
    last = {job: k for k, (job, _, _) in enumerate(pieces)}
    for late in heapq.nlargest(_TRIES, everything, key=lambda t: pieces[last[t]][2] + tail[t]):
        begin, least = _stretch(pieces, last[late], tail), tail[late]
        both = tuple(t for t in everything if release[t] >= begin and tail[t] >= least)
        yield "release", both
        yield "release", tuple(t for t in everything if tail[t] >= least)
        yield "tail", both
        yield "tail", tuple(t for t in everything if release[t] >= begin)
    by_tail, by_release = (sorted(everything, key=times.__getitem__, reverse=True) for times in (tail, release))
    for count in _counts(len(release)):
        yield "release", tuple(sorted(by_tail[:count]))
        yield "tail", tuple(sorted(by_release[:count]))


def _stretch(pieces: Sequence[tuple[int, float, float]], k: int, tail: Sequence[float]) -> float:
    """When the stretch that ends with piece k began."""
    shortest = tail[pieces[k][0]]
    while k > 0 and pieces[k - 1][2] == pieces[k][1] and tail[pieces[k - 1][0]] >= shortest:
        k -= 1
    return pieces[k][1]
