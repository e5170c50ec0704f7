"""Simulation by formulas: the network is one shared resource, and a message costs alpha + beta * bytes.

Planners use the same model (MG-WFBP section II, PACE section IV). Messages are sent one at a time, in the plan's order:
each message starts when the previous message has ended and all tensors of this message are ready. The time of an
all-reduce of n bytes is the cost of its collective; for an all-reduce in chunks, `legato.simulator.pipelining` computes
the time. If an all-reduce is split into two halves (reduce_scatter and all_gather, push and pull), each half takes half
of the time on the network, alpha/2 + beta/2 * n, and the time to add up gradients belongs to the first half. Some
collectives cannot be split (`UNDIVIDED`). The `server` of a message has no effect in this simulation.

A worker computes on one stream: it runs its ops in `op_order`, each as soon as the stream is free and the op's inputs
exist. With compute "unlimited" (PACE), every op runs as soon as its inputs exist. `period.py` defines which ops an op
waits for. Without forward overlap, optimizer and forward ops wait until the last message of the plan has arrived and is
unpacked (earlier messages are unpacked while later ones are sent). With forward overlap, gradients are read from the
buffers in which they arrived. Two kinds of tensors are copied: partitioned tensors that are not contiguous in memory
(`legato.core.layout`), and tensors that are sent in a wire format. The worker's stream gathers a tensor of these two
kinds just before the first op that reads the tensor. A wire format halves the bytes of a message.

[Note: contention] If a processor both computes and sends (`Cluster.contention`), time is divided into intervals in
which the stream runs at most one op and the network carries at most one message. A message proceeds at the pace 1 /
(cost + delay) while an op runs, and at 1 / cost while no op runs. An op runs at the pace 1 - overhead / (cost + delay)
while a message is in flight, but at least at `LEAST_PACE`. An op that produces gradients also takes the time to copy
them into their messages. Without forward overlap, a stream that waits for the last message unpacks messages that have
already arrived. With compute "unlimited", there is no contention.

All workers behave alike, so the timeline has the spans of worker 0 only.
"""

from __future__ import annotations

import math
from bisect import bisect
from typing import NamedTuple

from legato.core.cluster import UNDIVIDED, Cluster
from legato.core.errors import InputError, PlanError
from legato.core.layout import scattered_tensors
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.simulator.period import Compute, Period, check_compute
from legato.simulator.pipelining import message_s, second_half_s

__all__ = ["LEAST_PACE", "iteration_time", "simulate"]

#: The lowest pace to which a message can slow computation down, relative to computation alone.
LEAST_PACE = 0.05
_UNKNOWN = -1.0
_UNPACKING = -1  # the stream runs no op, but unpacks messages
_SECOND_HALF_OF = {"all_gather": "reduce_scatter", "pull": "push"}


class _Priced(NamedTuple):
    """A message with its costs: its tensors, the ops for which it waits, and the seconds that it occupies the network.

    In a sharded plan, all_gathers carry updated parameters; the parameter of tensor t has the index t + n, where n is
    the number of tensors. If computation runs during the message, the message takes `delay_s` longer, and computation
    loses `overhead_s`.
    """

    tensors: list[int]
    waits: list[int]
    cost_s: float
    delay_s: float = 0.0
    overhead_s: float = 0.0


def simulate(
    workload: Workload, plan: Plan, cluster: Cluster, *, compute: Compute = "one", lower_bound_s: float | None = None
) -> Timeline:
    """Simulate one steady-state iteration of the plan, and return the timeline of worker 0.

    Ops are in the lane "compute" (the kind of a span is the phase of its op), and messages in the lane "network". Ops
    and messages that take no time have no span. `lower_bound_s` is stored in the timeline. Raises `PlanError` if the
    plan does not fit the workload or cluster, or if it can never finish.
    """
    period = Period.of(workload)
    priced = _prepare(period, plan, cluster, compute)
    done = _run(period, plan, priced, compute, cluster)
    spans = [
        Span(0, "compute", op.name, start, end, op.phase)
        for op, start, end in zip(workload.ops, done.op_start, done.op_end, strict=True)
        if start < end
    ]
    spans += [
        Span(0, "network", _label(message), start, end, "message", message.nbytes)
        for message, start, end in zip(plan.messages, done.message_start, done.message_end, strict=True)
        if start < end
    ]
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    return Timeline(plan.scheduler, "predicted", done.iteration_s, tuple(spans), lower_bound_s)


