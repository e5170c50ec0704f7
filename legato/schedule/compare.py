"""Compare schedulers side by side on one workload, and choose the best plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.code import installed
from legato.core.errors import InputError, LegatoError, PlanError, TooLargeError
from legato.core.plan import Plan, Rounding, Shard
from legato.core.results import Results
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.schedule import GROUP, SERVER_SCHEDULERS, Scheduler, schedule, scheduler_names
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.heads_tails import check_size
from legato.schedule.basics.wire import check_wire
from legato.schedule.bound.lower_bound import Bound, lower_bound, verify_bound
from legato.schedule.bound.plan_kind import PlanKind, cluster_for_bound, kind_of
from legato.schedule.published.ddp import bucket_caps
from legato.simulator.collective import iteration_time, simulate

__all__ = [
    "MOST_BUCKET_BYTES",
    "SAME",
    "Candidate",
    "Contest",
    "best",
    "better_buckets",
    "check_bounds",
    "compare",
    "contestants",
    "hold_contest",
    "stock_buckets",
]

#: Predictions that differ by at most this fraction count as equal, because predictions are no more exact than that.
SAME = 0.005
#: The largest bucket to recommend for stock DDP, which keeps a copy of every bucket in memory. A larger tensor still
#: needs a bucket of its own size.
MOST_BUCKET_BYTES = 2**30


class Candidate(msgspec.Struct, frozen=True):
    """One scheduler's plan, its predicted timeline, and how long planning took (seconds).

    `bound` holds for all plans of the same `kind`. Plans of one kind agree in the fields of `PlanKind`, such as whether
    ops keep the captured order, and what is sharded. `runnable` says whether the PyTorch runtime can execute the plan
    as predicted (`is_runnable`). It is always true for legato's schedulers for parameter servers.
    """

    plan: Plan
    timeline: Timeline
    bound: Bound
    plan_s: float
    runnable: bool
    kind: PlanKind

    @property
    def iteration_s(self) -> float:
        return self.timeline.iteration_s

    @property
    def gap(self) -> float:
        """How far the iteration is above the proven lower bound: iteration / bound - 1."""
        return self.iteration_s / self.bound.seconds - 1 if self.bound.seconds > 0 else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of an iteration during which a worker computes, and the seconds during which it waits."""
        computing_s = self.timeline.computation_s
        return {"computing": computing_s, "waiting": max(0.0, self.iteration_s - computing_s)}

    @property
    def columns(self) -> dict[str, Any]:
        """The row of `legato plan --json`."""
        return {
            "scheduler": self.plan.scheduler,
            "iteration_s": self.iteration_s,
            "lower_bound_s": self.bound.seconds,
            "gap": self.gap,
            "overlap": self.timeline.overlap,
            "utilization": self.timeline.utilization,
            "num_messages": len(self.plan.messages),
            "runnable": self.runnable,
            "plan_s": self.plan_s,
        }


def compare(  # noqa: PLR0913
    workload: Workload,
    cluster: Cluster,
    contestants: Iterable[str | Scheduler | Plan] = (),
    *,
    collective: str | None = None,
    compute: Literal["one", "unlimited"] = "one",
    max_message_bytes: int | None = None,
    shard: Shard = "none",
    wire: Rounding = "none",
    progress: Callable[[int, int], object] | None = None,
    left_out: Callable[[str, InputError], object] | None = None,
) -> Results[Candidate]:
    """Let each contestant make a plan, and predict the plans; by default, use all schedulers that fit the cluster.

    A contestant is the name of a scheduler, a function, or a plan, which is used as it is.

    A message with several tensors never has more than `max_message_bytes`; schedulers that partition tensors keep every
    message within this limit. `shard` says whether all plans shard nothing, the optimizer, or the optimizer and the
    gradients. With `wire`, all gradients are sent in a wire format (`schedule`). Calls `progress(done, total)`
    after each contestant. If no contestants are given, a scheduler is left out if the workload is too large for it, if
    it sends all-reduces in halves but the collective has no halves, or if its package is broken. `left_out(name,
    error)` is then called. Raises `InputError` as `schedule` does, and if a message limit, shards or a wire format is
    given for a cluster with parameter servers. Raises `TooLargeError` if the workload has too many ops for a bound.
    """
    check_size(workload)
    if cluster.servers:
        if shard != "none":
            raise InputError(
                f"shard: {shard!r} with parameter servers (expected none: they keep the optimizer's states)"
            )
        if max_message_bytes is not None:
            raise InputError("max_message_bytes: given with parameter servers, whose messages have one tensor each")
    check_wire(wire, workload.tensors, servers=cluster.servers > 0, shard=shard)
    chosen = list(contestants)
    everyone: list[str | Scheduler | Plan] = chosen or [*scheduler_names(cluster)]
    bounds: dict[tuple[PlanKind, bool], Bound] = {}
    found: Results[Candidate] = Results()
    limits = {"collective": collective, "max_message_bytes": max_message_bytes}
    options = {name: value for name, value in limits.items() if value is not None}
    for i, one in enumerate(everyone):
        start = time.perf_counter()
        try:
            plan = one if isinstance(one, Plan) else schedule(one, workload, cluster, shard=shard, wire=wire, **options)
        except InputError as error:
            may_fail = isinstance(error, (TooLargeError, PlanError)) or one in installed(GROUP)
            if chosen or not may_fail or (one == everyone[-1] and not found):
                raise
            if left_out:
                left_out(str(one), error)
            continue
        plan_s = time.perf_counter() - start
        kind = kind_of(plan, workload)
        if (key := (kind, bool(plan.wires))) not in bounds:
            bounds[key] = lower_bound(workload, cluster_for_bound(plan, cluster), compute=compute, **kind._asdict())
        bound = bounds[key]
        timeline = simulate(workload, plan, cluster, compute=compute, lower_bound_s=bound.seconds)
        runnable = one in SERVER_SCHEDULERS or is_runnable(plan, workload)
        found.append(Candidate(plan, timeline, bound, plan_s, runnable, kind))
        if progress:
            progress(i + 1, len(everyone))
    return found


