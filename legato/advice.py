"""Advice on a traced job: the cost of communication, the gain from a better plan, and whether a change is worth it.

A verdict never compares a prediction with a measurement. The parts of a step and the difference between two jobs are
measured. They are medians over the steps, so a single odd step does not change them. The gain from a plan is predicted,
as a share of the predicted time of the traced plan. The difference between the traced plan's predicted time and its
measured time tells how far to trust other predictions.
"""

from __future__ import annotations

import html
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.pictures import draw_bars
from legato.core.plan import Plan
from legato.core.table import Column, Table
from legato.core.text import count, percent, shorten
from legato.core.timeline import Timeline
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Phase, Workload
from legato.fsdp.table import Comparison, Row, best
from legato.fsdp.traced import Fit, as_modules, compare_groups
from legato.ingest.jobs import import_jobs
from legato.ingest.names import GROUPED, Transfers
from legato.ingest.network import cluster_of, doubt
from legato.ingest.source import in_folders
from legato.ingest.traced import Imported, KindTimes, Notes, RankMeasure, Sharded, ShardedGroup
from legato.reports.model import ModelReport
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.ddp import ddp
from legato.simulator.collective import iteration_time, simulate
from legato.whole_jobs.traced import Traffic, replay, traffic

__all__ = [
    "Advice",
    "KindSeconds",
    "Prediction",
    "RankTimes",
    "Seconds",
    "Verdict",
    "advise",
    "asides",
    "changes",
    "headline",
    "of_traces",
    "times_of",
    "to_try",
    "told",
    "with_workers",
]

#: A gain, or a part of an iteration, below this share is not worth a change of code.
_WORTH = 0.02
#: If the predicted gain is less than this fraction of the prediction's error, it is too close to tell.
_TELLING = 1 / 3
#: If waiting for the host or for late ranks takes at least this share, the verdict says so.
_MUCH = 0.1
#: The bucket caps, in MiB, that are tried for DDP.
_CAPS_MIB = tuple(2**k for k in range(11))
_MIB = 2**20
#: If a job has more ranks, only the ranks that wait least and most for late ranks are shown.
_MOST_ROWS = 8
#: Parts of an iteration that count as computation in predictions, because no plan of gradients changes them.
COUNTED = "waiting for the host, and collectives that carry no gradients"
_KINDS = {GROUPED: "send and receive", "wait": "waiting for the end", "unknown": "of unknown kind"}
_CAUSES = {
    "exposed_s": "exposed communication",
    "late_s": "waiting for late ranks",
    "host_s": "waiting for the host",
}


class Seconds(msgspec.Struct, frozen=True):
    """Statistics of a time over the steps, in seconds: mean, standard deviation (`spread`) and median.

    `noise` is the median of the differences between each step's time and the median time. Sentences and tables give the
    median and the noise.
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
        noise = f" ± {format_seconds(self.noise)}" if self.noise > 0.001 * self.median > 0 else ""
        return f"{format_seconds(self.median)}{noise}"


class KindSeconds(msgspec.Struct, frozen=True):
    """The time per iteration that one kind of collective takes, and how much of it is exposed.

    All-gathers of different phases (`phase`) count as different kinds.
    """

    kind: str
    communication_s: Seconds
    exposed_s: Seconds
    phase: Phase | None = None


class RankTimes(msgspec.Struct, frozen=True):
    """The parts of one rank's iteration, over `steps` steps.

    An iteration consists of computing, exposed communication, waiting for late ranks and waiting for the host.
    `communication_s` includes communication that computing hides. `late_s` is None if the collectives of several ranks
    could not be compared, for example because only one rank was traced. `kinds` has the communication of each kind of
    collective; different kinds may overlap.
    """

    rank: int
    steps: int
    iteration_s: Seconds
    computation_s: Seconds
    communication_s: Seconds
    exposed_s: Seconds
    late_s: Seconds | None
    host_s: Seconds
    kinds: tuple[KindSeconds, ...] = ()

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of an iteration, in seconds (medians)."""
        late_s = 0.0 if self.late_s is None else self.late_s.median
        known = {"computing": self.computation_s.median, "exposed": self.exposed_s.median}
        return known | {"late ranks": late_s, "host": self.host_s.median}


class Prediction(msgspec.Struct, frozen=True):
    """The predicted iteration time of a plan, and the share of the traced plan's predicted time that the plan saves.

    The time and the share (`win`) are medians over the traced steps. If there are several steps, `wins` are the
    smallest and the largest share that the plan saves in a step.
    """

    plan: str
    iteration_s: float
    win: float
    wins: tuple[float, float] | None = None


