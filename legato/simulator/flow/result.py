"""What a flow simulation found: when what happened on each worker, and the papers' metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Span, Timeline, merge_intervals, overlap_coefficient
from legato.core.workload import Workload
from legato.simulator.flow.compute import Stream

__all__ = ["FlowResult", "Journeys", "Streams", "Transfers"]

Times = NDArray[np.float64]


@dataclass(frozen=True)
class Streams:
    """When segments of computation began: `forward_s` and `backward_s` [iteration, segment, worker]."""

    forward: Stream
    backward: Stream
    forward_s: Times
    backward_s: Times
    slowdown: Times

    def op_times(self, half: str, k: int) -> tuple[Times, Times]:
        """[worker, op of the half]: when the ops of iteration k start and end."""
        stream, begin = (self.forward, self.forward_s) if half == "forward" else (self.backward, self.backward_s)
        base = begin[k].T[:, stream.segment]
        factor = self.slowdown[k, : base.shape[0], None]
        return base + stream.op_start_s * factor, base + stream.op_end_s * factor


@dataclass(frozen=True)
class Transfers:
    """What links carried: worker w's link out is 2w, and in 2w + 1. A byte takes `s_per_byte[link]` seconds."""

    link: NDArray[np.int32]
    tag: NDArray[np.int32]  # iteration * messages + message
    begin_s: Times
    end_s: Times
    work_s: Times
    s_per_byte: Times


@dataclass(frozen=True)
class Journeys:
    """Messages of the last iteration on their way: parcel i of message `message[i]` and worker w, from
    `start_s[i, w]`, when it may be sent, to `end_s[i, w]`, when it is there."""

    message: NDArray[np.int64]
    nbytes: Times
    start_s: Times
    end_s: Times


