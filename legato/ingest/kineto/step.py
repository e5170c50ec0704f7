"""One step of one rank: the work of the rank's device, with the launch time and the phase of each piece of work.

[Note: two kinds of idle time] A device is idle for one of two reasons. Either the host has not launched the next kernel
yet. No plan of transfers can shorten this time, so it belongs to the computation (`TracedOp.gap_s`). Or the kernel has
been launched and waits for a transfer. Planning can shorten this time, so it is not part of any op. The time of the
launch, which the profiler records under the kernel's correlation number, separates the two kinds of idle time. The
kernel waits from its launch until the last of the transfers that end while the device is idle. A CPU has no launches,
so its ops wait from the beginning of the idle time. If a launch is recorded at its kernel's start or later, its time
says nothing but the difference between the clocks of host and device. In this case, the kernel waited if a transfer
ended at most this difference before the kernel's start.

[Note: a step on the device] A host that runs ahead of its device marks a step long before the device runs it. The marks
are not evenly spaced, because the host waits when its queue is full. On the device, a step therefore begins when
everything that was launched before the step is done, and at the earliest when the host begins the step. A step on the
device ends when the next step begins. All work of the device between these two times belongs to the step, including the
end of an earlier step's transfer or the beginning of a later step on another stream. With this definition, no part of a
step takes longer than the step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from legato.core.intervals import Intervals
from legato.ingest.kineto.phases import BackwardPass, Nodes, Phases, find_phases
from legato.ingest.kineto.trace.activities import (
    Activity,
    Described,
    collectives,
    computations,
    describe,
    device_free_at,
    foreign,
    grouped,
    suspected,
    waits,
)
from legato.ingest.kineto.trace.events import ACCUMULATE, HostInterval, Marks, Trace
from legato.ingest.names import GRADIENT_KINDS, GROUPED, tensor_bytes
from legato.ingest.traced import Notes, Sent, TracedOp, TracedTransfer

__all__ = ["ROUNDING_S", "TracedStep", "extract", "step_intervals", "transfers_of", "trim"]

#: The longest time after which a stream that waited for another stream continues.
_REACTION_S = 10e-6
#: Sums of times that differ by less than this are equal, since the finest time in a trace is a nanosecond.
ROUNDING_S = 4e-10


@dataclass(frozen=True)
class TracedStep:
    """One traced step of one rank.

    `sending` is the backward pass whose gradients are sent, or None if it is not known. The host launched op i at the
    time `host_s[i]` on the thread `thread[i]`; it issued transfer i at `issued_s[i]` on the thread `issued_on[i]`. On
    the device, the step begins at `begin_s` and lasts `length_s`. `foreign` are the times (start, end) of computations
    of other steps during this step, and `foreign_transfers` are the collectives (kind, start, end) of other steps.
    `waits` are the times in which an operator waits for collectives. `suspected` are kernels that may be transfers,
    with their total times.
    """

    trace: Trace
    interval: HostInterval
    phases: Phases
    sending: BackwardPass | None
    begin_s: float
    length_s: float
    ops: tuple[TracedOp, ...]
    host_s: NDArray[np.float64]
    thread: NDArray[np.int64]
    transfers: tuple[TracedTransfer, ...]
    issued_s: tuple[float, ...]
    issued_on: tuple[int, ...]
    on_device: bool
    foreign: tuple[tuple[float, float], ...] = ()
    foreign_transfers: tuple[tuple[str, float, float], ...] = ()
    waits: tuple[tuple[float, float], ...] = ()
    suspected: Mapping[str, float] = field(default_factory=dict)

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s

    @property
    def late_launches(self) -> int:
        """Return how many ops and transfers began, according to the trace, before the host launched them."""
        starts = [event.start_s for event in (*self.ops, *self.transfers)]
        launches = (*self.host_s.tolist(), *self.issued_s)
        return sum(start < host - ROUNDING_S for start, host in zip(starts, launches, strict=True))

    def ready_s(self, op: TracedOp, host_s: float, until_s: float) -> float:
        """Return when an op became ready; the device is idle from `until_s` on ([Note: two kinds of idle time])."""
        if not self.on_device:
            return until_s
        if host_s > op.start_s - ROUNDING_S:
            since = op.start_s - (host_s - op.start_s) - _REACTION_S
            return until_s if any(since <= t.end_s <= op.start_s + ROUNDING_S for t in self.transfers) else op.start_s
        return max(until_s, host_s)


def transfers_of(steps: Mapping[int, TracedStep]) -> dict[int, tuple[TracedTransfer, ...]]:
    """Return the transfers of each rank's step."""
    return {rank: step.transfers for rank, step in steps.items()}


def step_intervals(marks: Marks, notes: Notes) -> list[HostInterval]:
    """Return the steps that are marked in the trace, in order, or the whole trace if it has no marks."""
    if marks.steps:
        return marks.steps
    ends = [update.end_s for update in marks.updates]
    if len(ends) > 1:
        notes.lacks("ProfilerStep marks", "each step ends when the optimizer's step ends")
        return [HostInterval(f"step {i}", a, b) for i, (a, b) in enumerate(zip([-np.inf, *ends], ends, strict=False))]
    notes.lacks("ProfilerStep marks", "the whole trace is one step")
    return [HostInterval("step 0", -np.inf, np.inf)]