class Advice(msgspec.Struct, frozen=True):
    """The advice on a job, from its traces.

    Plans are for `rank`. `undelayed_s` has the median step time of each rank, without waits for late ranks.
    `measured_s` is the median step time of `rank`. `error` is the relative error of the traced plan's prediction: 0.1
    if the predicted time is 10% longer than `measured_s`, and None if the plans are for a network that was not traced.
    `predictions` begin with the traced plan. `gap` is how far legato's plan is above `lower_bound_s`. If nothing can be
    predicted, all fields about predictions are empty or None, and `lacking` says why. `code` is the code to try.
    `missing` lists what the traces lack, and `assumed` lists the assumptions made instead. `groups` are FSDP2's groups,
    and `costs` are the costs of FSDP2's collectives. The first row of `comparison` has the traced groups, and the other
    rows have other groups. `traffic` has the kinds of communication if the job sends more than gradients. `step_s` is
    the time of one step over all traced ranks, and `replayed_s` is the time of the same step when legato replays it.
    """

    name: str
    ranks: tuple[RankTimes, ...]
    workers: int | None
    verdict: tuple[str, ...]
    code: str = ""
    lacking: str = ""
    rank: int = 0
    undelayed_s: dict[int, float] = {}
    cluster: Cluster | None = None
    measured_s: float | None = None
    error: float | None = None
    predictions: tuple[Prediction, ...] = ()
    lower_bound_s: float | None = None
    gap: float | None = None
    plans: tuple[Plan, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    groups: tuple[ShardedGroup, ...] = ()
    costs: tuple[Fit, ...] = ()
    comparison: Comparison | None = None
    traffic: tuple[Traffic, ...] = ()
    step_s: float | None = None
    replayed_s: float | None = None
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def times_of(steps: Iterable[RankMeasure]) -> tuple[RankTimes, ...]:
    """Return the times of each rank, as statistics over all its steps."""
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
        _by_kind(steps),
    )


def _by_kind(steps: Sequence[RankMeasure]) -> tuple[KindSeconds, ...]:
    found = [{(times.kind, times.phase): times for times in step.kinds} for step in steps]
    none = KindTimes("", 0.0, 0.0)
    return tuple(
        KindSeconds(
            kind,
            Seconds.of([times.get((kind, phase), none).communication_s for times in found]),
            Seconds.of([times.get((kind, phase), none).exposed_s for times in found]),
            phase,
        )
        for kind, phase in sorted({key for times in found for key in times}, key=str)
    )


