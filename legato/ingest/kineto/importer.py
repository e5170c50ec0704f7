"""Import PyTorch profiler traces (Kineto): a workload, measurements of overlap, and the measured timeline."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from legato.core.errors import FileError, InputError
from legato.core.plan import Message, Plan, Slice
from legato.core.text import count
from legato.core.timeline import Span, SpanKind, Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.ingest.assemble import assemble
from legato.ingest.communications import Joint, matched
from legato.ingest.kineto.fsdp import sharded
from legato.ingest.kineto.gradients import gradients, why_none
from legato.ingest.kineto.measure import computing, measure
from legato.ingest.kineto.phases import FSDP
from legato.ingest.kineto.program import clock_shifts, program
from legato.ingest.kineto.step import TracedStep, extract, step_intervals, transfers_of, trim
from legato.ingest.kineto.trace.events import STRAY, HostInterval, Marks, Trace, read_marks, read_trace
from legato.ingest.names import Transfers
from legato.ingest.source import Progress, one_line, refusals_name_files, title_of
from legato.ingest.traced import Gradient, Imported, Notes, RankMeasure, TracedOp, TracedTransfer, Whole

__all__ = ["Graph", "import_kineto"]

#: From a long trace, only steps in the middle are read, with about this number of events in all.
_MOST_EVENTS = 400_000
_DIGITS = 10
#: Operators and kernels that clip gradients by their norm, or check them for `GradScaler`.
_ALL_GRADIENTS = re.compile("norm|non_finite", re.IGNORECASE)


class Graph(Protocol):
    """An execution trace, which complements the profiler trace of the same steps."""

    def describe(self, trace: Trace) -> None:
        """Add the shapes that the profiler did not record. Raises `FileError` if `trace` is of another process."""

    def dependencies(self, step: TracedStep, notes: Notes) -> Sequence[TracedOp]:
        """Return the ops of a trimmed step with their data dependencies."""


class _Step(NamedTuple):
    """A step on all ranks; the fields have the traced step, the trimmed step and the measurements by rank."""

    whole: dict[int, TracedStep]
    trimmed: dict[int, TracedStep]
    measures: dict[int, RankMeasure]


@refusals_name_files
def import_kineto(
    paths: Sequence[Path],
    *,
    name: str | None = None,
    step: str | None = None,
    rank: int | None = None,
    keep_idle: bool = True,
    graphs: dict[Path, Graph] | None = None,
    known: Transfers | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Import the traces of one or more ranks of one job.

    `step` is the name or number of a step (default: the step of median length). The workload is the computation of
    `rank` (default: the rank whose median step takes longest without waiting for late ranks). `known` says which
    kernels move data between devices (default: the table in `names`). Raises `FileError` for a file that is not a
    profiler trace, and `InputError` for ranks or steps that do not exist.
    """
    notes, known = Notes(), known or Transfers()
    readings = iter(_readings(paths, progress))
    traces = _by_rank([read_marks(path, next(readings)) for path in paths], notes)
    first = _first(traces, rank)
    marked = {r: step_intervals(marks, notes) for r, marks in traces.items()}
    graph_of = {r: (graphs or {}).get(trace.path) for r, trace in traces.items()}

    def read(r: int, wanted: list[HostInterval]) -> dict[str, TracedStep]:
        return _steps(traces[r], marked[r], wanted, graph_of[r], known, notes, next(readings, None))

    read_steps = _on_all_ranks(read, first, traces, _wanted(marked[first], step, traces[first]))
    for marks in traces.values():
        _note_repairs(marks, notes)
    every = [_measured(whole, traces, notes) for whole in read_steps]
    chosen = _longest([step.measures for step in every]) if rank is None else rank
    if chosen != first:  # only this rank's events are needed now; the events of all ranks might not fit into memory
        again = read(chosen, [step.whole[chosen].interval for step in every])
        for whole, trimmed, _ in every:
            trace = again[whole[chosen].interval.name].trace
            for steps in (whole, trimmed):
                steps[chosen] = replace(steps[chosen], trace=trace)
    title, workers = name or title_of(traces[first].path), traces[chosen].workers
    return _imported(title, every, chosen, workers, graph_of[chosen], notes, keep_idle)


