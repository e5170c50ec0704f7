"""What communication costs a traced job, what a better plan would win, and whether that is worth anything.

A verdict never compares a prediction with a measurement. What a step spends its
time on is measured, and so is the difference between two jobs. What a plan would
win is predicted, in proportion to the prediction of the plan that was traced.
How far that prediction is from the measured step says how far to trust the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.ingest.network import cluster_of
from legato.ingest.traced import Imported, Notes, RankMeasure
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.ddp import ddp
from legato.simulator.collective import iteration_time, simulate

__all__ = ["Advice", "Prediction", "RankTimes", "Seconds", "advise", "changes", "times_of", "with_workers"]

#: A smaller share of an iteration is not worth a change of code.
_WORTH = 0.02
#: From this share on, waiting for the host or for late ranks is a verdict.
_MUCH = 0.1
#: The caps, in MiB, that are tried for DDP's buckets.
_CAPS_MIB = tuple(2**k for k in range(11))
_MIB = 2**20
_CAUSES = {
    "exposed_s": "exposed communication",
    "late_s": "waiting for late ranks",
    "host_s": "waiting for the host",
}


class Seconds(msgspec.Struct, frozen=True):
    """A time of every step (seconds): the mean, the standard deviation as the spread, and the median.

    `noise` is the median distance from the median, which a single odd step does not change.
    """

    mean: float
    spread: float
    median: float
    noise: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Seconds:
        median = statistics.median(values)
        noise = statistics.median(abs(value - median) for value in values)
        return cls(statistics.fmean(values), statistics.pstdev(values), median, noise)

    def __str__(self) -> str:
        spread = f" ± {format_seconds(self.spread)}" if self.spread > 0.001 * self.mean > 0 else ""
        return f"{format_seconds(self.mean)}{spread}"


class RankTimes(msgspec.Struct, frozen=True):
    """Where the iterations of one rank go, over `steps` steps.

    An iteration is computing, exposed communication, waiting for late ranks and
    waiting for the host. `communication_s` includes what is hidden behind
    computing. `late_s` is None where the collectives of several ranks could not be
    compared, for example with the trace of one rank alone.
    """

    rank: int
    steps: int
    iteration_s: Seconds
    computation_s: Seconds
    communication_s: Seconds
    exposed_s: Seconds
    late_s: Seconds | None
    host_s: Seconds


class Prediction(msgspec.Struct, frozen=True):
    """The predicted iteration time of a plan, and the share of the traced plan's predicted time that it wins."""

    plan: str
    iteration_s: float
    win: float


class Advice(msgspec.Struct, frozen=True):
    """What a job's traces say.

    `measured_s` is the step that was planned for, without what late ranks
    delayed, and `error` how far the traced plan's prediction is from it (0.1: the
    prediction is 10% longer; None for another network). `predictions` begin with
    the traced plan; `gap` is how far legato's plan is above `lower_bound_s`. All
    are empty or None if `lacking` says why nothing can be predicted. `code` is
    the line to try.
    """

    name: str
    ranks: tuple[RankTimes, ...]
    workers: int | None
    verdict: tuple[str, ...]
    code: str = ""
    lacking: str = ""
    cluster: Cluster | None = None
    measured_s: float | None = None
    error: float | None = None
    predictions: tuple[Prediction, ...] = ()
    lower_bound_s: float | None = None
    gap: float | None = None
    plans: tuple[Plan, ...] = ()
    timelines: tuple[Timeline, ...] = ()


def times_of(steps: Iterable[RankMeasure]) -> tuple[RankTimes, ...]:
    """The times of each rank over all steps."""
    ranks: dict[int, list[RankMeasure]] = {}
    for step in steps:
        ranks.setdefault(step.rank, []).append(step)
    return tuple(_times(rank, ranks[rank]) for rank in sorted(ranks))


def _times(rank: int, steps: Sequence[RankMeasure]) -> RankTimes:
    def over(value: Callable[[RankMeasure], float]) -> Seconds:
        return Seconds.of([value(step) for step in steps])

    known = all(step.waiting_s is not None for step in steps)
    return RankTimes(
        rank,
        len(steps),
        over(lambda s: s.iteration_s),
        over(lambda s: s.computation_s),
        over(lambda s: s.communication_s),
        over(lambda s: s.exposed_comm_s),
        over(lambda s: s.exposed_waiting_s) if known else None,
        over(lambda s: s.idle_s),
    )