def with_workers(traced: Cluster, workers: int, notes: Notes) -> Cluster:
    """Return the cluster of a trace with another number of workers, which form a ring over links of the same speed."""
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

    `cluster` is the network to plan for, by default the traced one, with `workers` workers. If the traces lack
    something that a plan needs, the verdict only says what is missing and where the time goes.
    """
    found = _with_traffic(_advised(imported, cluster, workers), imported)
    if found.lacking:
        found = msgspec.structs.replace(found, verdict=(*found.verdict, *_hidden(found.ranks)))
    notes = imported.notes
    return msgspec.structs.replace(found, missing=tuple(notes.missing), assumed=tuple(notes.assumed))


def _with_traffic(known: Advice, imported: Imported) -> Advice:
    """Return the advice with its part on traffic, if the job sends more than gradients and buffers."""
    others = {t.kind for t in imported.transfers if not t.carries_gradients} - {"broadcast", "barrier"}
    whole = imported.whole
    if not others or imported.fsdp or whole is None:
        return known
    if whole.program is None:
        imported.notes.lacks(f"traffic by kind: {whole.lacking}")
        return known
    if not whole.program.communications:
        return known
    for line in whole.notes.missing:
        imported.notes.lacks(line)
    for line in whole.notes.assumed:
        imported.notes.assume(line)
    rows, replayed_s = traffic(whole.program), replay(whole.program).seconds
    step_s = whole.program.traced_s or replayed_s
    off = abs(replayed_s / step_s - 1) if step_s > 0 else 0.0
    told = [
        _told_traffic(row, step_s, off) for row in rows[: max(len(rows) - 1, 1)] if row.exposed_s >= _WORTH * step_s
    ]
    if not told:
        least = "at most " if rows[-1].at_most else ""
        told = [
            f"Ranks wait less than {percent(_WORTH, 0)} of the step for each kind of traffic: twice the bandwidth of "
            f"all links is predicted to save {least}{percent(rows[-1].win)}."
        ]
    exposed, waited = _share(known.ranks, "exposed_s"), rows[-1].exposed_s / step_s if step_s > 0 else 0.0
    if exposed >= waited + _WORTH:
        told = [
            f"Communication is exposed {percent(exposed)} of the time, but computation waits for it only "
            f"{percent(waited)}: otherwise the host had launched nothing to compute, or a rank was late.",
            *told,
        ]
    return msgspec.structs.replace(
        known, verdict=(*known.verdict, *told), traffic=tuple(rows), step_s=step_s, replayed_s=replayed_s
    )


def _told_traffic(row: Traffic, step_s: float, off: float) -> str:
    """Return sentences on how long ranks wait for a kind of traffic, and how much time faster links would save."""
    hint = f" Take it as a hint: the replayed step is itself off by {percent(off)}." if off > row.win else ""
    return (
        f"{row.kind[0].upper()}{row.kind[1:]}: ranks wait {percent(row.exposed_s / step_s)} of the step; twice the "
        f"bandwidth of its links is predicted to save {'at most ' if row.at_most else ''}{percent(row.win)}.{hint}"
    )


def _advised(imported: Imported, cluster: Cluster | None, workers: int | None) -> Advice:
    ranks = times_of(imported.steps)
    undelayed_s = {
        r.rank: statistics.median(step.undelayed_s for step in imported.steps if step.rank == r.rank) for r in ranks
    }
    name = imported.timeline.name if imported.timeline is not None else "trace"
    verdict = tuple(_bottleneck(ranks, imported.on_device))
    known = Advice(name, ranks, imported.workers, verdict, rank=imported.rank, undelayed_s=undelayed_s)
    if imported.sharded is not None:
        return _of_groups(known, imported, imported.sharded, cluster, workers)
    lacking, traced = _not_planned(imported, cluster) or imported.lacking, None
    if cluster is None and not lacking:
        try:
            traced = cluster_of(imported, workers)
            lacking = f"{why} (--bandwidth and --latency give a network)" if (why := doubt(traced)) else ""
            cluster = with_workers(traced, workers or traced.workers, imported.notes)
        except InputError as error:
            lacking = f"the trace does not tell what the network costs: {error}; or give --workers and --bandwidth"
    if lacking or imported.workload is None or cluster is None:
        return msgspec.structs.replace(known, lacking=lacking)
    return _predicted(known, imported, imported.workload, cluster, as_traced=cluster is traced)


def _not_planned(imported: Imported, cluster: Cluster | None) -> str:
    """Return why plans of all-reduces do not apply to this job, or "" if they do."""
    kinds = {transfer.kind for transfer in imported.transfers if transfer.carries_gradients}
    others = {transfer.kind for transfer in imported.transfers} - {"barrier"}
    if kinds - {"all_reduce"} or (imported.fsdp and kinds):
        return f"the job sends gradients by {' and '.join(sorted(kinds))} ({'FSDP' if imported.fsdp else 'FSDP?'})"
    if others and not kinds and cluster is None and imported.workers != 1:
        return "none of the job's collectives carries gradients (tensor or pipeline parallelism, or inference?)"
    return ""


def _predicted(known: Advice, imported: Imported, workload: Workload, cluster: Cluster, *, as_traced: bool) -> Advice:
    traced = imported.plan or ddp(workload, cluster)
    traced = msgspec.structs.replace(traced, scheduler="as traced" if imported.plan else "DDP")
    stock, code = _best_buckets(workload, cluster, traced)
    plans = (traced, stock, schedule("legato", workload, cluster))
    drawn = [simulate(workload, plan, cluster) for plan in plans]
    sent = {(tensor.name, tensor.nbytes) for tensor in workload.tensors}
    others = [w for w in imported.others if {(tensor.name, tensor.nbytes) for tensor in w.tensors} == sent]
    steps = [[line.iteration_s for line in drawn], *([iteration_time(w, p, cluster) for p in plans] for w in others)]
    bounds_s = [lower_bound(w, cluster).seconds for w in (workload, *others)]

    def prediction(k: int) -> Prediction:
        wins = [1 - step[k] / step[0] if step[0] > 0 else 0.0 for step in steps]
        predicted_s = statistics.median(step[k] for step in steps)
        span = (min(wins), max(wins)) if others else None
        return Prediction(plans[k].scheduler, predicted_s, statistics.median(wins), span)

    predictions = tuple(map(prediction, range(len(plans))))
    measured_s = known.undelayed_s[imported.rank]
    as_traced = as_traced and imported.plan is not None
    error = predictions[0].iteration_s / measured_s - 1 if as_traced and measured_s > 0 else None
    bound_s = statistics.median(bounds_s)
    verdict, code = _verdict(known.verdict, predictions, error, code)
    measured: tuple[Timeline, ...] = () if imported.timeline is None else (imported.timeline,)
    if as_traced:  # the predicted and the measured timeline of one plan share a name
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
        gap=predictions[-1].iteration_s / bound_s - 1 if bound_s > 0 else 0.0,
        plans=plans,
        timelines=(*measured, *drawn),
    )


def _of_groups(
    known: Advice, imported: Imported, found: Sharded, cluster: Cluster | None, workers: int | None
) -> Advice:
    """Return the advice with the predicted gains from other groups of FSDP2's modules."""
    known = msgspec.structs.replace(known, groups=(found.root, *found.groups) if found.root.gathered else found.groups)
    waits_known = all(measure.waiting_s is not None for measure in imported.ranks)
    try:
        if cluster is None and workers not in (None, found.ranks):
            raise InputError(f"groups are sharded over {found.ranks} ranks (for {workers}, give --bandwidth, too)")
        table, fits = compare_groups(found, waits_known=waits_known, cluster=cluster)
    except InputError as why:
        return msgspec.structs.replace(known, lacking=str(why))
    if not waits_known and fits:
        imported.notes.assume("a collective takes as long as the fastest of its size, which may wait for late ranks")
    base = table.rows[0].seconds
    mine = [step for step in imported.steps if step.rank == imported.rank]
    measured_s = statistics.median(step.iteration_s - step.exposed_waiting_s for step in mine)
    error = base / measured_s - 1 if cluster is None and measured_s > 0 else None
    verdict, row = _groups_verdict(known.verdict, table, error)
    drawn = (imported.timeline, table.steps[0], table.steps[table.rows.index(row)] if row is not None else None)
    return msgspec.structs.replace(
        known,
        verdict=tuple(verdict),
        code="" if row is None or row.wrapping is None else as_modules(row.wrapping).as_code(),
        cluster=cluster,
        costs=fits,
        measured_s=measured_s,
        error=error,
        predictions=tuple(Prediction(row.name, row.seconds, 1 - row.seconds / base) for row in table.rows),
        timelines=tuple(line for line in drawn if line is not None),
        comparison=table,
    )