def iteration_time(workload: Workload, plan: Plan, cluster: Cluster, *, compute: Compute = "one") -> float:
    """Return `simulate(...).iteration_s` without building spans. Raises the same errors as `simulate`."""
    period = Period.of(workload)
    return _run(period, plan, _prepare(period, plan, cluster, compute), compute, cluster).iteration_s


def _label(message: Message) -> str:
    first, more = message.slices[0].tensor, len(message.slices) - 1
    return f"{first} +{more}" if more else first


def _prepare(period: Period, plan: Plan, cluster: Cluster, compute: Compute) -> list[_Priced]:
    """Check the plan as far as possible without simulation, and return its messages with their costs."""
    check_compute(compute)
    check_plan(plan, period.workload)
    backward_ends = _backward_ends(period, plan, compute) if plan.shard != "none" else []
    priced = []
    # the aggregated ranges of bytes, by (kind of a first half, tensor)
    aggregated: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for i, message in enumerate(plan.messages):
        nbytes = message.wire_nbytes
        try:
            seconds = _seconds(cluster, message)
        except InputError as error:
            raise PlanError(f"messages[{i}].collective: {error}") from None
        if message.kind != "all_reduce":
            _check_turn(i, message, aggregated)
        share = 1.0 if message.kind == "all_reduce" else 0.5
        tensors = list({period.tensor_id[piece.tensor] for piece in message.slices})
        waits = [period.ready_op[t] for t in tensors]
        if plan.shard != "none" and message.kind == "all_gather":
            waits = [op for t in tensors for op in period.updates[t]] + backward_ends
            tensors = [t + len(period.ready_op) for t in tensors]
        priced.append(_Priced(tensors, waits, seconds, *_contended(cluster, nbytes, share)))
    return priced


def _backward_ends(period: Period, plan: Plan, compute: Compute) -> list[int]:
    """Return the last ops of the backward pass, which must end before new parameters are gathered."""
    backward = period.workload.phase_ops("backward")
    if compute == "one":
        mine = set(backward)
        return [op for op in plan.op_order or period.captured if op in mine][-1:]
    followed = {dep for op in backward for dep in period.workload.ops[op].deps}
    return [op for op in backward if op not in followed]


def _check_turn(i: int, message: Message, aggregated: dict[tuple[str, str], list[tuple[int, int]]]) -> None:
    """Raise `PlanError` for a second half whose bytes no earlier first half has sent; record first halves."""
    first = _SECOND_HALF_OF.get(message.kind)
    for piece in message.slices:
        if first is None:
            _join(aggregated.setdefault((message.kind, piece.tensor), []), piece)
        elif not _within(piece, aggregated.get((first, piece.tensor), [])):
            raise PlanError(f"messages[{i}]: {message.kind} of {piece.tensor!r} before the {first} of these bytes")


def _seconds(cluster: Cluster, message: Message) -> float:
    """Return a message's seconds on the network. Raises `InputError` if its collective is missing or indivisible."""
    name, way = message.collective or cluster.default_collective, (message.depth, message.wire_nbytes)
    seconds = message_s(cluster, name, *way)
    if message.kind == "all_reduce":
        return seconds
    if name in UNDIVIDED:
        raise InputError(f"{name!r} for {message.kind} (expected one that has halves, or all_reduce)")
    second_s = second_half_s(cluster, name, *way)
    return second_s if message.kind in _SECOND_HALF_OF else seconds - second_s


def _join(spans: list[tuple[int, int]], piece: Slice) -> None:
    """Add a slice to sorted spans that do not overlap the slice. Adjacent spans become one span."""
    start, stop = piece.start, piece.stop
    k = bisect(spans, (start, stop))
    if k < len(spans) and spans[k][0] == stop:
        stop = spans.pop(k)[1]
    if k and spans[k - 1][1] == start:
        k -= 1
        start = spans.pop(k)[0]
    spans.insert(k, (start, stop))