def check_bounds(
    candidates: Iterable[Candidate],
    workload: Workload,
    cluster: Cluster,
    *,
    compute: Literal["one", "unlimited"] = "one",
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Prove the bounds of candidates again, from their certificates, in exact arithmetic.

    Pass the same arguments as to `compare`. Calls `progress(done, total)` after each bound. Raises `InputError` if a
    certificate proves less than its bound claims.
    """
    different = {(candidate.kind, bool(candidate.plan.wires)): candidate for candidate in candidates}
    for i, one in enumerate(different.values()):
        verify_bound(one.bound, workload, cluster_for_bound(one.plan, cluster), compute=compute, **one.kind._asdict())
        if progress:
            progress(i + 1, len(different))


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the simplest of the plans that are within half a per cent of the fastest one.

    The simplest plan is DDP's own plan if it is fast enough, and otherwise the plan with the fewest messages, since the
    model leaves out what a message costs the host. DDP's plan comes first because the plan with the fewest messages is
    often `single`, which slows down most if the network is slower than predicted. If any candidates are runnable, only
    runnable candidates are considered.
    """
    candidates = [candidate for candidate in candidates if candidate.runnable] or candidates
    fastest = min(candidate.iteration_s for candidate in candidates)
    as_fast = (candidate for candidate in candidates if candidate.iteration_s <= fastest * (1 + SAME))
    return min(as_fast, key=_simplicity)


def contestants(candidates: Sequence[Candidate], most: int = 3) -> list[Candidate]:
    """Return DDP's own plan and different plans to compare with it in training, the simplest plan first.

    Besides DDP's plan, the result has up to `most` runnable plans with the shortest predicted iterations. The fastest
    plan with forward overlap and the fastest without it are always included, because an error of the prediction is
    likely to affect all plans with overlap, or all without.
    """
    different: dict[Any, Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: (c.plan.carrier != "ddp", c.iteration_s)):
        if candidate.runnable:
            plan = candidate.plan
            different.setdefault((plan.messages, plan.forward_overlap, plan.node_order), candidate)
    own = [candidate for candidate in different.values() if candidate.plan.carrier == "ddp"]
    others = [candidate for candidate in different.values() if candidate.plan.carrier != "ddp"]
    kinds = {candidate.plan.forward_overlap: candidate for candidate in reversed(others)}
    chosen = [*kinds.values(), *(c for c in others if c not in kinds.values())][:most]
    return sorted(own + chosen, key=_simplicity)


class Contest(msgspec.Struct, frozen=True):
    """The input for planning a tournament's contestants; with `overlap`, these plans may have forward overlap."""

    workload: Workload
    cluster: Cluster
    shard: Shard = "none"
    wire: Rounding = "none"
    overlap: bool = True


def hold_contest() -> None:
    """Read a `Contest` from standard input, and print its contestants, one plan per line; `legato.auto` runs this.

    On an error, print one line to standard error and exit with status 1.
    """
    try:
        contest = msgspec.json.decode(sys.stdin.buffer.read(), type=Contest)
        found = compare(contest.workload, contest.cluster, shard=contest.shard, wire=contest.wire)
        for candidate in contestants([c for c in found if contest.overlap or not c.plan.forward_overlap]):
            sys.stdout.buffer.write(files.encode(candidate.plan) + b"\n")
    except LegatoError as error:
        sys.exit(str(error))


def _simplicity(candidate: Candidate) -> tuple[bool, int, float]:
    return candidate.plan.carrier != "ddp", len(candidate.plan.messages), candidate.iteration_s


def stock_buckets(
    merged: Candidate,
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    compute: Literal["one", "unlimited"] = "one",
) -> tuple[Plan, float]:
    """Return a plan by merge-optimal whose messages stock DDP can use as its buckets, and the predicted seconds.

    `merged` is merge-optimal's plan. If one of its messages exceeds `MOST_BUCKET_BYTES`, merge-optimal plans again with
    this limit. All other arguments are the same as for `compare`.
    """
    if max(message.nbytes for message in merged.plan.messages) <= MOST_BUCKET_BYTES:
        return merged.plan, merged.iteration_s
    plan = schedule("merge-optimal", workload, cluster, collective=collective, max_message_bytes=MOST_BUCKET_BYTES)
    return plan, iteration_time(workload, plan, cluster, compute=compute)


def better_buckets(ddp_s: float, merged_s: float, merged: Plan) -> list[float]:
    """Return the `bucket_cap_mb_list` of a plan of merged tensors, or [] if DDP's default buckets should be as fast.

    `ddp_s` and `merged_s` are the predicted seconds per iteration with DDP's default buckets and with the plan.
    """
    return bucket_caps(merged) if ddp_s > merged_s * (1 + SAME) else []