def _groups_verdict(lines: Sequence[str], table: Comparison, error: float | None) -> tuple[list[str], Row | None]:
    """Return the sentences of a verdict on groups, and the row to try, preferably a row that needs no more memory."""
    traced = table.rows[0]
    same, free = (table.rows[best(table.rows, nbytes)] for nbytes in (traced.nbytes, None))
    wins = {row.name: 1 - row.seconds / traced.seconds for row in (same, free)}
    off = abs(error or 0.0)
    hint = f" Take it as a hint: the prediction of the traced groups is itself off by {percent(off)}."
    most = max(wins.values())
    if most < _WORTH:
        above = f" (the traced ones are {percent(traced.gap)} above the bound for their memory)" if traced.gap else ""
        told = f"no other groups are predicted to save {percent(_WORTH, 0)} of an iteration{above}."
        return [*lines, f"Probably nothing to gain: {told}{hint}" if off > _MUCH else f"Nothing to gain: {told}"], None
    if most < off * _TELLING:
        return [_too_close(most, off, "groups"), *lines], None
    told, row = "", free
    if wins[same.name] >= _WORTH:
        told, row = (
            f"Predicted to save {percent(wins[same.name])} of an iteration in no more memory: {same.name}.",
            same,
        )
    if wins[free.name] >= wins[same.name] + _WORTH:
        told += f"{' ' if told else ''}Predicted to save {percent(wins[free.name])} of an iteration with "
        told += f"{format_bytes(free.buffers)} instead of {format_bytes(traced.buffers)} of buffers: {free.name}."
    return [told + (hint if off > wins[row.name] else ""), *lines], row


def _over_steps(best: Prediction) -> str:
    """Return the smallest and the largest gain in a traced step in words, or "" if there is only one step."""
    if best.wins is None:
        return ""
    return f" ({' to '.join(dict.fromkeys(map(percent, best.wins)))} in the traced steps)"


def _too_close(win: float, off: float, of: str) -> str:
    return (
        f"Too close to tell: a gain of {percent(win)} is predicted, and the prediction of the traced {of} is itself "
        f"off by {percent(off)}."
    )


def _best_buckets(workload: Workload, cluster: Cluster, traced: Plan) -> tuple[Plan, str]:
    """Return the plan of DDP's fastest buckets, and the code that sets these buckets ("" for the traced buckets).

    Candidates are the traced buckets, DDP's default buckets, and buckets with each cap in `_CAPS_MIB`. If several
    candidates are about equally fast, the first in this list is best.
    """
    tried = {"": traced, "DistributedDataParallel(model)": ddp(workload, cluster)}
    for cap in _CAPS_MIB:
        tried[f"DistributedDataParallel(model, bucket_cap_mb={cap})"] = ddp(workload, cluster, bucket_bytes=cap * _MIB)
    seconds = {code: iteration_time(workload, plan, cluster) for code, plan in tried.items()}
    least = min(seconds.values())
    code = next(code for code in tried if seconds[code] <= least * (1 + _WORTH / 4))
    return msgspec.structs.replace(tried[code], scheduler="DDP, best buckets"), code