def with_workers(traced: Cluster, workers: int, notes: Notes) -> Cluster:
    """The cluster of a trace with another number of workers, as rings over the same links."""
    if workers == traced.workers:
        return traced
    if traced.workers < 2:
        raise InputError(f"--workers {workers}: the trace is of one worker (expected --bandwidth and --latency too)")
    notes.assume(f"an all-reduce between {workers} workers is a ring over the links of {traced.workers}")
    cost, sent = traced.cost(), 2 * (traced.workers - 1)
    bandwidth_bps = 8 * sent / traced.workers / cost.beta_s_per_byte
    return Cluster.derive(workers, bandwidth_bps, cost.startup_s / sent, collectives=["ring"])


def advise(imported: Imported, cluster: Cluster | None = None, workers: int | None = None) -> Advice:
    """Judge a job by its traces.

    `cluster` is the network to plan for, by default that of the traces, with
    `workers` workers. If the traces lack what a plan needs, the verdict tells
    where the time goes and what is missing.
    """
    ranks = times_of(imported.steps)
    name = imported.timeline.name if imported.timeline is not None else "trace"
    known = Advice(name, ranks, imported.workers, ())
    lacking, traced = imported.lacking or _sharded(imported), None
    if lacking:
        cluster = None
    if cluster is None and not lacking:
        try:
            traced = cluster_of(imported, workers)
            cluster = with_workers(traced, workers or traced.workers, imported.notes)
        except InputError as error:
            lacking = f"the trace does not tell what the network costs: {error}; or give --workers and --bandwidth"
    if imported.workload is None or cluster is None:
        return msgspec.structs.replace(known, verdict=tuple(_bottleneck(ranks)), lacking=lacking)
    return _predicted(known, imported, imported.workload, cluster, as_traced=cluster is traced)


def _sharded(imported: Imported) -> str:
    """Why plans of all-reduces say nothing about this job, or ""."""
    kinds = {transfer.kind for transfer in imported.transfers if transfer.carries_gradients}
    return f"the job sends gradients by {' and '.join(sorted(kinds))} (FSDP?)" if kinds - {"all_reduce"} else ""


def _predicted(known: Advice, imported: Imported, workload: Workload, cluster: Cluster, *, as_traced: bool) -> Advice:
    traced = imported.plan or ddp(workload, cluster)
    traced = msgspec.structs.replace(traced, scheduler="DDP as traced" if imported.plan else "DDP")
    stock, code = _best_buckets(workload, cluster, traced)
    plans = (traced, stock, schedule("legato", workload, cluster))
    drawn = [simulate(workload, plan, cluster) for plan in plans]
    base = drawn[0].iteration_s
    predictions = tuple(
        Prediction(plan.scheduler, line.iteration_s, 1 - line.iteration_s / base if base > 0 else 0.0)
        for plan, line in zip(plans, drawn, strict=True)
    )
    measured_s = next(m.undelayed_s for m in imported.ranks if m.rank == imported.rank)
    as_traced = as_traced and imported.plan is not None
    error = base / measured_s - 1 if as_traced and measured_s > 0 else None
    bound_s = lower_bound(workload, cluster).seconds
    verdict, code = _verdict(known.ranks, predictions, error, code)
    measured: tuple[Timeline, ...] = () if imported.timeline is None else (imported.timeline,)
    if as_traced:  # what was predicted and what was measured belong together
        measured = tuple(msgspec.structs.replace(line, name=traced.scheduler) for line in measured)
    return msgspec.structs.replace(
        known,
        verdict=tuple(verdict),
        code=code,
        cluster=cluster,
        measured_s=measured_s,
        error=error,
        predictions=predictions,
        lower_bound_s=bound_s,
        gap=drawn[-1].iteration_s / bound_s - 1 if bound_s > 0 else 0.0,
        plans=plans,
        timelines=(*measured, *drawn),
    )


