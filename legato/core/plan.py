"""A plan: the messages of an iteration, their contents, and the order in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from legato.core.errors import InputError, PlanError, TooLargeError, unknown_name
from legato.core.table import Table
from legato.core.text import count, shorten
from legato.core.units import Int64, format_bytes
from legato.core.workload import Workload

__all__ = [
    "MOST_CHUNKS",
    "ROUNDINGS",
    "SHARDS",
    "Carrier",
    "Kind",
    "Message",
    "Plan",
    "Rounding",
    "Shard",
    "Slice",
    "Wire",
    "check_messages",
    "check_plan",
]

#: Wire formats: two bytes for each float32 element of four bytes.
Wire = Literal["bf16", "fp16"]
#: The wire format in which a plan sends all gradients, or none.
Rounding = Literal["none", "bf16", "fp16"]
ROUNDINGS: tuple[Rounding, ...] = ("none", "bf16", "fp16")
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "push", "pull"]
#: State that is divided among the workers: nothing, the optimizer's states (ZeRO-1), or also the gradients (ZeRO-2).
Shard = Literal["none", "optimizer", "gradients"]
SHARDS: tuple[Shard, ...] = ("none", "optimizer", "gradients")
#: The system that runs a plan. `legato` sends the messages in the plan's order. `ddp` is torch's DDP, with the messages
#: as its buckets. `unordered` means parameter servers that send pulls in a new random order in each iteration; the plan
#: has one such order.
Carrier = Literal["legato", "ddp", "unordered"]

#: The most messages of a plan, each counted as often as its depth. To plan and simulate a million messages takes a
#: minute and a gigabyte. Real plans have hundreds; only a model of 4 TB in slices of 4 MiB has a million.
MOST_CHUNKS = 1_000_000
#: Kinds of messages that aggregate. Every byte is in exactly one message of these kinds.
_AGGREGATE = ("all_reduce", "reduce_scatter", "push")
#: Kinds that only aggregate, each with the kind that distributes the result.
_DISTRIBUTE = {"reduce_scatter": "all_gather", "push": "pull"}
_HEADS = {"#": str, "size": format_bytes, "kind": None, "tensors": None}
_MOST_ROWS = 30  # in a notebook
_SHARDED: dict[Shard, str] = {
    "optimizer": "optimizer sharded: reduce_scatter, update of the shard, all_gather of parameters",
    "gradients": "optimizer and gradients sharded: reduce_scatter, update of the shard, all_gather of parameters",
}
_OTHER_HALF = _DISTRIBUTE | {second: first for first, second in _DISTRIBUTE.items()}


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Bytes `start` to `stop` (exclusive) of the tensor called `tensor`."""

    tensor: str
    start: Int64
    stop: Int64

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(f"slice of {self.tensor!r}: {self.start} to {self.stop} (expected 0 <= start < stop)")

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message: slices of one or more tensors that are sent together.

    `collective` is a name in `Cluster.collectives`, or None for the default. `depth` is the number of chunks that the
    collective pipelines (Caramel, section 5). `server` is the parameter server of a push or pull. `wire` is the format
    in which float32 elements are sent after rounding, or None for no rounding.
    """

    slices: tuple[Slice, ...]
    kind: Kind = "all_reduce"
    collective: str | None = None
    depth: Int64 = 1
    server: Int64 | None = None
    wire: Wire | None = None

    def __post_init__(self) -> None:
        if not self.slices:
            raise InputError("message with no slices (expected at least one)")
        if not 1 <= self.depth <= MOST_CHUNKS:
            raise InputError(f"depth: {self.depth} (expected 1 to {MOST_CHUNKS:,})")

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.slices)

    @property
    def wire_nbytes(self) -> int:
        """Return the number of bytes that are sent: `nbytes`, or, in a `wire` format, half of them (rounded up)."""
        return self.nbytes if self.wire is None else -(-self.nbytes // 2)

    @property
    def tensors(self) -> list[str]:
        """Return the names of the message's tensors, each once."""
        return list(dict.fromkeys(piece.tensor for piece in self.slices))


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.plan/1"):
    """The messages of one iteration in order; the order *is* the schedule.

    A message is launched when the previous message has been launched and all tensors in it are ready, even if a later
    message is ready earlier. With `forward_overlap`, a forward op waits only for the parameters that it reads. Without
    `forward_overlap`, every forward op waits for the last message. `op_order` is the order in which a worker runs its
    ops in one iteration, backward pass first; if it is empty, ops run in the order of `Workload.iteration_order()`.
    `node_order` has the names of the ops that are nodes of a compiled model's graphs, in the order of `op_order`; the
    runtime puts the nodes into this order. `node_order` is empty if no node moves.

    `shard` says which state is divided, so that each worker keeps only its *shard*: the optimizer's states, or also the
    gradients (ZeRO-1 and ZeRO-2, Rajbhandari, Rasley, Ruwase, He, SC 2020, section 5). A sharded plan has no
    all_reduces, only reduce_scatters and all_gathers. After a reduce_scatter, a worker updates its shard of the
    parameters, and the all_gather with the same slices distributes the updated *parameters*. An optimizer op waits for
    the reduce_scatters of the tensors that it reads. An all_gather waits for the optimizer ops that update its tensors.
    A forward op waits for the all_gathers of the tensors that it reads.

    `carrier` says whether DDP or legato runs the plan. DDP can run only all-reduces of exact gradients.
    """

    scheduler: str
    messages: tuple[Message, ...]
    forward_overlap: bool = False
    op_order: tuple[Int64, ...] = ()
    node_order: tuple[str, ...] = ()
    workload_id: str = ""
    shard: Shard = "none"
    carrier: Carrier = "legato"

    def __post_init__(self) -> None:
        if not self.messages:
            raise InputError("messages: none given (expected at least one)")
        if self.carrier == "ddp" and not _suit_ddp(self.messages):
            raise InputError("carrier: 'ddp' (expected 'legato': DDP sends only all-reduces of exact gradients)")
        chunks = sum(message.depth for message in self.messages)
        if chunks > MOST_CHUNKS:
            count = f"{len(self.messages):,} messages of {chunks:,} chunks"
            raise TooLargeError(f"messages: {count} in all (expected at most {MOST_CHUNKS:,})")
        if self.shard not in SHARDS:
            raise unknown_name("shard", self.shard, SHARDS)

    @property
    def wires(self) -> list[Wire]:
        """Return the wire formats of the messages, each once; the list is empty if all gradients are exact."""
        return sorted({message.wire for message in self.messages if message.wire is not None})

    def in_wire_format(self, wire: Wire) -> Plan:
        """Return the plan with all messages in a wire format, which DDP cannot send, so legato is the carrier."""
        messages = tuple(msgspec.structs.replace(message, wire=wire) for message in self.messages)
        carrier = "legato" if self.carrier == "ddp" else self.carrier
        return msgspec.structs.replace(self, messages=messages, carrier=carrier)

    def sharded(self, shard: Shard, places: Mapping[str, int]) -> Plan:
        """Return the plan sharded as `shard` says, with a reduce_scatter and an all_gather in place of each all_reduce.

        Each all_reduce becomes a reduce_scatter in its place. The all_gathers follow, in the order in which the next
        forward pass reads the parameters; `places` has the place of each tensor in that order, and tensors without a
        place come last. Existing reduce_scatters and all_gathers keep their slices. With `shard="none"`, the plan is
        returned unchanged.

        Raises `InputError` on an unknown `shard`, on a plan for parameter servers, and on a plan that is already
        sharded in another way.
        """
        if shard not in SHARDS:
            raise unknown_name("shard", shard, SHARDS)
        if shard == "none":
            return self
        if self.shard not in ("none", shard):
            raise InputError(f"shard: {shard!r}, but the plan has {self.shard!r}")
        if any(message.kind in ("push", "pull") for message in self.messages):
            raise InputError(
                f"shard: {shard!r} with parameter servers (expected none: they keep the optimizer's states)"
            )
        groups = [message for message in self.messages if message.kind != "all_gather"]
        first = [msgspec.structs.replace(message, kind="reduce_scatter") for message in groups]
        second = [msgspec.structs.replace(message, kind="all_gather") for message in groups]
        second.sort(key=lambda message: min(places.get(name, len(places)) for name in message.tensors))
        messages = (*first, *second)
        return msgspec.structs.replace(self, messages=messages, shard=shard, forward_overlap=True, carrier="legato")

    def __str__(self) -> str:
        """Return the schedule, one line per message."""
        return str(Table.of(self._title(), _HEADS, self._rows()))

    def _repr_html_(self) -> str:
        """Return the schedule as a table for notebooks, with only the first messages if there are many."""
        rows = self._rows()
        rest = len(rows) - _MOST_ROWS
        more = f"<p>and {count(rest, 'more message')}; print() shows all of them</p>" if rest > 0 else ""
        return f"{Table.of(self._title(), _HEADS, rows[:_MOST_ROWS])._repr_html_()}{more}"

    def describe(self, workload: Workload) -> str:
        """Return the schedule; each message's line names the op before the message and the first op that waits for it.

        An all_gather or a pull is sent after the messages that aggregated its bytes. In a sharded plan, an all_gather
        is sent after the ops that update its tensors, and before the first forward op that reads its tensors. Raises
        `PlanError` if the plan does not fit the workload.
        """
        check_plan(self, workload)
        order = self.op_order or workload.iteration_order()
        at = {op: k for k, op in enumerate(order)}.__getitem__
        updates = set(workload.phase_ops("optimizer")) if self.shard != "none" else set()
        tensors = {tensor.name: tensor for tensor in workload.tensors}
        carriers = self._carriers()
        rows = []
        for message, row in zip(self.messages, self._rows(), strict=True):
            mine = [tensors[name] for name in message.tensors]
            readers = {reader for tensor in mine for reader in tensor.readers}
            # The ops between which the message is sent. A missing op on one side means that another message is there.
            ready = {tensor.ready_after for tensor in mine}
            before = {"all_gather": readers & updates, "pull": set[int]()}.get(message.kind, ready)
            later = {"reduce_scatter": readers & updates, "push": set[int]()}.get(message.kind, readers - updates)
            others = [k for name in message.tensors for k in carriers.get((_OTHER_HALF.get(message.kind), name), ())]
            after = workload.ops[max(before, key=at)].name if before else f"message {max(others)}"
            needed = workload.ops[min(later, key=at)].name if later else f"message {min(others)}" if others else ""
            rows.append([*row, shorten(after), shorten(needed)])
        return str(Table.of(self._title(), {**_HEADS, "sent after": None, "needed by": None}, rows))

    def _carriers(self) -> dict[tuple[str | None, str], list[int]]:
        """Return, for each kind and tensor, the indices of the messages that carry its bytes."""
        found: dict[tuple[str | None, str], list[int]] = {}
        for i, message in enumerate(self.messages):
            for name in message.tensors:
                found.setdefault((message.kind, name), []).append(i)
        return found

    def _title(self) -> str:
        nbytes = sum(message.nbytes for message in self.messages if message.kind in _AGGREGATE)
        size = f"{count(len(self.messages), 'message')}, {format_bytes(nbytes)} of gradients"
        size += f", messages in {' and '.join(self.wires)}" if self.wires else ""
        overlap = "with forward overlap" if self.forward_overlap else "forward ops wait for the last message"
        title = f"{shorten(self.scheduler)}: {size}, {overlap}{', ops reordered' if self.op_order else ''}"
        return title if self.shard == "none" else f"{title}, {_SHARDED[self.shard]}"

    def _rows(self) -> list[list[Any]]:
        """Return index, size, kind and tensors of each message. A tensor's size is computed from its slices."""
        sizes: dict[str, int] = {}
        for message in self.messages:
            for piece in message.slices:
                sizes[piece.tensor] = max(sizes.get(piece.tensor, 0), piece.stop)
        return [
            [i, message.nbytes, _kind(message), _contents(message, sizes)] for i, message in enumerate(self.messages)
        ]