def _verdict(
    lines: Sequence[str], predictions: Sequence[Prediction], error: float | None, stock_code: str
) -> tuple[list[str], str]:
    """Return the sentences of a verdict, the most important sentence first, and the code to try.

    `lines` are sentences about everything that iterations wait for.
    """
    _, stock, ours = predictions
    off = abs(error or 0.0)
    hint = f" Take it as a hint: the prediction of the traced plan is itself off by {percent(off)}."
    if max(stock.win, ours.win) < _WORTH:
        told = f"no plan of transfers is predicted to save {percent(_WORTH, 0)} of an iteration."
        return [*lines, f"Probably nothing to gain: {told}{hint}" if off > _MUCH else f"Nothing to gain: {told}"], ""
    if max(stock.win, ours.win) < off * _TELLING:
        return [_too_close(max(stock.win, ours.win), off, "plan"), *lines], ""
    use_stock = stock.win >= ours.win - _WORTH / 2
    best = stock if use_stock else ours
    told = f"Predicted to save {percent(best.win)} of an iteration{_over_steps(best)}: "
    told += "DDP with its best buckets." if use_stock else "legato."
    if not use_stock and stock.win >= _WORTH:
        told += f" DDP with its best buckets saves {percent(stock.win)} ({stock_code})."
    if off > best.win:
        told += hint
    return [told, *lines], stock_code if use_stock else "model, optimizer = legato.distribute(model, optimizer)"


def _bottleneck(ranks: Sequence[RankTimes], on_device: bool = True) -> list[str]:
    """Say what iterations wait for. Each time is a mean over the ranks; a rank's time is the median over its steps."""
    shares = {cause: _share(ranks, cause) for cause in _CAUSES}
    lines = []
    if shares["host_s"] >= _MUCH:
        which = "the" if shares["host_s"] == max(shares.values()) else "a"
        idle = "the device waits for it" if on_device else "no operator runs"
        cure = (
            "larger batches, fewer and larger kernels, torch.compile or CUDA graphs do"
            if on_device
            else ("larger batches or torch.compile do")
        )
        lines.append(
            f"The host is {which} bottleneck: {idle} {percent(shares['host_s'], 0)} of the time, which no plan of "
            f"transfers changes ({cure})."
        )
    if shares["late_s"] >= _MUCH:
        late = min(ranks, key=lambda rank: rank.late_s.median if rank.late_s else math.inf)
        lines.append(
            f"Late ranks cost {percent(shares['late_s'], 0)} of the time, which no plan of transfers changes. Rank "
            f"{late.rank} waits least: the other ranks wait for it."
        )
    if shares["exposed_s"] >= _MUCH:
        iteration_s = _over_ranks(ranks, "iteration_s")
        by_kind = {kind: exposed / iteration_s for kind, (_, exposed) in _kinds_over_ranks(ranks).items()}
        most = [f"{kind} {percent(share, 0)}" for kind, share in by_kind.items() if share >= _WORTH]
        lines.append(f"Exposed communication takes {percent(shares['exposed_s'], 0)} of the time: {', '.join(most)}.")
    if _over_ranks(ranks, "communication_s") > 0 and shares["exposed_s"] < _WORTH:
        lines.append(f"Little communication is exposed: it takes {percent(shares['exposed_s'])} of the time.")
    return lines


def _over_ranks(ranks: Sequence[RankTimes], cause: str) -> float:
    """Return the mean of a time over the ranks; a rank's time is the median over its steps."""
    found = [getattr(rank, cause) for rank in ranks]
    return statistics.fmean(0.0 if value is None else value.median for value in found)


def _share(ranks: Sequence[RankTimes], cause: str) -> float:
    """Return the share of an iteration that one of its parts takes, such as `exposed_s`."""
    iteration_s = _over_ranks(ranks, "iteration_s")
    return _over_ranks(ranks, cause) / iteration_s if iteration_s > 0 else 0.0


def _hidden(ranks: Sequence[RankTimes]) -> list[str]:
    """Return how long an iteration would be without exposed communication, in words, for jobs without predictions."""
    exposed_s, iteration_s = (_over_ranks(ranks, what) for what in ("exposed_s", "iteration_s"))
    if _share(ranks, "exposed_s") < _WORTH:
        return []
    return [
        f"If the {format_seconds(exposed_s)} of exposed communication were hidden, an iteration would take "
        f"{format_seconds(iteration_s - exposed_s)} instead of {format_seconds(iteration_s)}, "
        f"{percent(_share(ranks, 'exposed_s'))} less."
    ]