def _on_all_ranks(
    read: Callable[[int, list[HostInterval]], dict[str, TracedStep]],
    first: int,
    ranks: Iterable[int],
    wanted: list[HostInterval],
) -> list[dict[int, TracedStep]]:
    """Return the wanted steps that all ranks have. To save memory, only the first rank's steps keep events."""
    steps_of: dict[int, dict[str, TracedStep]] = {}
    for r in sorted(ranks, key=lambda r: (r != first, r)):
        found = read(r, wanted)
        wanted = [interval for interval in wanted if interval.name in found]
        steps_of[r] = {n: s if r == first else replace(s, trace=s.trace.without_events()) for n, s in found.items()}
    return [{r: steps_of[r][interval.name] for r in sorted(steps_of)} for interval in wanted]


def _measured(whole: dict[int, TracedStep], traces: dict[int, Marks], notes: Notes) -> _Step:
    waits_known = _set_waits(whole, traces, notes)
    trimmed = {r: trim(s) for r, s in whole.items()}
    return _Step(whole, trimmed, {r: measure(r, s, waits_known) for r, s in trimmed.items()})


def _imported(
    title: str, every: list[_Step], chosen: int, workers: int | None, graph: Graph | None, notes: Notes, keep_idle: bool
) -> Imported:
    """Return the result of the import: the chosen rank's step of median length, with data of its other steps."""
    lengths_s = [step.whole[chosen].length_s for step in every]
    number = lengths_s.index(statistics.median_low(lengths_s))
    whole, steps, measures = every[number]
    mine = steps[chosen]
    for kernel, seconds in mine.suspected.items():
        said = f"{one_line(kernel, 60)} looks like a transfer, and is counted as computing"
        notes.assume(f"{said} ({format_seconds(seconds)} of a step; --transfer says what it is)")
    if graph is not None:
        mine = replace(mine, ops=tuple(graph.dependencies(mine, notes)))
    else:
        notes.lacks("data dependencies between ops", "each op needs the one before it")
    sent = gradients(mine, notes)
    workload, lacking = _workload(title, mine, sent, notes, keep_idle)
    others = [step.trimmed[chosen] for step in (*every[:number], *every[number + 1 :])]
    return Imported(
        workload,
        _timeline(title, steps, chosen, measures[chosen]),
        tuple(measures.values()),
        notes,
        lacking=lacking,
        steps=tuple(measure for step in every for measure in step.measures.values()),
        transfers=tuple(t for step in every for t in step.trimmed[chosen].transfers),
        workers=workers,
        plan=None if workload is None else _plan(mine, sent),
        rank=chosen,
        on_device=mine.on_device,
        fsdp=any(name.startswith(FSDP) for name in mine.trace.names),
        sharded=sharded([step.whole[chosen] for step in every], number, workers),
        whole=_whole(title, whole, workers, keep_idle),
        others=() if graph is not None or workload is None else _alike(workload, others, keep_idle),
    )


def _alike(workload: Workload, others: Sequence[TracedStep], keep_idle: bool) -> tuple[Workload, ...]:
    """Return those workloads of the other steps that have as many ops as `workload`."""
    ignored = Notes()
    found = (_workload(workload.name, s, gradients(s, ignored), ignored, keep_idle)[0] for s in others)
    return tuple(other for other in found if other is not None and len(other.ops) == len(workload.ops))