def _within(piece: Slice, spans: list[tuple[int, int]]) -> bool:
    """Return whether one of these spans contains all bytes of a slice."""
    k = bisect(spans, (piece.start, math.inf)) - 1
    return k >= 0 and spans[k][1] >= piece.stop


def _contended(cluster: Cluster, nbytes: int, share: float) -> tuple[float, float]:
    if cluster.contention is None:
        return 0.0, 0.0
    return share * cluster.contention.delay.cost(nbytes), share * cluster.contention.overhead.cost(nbytes)


def _run(period: Period, plan: Plan, priced: list[_Priced], compute: Compute, cluster: Cluster) -> _Run:
    kind = _ContendedRun if cluster.contention is not None and compute == "one" else _Run
    done = kind(period, plan, priced, compute, cluster)
    done.run()
    return done


class _Run:
    """The simulation of one iteration.

    One cursor goes over the ops in execution order, and another cursor over the messages. Each cursor advances until it
    needs a time that is not known yet. All times are maxima and sums of earlier times, so it does not matter which
    cursor advances first. If neither cursor can advance, the plan deadlocks: ops and messages wait for each other.
    """

    def __init__(self, period: Period, plan: Plan, priced: list[_Priced], compute: Compute, cluster: Cluster) -> None:
        self.period, self.plan, self.messages = period, plan, priced
        self.one_stream, self.sharded = compute == "one", plan.shard != "none"
        self.order = (plan.op_order or period.captured) if self.one_stream else period.topological
        self.duration, self.reads = period.duration_s, period.reads
        phases = [op.phase for op in period.workload.ops]
        self.backward = [phase == "backward" for phase in phases]
        before = ("backward", "optimizer") if self.sharded else ("backward",)
        self.waits_for_last = [not plan.forward_overlap and phase not in before for phase in phases]
        if self.sharded:
            self._shard(cluster.workers)
        self.op_start = [0.0] * len(self.order)
        self.op_end = [_UNKNOWN] * len(self.order)
        self.message_start: list[float] = []
        self.message_end: list[float] = []
        arriving = len(period.ready_op) * (2 if self.sharded else 1)
        self.arrival = [0.0] * arriving  # by tensor, the arrival of its last byte so far
        self.missing = [0] * arriving  # by tensor, the number of its messages that have not been sent yet
        for message in priced:
            for t in message.tensors:
                self.missing[t] += 1
        self.stream = self.network = 0.0  # the times since which the stream and the network are free
        self.unpack_s = 0.0 if plan.forward_overlap else plan.messages[-1].nbytes * cluster.unpack_s_per_byte
        self.gather_s = self._gather_s(cluster) if plan.forward_overlap else {}
        self.computed = 0

    def _shard(self, workers: int) -> None:
        """Change the ops: optimizer ops update a shard, and forward ops read gathered parameters ([Note: shards])."""
        period, ops = self.period, self.period.workload.ops
        self.duration, self.reads = list(period.duration_s), list(period.reads)
        for i, op in enumerate(ops):
            if op.phase == "optimizer":
                self.duration[i] /= workers
            elif op.phase == "forward":
                self.reads[i] = [t + len(period.ready_op) for t in period.reads[i]]
        if not self.one_stream:
            backward, forward = (period.workload.phase_ops(phase) for phase in ("backward", "forward"))
            self.order = [*backward, *period.updates_by_arrival(self.plan.messages), *forward]

    def _gather_s(self, cluster: Cluster) -> dict[int, float]:
        """Return the seconds that each op needs to gather gradients before it starts, by op."""
        tensors = self.period.workload.tensors
        if not cluster.unpack_s_per_byte:
            return {}
        place = {op: k for k, op in enumerate(self.order)}
        gather_s: dict[int, float] = {}
        for name in self._copied({t.name: t.nbytes for t in tensors}, cluster.workers):
            tensor = tensors[self.period.tensor_id[name]]
            readers = tensor.readers
            if self.sharded:
                readers = tuple(r for r in readers if r not in self.period.updates[self.period.tensor_id[name]])
            if readers:
                first = min(readers, key=place.__getitem__)
                gather_s[first] = gather_s.get(first, 0.0) + tensor.nbytes * cluster.unpack_s_per_byte
        return gather_s

    def _copied(self, sizes: dict[str, int], workers: int) -> list[str]:
        """Return the tensors whose gradients have to be copied from the buffers in which they arrive."""
        rounded = [message for message in self.plan.messages if message.wire is not None]
        names = [name for message in rounded for name in message.tensors]
        exact = [message for message in self.plan.messages if message.wire is None] if rounded else self.plan.messages
        return list(dict.fromkeys([*names, *scattered_tensors(exact, sizes, workers)]))

    @property
    def iteration_s(self) -> float:
        return max(self.network + self.unpack_s, max(self.op_end))

    def run(self) -> None:
        """Compute all times. Raises `PlanError` if ops and messages of the plan wait for each other."""
        while self.computed < len(self.order) or len(self.message_start) < len(self.messages):
            before = self.computed + len(self.message_start)
            self.compute()
            self.send()
            if self.computed + len(self.message_start) == before:
                raise PlanError(self.deadlock())

    def compute(self) -> None:
        """Run ops up to the first op that waits for an unsent message."""
        reads, waits, duration = self.reads, self.period.waits, self.duration
        op_end, all_sent = self.op_end, len(self.message_start) == len(self.messages)
        while self.computed < len(self.order):
            i = self.order[self.computed]
            start = self.stream if self.one_stream else 0.0
            if self.waits_for_last[i]:
                if not all_sent:
                    return
                start = max(start, self.network + self.unpack_s)
            elif not self.backward[i]:
                if any(self.missing[t] for t in reads[i]):
                    return
                for t in reads[i]:
                    start = max(start, self.arrival[t])
            for op in waits[i]:
                start = max(start, op_end[op])
            start += self.gather_s.get(i, 0.0)
            self.op_start[i] = start
            self.stream = op_end[i] = start + duration[i]
            self.computed += 1

    def send(self) -> None:
        """Send messages up to the first message that waits for an op that has not run."""
        op_end = self.op_end
        while len(self.message_start) < len(self.messages):
            message = self.messages[len(self.message_start)]
            ready = [op_end[op] for op in message.waits]
            if _UNKNOWN in ready:
                return
            start = max(self.network, max(ready, default=0.0))
            self.message_start.append(start)
            self.arrives(message, start + message.cost_s)

    def arrives(self, message: _Priced, moment: float) -> None:
        """Record the arrival of the message in flight."""
        self.network = moment
        self.message_end.append(moment)
        for t in message.tensors:
            self.arrival[t] = moment
            self.missing[t] -= 1

    def deadlock(self) -> str:
        """Say why neither cursor can advance: an op waits for a message, which waits for a later op."""
        period, sent, stuck = self.period, len(self.message_start), self.order[self.computed]
        ops, tensors = period.workload.ops, period.workload.tensors
        late = next(op for op in self.messages[sent].waits if self.op_end[op] == _UNKNOWN)
        if self.plan.messages[sent].kind == "all_gather" and self.sharded:
            own = [t - len(tensors) for t in self.messages[sent].tensors]
            names = [tensors[t].name for t in own if late in period.updates[t]]
            what = f"the update of {names[0]!r} by op" if names else "the end of the backward pass, op"
            waits = f"messages[{sent}] waits for {what} {late} ({ops[late].name!r})"
        else:
            name = next(tensors[t].name for t in self.messages[sent].tensors if period.ready_op[t] == late)
            waits = f"messages[{sent}] waits for {name!r} from op {late} ({ops[late].name!r})"
        if late == stuck or not self.one_stream:
            return f"{waits}, which waits for this message or a later one"
        return (
            f"{waits}, which op_order puts after op {stuck} ({ops[stuck].name!r}), "
            "which waits for this message or a later one"
        )