def told(advice: Advice, changed: Sequence[str] = ()) -> tuple[Table | str, ...]:
    """Return the tables and lines of a verdict in reading order, without the code to try.

    `changed` has the sentences of `changes` that compare this job with an earlier job.
    """
    kinds, plans = _kinds_table(advice.ranks), _plans_table(advice)
    found: list[Table | str] = [_times_table(advice)]
    tables = (kinds, _traffic_table(advice), _groups_table(advice.groups), plans)
    found += [table for table in tables if table is not None]
    if len(advice.ranks) > 1 and (plans is not None or advice.comparison is not None):
        found.append(_longest(advice))
    found += map(str, advice.costs)
    if advice.comparison is not None:
        found.append(advice.comparison.table("Ways to group modules"))
        found.append(f"Predicted computation includes what no grouping changes: {COUNTED}.")
    if plans is not None:
        found.append(
            f"legato's plan is {percent(advice.gap or 0.0)} above the bound. Predicted computation includes what "
            f"no plan of gradients changes: {COUNTED}."
        )
    if advice.error is not None and advice.measured_s is not None:
        known = any(rank.late_s is not None for rank in advice.ranks)
        found.append(
            f"The prediction of the traced {'plan' if advice.comparison is None else 'groups'} is off by "
            f"{percent(advice.error, signed=True)}: "
            f"{format_seconds(advice.predictions[0].iteration_s)} predicted, {format_seconds(advice.measured_s)} "
            f"measured{', without delays by late ranks' if known else ''}."
        )
    found += advice.verdict
    if advice.lacking:
        found.append(_no_plan(advice.lacking))
    return (*found, *changed)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a job, or on a job before and after a change; `changes` then says what changed."""

    jobs: tuple[Imported, ...]
    advice: tuple[Advice, ...]
    changes: tuple[str, ...]

    def said(self) -> Iterator[tuple[Advice, tuple[Table | str, ...]]]:
        """Yield the advice on each job, with its tables and lines of text."""
        for advice in self.advice:
            yield advice, told(advice, self.changes if advice is self.advice[-1] else ())

    def __str__(self) -> str:
        """Return the text that `legato advise` prints."""
        lines: list[str] = []
        for advice, parts in self.said():
            for part in parts:
                lines.append(str(part))
            lines += [*to_try(advice), *asides(advice)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the verdict as HTML for notebooks, below a picture of the parts of each rank's iteration."""
        shown = []
        for advice, parts in self.said():
            bars = [(f"rank {rank.rank}", rank.parts, str(rank.iteration_s)) for rank in _shown(advice.ranks)]
            shown.append(draw_bars(bars, f"{advice.name}: measured"))
            shown += [f"<p>{html.escape(p)}</p>" if isinstance(p, str) else p._repr_html_() for p in parts]
            shown += [f"<pre>{html.escape(line)}</pre>" for line in to_try(advice)]
            shown += [f"<p>{html.escape(line)}</p>" for line in asides(advice)]
        return "".join(shown)

    def sections(self) -> tuple[ModelReport, ...]:
        """Return one section of a page for each job."""
        return tuple(
            ModelReport(
                advice.name,
                job.workload,
                advice.cluster,
                timelines=advice.timelines or tuple(t for t in [job.timeline] if t is not None),
                plans=advice.plans,
                told=tuple(part for part in parts if part != headline(advice)),
                asides=asides(advice),
                verdict=headline(advice),
                code=advice.code,
                computation=COUNTED,
            )
            for job, (advice, parts) in zip(self.jobs, self.said(), strict=True)
        )