def _kind(message: Message) -> str:
    options = [] if message.collective is None else [shorten(message.collective)]
    options += [f"depth {message.depth}"] if message.depth > 1 else []
    options += [] if message.server is None else [f"server {message.server}"]
    options += [] if message.wire is None else [message.wire]
    return f"{message.kind} ({', '.join(options)})" if options else message.kind


def _contents(message: Message, sizes: Mapping[str, int]) -> str:
    """Return the names of tensors, or the first and the last name if there are many. [start:stop] marks a part."""
    names = [
        shorten(piece.tensor) + (f"[{piece.start}:{piece.stop}]" if piece.nbytes < sizes[piece.tensor] else "")
        for piece in message.slices
    ]
    if len(names) <= 2:
        return ", ".join(names)
    parts = sum(piece.nbytes < sizes[piece.tensor] for piece in message.slices)
    partial = f", {parts} in part" if parts else ""
    return f"{names[0]} ... {names[-1]} ({count(len(message.tensors), 'tensor')}{partial})"


def check_plan(plan: Plan, workload: Workload) -> None:
    """Raise `PlanError` unless the plan fits the workload.

    The plan must aggregate every byte of every tensor exactly once. The plan must distribute the results of messages
    that only aggregate (reduce_scatter, push). The `op_order` must respect the dependencies. A sharded plan must
    consist of reduce_scatters, each with a later all_gather of the same slices.
    """
    check_messages(plan, {tensor.name: tensor.nbytes for tensor in workload.tensors})
    if plan.op_order:
        _check_op_order(plan.op_order, workload)


