"""A plan made concrete for one model: one flat buffer a message, and every gradient's place in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from legato.core.errors import PlanError
from legato.core.layout import BufferLayout, buffer_layout, chains
from legato.core.plan import Message, Plan, Slice, check_messages
from legato.pytorch.runtime.update import Update

__all__ = ["IDLE", "PENDING", "SENT", "Bucket", "BucketSlice", "Slot", "make_buckets"]

#: Where a parameter stands between two backward passes.
IDLE = "idle"  # nothing is outstanding
SENT = "sent"  # its gradient is on its way; `optimizer.step()` was not called yet
PENDING = "pending"  # `optimizer.step()` was called; the update is still to be applied


@dataclass(eq=False, slots=True)
class Slot:
    """One trained parameter, and what is still to be done with it."""

    name: str
    parameter: nn.Parameter
    plain_class: type
    slices: list[BucketSlice] = field(default_factory=list)
    stage: str = IDLE
    buckets: list[Bucket] = field(default_factory=list)
    ready: bool = False  # its gradient is there in this backward pass
    has_grad: bool = False  # ... and is not merely known to be absent
    update: Update | None = None  # the call of `step()` that applies the gradient; None when it is not pending
    whole: Tensor | None = None  # all of its gradient, as a view of the messages, where it lies in one place

    # The stages of a parameter; no other code assigns `stage` or `update`.

    def mark_sent(self) -> None:
        """IDLE (or SENT) -> SENT: the gradient was packed, and `optimizer.step()` was not called yet."""
        self.stage = SENT

    def mark_stepped(self, update: Update | None = None) -> None:
        """-> PENDING: `optimizer.step()` was called; `update` is None where a server computes the new value."""
        self.stage, self.update = PENDING, update

    def mark_settled(self) -> None:
        """-> IDLE: parameter and gradient are up to date, or the gradient was dropped."""
        self.stage, self.update = IDLE, None


@dataclass(eq=False, slots=True)
class BucketSlice:
    """Elements `start` to `stop` of a parameter, and their place in a message's buffer."""

    slot: Slot
    bucket: Bucket
    start: int
    stop: int
    view: Tensor  # shaped like the parameter when it is the whole of it, else flat
    flag: Tensor | None  # one element: how many ranks had a gradient (first piece only)

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.slot.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """This piece's part of a tensor that is shaped like the parameter."""
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(eq=False, slots=True)
class Bucket:
    """One message as it goes out: a buffer, what is packed into it, and its progress.

    An all_gather has the buffer of its reduce_scatter, and packs nothing.
    """

    index: int
    message: Message
    buffer: Tensor
    slices: list[BucketSlice] = field(default_factory=list)
    scattered: Bucket | None = None  # the first half of which this is the second
    gathered: Bucket | None = None  # ... and the other way round
    slots: int = 0  # parameters in it
    missing: int = 0  # ... whose gradients are not there yet
    work: Any = None  # the collective in flight

    @property
    def label(self) -> str:
        slices = self.message.slices
        return slices[0].tensor if len(slices) == 1 else f"{slices[0].tensor} +{len(slices) - 1}"


def make_buckets(plan: Plan, parameters: Mapping[str, nn.Parameter], ranks: int) -> tuple[list[Slot], list[Bucket]]:
    """Buffers for a plan on these parameters, messages in the plan's order.

    A message that holds several dtypes or devices is cut by them: one buffer
    has one of each. Raises `PlanError` when the plan is for another model, cuts
    an element in two, or gathers what no one message scattered.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    unplanned = set(sizes) - {piece.tensor for m in plan.messages for piece in m.slices}
    if unplanned:
        name = min(unplanned)
        raise PlanError(f"the plan is for another model: it does not have parameter {name!r} ({len(unplanned)} in all)")
    check_messages(plan, sizes)
    slots = {name: Slot(name, p, type(p)) for name, p in parameters.items()}
    parts = [(i, part) for i, message in enumerate(plan.messages) for part in _uniform(message, i, parameters)]
    placed = iter(_placed([part for _, part in parts if part.kind != "all_gather"], parameters, sizes, ranks))
    buckets: list[Bucket] = []
    scattered: dict[frozenset[Slice], Bucket] = {}
    for i, part in parts:
        if part.kind == "all_gather":
            buckets.append(_second_half(len(buckets), part, i, scattered))
            continue
        buckets.append(_make_bucket(len(buckets), part, *next(placed), slots))
        if part.kind == "reduce_scatter":
            scattered[frozenset(part.slices)] = buckets[-1]
    for slot in slots.values():
        slot.slices.sort(key=lambda piece: piece.start)
        slot.whole = _whole(slot)
    return list(slots.values()), buckets


def _uniform(message: Message, i: int, parameters: Mapping[str, nn.Parameter]) -> list[Message]:
    """Message i of the plan, cut by dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Slice]] = {}
    for piece in message.slices:
        p = parameters[piece.tensor]
        if piece.start % p.element_size() or piece.stop % p.element_size():
            raise PlanError(f"messages[{i}]: {piece.tensor!r} is cut inside an element of {p.element_size()} bytes")
        groups.setdefault((p.dtype, p.device), []).append(piece)
    return [msgspec.structs.replace(message, slices=tuple(group)) for group in groups.values()]