def _note_repairs(marks: Marks, notes: Notes) -> None:
    """Add notes about invalid records in a file that were left out or repaired."""
    timeless, left_out = marks.timeless.total(), marks.devices.total() - marks.devices[marks.device]
    for happened, said in (
        (timeless, f"{count(timeless, 'event')} without times or of negative duration did not happen"),
        (marks.unmarked, f"{count(marks.unmarked, 'ProfilerStep mark')} of no time mark nothing"),
        (left_out, f"the device of the rank is {marks.device}, without {count(left_out, 'event')} of other devices"),
        (marks.repeats, f"{count(marks.repeats, 'event')} that are in the file twice happened once"),
        (marks.misplaced, f"{count(marks.misplaced, 'event')} far from where launches have them did not happen"),
        (
            marks.endless,
            f"streams run one after another, so {count(marks.endless, 'event')} that would outlast the next one ended "
            "where that begins",
        ),
        (
            marks.behind_s,
            f"most kernels begin before their launches, so the device's clock is {format_seconds(marks.behind_s)} slow",
        ),
        (
            marks.late,
            f"the clocks of host and device are apart, so {count(marks.late, 'kernel')} that began before the launch "
            "waited for what ended as it began",
        ),
        (marks.repaired, f"what is not JSON means what it shows ({count(marks.repaired, 'value')})"),
    ):
        if happened:
            notes.assume(f"{marks.path.name}: {said}")


def _whole(title: str, steps: dict[int, TracedStep], workers: int | None, keep_idle: bool) -> Whole:
    """Return the program of a step, or the reason why the traces do not give one."""
    notes = Notes()
    try:
        return Whole(program(title, steps, workers, notes, keep_idle=keep_idle), notes)
    except InputError as error:
        return Whole(None, notes, str(error))


def _steps(
    marks: Marks,
    marked: list[HostInterval],
    wanted: list[HostInterval],
    graph: Graph | None,
    known: Transfers,
    notes: Notes,
    progress: Progress | None,
) -> dict[str, TracedStep]:
    """Return the wanted steps of one rank, by name, without steps in which nothing was computed."""
    names = {interval.name for interval in wanted}
    same = [w for w in marked if w.name in names]
    if not same:
        raise FileError(f"{marks.path}: none of the steps {_listed(wanted)} (has {_listed(marked)})")
    trace = read_trace(marks, HostInterval("", same[0].start_s, max(w.end_s for w in same)), progress, known)
    if graph is not None:
        graph.describe(trace)
    found = {w.name: extract(trace, w, notes) for w in same}
    marks.late = sum(step.late_launches for step in found.values())
    computing = {name: step for name, step in found.items() if _lasts(step, step.ops)}
    if not computing:
        computing = {name: step for name, step in found.items() if _lasts(step, step.transfers)}
        notes.lacks("computation: kernels, or operators of a CPU")
    if not computing:
        raise FileError(
            f"{marks.path}: nothing takes time in step {_listed(same)} (expected a trace of torch.profiler)"
        )
    return computing


def _lasts(step: TracedStep, events: Sequence[TracedOp | TracedTransfer]) -> bool:
    """Return whether a step and at least one of its events take time."""
    return step.length_s > 0 and any(event.end_s > event.start_s for event in events)


def _workload(
    title: str, step: TracedStep, sent: Sequence[Gradient], notes: Notes, keep_idle: bool
) -> tuple[Workload | None, str]:
    """Return the workload of a step, or None and the reason if the step lacks something that a workload needs."""
    device = "gpu" if step.on_device else "cpu"
    try:
        if not sent:
            raise InputError(why_none(step))
        together = _together(step, notes)
        return assemble(
            title, step.ops, sent, notes, keep_idle=keep_idle, device=device, untraced_s=None, together=together
        ), ""
    except InputError as error:
        return None, str(error)


def _together(step: TracedStep, notes: Notes) -> set[int]:
    """Return the ops between the backward pass and the optimizer's step, if any of these ops needs all gradients."""
    moments, updated_s = step.host_s.tolist(), step.phases.optimizer_s
    found = {i for i, op in enumerate(step.ops) if op.phase == "optimizer" and moments[i] < updated_s}
    if not any(_ALL_GRADIENTS.search(step.ops[i].name) for i in found):
        return set()
    notes.assume("gradients are clipped or checked before the optimizer's step, which needs all of them")
    return found


