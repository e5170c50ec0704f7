"""The result of a flow simulation: all times on each worker, and the metrics of the papers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError
from legato.core.intervals import Intervals
from legato.core.plan import Plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.iterations.compute import Stream
from legato.simulator.flow.iterations.unroll import Iteration, Unrolled
from legato.simulator.flow.network.disturbances import Profile

__all__ = ["ComputeTimes", "FlowResult", "IterationTimes", "MessageTimes", "iteration_end_s"]

Times = NDArray[np.float64]


@dataclass(frozen=True)
class IterationTimes:
    """The times of an `Iteration` (unroll.py) on the simulated workers (only one of several identical workers).

    `forward_s` and `backward_s` [segment, worker] are the starts of segments. `computed_s` is the end of the last
    forward op. Each other time is the end of a step: when a fragment or message was launched, summed, released or
    received.
    """

    forward_s: Times
    backward_s: Times
    launched_s: Times
    summed_s: Times
    released_s: Times
    received_s: Times
    computed_s: float

    @classmethod
    def of(cls, run: Iteration, records: NDArray[np.void]) -> IterationTimes:
        """Return the times of an unrolled iteration that the engine has run."""

        def end_s(ids: Ids) -> Times:
            return np.asarray(records["end_s"][ids] + records["delay_s"][ids])

        return cls(
            forward_s=records["begin_s"][run.forward],
            backward_s=records["begin_s"][run.backward],
            launched_s=end_s(run.launched),
            summed_s=end_s(run.summed),
            released_s=end_s(run.released),
            received_s=end_s(run.received),
            computed_s=float(end_s(run.forward[-1:]).max(initial=0.0)),
        )


def iteration_end_s(fabric: Fabric, run: IterationTimes) -> float:
    """Return when an iteration ends: with servers, when the last sum is complete; otherwise, when all is done."""
    if fabric.servers:
        return float(run.summed_s.max())
    return max(float(run.received_s.max()), run.computed_s)


@dataclass(frozen=True)
class ComputeTimes:
    """The starts of segments of computation: `forward_s` and `backward_s` [iteration, segment, worker], in seconds.

    `disturbed` has, for each worker that a disturbance slows down, its speed over time (a `Profile`).
    """

    forward: Stream
    backward: Stream
    forward_s: Times
    backward_s: Times
    slowdown: Times
    disturbed: Mapping[int, Profile]

    @classmethod
    def of(cls, unrolled: Unrolled, runs: Sequence[IterationTimes]) -> ComputeTimes:
        """Return when segments of computation start in all unrolled iterations, from the times of each iteration."""
        return cls(
            unrolled.forward,
            unrolled.backward,
            np.array([run.forward_s for run in runs]),
            np.array([run.backward_s for run in runs]),
            unrolled.slowdown,
            unrolled.disturbed,
        )

    def op_times(self, half: str, k: int) -> tuple[Times, Times]:
        """Return [worker, op] arrays of the starts and the ends of a half's ops in iteration k."""
        stream, begin = (self.forward, self.forward_s) if half == "forward" else (self.backward, self.backward_s)
        base = begin[k].T[:, stream.segment]
        factor = self.slowdown[k, : base.shape[0], None]
        work_s = stream.op_start_s * factor, stream.op_end_s * factor
        start_s, end_s = base + work_s[0], base + work_s[1]
        for worker, profile in self.disturbed.items():
            start_s[worker] = profile.end_s(base[worker], work_s[0][worker])
            end_s[worker] = profile.end_s(base[worker], work_s[1][worker])
        return start_s, end_s