class _ContendedRun(_Run):
    """The simulation of one iteration if messages and computation slow each other down ([Note: contention])."""

    def __init__(self, period: Period, plan: Plan, priced: list[_Priced], compute: Compute, cluster: Cluster) -> None:
        super().__init__(period, plan, priced, compute, cluster)
        assert cluster.contention is not None
        self.duration = list(self.duration)
        for t, tensor in enumerate(period.workload.tensors):
            self.duration[period.ready_op[t]] += tensor.nbytes * cluster.contention.pack_s_per_byte
        self.unpack_s_per_byte = 0.0 if plan.forward_overlap else cluster.unpack_s_per_byte
        self.packed_bytes = 0  # the bytes that have arrived and are still to be unpacked
        # of the ops for which the next message waits, the number that have ended, counted from the first
        self.ready = 0
        # of the tensors that the next op reads, the number that have arrived, counted from the first
        self.read = 0

    def run(self) -> None:
        """Compute all times by going through the moments at which an op or a message begins or ends."""
        # remaining seconds of computation, and the remaining fraction of the message
        now = op_left = message_left = 0.0
        op = message = None
        while self.computed < len(self.order) or len(self.message_end) < len(self.messages):
            if op is None and self.computed < len(self.order):
                op, op_left = self.begun_op(now)
            if message is None and (k := len(self.message_end)) < len(self.messages) and self.may_send(k):
                message, message_left = self.messages[k], 1.0
                self.message_start.append(now)
                self.ready = 0
            if op is None and message is None:
                raise PlanError(self.deadlock())
            busy_s, pace = (0.0, 1.0) if message is None else _paces(message, computes=op is not None)
            op_s = op_left / pace if op is not None else math.inf
            message_s = message_left * busy_s if message is not None else math.inf
            step = min(op_s, message_s)
            now += step
            if op is not None:
                op_left -= step * pace
                if op_s <= step:
                    self.end_op(op, now)
                    op = None
            if message is not None:
                if message_s <= step:
                    self.arrives(message, now)
                    message = None
                else:
                    message_left -= step / busy_s

    def begun_op(self, now: float) -> tuple[int | None, float]:
        """Return the work that the stream, which is idle, begins now (or None), and the seconds of this work."""
        i = self.order[self.computed]
        if self.packed_bytes and self.waits_for_last[i]:
            unpack_s, self.packed_bytes = self.packed_bytes * self.unpack_s_per_byte, 0
            return _UNPACKING, unpack_s
        if not self.may_run(i):
            return None, 0.0
        gather_s = self.gather_s.get(i, 0.0)
        self.op_start[i], self.read = now + gather_s, 0
        return i, gather_s + self.duration[i]

    def end_op(self, op: int, now: float) -> None:
        if op != _UNPACKING:
            self.op_end[op] = now
            self.op_start[op] = min(self.op_start[op], now)
            self.computed += 1

    def arrives(self, message: _Priced, moment: float) -> None:
        arrived = self.plan.messages[len(self.message_end)]
        if self.unpack_s_per_byte and not (self.sharded and arrived.kind == "reduce_scatter"):
            self.packed_bytes += arrived.nbytes
        super().arrives(message, moment)

    def may_run(self, i: int) -> bool:
        """Return whether the free stream may now run op i, its next op."""
        if self.backward[i]:
            return True
        if self.waits_for_last[i]:
            return len(self.message_end) == len(self.messages)
        reads = self.reads[i]
        while self.read < len(reads) and not self.missing[reads[self.read]]:
            self.read += 1
        return self.read == len(reads)

    def may_send(self, k: int) -> bool:
        """Return whether the gradients (or updated parameters) of message k, the next message, are ready."""
        waits = self.messages[k].waits
        while self.ready < len(waits) and self.op_end[waits[self.ready]] != _UNKNOWN:
            self.ready += 1
        return self.ready == len(waits)


def _paces(message: _Priced, *, computes: bool) -> tuple[float, float]:
    """Return the seconds that the message takes in all, and the pace of computation during this time."""
    if not computes:
        return message.cost_s, 1.0
    busy_s = message.cost_s + message.delay_s
    return busy_s, max(LEAST_PACE, 1 - message.overhead_s / busy_s) if busy_s > 0 else 1.0