@dataclass(frozen=True)
class FlowResult:
    """K iterations of W workers with T tensors (in `workload.tensors` order); all times from the start of the run.

    Where workers are identical and the fabric is symmetric, W is less than the
    network's number of workers: those that stand for all. `num_events` services
    on links and streams were simulated. Metrics are those of the last iteration.
    """

    workload: Workload
    plan: Plan
    servers: int
    end_s: Times  # [K]
    gradient_s: Times  # [K, W, T]
    aggregated_s: Times  # [K, T]
    received_s: Times  # [K, W, T]
    num_events: int
    streams: Streams = field(repr=False)
    journeys: Journeys = field(repr=False)
    transfers: Transfers | None = field(repr=False)

    @property
    def iterations(self) -> int:
        return len(self.end_s)

    @property
    def iteration_s(self) -> float:
        """The one iteration's time, or, of several, the mean of all but the first."""
        if self.iterations == 1:
            return float(self.end_s[0])
        return float(self.end_s[-1] - self.end_s[0]) / (self.iterations - 1)

    @property
    def forward_start_s(self) -> Times:
        return self._edge("forward", first=True)

    @property
    def forward_end_s(self) -> Times:
        return self._edge("forward", first=False)

    @property
    def backward_start_s(self) -> Times:
        return self._edge("backward", first=True)

    @property
    def backward_end_s(self) -> Times:
        return self._edge("backward", first=False)

    def _edge(self, half: str, *, first: bool) -> Times:
        """[K, W]: when the first op starts, or the last one ends."""
        times = [self.streams.op_times(half, k) for k in range(self.iterations)]
        return np.array([start[:, 0] if first else end[:, -1] for start, end in times])

    @property
    def aggregation_s(self) -> float:
        """From the first gradient of any worker until everything is aggregated (Network Operator Edition, 8)."""
        return float(self.aggregated_s[-1].max() - self.gradient_s[-1].min())

    @property
    def backward_to_aggregated_s(self) -> float:
        """From the first backward op of any worker until everything is aggregated."""
        return float(self.aggregated_s[-1].max() - self.backward_start_s[-1].min())

    @property
    def distribution_s(self) -> float:
        """From the first sum that may be handed out until all workers have everything."""
        if self.servers:
            start = 0.0 if self.iterations == 1 else float(self.end_s[-2])
        else:
            start = float(self.aggregated_s[-1].min())
        return float(self.received_s[-1].max()) - start

    @property
    def staggering_s(self) -> float:
        """Backpropagation staggering: from the first worker's start of the backward pass to the last one's."""
        starts = self.backward_start_s[-1]
        return float(starts.max() - starts.min())

    @property
    def straggler_effect(self) -> float:
        """TicTac: the longest that a worker, done with its backward pass, waits for the slowest, over the iteration."""
        ends = self.backward_end_s[-1]
        return float(ends.max() - ends.min()) / self.iteration_s if self.iteration_s > 0 else 0.0

    @property
    def communication_s(self) -> float:
        """N: the time in which a message of worker 0's is on its way."""
        way = self.journeys
        spans = merge_intervals(zip(way.start_s[:, 0].tolist(), way.end_s[:, 0].tolist(), strict=True))
        return float(sum(end - start for start, end in spans))

    @property
    def computation_s(self) -> float:
        """C: the computation of worker 0."""
        streams, k = self.streams, self.iterations - 1
        parts = (streams.forward.duration_s[0].sum(), streams.backward.duration_s[0].sum())
        return float(sum(parts) * streams.slowdown[k, 0])

    @property
    def overlap(self) -> float:
        """Overlap coefficient (N + C - T) / min(N, C) of worker 0; 0 where nothing can overlap."""
        return overlap_coefficient(self.communication_s, self.computation_s, self.iteration_s)

    @property
    def utilization(self) -> float:
        """U = C / T of worker 0."""
        return self.computation_s / self.iteration_s if self.iteration_s > 0 else 1.0

    def timeline(self, workers: Iterable[int] | None = None, name: str = "", *, links: bool = False) -> Timeline:
        """The last iteration of those workers (None: all that were simulated), from its first event on.

        Lanes: "compute", and "network", a message from when it may be sent until
        it is there. With `links`, if transfers were kept, also "out" and "in":
        what the worker's link carries, for others too. Raises `InputError` on a
        worker that was not simulated.
        """
        count = self.gradient_s.shape[1]
        chosen = list(range(count)) if workers is None else list(workers)
        for worker in chosen:
            if not 0 <= worker < count:
                raise InputError(f"worker {worker}: not simulated (expected 0 to {count - 1})")
        spans = [*self._compute_spans(chosen), *self._message_spans(chosen)]
        spans += self._link_spans(chosen) if links else ()
        zero = min((span[3] for span in spans), default=0.0)
        made = [Span(w, lane, label, start - zero, end - zero, *rest) for w, lane, label, start, end, *rest in spans]
        made.sort(key=lambda span: (span.worker, span.start_s, span.end_s))
        return Timeline(name or self.plan.scheduler, "predicted", self.iteration_s, tuple(made))

    def _compute_spans(self, workers: list[int]) -> Iterator[tuple[Any, ...]]:
        k = self.iterations - 1
        for half, stream in (("forward", self.streams.forward), ("backward", self.streams.backward)):
            start, end = self.streams.op_times(half, k)
            for w in workers:
                for at, i in enumerate(stream.ops):
                    op = self.workload.ops[i]
                    if start[w, at] < end[w, at]:
                        yield w, "compute", op.name, float(start[w, at]), float(end[w, at]), op.phase

    def _message_spans(self, workers: list[int]) -> Iterator[tuple[Any, ...]]:
        way, labels = self.journeys, self._labels()
        for w in workers:
            for i, message in enumerate(way.message):
                start, end = float(way.start_s[i, w]), float(way.end_s[i, w])
                if start < end:
                    yield w, "network", labels[message], start, end, "message", round(way.nbytes[i])

    def _link_spans(self, workers: list[int]) -> Iterator[tuple[Any, ...]]:
        transfers, labels = self.transfers, self._labels()
        if transfers is None:
            return
        first = (self.iterations - 1) * len(labels)
        last_ones = transfers.tag >= first
        for w in workers:
            for link, lane in ((2 * w, "out"), (2 * w + 1, "in")):
                for i in np.flatnonzero((transfers.link == link) & last_ones):
                    begin, end = float(transfers.begin_s[i]), float(transfers.end_s[i])
                    nbytes = round(float(transfers.work_s[i] / transfers.s_per_byte[link]))
                    if begin < end:
                        yield w, lane, labels[transfers.tag[i] - first], begin, end, "message", nbytes

    def _labels(self) -> list[str]:
        return [_label(message.slices[0].tensor, len(message.slices) - 1) for message in self.plan.messages]


def _label(tensor: str, more: int) -> str:
    return f"{tensor} +{more}" if more else tensor
