"""Imports PyTorch profiler traces (Kineto): a workload, measurements of overlap, and the measured timeline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from legato.core.errors import FileError, InputError
from legato.core.timeline import Span, SpanKind, Timeline, merge_intervals, overlap_coefficient
from legato.ingest.assemble import assemble
from legato.ingest.kineto.events import HostInterval, Marks, read_marks, read_trace
from legato.ingest.kineto.gradients import gradients
from legato.ingest.kineto.step import TracedStep, extract, step_intervals, trim
from legato.ingest.source import Progress, one_line
from legato.ingest.traced import Imported, Notes, RankMeasure, TracedOp

__all__ = ["Dependencies", "import_kineto"]

#: Gives the ops of a trimmed step their data dependencies, which the profiler trace alone does not have.
Dependencies = Callable[[TracedStep, Notes], Sequence[TracedOp]]


def import_kineto(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    step: str | None = None,
    rank: int | None = None,
    keep_idle: bool = True,
    batch_size: int = 1,
    dependencies: dict[Path, Dependencies] | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Import the traces of one or more ranks of one job.

    `step` is the name or number of a step (default: the one of median length);
    the workload is the computation of `rank` (default: the lowest). Raises
    `FileError` for a file that is not a profiler trace, and `InputError` for
    ranks or steps that do not exist.
    """
    notes = Notes()
    readings = iter(_readings(paths, progress))
    traces = _by_rank([read_marks(path, next(readings)) for path in paths], notes)
    chosen = _chosen(traces, rank)
    marked = {r: step_intervals(marks, notes) for r, marks in traces.items()}
    interval = _interval(marked[chosen], step, traces[chosen])
    steps = {}
    for r, marks in traces.items():
        same = [w for w in marked[r] if w.name == interval.name]
        if not same:
            raise InputError(f"{marks.path}: no step {interval.name!r} (has {_listed(marked[r])})")
        found = extract(read_trace(marks, same[0], next(readings)), same[0], notes)
        if not found.ops:
            raise FileError(
                f"{marks.path}: no computation in step {interval.name!r} (expected a trace of torch.profiler)"
            )
        steps[r] = found if r == chosen else replace(found, trace=found.trace.without_events())
    waits_known = _set_waits(steps, traces, notes)
    steps = {r: trim(s) for r, s in steps.items()}
    mine = steps[chosen]
    find = (dependencies or {}).get(mine.trace.marks.path)
    if find is not None:
        mine = replace(mine, ops=tuple(find(mine, notes)))
    else:
        notes.lacks("data dependencies between ops", "each op needs the one before it")
    measures = tuple(_measure(r, s, waits_known) for r, s in sorted(steps.items()))
    measured = next(m for m in measures if m.rank == chosen)
    workload = assemble(
        name or _title(mine.trace.marks.path),
        mine.ops,
        gradients(mine, notes),
        notes,
        keep_idle=keep_idle,
        batch_size=batch_size,
        device="gpu" if mine.on_device else "cpu",
        untraced_s=None,
    )
    return Imported(workload, _timeline(workload.name, steps, chosen, measured), measures, notes)


def _readings(paths: Sequence[Path], progress: Progress | None) -> list[Progress | None]:
    """One progress callback per reading of a file; each file is read twice."""
    sizes = 2 * [path.stat().st_size if path.is_file() else 0 for path in paths]
    if progress is None:
        return [None for _ in sizes]
    return [partial(_advance, progress, sum(sizes[:i]), sum(sizes)) for i in range(len(sizes))]