def _suit_ddp(messages: Iterable[Message]) -> bool:
    return all(one.kind == "all_reduce" and one.wire is None for one in messages)


def check_messages(plan: Plan, sizes: dict[str, int]) -> None:
    """Raise `PlanError` unless messages aggregate and distribute every byte; `sizes` has each tensor's bytes."""
    covered: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for i, message in enumerate(plan.messages):
        spans = covered.setdefault(message.kind, {})
        for piece in message.slices:
            size = sizes.get(piece.tensor)
            if size is None:
                raise PlanError(f"messages[{i}]: the workload has no tensor {piece.tensor!r} (another workload?)")
            if piece.stop > size:
                raise PlanError(f"messages[{i}]: byte {piece.stop} of {piece.tensor!r}, which has only {size} bytes")
            spans.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    aggregated = [covered[kind] for kind in _AGGREGATE if kind in covered]
    for tensor, size in sizes.items():
        _check_cover(tensor, size, [span for spans in aggregated for span in spans.get(tensor, ())])
    for kind, second in _DISTRIBUTE.items():
        first, handed = covered.get(kind, {}), covered.get(second, {})
        for tensor in dict.fromkeys([*first, *handed]):
            if _union(first.get(tensor, ())) != _union(handed.get(tensor, ())):
                raise PlanError(f"{tensor!r}: {kind} and {second} messages carry different bytes (expected the same)")
    if plan.shard != "none":
        _check_sharded(plan)