def _second_half(index: int, message: Message, i: int, scattered: dict[frozenset[Slice], Bucket]) -> Bucket:
    """The all_gather that belongs to a reduce_scatter before it."""
    first = scattered.pop(frozenset(message.slices), None)
    if first is None:
        raise PlanError(f"messages[{i}]: an all_gather of other slices than those of one reduce_scatter before it")
    there, here = ((m.collective, m.depth) for m in (first.message, message))
    if there != here:
        raise PlanError(f"messages[{i}]: an all_gather by collective and depth {here} of what was scattered by {there}")
    bucket = Bucket(index, message, first.buffer, slots=first.slots, scattered=first)
    first.gathered = bucket
    for slot in {id(piece.slot): piece.slot for piece in first.slices}.values():
        slot.buckets.append(bucket)
    return bucket


def _placed(
    messages: list[Message], parameters: Mapping[str, nn.Parameter], sizes: Mapping[str, int], ranks: int
) -> list[tuple[BufferLayout, Tensor]]:
    """Layouts and buffers; halves of an all-reduce have equally many elements for every rank."""
    firsts = [parameters[message.slices[0].tensor] for message in messages]
    layouts = [
        buffer_layout(message, sizes, first.element_size(), ranks if message.kind == "reduce_scatter" else 1)
        for message, first in zip(messages, firsts, strict=True)
    ]
    return list(zip(layouts, _allocated(layouts, [(p.dtype, p.device) for p in firsts]), strict=True))


def _allocated(layouts: Sequence[BufferLayout], kinds: Sequence[tuple[torch.dtype, torch.device]]) -> list[Tensor]:
    """A buffer of zeros for each layout, of these dtypes and devices."""
    buffers: dict[int, Tensor] = {}
    for chain in chains(layouts):
        dtype, device = kinds[chain[0]]
        sizes = [layouts[i].elements for i in chain]
        memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
        buffers.update(zip(chain, torch.split(memory, sizes), strict=True))
    return [buffers[i] for i in range(len(layouts))]


def _make_bucket(index: int, message: Message, layout: BufferLayout, buffer: Tensor, slots: dict[str, Slot]) -> Bucket:
    """A message with a buffer of its own."""
    bucket = Bucket(index, message, buffer)
    for piece, at in zip(layout.slices, layout.starts, strict=True):
        slot = slots[piece.tensor]
        start, stop = (byte // buffer.element_size() for byte in (piece.start, piece.stop))
        view = buffer[at : at + stop - start]
        if stop - start == slot.parameter.numel():
            view = view.view(slot.parameter.shape)
        flag = layout.flags.get(piece.tensor) if start == 0 else None
        bucket.slices.append(
            BucketSlice(slot, bucket, start, stop, view, None if flag is None else buffer[flag : flag + 1])
        )
        slot.slices.append(bucket.slices[-1])
        if bucket not in slot.buckets:
            slot.buckets.append(bucket)
            bucket.slots += 1
    return bucket


def _whole(slot: Slot) -> Tensor | None:
    """The gradient in one view that is laid out like the parameter, if its pieces lie one behind the other."""
    views = [piece.view for piece in slot.slices]
    for a, b in itertools.pairwise(views):
        together = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        if not together or b.storage_offset() != a.storage_offset() + a.numel():
            return None
    parameter = slot.parameter
    if not parameter.is_contiguous():
        return None
    return views[0].as_strided(parameter.shape, parameter.stride(), views[0].storage_offset())