@dataclass(frozen=True)
class MessageTimes:
    """The times when the fragments of the last iteration's messages are in flight.

    Fragment i of message `message[i]` is in flight for worker w from `start_s[i, w]`, when it may be sent, to `end_s[i,
    w]`, when it has arrived. If the number of messages in flight is limited, a fragment is in flight until it has
    arrived on all workers.
    """

    message: NDArray[np.int64]
    nbytes: Times
    start_s: Times
    end_s: Times

    @classmethod
    def of(cls, unrolled: Unrolled, run: IterationTimes) -> MessageTimes:
        """Return when fragments are in flight: to be summed, then to be distributed (after a barrier, all at once)."""
        reducing, distributing, received_s = unrolled.reducing, unrolled.distributing, run.received_s
        if unrolled.fabric.in_flight is not None:  # other messages wait until the message has arrived everywhere
            received_s = np.broadcast_to(received_s.max(axis=1, keepdims=True), received_s.shape)
        sums = np.broadcast_to(run.summed_s.max(axis=1, keepdims=True), (len(reducing), received_s.shape[1]))
        barrier = unrolled.fabric.servers and unrolled.fabric.synchronous
        free = run.released_s.max() if barrier else run.released_s.min(axis=1)[:, None]
        return cls(
            message=np.concatenate([reducing.message, distributing.message]),
            nbytes=np.concatenate([reducing.nbytes, distributing.nbytes]),
            start_s=np.concatenate([run.launched_s[reducing.message], np.broadcast_to(free, received_s.shape)]),
            end_s=np.concatenate([sums, received_s]),
        )