def extract(trace: Trace, interval: HostInterval, notes: Notes) -> TracedStep:
    """Return the ops and transfers of a step. Ops may overlap before `trim`."""
    on_device = len(trace.device) > 0
    if not on_device:
        notes.lacks("device kernels", "the CPU operators are the computation")
    computation = sorted(computations(trace, interval.start_s, interval.end_s), key=lambda a: a.start_s)
    phases = find_phases(trace, interval, computation, notes)
    ops = tuple(TracedOp(a.name, phases.at(a.host_s), a.start_s, a.end_s, a.end_s - a.start_s) for a in computation)
    issued = sorted(collectives(trace, interval.start_s, interval.end_s), key=lambda a: a.host_s)
    if any(a.name.startswith("nccl:") for a in issued):
        notes.assume("a collective of NCCL takes as long as its host takes to issue it")
    described = [describe(trace, a) for a in issued]
    together = _together(trace, interval, issued, described)
    can_carry = _of_gradients(trace, interval, issued, described, phases)
    sending = _sending(phases, [a.host_s for a, can in zip(issued, can_carry, strict=True) if can], notes)
    since = phases.backward_s if sending is None else sending.start_s
    transfers = tuple(
        TracedTransfer(
            a.name,
            what.kind,
            what.nbytes,
            a.start_s,
            a.end_s,
            phases.at(a.host_s),
            can and since <= a.host_s,
            ranks=what.ranks,
            group=what.group,
            purpose=what.purpose,
            peer=what.peer,
            stream=int(a.columns.thread[a.row]),
            parts=parts,
        )
        for a, what, can, parts in zip(issued, described, can_carry, together, strict=True)
    )
    begin, length = _extent(trace, interval, ops, transfers)
    return TracedStep(
        trace, interval, phases, sending, begin, length,
        ops, np.array([a.host_s for a in computation]), np.array([a.thread for a in computation], dtype=np.int64),
        transfers, tuple(a.host_s for a in issued), tuple(a.thread for a in issued), on_device,
        *foreign(trace, interval.start_s, interval.end_s, begin, begin + length),
        tuple(waits(trace, begin, begin + length)),
        suspected(trace, computation),
    )  # fmt: skip


def _together(
    trace: Trace, interval: HostInterval, issued: Sequence[Activity], described: Sequence[Described]
) -> list[tuple[Sent, ...]]:
    """Return, for each kernel, the sends and receives that it groups; () if it groups none."""
    since: dict[int, float] = {}  # when each thread launched its last kernel with several sends and receives
    found = []
    for activity, what in zip(issued, described, strict=True):
        before = since.get(activity.thread, interval.start_s)
        found.append(grouped(trace, activity, before) if what.kind == GROUPED else ())
        since[activity.thread] = activity.host_s
    return found


def _of_gradients(
    trace: Trace, interval: HostInterval, issued: Sequence[Activity], described: Sequence[Described], phases: Phases
) -> list[bool]:
    """Return, for each collective, whether it can carry gradients, provided that the backward pass issued it.

    A collective carries no gradients if it has integers, or if it is part of an autograd node. Losses and norms are
    recognized by their size: they have less than half the bytes of the smallest parameter, and a gradient in 16 bits
    has exactly half. An all-reduce within a compiled graph carries gradients if its bytes equal the bytes of
    parameters.
    """
    nodes, sizes = Nodes(trace), _parameter_sizes(trace, interval)

    def can(activity: Activity, what: Described) -> bool:
        if what.kind not in GRADIENT_KINDS or what.integers or activity.host_s >= phases.optimizer_s:
            return False
        if what.nbytes is not None and sizes and 2 * what.nbytes < min(sizes):
            return False
        own = nodes.own(activity)
        if own is None and what.kind == "all_reduce" and what.nbytes is not None and sizes:
            return _add_up(sizes, what.nbytes) or _add_up(sizes, 2 * what.nbytes)
        return not own

    return [phases.trains and can(a, what) for a, what in zip(issued, described, strict=True)]


def _parameter_sizes(trace: Trace, interval: HostInterval) -> list[int]:
    """Return the bytes of a step's parameters, in the order of their gradients, or [] if some sizes are unknown."""
    columns = trace.operator
    first, last = np.searchsorted(columns.start, (interval.start_s, interval.end_s))
    found = [columns.detail(i) for i in range(int(first), int(last)) if trace.named(columns, i) == ACCUMULATE]
    sizes = [None if args is None else tensor_bytes(args.dimensions(), args.type_names()) for args in found]
    known = [size for size in sizes if size is not None]
    return known if len(known) == len(sizes) else []


def _add_up(sizes: Sequence[int], wanted: int) -> bool:
    """Return whether the sizes of some consecutive parameters add up to `wanted`."""
    sums = set(itertools.accumulate(sizes, initial=0))
    return any(total - wanted in sums for total in sums)