def _plan(step: TracedStep, sent: Sequence[Gradient]) -> Plan | None:
    """Return the all-reduces of the step as a plan, or None if some gradient was sent in another way."""
    if any(t.kind != "all_reduce" for t in step.transfers if t.carries_gradients):
        return None
    transfers: dict[int, list[Slice]] = {}
    for gradient in sent:
        if gradient.transfer is None:
            return None
        transfers.setdefault(gradient.transfer, []).append(Slice(gradient.name, 0, gradient.nbytes))
    return Plan("traced", tuple(Message(tuple(slices)) for _, slices in sorted(transfers.items())))


def _readings(paths: Sequence[Path], progress: Progress | None) -> list[Progress | None]:
    """Return a progress callback for each reading of a file; every file is read twice."""
    sizes = 2 * [path.stat().st_size if path.is_file() else 0 for path in paths]
    if progress is None:
        return [None for _ in sizes]
    return [partial(_advance, progress, sum(sizes[:i]), sum(sizes)) for i in range(len(sizes))]


def _advance(progress: Progress, before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _by_rank(traces: list[Marks], notes: Notes) -> dict[int, Marks]:
    found: dict[int, Marks] = {}
    for number, trace in enumerate(traces):
        _check_one_rank(trace)
        if trace.rank is None and len(traces) > 1:
            notes.lacks("the rank of some traces", "ranks are numbered in the order of the files")
        rank = number if trace.rank is None else trace.rank
        if rank in found:
            raise FileError(f"{trace.path}: rank {rank} again (is also in {found[rank].path})")
        found[rank] = trace
    sizes = {trace.workers: trace for trace in traces if trace.workers is not None}
    if len(sizes) > 1:
        a, b = list(sizes.values())[:2]
        raise FileError(
            f"{a.path} and {b.path}: of jobs with {a.workers} and {b.workers} ranks (expected the traces of one job)"
        )
    most = max(sizes, default=0)
    if 1 < len(traces) < most:
        notes.lacks(f"the traces of {most - len(traces)} of the job's {count(most, 'rank')}")
    return found


def _check_one_rank(trace: Marks) -> None:
    """Raise `FileError` if a trace has no work, too much work without times, or the work of several ranks."""
    if not trace.has_work:
        seen = count(trace.events, "event")
        seen += f", {trace.timeless.total()} of them without times" if trace.timeless else ""
        raise FileError(f"{trace.path}: no operators and no kernels in {seen} (expected a trace of torch.profiler)")
    if 2 * (lost := trace.timeless["device"]) > (every := lost + trace.devices.total()):
        raise FileError(f"{trace.path}: {lost} of {every} kernels have no times or negative ones (expected times)")
    others = [name for name, number in trace.devices.items() if number * STRAY > trace.devices[trace.device]]
    if len(others) > 1:
        raise FileError(f"{trace.path}: devices {' and '.join(sorted(others))} (expected a trace of one rank)")


def _first(traces: dict[int, Marks], rank: int | None) -> int:
    """Return the rank whose steps are read on all ranks: `rank` or the lowest. Others may lack some of its steps."""
    if rank is not None and rank not in traces:
        raise InputError(f"rank {rank} is in none of the traces (has {', '.join(map(str, sorted(traces)))})")
    return min(traces) if rank is None else rank


def _longest(measures: Sequence[dict[int, RankMeasure]]) -> int:
    """Return the rank whose median step, without waits for late ranks, is longest (the lowest of equal ranks)."""
    return max(
        sorted(measures[0]), key=lambda r: round(statistics.median(step[r].undelayed_s for step in measures), _DIGITS)
    )


def _wanted(marked: list[HostInterval], step: str | None, trace: Marks) -> list[HostInterval]:
    """Return the step named or numbered `step`; without `step`, all steps (of a long trace, only the middle steps)."""
    if step is not None:
        found = [w for w in marked if step in (w.name, w.name.rpartition("#")[2], w.name.rpartition(" ")[2])]
        if not found:
            raise FileError(f"{trace.path}: no step {step!r} (has {_listed(marked)})")
        return found[:1]
    most = max(1, _MOST_EVENTS * len(marked) // max(trace.events, 1))
    first = max(0, (len(marked) - most) // 2)
    return marked[first : first + most]


def _listed(marked: list[HostInterval]) -> str:
    return one_line(", ".join(w.name for w in marked))


def _set_waits(steps: dict[int, TracedStep], traces: dict[int, Marks], notes: Notes) -> bool:
    """Split each collective into waiting and transfer, and return whether waiting is known.

    The last rank to join a collective does not wait. If the trace of only one of several ranks is given, waiting is
    unknown.
    """
    told = {t.workers for t in traces.values()}
    if not any(s.transfers for s in steps.values()) or (len(steps), told) == (1, {1}):
        return True
    if len(steps) == 1:
        notes.lacks("the other ranks", "no collective waits for a late rank: all of its time is transfer")
        return False
    try:
        joints = matched(transfers_of(steps))
    except InputError:
        notes.lacks("the same collectives on all ranks", "no collective waits for a late rank")
        return False
    if any(t.has_groups for t in traces.values()) and any(not joint.group for joint in joints):
        notes.assume("the ranks of all groups take part in every collective, where waiting for late ranks is computed")
    if len(steps) != max(workers or len(steps) for workers in told):
        notes.assume("one of the given ranks is the last to join each collective")
    for r, waited in _waited(steps, joints).items():
        steps[r] = replace(steps[r], transfers=tuple(waited))
    return True


def _waited(steps: dict[int, TracedStep], joints: Sequence[Joint]) -> dict[int, list[TracedTransfer]]:
    """Return each rank's transfers with their waits.

    The wait of a transfer is its time on this rank minus its time on the rank where it takes the shortest time.
    """
    transfers = transfers_of(steps)
    waited = {r: list(own) for r, own in transfers.items()}
    for joint in joints:
        same = joint.of(transfers)
        shortest = min(t.end_s - t.start_s for t in same.values())
        for r, t in same.items():
            waited[r][joint.parts[r]] = replace(t, waited_s=t.end_s - t.start_s - shortest)
    return waited


def _timeline(name: str, steps: dict[int, TracedStep], chosen: int, measured: RankMeasure) -> Timeline:
    """Return the step on all ranks, the chosen rank first, as an iteration that begins with the backward pass.

    The clocks of the ranks are aligned by the ends of the collectives. The step's forward pass is shown after the
    backward pass, as the forward pass of the next step.
    """
    reference = steps[chosen]
    start_s = min((op.start_s for op in reference.ops if op.phase == "backward"), default=reference.begin_s)
    forward_s = measured.iteration_s - (start_s - reference.begin_s)  # when the next forward pass begins
    spans = []

    def add(
        worker: int, lane: str, what: str, start: float, end: float, kind: SpanKind, nbytes: int | None = None
    ) -> None:
        at = start - start_s if start >= start_s else start - reference.begin_s + forward_s
        spans.append(Span(worker, lane, what, at, at + (end - start), kind, nbytes))

    try:
        shifts = clock_shifts(steps, matched(transfers_of(steps)))
    except InputError:
        shifts = {r: -step.begin_s for r, step in steps.items()}
    order = [chosen, *(r for r in sorted(steps) if r != chosen)]
    for worker, r in enumerate(order):
        step, shift = steps[r], shifts[r] - shifts[chosen]
        for op in computing(step):
            add(worker, "compute", op.name, op.start_s + shift, op.end_s + shift, op.phase)
        for number, t in enumerate(step.transfers):
            add(worker, "network", f"{t.kind} {number:02}", t.began_s + shift, t.end_s + shift, "message", t.nbytes)
    return Timeline(name, "measured", measured.iteration_s, tuple(spans))