@dataclass(frozen=True)
class FlowResult:
    """The times of K iterations of W workers with T tensors (ordered as `workload.tensors`), in seconds from the start.

    If workers are identical, W may be smaller than the number of workers of the network. Column w of the arrays is
    worker `ranks[w]`, and `members[w]` workers (including this one) have these times. `num_events` is the number of
    simulated services on links and streams. Metrics describe the last iteration, except `iteration_s`.
    """

    workload: Workload
    plan: Plan
    servers: int
    ranks: NDArray[np.int64]  # axes [W]
    members: NDArray[np.int64]  # axes [W]
    end_s: Times  # axes [K]
    aggregated_s: Times  # axes [K, T]
    received_s: Times  # axes [K, W, T]
    num_events: int
    compute: ComputeTimes = field(repr=False)
    messages: MessageTimes = field(repr=False)

    @classmethod
    def of(cls, unrolled: Unrolled, runs: Sequence[IterationTimes]) -> FlowResult:
        """Return the result of a simulation, given the times of each iteration."""
        compute, topology = ComputeTimes.of(unrolled, runs), unrolled.topology
        carriers = unrolled.fragments_of_tensor(unrolled.reducing)
        aggregated_s = np.array([[run.summed_s[i].max() for i in carriers] for run in runs])
        received_s = np.array([[run.received_s[i].max(axis=0) for i in unrolled.readable] for run in runs])
        return cls(
            workload=unrolled.workload,
            plan=unrolled.plan,
            servers=unrolled.fabric.servers,
            ranks=topology.ranks,
            members=topology.members,
            end_s=np.array([iteration_end_s(unrolled.fabric, run) for run in runs]),
            aggregated_s=aggregated_s,
            received_s=received_s.transpose(0, 2, 1),
            num_events=topology.graph.num_services,
            compute=compute,
            messages=MessageTimes.of(unrolled, runs[-1]),
        )

    @property
    def iterations(self) -> int:
        return len(self.end_s)

    @property
    def iteration_s(self) -> float:
        """Return the seconds of one iteration: the mean of all iterations but the first, if there are several."""
        if self.iterations == 1:
            return float(self.end_s[0])
        return float(self.end_s[-1] - self.end_s[0]) / (self.iterations - 1)

    @property
    def backward_to_aggregated_s(self) -> float:
        """Return the seconds from the first backward op of any worker until all gradients are aggregated."""
        start_s, _ = self.compute.op_times("backward", self.iterations - 1)
        return float(self.aggregated_s[-1].max() - start_s[:, 0].min())

    def _in_flight(self) -> Intervals:
        way = self.messages
        return Intervals(zip(way.start_s[:, 0].tolist(), way.end_s[:, 0].tolist(), strict=True))

    @property
    def computation_s(self) -> float:
        """Return C: the seconds in which worker 0 computes."""
        compute, k = self.compute, self.iterations - 1
        if 0 in compute.disturbed:
            times = [compute.op_times(half, k) for half in ("forward", "backward")]
            return float(sum((end[0] - start[0]).sum() for start, end in times))
        parts = (compute.forward.duration_s[0].sum(), compute.backward.duration_s[0].sum())
        return float(sum(parts) * compute.slowdown[k, 0])

    @property
    def last_s(self) -> float:
        """Return T, the seconds of worker 0's last iteration.

        T is `iteration_s`. But if jitter makes iterations differ, T is the time between the last two ends of worker 0's
        computation, in the second to last and in the last iteration.
        """
        if (self.compute.slowdown == self.compute.slowdown[-1]).all():
            return self.iteration_s
        every = [[self.compute.op_times(half, k)[1][0] for half in ("forward", "backward")] for k in (-2, -1)]
        before_s, end_s = (float(np.concatenate(halves).max()) for halves in every)
        return end_s - before_s

    @property
    def overlap(self) -> float:
        """Return the overlap of worker 0's messages and ops in the last iteration."""
        times = [self.compute.op_times(half, self.iterations - 1) for half in ("forward", "backward")]
        spans = (zip(start[0].tolist(), end[0].tolist(), strict=True) for start, end in times)
        return self._in_flight().overlap(Intervals(chain.from_iterable(spans)))

    @property
    def utilization(self) -> float:
        """Return the utilization U = C / T of worker 0."""
        return self.computation_s / self.last_s if self.last_s > 0 else 1.0

    def timeline(self, workers: Iterable[int] | None = None, name: str = "") -> Timeline:
        """Return the timeline of the last iteration, from its first event on.

        The timeline has the spans of `workers` (None: all workers that were kept), and its iteration time is `last_s`.
        The lanes are "compute" and "network"; the span of a message begins when the message may be sent, and ends when
        it has arrived. Raises `InputError` on a worker that was not kept.
        """
        column = {rank: w for w, rank in enumerate(self.ranks.tolist())}
        for worker in () if workers is None else (workers := list(workers)):
            if worker not in column:
                raise InputError(f"worker {worker}: not simulated (expected {_listed(sorted(column))})")
        chosen = [column[worker] for worker in sorted(column) if workers is None or worker in workers]
        spans = self.spans(chosen)
        rank = self.ranks.tolist()
        zero = min((span[3] for span in spans), default=0.0)
        made = [
            Span(rank[w], lane, label, start - zero, end - zero, *rest) for w, lane, label, start, end, *rest in spans
        ]
        made.sort(key=lambda span: (span.worker, span.start_s, span.end_s))
        members = tuple((rank[w], count) for w, count in enumerate(self.members.tolist()) if count > 1 and w in chosen)
        title = name or self.plan.scheduler
        return Timeline(title, "predicted", self.last_s, tuple(made), members=members)

    def spans(self, columns: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return (column, lane, name, start, end, kind, bytes of a message) of the last iteration, in seconds."""
        return [*self._compute_spans(columns), *self._message_spans(columns)]

    def _compute_spans(self, workers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        k = self.iterations - 1
        for half, stream in (("forward", self.compute.forward), ("backward", self.compute.backward)):
            start, end = self.compute.op_times(half, k)
            for w in workers:
                for at, i in enumerate(stream.ops):
                    op = self.workload.ops[i]
                    if start[w, at] < end[w, at]:
                        yield w, "compute", op.name, float(start[w, at]), float(end[w, at]), op.phase

    def _message_spans(self, workers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        way, labels = self.messages, self._labels()
        for w in workers:
            for i, message in enumerate(way.message):
                start, end = float(way.start_s[i, w]), float(way.end_s[i, w])
                if start < end:
                    yield w, "network", labels[message], start, end, "message", round(way.nbytes[i])

    def _labels(self) -> list[str]:
        return [_label(message.slices[0].tensor, len(message.slices) - 1) for message in self.plan.messages]


def _label(tensor: str, more: int) -> str:
    return f"{tensor} +{more}" if more else tensor


def _listed(workers: list[int]) -> str:
    """Return the numbers of workers in words, such as "0 to 31 or 1023"."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return " or ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
