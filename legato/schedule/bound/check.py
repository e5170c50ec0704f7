"""Proves a lower bound again, from its certificate alone, in exact arithmetic.

The checker shares nothing with the code that found the bound. It finds release times
and tails by walking over the ops, and evaluates the recurrence of `merge_optimal.py` as
it is written, everything in whole numbers: a float is a whole number of `1 / SCALE`
seconds, so there is no rounding. `lower_bound.py` has the proof that is checked.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, pairwise

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Shard
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order
from legato.schedule.basics.sharded import check_shard, with_sharded_updates, without_updates
from legato.schedule.bound.check_gathers import check_gathers
from legato.schedule.bound.check_sides import check_sides
from legato.schedule.bound.lower_bound import Bound, Certificate
from legato.schedule.bound.plan_kind import PlanKind, Sends, check_sends, wider_kinds
from legato.schedule.bound.walk import SCALE, Walk, whole
from legato.simulator.collective import LEAST_PACE
from legato.simulator.period import Compute

__all__ = ["verify_bound"]

#: Parts of the claimed time, in which "nested" counts, everything rounded down.
_CLAIMED = 2**60


def verify_bound(
    bound: Bound,
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Compute = "one",
    order: Order = "captured",
    sends: Sends = "halves",
    shard: Shard = "none",
    step_last: bool = False,
    wire: bool = False,
) -> Fraction:
    """The exact seconds that the certificate proves, under the settings given to `lower_bound`.

    Raises `InputError` when this is less than the bound claims (by more than the
    rounding of its floats, a part in 10**9), or when the certificate names tensors
    that the workload does not have, or is for plans of another kind.
    """
    check_sends(sends)
    certificate, kind = bound.certificate, PlanKind(order, sends, shard, step_last, wire)
    if certificate.kind is not None:
        if certificate.kind not in wider_kinds(kind):
            raise InputError(f"certificate: for {certificate.kind} (expected one that has all of {kind})")
        kind = certificate.kind
    _check_sets(certificate, workload)
    if certificate.at_floors:
        cluster = cluster.at_floors()
    if kind.wire:
        cluster = cluster.in_wire_format()
    if kind.shard == "none" and certificate.case in ("update", "step", "gathers"):
        raise InputError(f"certificate: case {certificate.case!r} without a shard")
    proves = _unsharded if kind.shard == "none" else _sharded
    proved = proves(bound, workload, cluster, compute, kind)
    if Fraction(bound.seconds) > proved * (1 + Fraction(1, 10**9)):
        raise InputError(f"bound: {bound.seconds} s (its certificate proves only {float(proved)} s)")
    return proved


def _check_sets(certificate: Certificate, workload: Workload) -> None:
    chosen, case, sizes = certificate.tensors, certificate.case, certificate.sets
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(range(len(workload.tensors))):
        raise InputError(f"certificate: tensors {chosen} (expected different indices below {len(workload.tensors)})")
    if (case in ("compute", "processor")) != (not chosen):
        raise InputError(f"certificate: case {case!r} with {len(chosen)} tensors")
    if case in ("nested", "sides", "gathers") and not (
        sizes and sizes[0] >= 1 and sizes[-1] == len(chosen) and all(a < b for a, b in pairwise(sizes))
    ):
        raise InputError(f"certificate: sets {sizes} (expected rising numbers up to {len(chosen)})")


def _sharded(bound: Bound, every: Workload, cluster: Cluster, compute: Compute, kind: PlanKind) -> Fraction:
    """What a certificate proves for plans that shard the updates, which send pairs."""
    if kind.sends == "all_reduces":
        raise InputError(f"sends: 'all_reduces' with shard {kind.shard!r} (expected halves or pairs)")
    check_shard(kind.shard)
    certificate, case = bound.certificate, bound.certificate.case
    workload = with_sharded_updates(every, cluster.workers)
    if case not in ("compute", "processor"):
        workload = without_updates(workload)
    if case not in ("update", "step", "gathers"):
        return _unsharded(bound, workload, cluster, compute, kind._replace(sends="pairs"))
    walk = Walk(workload, compute, kind.order)
    if case == "update":
        return _update(every, cluster, walk, bound)
    if compute != "one":
        raise InputError(f"certificate: case {case!r} with unlimited streams (expected one)")
    from_s = _first_gather(every, cluster, walk, certificate.tensors, kind.step_last)
    if case == "step":
        return _step(every, cluster, walk, certificate.tensors, from_s)
    return check_gathers(workload, cluster, walk, certificate, from_s)


def _unsharded(bound: Bound, workload: Workload, cluster: Cluster, compute: Compute, kind: PlanKind) -> Fraction:
    certificate, case, sends = bound.certificate, bound.certificate.case, kind.sends
    chosen, walk = certificate.tensors, Walk(workload, compute, kind.order)
    if case in ("compute", "processor"):
        proved = Fraction(walk.compute(), SCALE)
        return proved if case == "compute" else proved + _shared_processor(workload, cluster, compute)
    if case == "both":
        near_both = {t: (walk.release(t), walk.tail(t)) for t in chosen}
        return _both_ends(workload, cluster, near_both, bound, sends == "all_reduces")
    if case == "nested":
        return _nested(workload, cluster, walk, certificate, sends)
    if case == "sides":
        if sends == "halves":
            raise InputError("certificate: case 'sides' for halves (expected pairs or all-reduces)")
        return check_sides(workload, cluster, walk, certificate)
    near, far = (walk.release, walk.tail) if case == "release" else (walk.tail, walk.release)
    return _network(workload, cluster, {t: near(t) for t in chosen}, sends) + Fraction(min(map(far, chosen)), SCALE)


def _shared_processor(workload: Workload, cluster: Cluster, compute: Compute) -> Fraction:
    """The least seconds that packing and messages take from the processor, or keep it waiting."""
    if cluster.contention is None or compute != "one":
        raise InputError(f"certificate: case 'processor' without contention on one stream (compute {compute!r})")
    entire = _End(workload, cluster, dict.fromkeys(range(len(workload.tensors)), 0), all_reduce_only=True)
    taken = 1 - Fraction(LEAST_PACE)
    overhead, nbytes = cluster.contention.overhead, entire.total
    alpha = min(Fraction(overhead.alpha_s), taken * Fraction(entire.alpha, entire.unit))
    beta = min(Fraction(overhead.beta_s_per_byte), taken * Fraction(entire.slope, entire.unit))
    return alpha + (beta + Fraction(cluster.contention.pack_s_per_byte)) * nbytes


def _network(workload: Workload, cluster: Cluster, near: dict[int, int], sends: Sends) -> Fraction:
    """f(near), plus alpha/2 where halves need not be sent in pairs."""
    end = _End(workload, cluster, near, sends != "halves")
    return Fraction(end.finish[-1] + end.alpha - end.half, end.unit)


def _both_ends(
    workload: Workload, cluster: Cluster, near: dict[int, tuple[int, int]], bound: Bound, all_reduce_only: bool
) -> Fraction:
    """m - alpha/2, plus the time needed from the far end for the work that cannot be done by m."""
    moment = bound.certificate.moment_s
    if not (math.isfinite(moment) and moment >= 0):
        raise InputError(f"certificate: moment_s {moment} (expected finite seconds, at least 0)")
    front = _End(workload, cluster, {t: release for t, (release, _) in near.items()}, all_reduce_only)
    back = _End(workload, cluster, {t: tail for t, (_, tail) in near.items()}, all_reduce_only)
    m = whole(moment) * front.total
    left = front.sent[-1] - front.done_by(m)
    return Fraction(m - front.half + back.time_for(left), front.unit)


def _update(every: Workload, cluster: Cluster, walk: Walk, bound: Bound) -> Fraction:
    """f(release times) + d + f(tails), with f for halves, of the tensors that an optimizer op reads."""
    chosen, op = bound.certificate.tensors, bound.certificate.op
    if op not in every.phase_ops("optimizer"):
        raise InputError(f"certificate: op {op} (expected an optimizer op)")
    if set(chosen) != {t for t, tensor in enumerate(every.tensors) if op in tensor.readers}:
        raise InputError(f"certificate: tensors {chosen} (expected all that op {op} reads)")
    total = Fraction(every.ops[op].duration_s / cluster.workers)  # as the simulator rounds it
    for near in (walk.release, walk.tail):
        end = _End(every, cluster, {t: near(t) for t in chosen}, all_reduce_only=False, one_kind=True)
        total += Fraction(end.finish[-1], end.unit)
    return total


def _first_gather(every: Workload, cluster: Cluster, walk: Walk, chosen: tuple[int, ...], step_last: bool) -> Fraction:
    """b + d."""
    updates = set(every.phase_ops("optimizer")) if step_last else set()
    least = []
    for t in chosen:
        own = updates & set(every.tensors[t].readers)
        least.append(sum((Fraction(every.ops[op].duration_s / cluster.workers) for op in own), Fraction(0)))
    return Fraction(walk.backward_until[-1], SCALE) + min(least)


def _step(every: Workload, cluster: Cluster, walk: Walk, chosen: tuple[int, ...], from_s: Fraction) -> Fraction:
    """b + d + f(tails), or max(b, f(release times)) + alpha/2 + beta/2 * B + min q, with f for halves."""
    backward = Fraction(walk.backward_until[-1], SCALE)
    front, back = (
        _End(every, cluster, {t: near(t) for t in chosen}, all_reduce_only=False, one_kind=True)
        for near in (walk.release, walk.tail)
    )
    busy = max(backward, Fraction(front.finish[-1], front.unit)) + Fraction(back.half + back.sent[-1], back.unit)
    one_after_another = from_s + Fraction(back.finish[-1], back.unit)
    return max(one_after_another, busy + Fraction(min(map(walk.tail, chosen)), SCALE))


def _nested(workload: Workload, cluster: Cluster, walk: Walk, certificate: Certificate, sends: Sends) -> Fraction:
    """The claimed seconds, as `nested.py` defines them. Raises `InputError` if messages may take no longer.

    Counts in parts of the claimed time, everything rounded down. Goes through the sets from
    the innermost one, with the least number of messages for each pair of the sets at which
    the range of messages began and ended.
    """
    sizes = certificate.sets
    claimed = sum(map(Fraction, (certificate.before_s, certificate.network_s, certificate.after_s)), Fraction(0))
    everything = range(len(workload.tensors))
    entire = _End(workload, cluster, dict.fromkeys(everything, 0), sends != "halves")
    sets = [certificate.tensors[:size] for size in sizes]
    release, tail, forward = (
        [min(map(of, tensors)) * entire.total for tensors in sets] for of in (walk.release, walk.tail, walk.forward)
    )
    work = [entire.slope * sum(workload.tensors[t].nbytes for t in tensors) for tensors in sets]
    later = innermost = [[0] * len(sets)] * len(sets)
    alone = [0] * len(sets)
    updates = _Updates(workload, walk, entire)
    if updates.shares:
        released = _Carried(workload, cluster, {t: walk.release(t) for t in everything}, sends == "all_reduces", entire)
        left = [entire.slope * entire.total - released.by(moment) for moment in release]
        least = entire.slope * min(workload.tensors[t].nbytes for t in sets[0])
        later, innermost = (
            [[updates.least(of - done + whole, capped=True) for of in left] for done in work] for whole in (0, least)
        )
        others = updates.least(left[0], capped=True)
        alone = [max(updates.least(done, capped=False), others) for done in work]

    def parts(seconds: int) -> int:
        return int(seconds * _CLAIMED // (claimed * entire.unit)) if claimed else 0

    release, tail, forward, work, alone = ([*map(parts, of)] for of in (release, tail, forward, work, alone))
    first, once = parts(entire.half), parts(entire.alpha - entire.half)
    messages = {(0, 0): 1}
    for t in range(len(sets)):
        if t:
            grown = messages.copy()
            for (i, j), count in messages.items():
                for ends, more in (((t, j), 1), ((i, t), 1), ((t, t), 1 if sends == "pairs" else 2)):
                    grown[ends] = min(grown.get(ends, count + more), count + more)
            messages = grown
        updated = [[*map(parts, of[t])] for of in (innermost, later)]
        updated[0][0] = min(alone[t], first + updated[0][0])
        messages = {
            (i, j): count
            for (i, j), count in messages.items()
            if once + count * first + release[i] + work[t]
            + max(tail[j], forward[j] + updated[j > 0][i]) <= _CLAIMED
        }  # fmt: skip
        if not messages:
            return claimed
    raise InputError(f"bound: messages with nested sets may take {float(claimed)} s")


class _Updates:
    """The least time of the updates of tensors that have some work, in the units of `entire`, rounded down."""

    def __init__(self, workload: Workload, walk: Walk, entire: _End) -> None:
        shares: dict[int, int] = {}
        for op, duration in enumerate(walk.duration):
            if walk.phase[op] == "optimizer" and walk.compute_setting == "one":
                tensors = [t for t, tensor in enumerate(workload.tensors) if op in tensor.readers]
                total = sum(workload.tensors[t].nbytes for t in tensors)
                for t in tensors:
                    share = duration * entire.total * workload.tensors[t].nbytes // total
                    shares[t] = shares.get(t, 0) + share
        works = [entire.slope * tensor.nbytes for tensor in workload.tensors]
        every = [(shares.get(t, 0), work) for t, work in enumerate(works)]
        self.shares = sorted(every, key=lambda of: Fraction(*of)) if shares and entire.slope else []

    def least(self, work: int, *, capped: bool) -> int:
        """The least time for this much work; if `capped`, no tensor counts more than its work."""
        least = 0
        for seconds, of in self.shares:
            if work <= 0:
                break
            counted = min(seconds, of) if capped else seconds
            least += counted if of <= work else counted * work // of
            work -= of
        return least


class _End:
    """f for tensors seen from one end of the period, in units of 1 / (SCALE * bytes), so that the slope is whole."""

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        near: dict[int, int],
        all_reduce_only: bool,
        of: int | None = None,
        one_kind: bool = False,
    ) -> None:
        """`of`: the bytes up to which a line replaces the cheapest cost; by default, those of these tensors.

        `one_kind`: a message does half of the work of its bytes.
        """
        inward = sorted(near, key=near.__getitem__)
        sizes = [workload.tensors[t].nbytes for t in inward]
        self.total = total = sum(sizes) if of is None else of
        self.unit = SCALE * total
        costs = [(whole(c.alpha_s), whole(c.beta_s_per_byte)) for c in cluster.least_costs()]
        alpha = min(a for a, _ in costs)
        self.slope = min(a + b * total for a, b in costs) - alpha  # of a byte, in the finer unit
        self.alpha = alpha * total
        self.half = self.alpha if all_reduce_only else self.alpha // 2  # what a message pays first
        self.sent = [self.slope // (2 if one_kind else 1) * nbytes for nbytes in accumulate(sizes, initial=0)]
        self.near = [near[t] * total for t in inward]
        self.finish = [0]
        for j in range(len(inward)):
            self.finish.append(self._begun(j) + self.half + self.sent[j + 1])

    def _begun(self, j: int) -> int:
        """The least (start of a message whose last bytes are of tensor j) - (work before it)."""
        return min(max(self.finish[i], self.near[j]) - self.sent[i] for i in range(j + 1))

    def done_by(self, moment: int) -> int:
        """The most work by a moment: for some j, all tensors before j and as much of j as there is time for."""
        possible = (min(moment - self.half - self._begun(j), self.sent[j + 1]) for j in range(len(self.near)))
        return max(0, *possible)

    def time_for(self, work: int) -> int:
        """The least time for this much work."""
        if work <= 0:
            return 0
        j = next(j for j in range(len(self.near)) if self.sent[j + 1] >= work)
        return self._begun(j) + self.half + work


class _Carried:
    """The most work for tensors by a moment, in the units of `entire`; with halves as in `capacity.py`."""

    def __init__(
        self, workload: Workload, cluster: Cluster, near: dict[int, int], all_reduce_only: bool, entire: _End
    ) -> None:
        self.alpha, self.all_reduce_only, self.empty = entire.alpha, all_reduce_only, not near
        self.any = _End(workload, cluster, near, all_reduce_only, entire.total)
        self.one_kind = _End(workload, cluster, near, all_reduce_only, entire.total, one_kind=True)

    def by(self, moment: int) -> int:
        if self.empty:
            return 0
        if self.all_reduce_only:
            return self.any.done_by(moment)
        return min(self.any.done_by(moment), max(self.one_kind.done_by(moment), moment - self.any.near[0] - self.alpha))