def of_traces(
    traces: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    cluster: Cluster | Callable[[Imported], Cluster | None] | None = None,
    workers: int | None = None,
    rank: int | None = None,
    step: str | None = None,
    transfer: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Return a verdict on a traced job: where its time goes, and what a better plan would save.

    `traces` are the files of torch.profiler, one for each rank, or the folder that holds them. The files may include
    execution traces. If a rank has two traces, legato assumes that the second one was made after a change of the job.
    `cluster` is the network to plan for, by default the traced network, with `workers` workers. Plans are made for
    `rank` and `step`. `transfer` has `PATTERN=COLLECTIVE` for each kernel that legato does not know. `say` is called
    with each note about files that are left out. Raises `FileError` on a wrong file, and `InputError` on wrong options.
    """
    paths = [traces] if isinstance(traces, (str, os.PathLike)) else traces
    files = in_folders([Path(path) for path in paths], say)
    jobs = import_jobs(files, rank=rank, step=step, known=Transfers(transfer), progress=progress)
    found = tuple(advise(job, cluster(job) if callable(cluster) else cluster, workers) for job in jobs)
    return Verdict(tuple(jobs), found, tuple(changes(*found)) if len(found) == 2 else ())


def to_try(advice: Advice) -> list[str]:
    """Return lines with the code to try, or none if there is nothing to try."""
    lines = advice.code.splitlines()
    return [f"Try: {lines[0]}"] if len(lines) == 1 else ["Try:", *lines] if lines else []


def headline(advice: Advice) -> str:
    """Return the most important sentence of a verdict."""
    return advice.verdict[0] if advice.verdict else _no_plan(advice.lacking)


def _no_plan(lacking: str) -> str:
    return f"No plan: {lacking}."


def asides(advice: Advice) -> tuple[str, ...]:
    """Return notes on what the traces lack, what legato assumes instead, and what the tables leave out."""
    few = f"only the {_MOST_ROWS} ranks that wait least and most for late ranks are shown; --json has all"
    return (
        *([few] if len(advice.ranks) > _MOST_ROWS else []),
        *(f"missing: {line}" for line in advice.missing),
        *(f"assumed: {line}" for line in advice.assumed),
    )


def _times_table(advice: Advice) -> Table:
    number = len(advice.ranks)
    ranks = count(number, "rank") if advice.workers is None else f"{number} of {count(advice.workers, 'rank')}"
    steps = max(rank.steps for rank in advice.ranks)
    how = "measured" if steps == 1 else "measured: medians ± the median distance from them"
    columns = [
        Column("rank", "rank"),
        *(
            Column(head, key, str, missing="?")
            for head, key in (
                ("iteration", "iteration_s"),
                ("computing", "computation_s"),
                ("communicating", "communication_s"),
                ("exposed", "exposed_s"),
                ("late ranks", "late_s"),
                ("host", "host_s"),
            )
        ),
    ]
    title = f"{'' if number > 1 else f'{advice.name}: '}{ranks}, {count(steps, 'step')}, {how}"
    return Table(title, _shown(advice.ranks), columns)


def _shown(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    if len(ranks) <= _MOST_ROWS:
        return list(ranks)
    by_wait = sorted(ranks, key=lambda r: 0.0 if r.late_s is None else r.late_s.median)
    some = [*by_wait[: _MOST_ROWS // 2], *by_wait[-_MOST_ROWS // 2 :]]
    return sorted(some, key=lambda r: r.rank)


def _kinds_over_ranks(ranks: Sequence[RankTimes]) -> dict[str, tuple[float, float]]:
    """Return the seconds (communicating, exposed) of each kind, as means of ranks' medians, the most exposed first."""
    totals: dict[str, tuple[float, float]] = {}
    for rank in ranks:
        for times in rank.kinds:
            n, exposed = totals.get(_named_kind(times), (0.0, 0.0))
            totals[_named_kind(times)] = n + times.communication_s.median, exposed + times.exposed_s.median
    means = {kind: (n / len(ranks), exposed / len(ranks)) for kind, (n, exposed) in totals.items()}
    return dict(sorted(means.items(), key=lambda item: (-item[1][1], -item[1][0], item[0])))


def _kinds_table(ranks: Sequence[RankTimes]) -> Table | None:
    """Return a table of communication by kind of collective; its times are means over the ranks."""
    found = _kinds_over_ranks(ranks)
    if not found:
        return None
    alone = {_named_kind(times): times for times in ranks[0].kinds} if len(ranks) == 1 else {}
    known = all(rank.late_s is not None for rank in ranks)
    waits = "without waiting for late ranks" if known else "which may wait for late ranks"
    rows = (
        (kind, alone[kind].communication_s, alone[kind].exposed_s) if alone else (kind, *seconds)
        for kind, seconds in found.items()
    )
    write = dict.fromkeys(("communicating", "exposed"), str if alone else format_seconds)
    title = f"Collectives of an iteration{'' if alone else ', means over the ranks'}, {waits}"
    return Table.of(title, {"kind": None, **write}, rows)


def _traffic_table(advice: Advice) -> Table | None:
    """Return a table of the kinds of traffic, with the gain from twice the bandwidth."""
    step_s = advice.step_s
    if not advice.traffic or not step_s or advice.replayed_s is None:
        return None
    off = percent(advice.replayed_s / step_s - 1, signed=True)
    columns = [
        Column("traffic", "kind"),
        Column("transferring", "seconds", format_seconds),
        Column("ranks wait", "exposed_s"),
        Column("share", lambda row: row.exposed_s / step_s, percent),
        Column("twice the bandwidth saves", lambda row: (row.win, row.at_most and row.win > 0), _saved),
    ]
    title = (
        f"Traffic of the step of all ranks, {format_seconds(step_s)} as traced (replayed: {off}), means over the ranks"
    )
    return Table(title, advice.traffic, columns)


def _saved(win: tuple[float, bool]) -> str:
    return f"{'at most ' if win[1] else ''}{percent(win[0])}"


def _named_kind(times: KindSeconds) -> str:
    kind = _KINDS.get(times.kind, times.kind.replace("_", "-"))
    return kind if times.phase is None else f"{kind} ({times.phase})"


def _plans_table(advice: Advice) -> Table | None:
    if not advice.predictions or advice.cluster is None or advice.lower_bound_s is None:
        return None
    rows = [(p.plan, p.iteration_s, p.win if abs(p.win) >= 5e-4 else None) for p in advice.predictions]
    rows.append(("lower bound of any plan", advice.lower_bound_s, None))
    several = ", medians over its traced steps" if advice.predictions[0].wins else ""
    title = (
        f"Plans for {count(advice.cluster.workers, 'worker')}, from rank {advice.rank}{several}; an all-reduce takes "
        f"{advice.cluster.cost()}"
    )
    return Table.of(title, {"plan": None, "predicted": format_seconds, "gain": percent}, rows)


def _longest(advice: Advice) -> str:
    """Return a sentence on which rank the plans are for, and on the ranks with the longest and the shortest step."""
    by_time, mine = sorted(advice.undelayed_s, key=advice.undelayed_s.__getitem__), advice.rank
    times = {rank: format_seconds(advice.undelayed_s[rank]) for rank in (mine, by_time[0], by_time[-1])}
    whose = "which takes longest" if times[mine] == times[by_time[-1]] else "as asked for"
    known = " without waiting for late ranks" if advice.ranks[0].late_s is not None else ""
    said = [f"rank {rank} takes {time}" for rank, time in times.items()]
    return f"Plans are for rank {mine}, {whose}: {', '.join(said)} a step{known}."


def _groups_table(groups: Sequence[ShardedGroup]) -> Table | None:
    """Return a table of FSDP2's groups in forward order; neighbours of the same size and settings share a row."""

    def alike(group: ShardedGroup) -> tuple[object, ...]:
        return len(group.modules), group.gathered, group.scattered, group.reshard, group.ahead

    rows = []
    for _, same in itertools.groupby(groups, alike):
        run = list(same)
        first, last = (shorten(", ".join(group.modules)) or "root" for group in (run[0], run[-1]))
        group = run[0]
        kept = "resharded" if group.reshard else "kept"
        kept += "" if isinstance(group.reshard, bool) else f" to {count(group.reshard, 'rank')}"
        means = (statistics.fmean(g.backward_s if back else math.fsum(g.forward_s) for g in run) for back in (0, 1))
        rows.append(
            (
                first if len(run) == 1 else f"{first} to {last} ({len(run)} groups)",
                *(nbytes or None for nbytes in (group.gathered, group.scattered)),
                kept,
                "{}, {}".format(*group.ahead),
                *(seconds if group.modules else None for seconds in means),
            )
        )
    write = {
        "group": None,
        "gathered": format_bytes,
        "reduced": format_bytes,
        "after forward": None,
        "ahead: forward, backward": None,
        "forward": format_seconds,
        "backward": format_seconds,
    }
    return Table.of("Groups of FSDP2, as traced", write, rows) if rows else None


def changes(before: Advice, after: Advice) -> list[str]:
    """Return sentences about what changed between two jobs. Each time is the mean of the ranks' medians."""
    old, new = (_over_ranks(job.ranks, "iteration_s") for job in (before, after))
    noise = max(r.iteration_s.noise for job in (before, after) for r in job.ranks)
    ratio = new / old - 1 if old > 0 else 0.0
    if abs(new - old) <= noise:
        first = f"No change beyond the spread of the steps: {format_seconds(old)} before, {format_seconds(new)} after."
    else:
        how = "longer" if new > old else "shorter"
        first = (
            f"An iteration is {percent(abs(ratio))} {how}: {format_seconds(old)} before, {format_seconds(new)} after."
        )
    parts = {"computation_s": "computing", **_CAUSES}
    moved = {what: _over_ranks(after.ranks, key) - _over_ranks(before.ranks, key) for key, what in parts.items()}
    told = ", ".join(
        f"{what} {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"
        for what, seconds in sorted(moved.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) > 1e-3 * old
    )
    return [first, f"By cause: {told}."] if told else [first]