def _sending(phases: Phases, issued: list[float], notes: Notes) -> BackwardPass | None:
    """Return the backward pass whose gradients are sent: the last pass that contains a time in `issued`."""
    passes = phases.passes
    if len(passes) < 2:
        return passes[0] if passes else None
    starts = [p.start_s for p in passes]
    senders = sorted({bisect.bisect_right(starts, moment) - 1 for moment in issued if starts[0] <= moment})
    chosen = senders[-1] if senders else len(passes) - 1
    which = f"backward pass {chosen + 1} of {len(passes)}"
    notes.assume(f"the gradients of {which} are sent; the other passes are computation")
    if len(senders) > 1:
        notes.lacks(
            f"a single backward pass that sends gradients: {len(senders)} of {len(passes)} do",
            "the transfers of the earlier passes are ops of their measured time",
        )
    return passes[chosen]


def _extent(
    trace: Trace, interval: HostInterval, ops: Sequence[TracedOp], transfers: Sequence[TracedTransfer]
) -> tuple[float, float]:
    """Return the start of the step on the device, and its length (see the note above)."""
    first = min((o.start_s for o in ops), default=0.0)
    last = max([first, *(o.end_s for o in ops), *(t.end_s for t in transfers)])
    begin = first if interval.start_s == -np.inf else device_free_at(trace, interval.start_s)
    end = last if interval.end_s == np.inf else device_free_at(trace, interval.end_s)
    return begin, max(end - begin, 0.0)


def trim(step: TracedStep) -> TracedStep:
    """Return the step with its ops on one stream.

    Time in which ops overlap belongs to the op that begins first. Waits for transfers are taken out of the gaps
    between ops; the rest of a gap is due to the host.

    Collectives that carry no gradients become ops, without the time for which they wait for late ranks. The gap after
    the last op is added to the gap of the first op, as if the step before had ended with the same gap.
    """
    ops, host, thread = list(step.ops), step.host_s.tolist(), step.thread.tolist()
    for transfer, issued, on in zip(step.transfers, step.issued_s, step.issued_on, strict=True):
        if not transfer.carries_gradients:
            start = transfer.began_s
            ops.append(TracedOp(transfer.name, transfer.phase, start, transfer.end_s, transfer.end_s - start))
            host.append(issued)
            thread.append(on)
    order = sorted(range(len(ops)), key=lambda i: ops[i].start_s)
    waits, carries = _Stalls(step, waiting=True), _Stalls(step, waiting=False)
    until = step.begin_s
    trimmed: list[TracedOp] = []
    for i in order:
        op = ops[i]
        gap = max(op.start_s - until, 0.0)
        ready = step.ready_s(op, host[i], until)
        waited, stalled = (min(gap, stalls.within(ready, op.start_s)) for stalls in (waits, carries))
        lasts = max(op.end_s - max(until, op.start_s), 0.0)
        late = max(waited - stalled, 0.0)
        trimmed.append(replace(op, duration_s=lasts, gap_s=gap - waited, stalled_s=stalled, late_s=late))
        until = max(until, op.end_s)
    if trimmed:
        gap = max(step.end_s - until, 0.0)
        waited, stalled = (min(gap, stalls.within(until, step.end_s)) for stalls in (waits, carries))
        first, late = trimmed[0], max(waited - stalled, 0.0)
        trimmed[0] = replace(
            first, gap_s=first.gap_s + gap - waited, stalled_s=first.stalled_s + stalled, late_s=first.late_s + late
        )
    moments = np.array([host[i] for i in order])
    threads = np.array([thread[i] for i in order], dtype=np.int64)
    by_launch = np.argsort(moments, kind="stable")
    highest = np.maximum.accumulate(by_launch) if len(by_launch) else by_launch
    after = np.searchsorted(moments[by_launch], step.issued_s) - 1
    transfers = tuple(
        replace(t, after=int(highest[k]) if k >= 0 else -1) for t, k in zip(step.transfers, after, strict=True)
    )
    return replace(step, ops=tuple(trimmed), host_s=moments, thread=threads, transfers=transfers)


class _Stalls:
    """The times in which computation may have waited for the network.

    With `waiting`, the times include waits of collectives for late ranks. The transfer time of a collective that
    carries no gradients is never included, because such a collective is an op of the step.
    """

    def __init__(self, step: TracedStep, waiting: bool) -> None:
        spans = [
            (t.start_s if waiting else t.began_s, t.end_s if t.carries_gradients else t.began_s)
            for t in step.transfers
            if t.carries_gradients or waiting
        ]
        self._done = sorted(end for _, end in spans)
        self._busy = Intervals(spans)

    def within(self, start: float, end: float) -> float:
        """Return how long the device waited from `start` on, at most up to the last end of a transfer before `end`."""
        last = bisect.bisect_right(self._done, end) - 1
        return self._busy.within(start, max(self._done[last], start)).seconds if last >= 0 else 0.0