def _check_sharded(plan: Plan) -> None:
    """Check that each all_gather has the slices of an earlier reduce_scatter: they define each worker's shard."""
    scattered: set[tuple[Slice, ...]] = set()
    for i, message in enumerate(plan.messages):
        if message.wire is not None:
            raise PlanError(f"messages[{i}].wire: {message.wire!r} in a sharded plan (expected none)")
        if message.kind == "reduce_scatter":
            scattered.add(message.slices)
        elif message.kind != "all_gather":
            raise PlanError(f"messages[{i}]: {message.kind} in a sharded plan (expected reduce_scatter or all_gather)")
        elif message.slices in scattered:
            scattered.remove(message.slices)
        else:
            raise PlanError(
                f"messages[{i}]: all_gather of {shorten(message.slices[0].tensor)!r} in a sharded plan "
                "(expected the slices of one reduce_scatter before it)"
            )


def _check_cover(tensor: str, size: int, pieces: list[tuple[int, int]]) -> None:
    if pieces == [(0, size)]:
        return
    at = 0
    for start, stop in sorted(pieces):
        if start != at:
            problem = "never sent" if start > at else "sent twice"
            raise PlanError(f"{tensor!r}: byte {min(start, at)} is {problem} (expected exactly once)")
        at = stop
    if at != size:
        raise PlanError(f"{tensor!r}: byte {at} is never sent (expected exactly once)")


def _union(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _check_op_order(order: tuple[int, ...], workload: Workload) -> None:
    ops = workload.ops
    if sorted(order) != list(range(len(ops))):
        raise PlanError(f"op_order: not an order of the workload's {len(ops)} ops")
    at = {op: k for k, op in enumerate(order)}
    for i, op in enumerate(ops):
        for dep in op.deps:
            # The backward pass needs results of the previous forward pass: the iteration starts with the backward pass.
            crosses_period = ops[dep].phase == "forward" and op.phase != "forward"
            if not crosses_period and at[dep] > at[i]:
                raise PlanError(f"op_order: op {i} runs before op {dep}, which it depends on")
    for tensor in workload.tensors:
        ready = at[tensor.ready_after]
        updated = max((at[r] for r in tensor.readers if ops[r].phase == "optimizer"), default=ready)
        for r in tensor.readers:
            if at[r] < ready:
                raise PlanError(f"op_order: {tensor.name!r} is read before its gradient is ready")
            if at[r] < updated and ops[r].phase == "forward":
                raise PlanError(f"op_order: op {r} reads {tensor.name!r} before it is updated")
