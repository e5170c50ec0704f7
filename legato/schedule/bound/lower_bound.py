"""A time that no schedule can beat, and the set of tensors that proves it.

Take any schedule: any merging, partitioning and order of messages, all-reduces or
their two halves, any mixture of the cluster's collectives, with forward overlap. Let
S be any set of tensors, B their bytes, r the release time (Carlier's head) and q the
tail of a tensor (`heads_tails.py`).

*Cost.* Let alpha be the least of the collectives' alphas and beta the slope at
which alpha + beta * B is the cost of the cheapest collective for B bytes. The
cheapest cost is concave in the size, so a message that carries b <= B bytes of
S costs at least alpha + beta * b, whichever its collective (with one
collective, this is its own cost); a half costs at least half of that.

*Release.* List the messages that aggregate bytes of S (all-reduces and first
halves) in time order; the j-th starts no earlier than R(j), the largest release time
in it or before it. From then until the last byte of S arrives, the network carries
the messages l >= j, each at least alpha/2 + beta/2 * b(l), and delivers these
bytes (the other half of each all-reduce, or later second halves, at
least one), for at least alpha/2 + beta/2 * (sum of b(l)). So S arrives after

    alpha/2 + max over j of  R(j) + sum over l >= j of (alpha/2 + beta * b(l)).

Moving each byte into the first message with R >= its release time only lowers
this, and then every message carries neighbours in order of release: it is at least
alpha/2 + f, with f from `merge_optimal.py` for alpha/2 and beta. The tensor that arrives
last still has a tail of at least min q(S):

    T >= f(release times of S) + alpha/2 + min q(S).

*Tail.* The same backwards in time, with the messages that deliver bytes of S:

    T >= min r(S) + alpha/2 + f(tails of S).

*Both.* Count only the network's work, beta * b of a message that carries b bytes
of S (half of it for a half): B in all. Let U(x) be the most work that can be
done by x when each message pays alpha/2 first and carries what is released by
its start (`capacity.py`), and V(y) the same backwards in time. Take any moment m,
and the message from s to e in which it lies, with a work of w <= e - s - alpha/2.
The messages before it have done a <= U(s), those after it c <= V(T - e). Divide
w so that a + w1 could be done by m: if m >= s + alpha/2, take w1 = m - s -
alpha/2, then a + w1 <= U(m), and c + w2 <= V(T - e + alpha/2 + w2) <=
V(T - m + alpha/2); if not, w1 = 0 does the same. (No message at m: even less.) So

    beta * B <= U(m) + V(T - m + alpha/2)

and T is at least m - alpha/2 plus the time that V needs for the rest. This
counts what the network loses at both ends of the period: the small messages
with which it has to begin, and those with which it has to end so that the forward
pass does not wait.

*Between.* Let h be the least release time of S and q its least tail. All messages with
bytes of S lie between h and T - q and take alpha + beta * B at least. Let W be
the work for the other tensors, beta * b for b bytes, and U and V as above, but
for the others only, and sharper where there are halves (`HalvesCapacity`). The
messages that start before h have done a <= U(e) of it when the last of them
ends, at e; if e > h, then e - a is at least h - U(h), since U grows no faster
than time. The same at the other end. What neither has done is done between, so

    T >= h + alpha + beta * B + max(0, W - U(h) - V(q)) + q.

Sets that are small but late (the first layers) wait for everything that could go
neither before them nor after.

*Detours.* Where ops may run in any order on one stream, "between" proves more.
Let K be the ops that every gradient of S depends on, and g >= sum of d(K) the
moment at which the first gradient of S is ready. An op outside of K that
produces gradients of other tensors, with w seconds of network work, either runs
before g and delays g by its duration d, or what it produces is not sent by messages
that start before g. With V as above,

    T >= sum of d(K) + sum of d of those before g + alpha + beta * B
         + max(0, sum of w of the others - V(q)) + q.

The least of this over all choices of ops, or of parts of ops, is a linear
program that a greedy choice solves: V(q) goes to those with the largest d/w, and
of each of the rest the smaller of d and w counts.

*Last.* In any order of ops, what is not computed before the message that a tensor
waits for needs a message of its own after it (`last_message.py`).

*Nested.* Sets that lie inside each other are sent in stretches of time that do, too,
each of a whole number of messages; what arrives last is updated last (`nested.py`).

*Ranges.* The same sets, with the latest end of each of their messages: what a message brings is
updated after it, and so is all that comes later (`ranges.py`; for all-reduces only).

*Sides.* The same sets, and what is sent before the last gradients are scattered, and after that:
what is scattered on one side is gathered on the other one, or on the same (`sides.py`; for
all-reduces and pairs only).

*Whole.* Large tensors are updated when they are complete, and meanwhile the stream has little to
do. In which order they arrive is a path, and the best one gives a bound (`whole.py`).

*Sequences.* Where messages are expensive, all sequences of them are followed at once,
with the least time that each state needs (`sequences.py`).

*All-reduces only.* If every message is an all-reduce, alpha stands where alpha/2 stands
above: S arrives after max over j of R(j) + sum over l >= j of (alpha + beta *
b(l)), nothing comes on top, and both ends give beta * B <= U(m) + V(T - m +
alpha) with messages that pay alpha first.

*Pairs.* If every message is an all-reduce or one of two halves, and what one half
scatters is what the other one gathers, then both halves of the pairs l >= j come after
R(j). So "release" and "tail" are those of all-reduces only. "Nested" and "whole" also
prove more for pairs than for any halves, and "sequences" follows which of them are
under way.

*Processor.* Where messages and computation share a processor (`Cluster.contention`),
take a message that needs c seconds on its own and takes o from computation, and let p
be the part of its way on which it is beside computation: the stream is busy p * o
longer, and waits for (1 - p) * c. In one period, for all bytes B, with o never more than
the simulator lets it take,

    T >= computation and packing + sum over messages of min(o, c)
      >= computation and packing + min(alphas) + min(betas) * B.

*Shards.* Where workers update their shards only (`Plan.shard`), leave the optimizer ops
out of the workload: every message still waits for its gradients, and every forward op for
the all-gathers of what it reads, in the same times or earlier. So what a sharded plan does
is a schedule of this workload, in pairs, and all of the above holds for it, with tails
of forward ops alone. And no worker computes less than its own shard's updates and all
other ops ("compute" and "processor", with updates divided by the number of workers).

*Update.* Let S be the tensors that an optimizer op reads, and d its time for one shard.
All reduce-scatters with bytes of S end before it begins, and no all-gather of S begins
before it ends. Each message with b bytes of S takes alpha/2 + beta/2 * b at least, so with
f for these costs,

    T >= f(release times of S) + d + f(tails of S).

*Step.* Parameters are gathered when the whole backward pass has ended, which takes b
seconds on one stream. If updates follow it, too, as they do where `optimizer.step()`
makes them (`step_last`), let d be the least time that those of a tensor of S take for one
shard; else, let d be 0. No all-gather of S begins before b + d, so

    T >= b + d + f(tails of S).

The network also has to finish the reduce-scatters of S. After b all gradients are ready,
so those that are left could go one after another, and by the definition of f they take
f(release times of S) - b at least. All all-gathers of S come after b as well, so

    T >= max(b, f(release times of S)) + alpha/2 + beta/2 * B + min q(S).

*Gathers.* The same for nested sets, whose messages are as many beside one pass as beside the other one:
what is scattered during the backward pass is gathered after it (`gathers.py`).

*Floors.* A message costs no less than the smallest one. So all arguments also hold where
every message costs that much, whatever its bytes (`Cluster.at_floors`), and otherwise
without floors.

*Wire formats.* A message of b bytes costs what its collective takes for b bytes or, in a
wire format, for half of them, rounded up: no less than alpha + beta/2 * b, and its
overhead no less than that with half the slope. All of these arguments use costs and
overheads only from below. So with all slopes halved (`Cluster.in_wire_format`) they hold
for all plans, whichever of their messages are in a format.

"Release" and "tail" are at least min r + (alpha + beta * B) + min q, the value of Jackson's
preemptive schedule (the exact optimum when alpha is 0: PACE's problem) with
one alpha added, and more where S cannot go in one message. And no schedule is
faster than its computation alone.

Every S gives a valid bound. A few dozen promising ones are tried, so the bound may
miss the best S, but it never claims too much. `check.py` proves a bound again from
its certificate alone, in exact arithmetic.
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
from legato.schedule.basics.heads_tails import MOST_BITS, Detours, HeadsTails, Order, heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.sharded import check_shard, with_sharded_updates, without_updates
from legato.schedule.bound.between import between
from legato.schedule.bound.capacity import Capacity
from legato.schedule.bound.gathers import gathers
from legato.schedule.bound.last_message import last_message
from legato.schedule.bound.nested import SetsBound, nested
from legato.schedule.bound.plan_kind import PlanKind, Sends, check_sends, wider_kinds
from legato.schedule.bound.ranges import ranges
from legato.schedule.bound.release_times import AnyOrderReleaseTimes, FixedReleaseTimes
from legato.schedule.bound.sequences import Levels, sequences
from legato.schedule.bound.sides import sides
from legato.schedule.bound.waiting_updates import Updates
from legato.schedule.bound.whole import whole
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
    "between",
    "last",
    "nested",
    "ranges",
    "sides",
    "whole",
    "sequences",
    "update",
    "step",
    "gathers",
]


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why no schedule is faster: the indices S of the critical tensors, and the time that they take.

    `case` names the argument above that gives the bound; S is empty with "compute",
    where computation alone takes as long, and with "processor". Three times follow one
    another and add up to the bound, in seconds: `before_s`, the computation before the
    first tensor of S is ready (with "last", before its message); `network_s`, the
    network with its unavoidable waits; and `after_s`, the time after. `moment_s` is the
    m of "both".
    `levels` are the bytes to which "sequences" rounds; its S is in the order of its
    limits. With "nested", "ranges", "sides" and "gathers", the first `sets[0]`, `sets[1]`, ... of its S are the sets.
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
    levels: Levels = ((), ())
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
    `thorough`, it leaves out "ranges", "sides" and "sequences", which take longest to find, and "nested"
    tries fewer sets. In any order,
    "last" and the detours of "between" need sets of ops and are left out above
    `MOST_BITS` ops, and "sequences" then takes each release time for itself. What holds for
    a wider kind of plans (`wider_kinds`) holds for this one, too, so it is never less than for
    these, if it is thorough and there are at most 64 tensors, or 4,096 and the kinds differ in `sends` only. Raises
    `InputError` on an unknown setting, and `TooLargeError` on too many ops.
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
    reorders = order == "any" and compute == "one" and len(workload.ops) <= MOST_BITS
    detours = Detours(workload, line.beta_s_per_byte) if reorders else None
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    late = between(times, nbytes, line, all_reduce_only, beat_s=found.seconds, detours=detours)
    if late is not None:
        found = _certified("between", late.seconds, late.tensors, late.first_s, late.last_s)
    last = detours and last_message(times, nbytes, line, all_reduce_only, detours, beat_s=found.seconds)
    if last:
        found = _certified("last", last.seconds, (last.tensor,), last.before_s, last.after_s)
    first, last_s = min(times.release_s), min(times.tail_s)
    most = {} if thorough else {"most": _FEW_SETS}
    chain = nested(workload, times, line, sends, beat_s=found.seconds, one_stream=compute == "one", **most)
    if chain is not None:
        found = _of_sets("nested", chain, first, last_s)
    updates = Updates(workload, order) if compute == "one" and workload.phase_ops("optimizer") else None
    if updates is not None:
        large = whole(workload, times, updates, line, sends, beat_s=found.seconds)
        if large is not None:
            found = _certified("whole", large.seconds, large.tensors, first, last_s)
    if not thorough:
        return found
    if compute == "one" and all_reduce_only:
        stretch = ranges(workload, times, line, beat_s=found.seconds)
        if stretch is not None:
            found = _of_sets("ranges", stretch, first, last_s)
    if sends == "pairs":
        divided = sides(times, nbytes, line, beat_s=found.seconds)
        if divided is not None:
            found = _of_sets("sides", divided, first, last_s)
    ready = AnyOrderReleaseTimes(detours, nbytes) if detours else FixedReleaseTimes(times.release_s, nbytes)
    relaxed = sequences(times, nbytes, line, sends, ready, beat_s=found.seconds, updates=updates)
    if relaxed is None:
        return found
    sure = _certified("sequences", relaxed.seconds, relaxed.tensors, first, last_s)
    return msgspec.structs.replace(sure, certificate=msgspec.structs.replace(sure.certificate, levels=relaxed.levels))


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