def _advance(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _by_rank(traces: list[Marks], notes: Notes) -> dict[int, Marks]:
    found: dict[int, Marks] = {}
    for number, trace in enumerate(traces):
        if not trace.has_work:
            raise FileError(f"{trace.path}: no operators and no kernels in {trace.events} events (expected a trace "
                            "of torch.profiler)")  # fmt: skip
        if trace.rank is None and len(traces) > 1:
            notes.lacks("the rank of some traces", "ranks are numbered in the order of the files")
        rank = number if trace.rank is None else trace.rank
        if rank in found:
            raise InputError(f"{trace.path}: rank {rank} again (is also in {found[rank].path})")
        found[rank] = trace
    sizes = {trace.workers for trace in traces} - {None}
    if sizes and len(traces) < max(size or 0 for size in sizes):
        notes.lacks(f"{max(size or 0 for size in sizes) - len(traces)} of the job's ranks")
    return found


def _chosen(traces: dict[int, Marks], rank: int | None) -> int:
    if rank is not None and rank not in traces:
        raise InputError(f"rank {rank} is in none of the traces (has {', '.join(map(str, sorted(traces)))})")
    return min(traces) if rank is None else rank


def _interval(marked: list[HostInterval], step: str | None, trace: Marks) -> HostInterval:
    if step is not None:
        found = [w for w in marked if step in (w.name, w.name.rpartition("#")[2], w.name.rpartition(" ")[2])]
        if not found:
            raise InputError(f"{trace.path}: no step {step!r} (has {_listed(marked)})")
        return found[0]
    middle = statistics.median_low([w.end_s - w.start_s for w in marked])
    return next(w for w in marked if w.end_s - w.start_s == middle)


def _listed(marked: list[HostInterval]) -> str:
    return one_line(", ".join(w.name for w in marked))


def _set_waits(steps: dict[int, TracedStep], traces: dict[int, Marks], notes: Notes) -> bool:
    """Split each collective into waiting and transfer, since the last rank to join does not wait.

    Returns whether waiting is known; it is not with the trace of one rank.
    """
    kinds = [[t.kind for t in s.transfers] for s in steps.values()]
    if not kinds[0]:
        return len(steps) > 1
    if len(steps) == 1:
        notes.lacks("the other ranks", "no collective waits for a late rank: all of its time is transfer")
        return False
    if any(kind != kinds[0] for kind in kinds):
        notes.lacks("the same collectives on all ranks", "no collective waits for a late rank")
        return False
    if len(steps) != max(t.workers or len(steps) for t in traces.values()):
        notes.assume("one of the given ranks is the last to join each collective")
    matched = zip(*(s.transfers for s in steps.values()), strict=True)
    shortest = [min(t.end_s - t.start_s for t in same) for same in matched]
    for r, s in steps.items():
        waited = tuple(
            replace(t, waited_s=t.end_s - t.start_s - best) for t, best in zip(s.transfers, shortest, strict=True)
        )
        steps[r] = replace(s, transfers=waited)
    return True


def _measure(rank: int, step: TracedStep, waits_known: bool) -> RankMeasure:
    ops = _computing(step)
    computing = merge_intervals((o.start_s, o.end_s) for o in ops)
    carrying = merge_intervals((t.start_s + t.waited_s, t.end_s) for t in step.transfers)
    c, n, t = _length(computing), _length(carrying), step.length_s
    union = _length(merge_intervals(computing + carrying))
    host = math.fsum(o.duration_s + o.gap_s for o in ops)
    hidden = n - math.fsum(o.stalled_s for o in step.ops)
    return RankMeasure(
        rank=rank,
        step=step.interval.name,
        iteration_s=t,
        computation_s=c,
        communication_s=n,
        waiting_s=math.fsum(x.waited_s for x in step.transfers) if waits_known else None,
        idle_s=max(t - union, 0.0),
        exposed_comm_s=union - c,
        rho=n / c if c > 0 else 0.0,
        overlap=overlap_coefficient(n, c, t),
        utilization=c / t if t > 0 else 1.0,
        host_overlap=hidden / min(n, host) if min(n, host) > 0 else 0.0,
    )


def _computing(step: TracedStep) -> list[TracedOp]:
    """The ops without those that are transfers."""
    transfers = {(t.name, t.end_s) for t in step.transfers}
    return [op for op in step.ops if (op.name, op.end_s) not in transfers]


def _length(intervals: list[tuple[float, float]]) -> float:
    return math.fsum(b - a for a, b in intervals)


def _timeline(name: str, steps: dict[int, TracedStep], chosen: int, measured: RankMeasure) -> Timeline:
    """The step on all ranks, the chosen one first, as a period that begins with the backward pass.

    The ranks' clocks are aligned by the ends of the collectives. The forward pass follows, as that of the next step.
    """
    reference = steps[chosen]
    start_s = min((op.start_s for op in reference.ops if op.phase == "backward"), default=reference.begin_s)
    forward_s = measured.iteration_s - (start_s - reference.begin_s)  # when the next forward pass begins
    spans = []

    def add(
        worker: int, lane: str, what: str, start: float, end: float, kind: SpanKind, nbytes: int | None = None
    ) -> None:
        at = start - start_s if start >= start_s else start - reference.begin_s + forward_s
        spans.append(Span(worker, lane, what, at, at + end - start, kind, nbytes))

    order = [chosen, *(r for r in sorted(steps) if r != chosen)]
    for worker, r in enumerate(order):
        step = steps[r]
        late = [b.end_s - a.end_s for a, b in zip(step.transfers, reference.transfers, strict=False)]
        shift = statistics.median(late) if late else reference.begin_s - step.begin_s
        for op in _computing(step):
            add(worker, "compute", op.name, op.start_s + shift, op.end_s + shift, op.phase)
        for number, t in enumerate(step.transfers):
            start = t.start_s + t.waited_s + shift
            add(worker, "network", f"{t.kind} {number:02}", start, t.end_s + shift, "message", t.nbytes)
    return Timeline(name, "measured", measured.iteration_s, tuple(spans))


def _title(path: Path) -> str:
    return one_line(path.name.partition(".")[0], 60) or "trace"