def _best_buckets(workload: Workload, cluster: Cluster, traced: Plan) -> tuple[Plan, str]:
    """DDP's fastest buckets and the code that makes them ("" for the traced ones), the least change on a tie.

    They are the traced buckets, DDP's default ones, or those of one cap.
    """
    tried = {"": traced, "DistributedDataParallel(model)": ddp(workload, cluster)}
    for cap in _CAPS_MIB:
        tried[f"DistributedDataParallel(model, bucket_cap_mb={cap})"] = ddp(workload, cluster, bucket_bytes=cap * _MIB)
    seconds = {code: iteration_time(workload, plan, cluster) for code, plan in tried.items()}
    least = min(seconds.values())
    code = next(code for code in tried if seconds[code] <= least * (1 + _WORTH / 4))
    return msgspec.structs.replace(tried[code], scheduler="DDP, best buckets"), code


def _verdict(
    ranks: Sequence[RankTimes], predictions: Sequence[Prediction], error: float | None, stock_code: str
) -> tuple[list[str], str]:
    """Sentences, the most important first, and the line of code to try."""
    _, stock, ours = predictions
    lines = _bottleneck(ranks)
    if max(stock.win, ours.win) < _WORTH:
        return [*lines, f"Nothing to gain: no plan of transfers is predicted to win {_WORTH:.0%} of an iteration."], ""
    use_stock = stock.win >= ours.win - _WORTH / 2
    best = stock if use_stock else ours
    told = f"Predicted to win {best.win:.1%} of an iteration: "
    told += "DDP with other buckets." if use_stock else "legato."
    if not use_stock and stock.win >= _WORTH:
        told += f" DDP with its best buckets wins {stock.win:.1%} ({stock_code})."
    if error is not None and abs(error) > best.win:
        told += f" Take it as a hint: the prediction of the traced plan is itself off by {error:+.1%}."
    return [told, *lines], stock_code if use_stock else "model, optimizer = legato.distribute(model, optimizer)"


def _bottleneck(ranks: Sequence[RankTimes]) -> list[str]:
    """What else the iterations wait for, as means over the ranks."""
    iteration_s = _mean(ranks, "iteration_s")
    shares = {cause: _mean(ranks, cause) / iteration_s if iteration_s > 0 else 0.0 for cause in _CAUSES}
    lines = []
    if shares["host_s"] >= _MUCH:
        lines.append(
            f"The host is {'the' if shares['host_s'] == max(shares.values()) else 'a'} bottleneck: the device waits "
            f"for it {shares['host_s']:.0%} of the time, which no plan of transfers changes (larger batches, fewer "
            "and larger kernels, torch.compile or CUDA graphs do)."
        )
    if shares["late_s"] >= _MUCH:
        late = min(ranks, key=lambda rank: rank.late_s.mean if rank.late_s else math.inf)
        lines.append(
            f"Late ranks cost {shares['late_s']:.0%} of the time, which no plan of transfers changes. Rank "
            f"{late.rank} waits least: the others wait for it."
        )
    if _mean(ranks, "communication_s") > 0 and shares["exposed_s"] < _WORTH:
        lines.append(f"Communication is hidden: {shares['exposed_s']:.1%} of the time is exposed.")
    return lines


def _mean(ranks: Sequence[RankTimes], cause: str, of: str = "mean") -> float:
    found = [getattr(rank, cause) for rank in ranks]
    return statistics.fmean(0.0 if value is None else getattr(value, of) for value in found)


def changes(before: Advice, after: Advice) -> list[str]:
    """What changed from one job to another, as sentences: by the median steps, as means over the ranks."""
    old, new = (_mean(job.ranks, "iteration_s", "median") for job in (before, after))
    noise = max(r.iteration_s.noise for job in (before, after) for r in job.ranks)
    ratio = new / old - 1 if old > 0 else 0.0
    if abs(new - old) <= noise:
        first = f"No change beyond the spread of the steps: {format_seconds(old)} before, {format_seconds(new)} after."
    else:
        how = "longer" if new > old else "shorter"
        first = f"An iteration is {abs(ratio):.1%} {how}: {format_seconds(old)} before, {format_seconds(new)} after."
    parts = {"computation_s": "computing", **_CAUSES}
    moved = {
        what: _mean(after.ranks, key, "median") - _mean(before.ranks, key, "median") for key, what in parts.items()
    }
    told = ", ".join(
        f"{what} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for what, seconds in sorted(moved.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) > 1e-3 * old
    )
    return [first, f"Of it: {told}."] if told else [first]
