"""The buckets of a plan for one model: a flat buffer for each message, and the place of every gradient in it.

A `Bucket` is what `DistributedDataParallel` calls a bucket, with one difference: a gradient may be partitioned among
several buckets. A `Slot` has the state of one parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from legato.core.errors import PlanError, RankError
from legato.core.layout import BufferLayout, buffer_layout, chains, realigned, sharded_layout
from legato.core.plan import Message, Plan, Slice, check_messages
from legato.pytorch.private.tensors import version_of, without_overrides
from legato.pytorch.runtime.waiting.update import Update, zeroing

__all__ = [
    "ABSENT",
    "ARRIVED",
    "AWAITED",
    "EARLY",
    "IDLE",
    "PENDING",
    "SENT",
    "UPDATING",
    "Bucket",
    "BucketSlice",
    "Slot",
    "check_plan",
    "make_buckets",
]

#: The dtypes of the wire formats for float32 gradients.
_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: The stages of a parameter between two backward passes.
IDLE = "idle"  # parameter and gradient are up to date
SENT = "sent"  # the gradient was sent; `optimizer.step()` was not called yet
PENDING = "pending"  # `optimizer.step()` was called; the update is not applied yet
UPDATING = "updating"  # the update is being applied; other threads have to wait
#: The states of a gradient in a backward pass that sends.
AWAITED = "awaited"  # it has not arrived yet
EARLY = "early"  # a compiled graph has handed it over, and autograd has not added it yet
ARRIVED = "arrived"
ABSENT = "absent"  # this rank has no gradient


@dataclass(eq=False, slots=True)
class Slot:
    """One trained parameter, and the work that remains to be done for it.

    Only the methods `mark_...` may change `stage` and `update`.
    """

    name: str
    parameter: nn.Parameter
    plain_class: type
    nbytes: int
    order: tuple[int, ...] | None = (
        None  # in a sharded plan: the dimensions in the order of memory, if that is not their own order
    )
    slices: list[BucketSlice] = field(default_factory=list)  # sorted by their elements
    buckets: list[Bucket] = field(default_factory=list)  # the buckets that hold a slice of it, in the plan's order
    parts: dict[int, list[BucketSlice]] = field(default_factory=dict)  # its slices, by the index of their bucket
    to_pack: int = 0  # the number of buckets into which the gradient is still to be packed in this pass
    whole: Tensor | None = None  # the whole gradient as one view of the buckets; None if its slices are not adjacent
    is_apart: bool = False  # whether `whole` has its own memory, because the slices are not adjacent in the buckets
    gradient: str = AWAITED
    offered: tuple[int, int] | None = None  # address and version of the gradient that a compiled graph handed over
    kept: int = 0  # how often the offered gradient itself arrived; -1 once another gradient did
    taken: Tensor | None = None  # an EARLY gradient, until it is packed or arrives
    was_read: bool = False  # whether its gate has seen a read in a watched forward pass
    gate: Any = None  # the data of the parameter's gate
    stage: str = IDLE
    update: Update | None = None  # the call of `step()` whose update a PENDING parameter awaits
    zero_after: Callable[[nn.Parameter], None] | None = None  # what `zero_grad()` does to the gradient after its use
    zeroed: bool = False  # under a sharded plan: whether the gradient was zeroed after it was sent
    spent: Tensor | None = None  # the stand-in in `.grad` after a sharded optimizer has taken the gradient

    @property
    def owner(self) -> int:
        """Return the index of the parameter's optimizer in a sharded plan; -1 if it has none."""
        return self.buckets[-1].owner

    @property
    def has_grad(self) -> bool:
        """Return whether this rank has a gradient to send in this backward pass, or had one in the last pass."""
        return self.gradient == ARRIVED or self.gradient == EARLY

    def begin_pass(self, lends: bool) -> None:
        """Prepare for a backward pass that sends gradients; `lends` says whether they share the buckets' memory."""
        self.clear_spent()
        self.gradient, self.taken, self.zeroed = AWAITED, None, False
        self.to_pack = len(self.parts)
        lent = lends and self.whole is not None and not self.is_apart
        if lent and self.whole.data_ptr() != self.slices[0].view.data_ptr():  # pyrefly: ignore[missing-attribute]
            self.whole = _whole(self)  # the user has given the gradient other memory (`p.grad.data = ...`)

    def keep_apart(self) -> Iterator[Tensor]:
        """Give a gradient its own memory if its slices are not adjacent in the buckets; then yield a view of it."""
        self.is_apart = self.whole is None
        if self.is_apart:
            self.whole = torch.zeros_like(self.parameter, requires_grad=False)
            yield self.whole.detach()

    @property
    def is_spent(self) -> bool:
        """Return whether a sharded optimizer took the gradient. Call this only if the parameter's gate is disabled."""
        spent = self.spent
        return spent is not None and self.parameter.grad is spent and not _is_overwritten(spent)

    def spend(self) -> None:
        """Take the gradient for a sharded optimizer, and leave a NaN without memory of its own in its place."""
        with without_overrides():
            if self.spent is None:  # one number in memory, but not a view, so it can be detached and zeroed in place
                p = self.parameter
                self.spent = torch.empty_strided(p.shape, [0] * p.dim(), dtype=p.dtype, device=p.device)
            if _is_overwritten(self.spent):
                self.spent.fill_(math.nan)
                # An attribute of the tensor, so that later plans see it too.
                self.spent._legato_spent = version_of(self.spent)  # pyrefly: ignore[missing-attribute]
            self.parameter.grad = self.spent

    def clear_spent(self) -> None:
        """Give a gradient its own memory if a sharded optimizer has taken it, and the program has zeroed it since."""
        with without_overrides():
            if self.parameter.grad is self.spent is not None and not self.is_spent:
                self.zero(set_to_none=False)

    def find_spent(self) -> None:
        """Find out whether the gradient was taken under the previous plan."""
        if hasattr(self.parameter.grad, "_legato_spent"):
            self.spent = self.parameter.grad

    def zero(self, set_to_none: bool) -> None:
        """Do what `zero_grad` does, even if the gradient was taken; this does not wait for the parameter."""
        self.zeroed = not set_to_none
        with without_overrides():
            if self.parameter.grad is self.spent is not None:
                self.parameter.grad = None if set_to_none else torch.zeros_like(self.parameter)
            else:
                zeroing(set_to_none)(self.parameter)

    def check_cleared(self) -> None:
        """Raise `RankError` if a backward pass or a step is about to use a gradient that was taken."""
        self.clear_spent()
        if self.is_spent:
            raise RankError(
                f"{self.name}: step() has used its gradient up, and nothing can be added to it: call zero_grad() "
                "before the next backward pass"
            )

    def offer(self, grad: Tensor) -> None:
        """Remember the gradient that a compiled graph offers for sending before autograd delivers it."""
        self.offered = _identity(grad)

    def compare(self, grad: Tensor | None) -> None:
        """Compare an arriving gradient with the offered gradient. Raises `RankError` if the wrong gradient was sent."""
        kept = grad is not None and _identity(grad) == self.offered
        self.kept = self.kept + 1 if kept else -1
        self.offered = None
        if self.gradient == EARLY and not kept:
            raise RankError(
                f"{self.name}: the gradient that a compiled graph handed out was sent, and another one arrived (a hook "
                "that was added, or a parameter that eager code uses too, in this step only?)"
            )

    def mark_sent(self) -> None:
        """Enter SENT: the gradient was packed."""
        self.stage = SENT

    def mark_stepped(self, update: Update | None = None) -> None:
        """Enter PENDING: `optimizer.step()` was called. `update` is None if other processes update the parameter."""
        self.stage, self.update, self.zero_after = PENDING, update, None

    def mark_updating(self) -> None:
        """Enter UPDATING: the update is being applied."""
        self.stage = UPDATING

    def mark_settled(self) -> None:
        """Enter IDLE: parameter and gradient are up to date, or the gradient was dropped."""
        self.stage, self.update = IDLE, None

    def ordered(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor shaped like the parameter, with its dimensions in the order used by slices."""
        return tensor if self.order is None else tensor.permute(self.order)

    def unpack_into(self, tensor: Tensor) -> None:
        """Copy the elements of all slices into a tensor that is shaped like the parameter and may have any strides."""
        tensor = self.ordered(tensor)
        flat = None if tensor.is_contiguous() else tensor.contiguous()
        target = tensor if flat is None else flat
        for part in self.slices:
            (target if part.whole else target.view(-1)[part.start : part.stop]).copy_(part.view)
        if flat is not None:
            tensor.copy_(flat)

    def release(self) -> None:
        """Release the buckets, because slots and buckets refer to each other and would keep their memory alive."""
        self.slices, self.buckets, self.parts = [], [], {}
        self.whole = self.gate = self.spent = None


def _is_overwritten(spent: Tensor) -> bool:
    """Return whether the program has replaced or changed the NaN that stands in for a gradient that was taken."""
    return version_of(spent) != getattr(spent, "_legato_spent", -1)


@dataclass(eq=False, slots=True)
class BucketSlice:
    """Elements `start` to `stop` (exclusive) of a parameter, and their place in a bucket."""

    slot: Slot
    bucket: Bucket
    start: int
    stop: int
    view: Tensor  # a view of the bucket's buffer: flat, or shaped like the parameter (`ordered`) if it is `whole`
    flag: Tensor | None  # the element that counts the ranks with a gradient; only the parameter's first slice has one,
    # but every slice in a sharded plan
    whole: bool  # whether the slice holds all elements of the parameter

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice's elements of a tensor that has the parameter's shape, in the slice's order."""
        tensor = self.slot.ordered(tensor)
        return tensor if self.whole else tensor.reshape(-1)[self.start : self.stop]


@dataclass(eq=False, slots=True)
class Bucket:
    """A message of the plan: its buffer, its slices, and its progress.

    The bucket of an all_gather shares the buffer of its reduce_scatter, and nothing is packed into it. In a sharded
    plan, the same optimizer updates all parameters of a bucket; `owner` is its index.
    """

    message: Message
    buffer: Tensor
    index: int = -1  # its position in the plan
    slices: list[BucketSlice] = field(default_factory=list)
    scattered: Bucket | None = None  # the reduce_scatter, if this is an all_gather
    gathered: Bucket | None = None  # the all_gather, if this is a reduce_scatter
    slots: int = 0  # the number of parameters in it
    last_of: list[Slot] = field(default_factory=list)  # the slots for which this is the last bucket
    flags: Tensor | None = None  # the elements that count ranks, adjacent; in a sharded plan [rank, element]
    marks: Tensor | None = None  # in a sharded plan, for each rank: whether it has updated its chunk
    owner: int = -1  # in a sharded plan: the index of its parameters' optimizer; -1 if they have none
    missing: int = 0  # the number of parameters whose gradients have not arrived yet
    arrived: list[Slot] = field(default_factory=list)  # slots with gradients that have arrived but are not packed
    waiting_bytes: int = 0  # the bytes of the gradients of `arrived`
    writable: bool = False  # whether its buffer can be written in this backward pass
    work: Any = None  # the collective in flight
    #: The name of the first tensor and the number of further tensors, for error messages and timelines.
    label: str = field(init=False)

    def __post_init__(self) -> None:
        slices = self.message.slices
        self.label = slices[0].tensor if len(slices) == 1 else f"{slices[0].tensor} +{len(slices) - 1}"

    @property
    def has_arrived(self) -> bool:
        """Return whether no collective of this bucket is in flight."""
        return self.work is None or self.work.is_completed()

    def release(self) -> None:
        """Release the memory for good."""
        self.buffer, self.flags, self.marks = self.buffer.new_empty(0), None, None
        self.slices, self.last_of, self.arrived = [], [], []
        self.scattered = self.gathered = self.work = None


def make_buckets(
    plan: Plan,
    parameters: Mapping[str, nn.Parameter],
    ranks: int,
    owner_of: Callable[[nn.Parameter], int] = lambda _: -1,
) -> tuple[list[Slot], list[Bucket]]:
    """Make the slots of these parameters and the buckets of a plan, in the plan's order.

    A message with several dtypes, devices or owners becomes several buckets, one for each combination. Raises
    `PlanError` if the plan is for another model or splits an element, or if no earlier reduce_scatter has the same
    slices as an all_gather.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    unplanned = set(sizes).difference(*(message.tensors for message in plan.messages))
    if unplanned:
        name = min(unplanned)
        raise PlanError(f"the plan is for another model: it does not have parameter {name!r} ({len(unplanned)} in all)")
    check_messages(plan, sizes)
    sharded = plan.shard != "none"
    slots = {
        name: Slot(name, p, type(p), p.nbytes, _order_in_memory(p) if sharded else None)
        for name, p in parameters.items()
    }
    parts = [(i, part) for i, m in enumerate(plan.messages) for part in _uniform(m, i, parameters, owner_of, sharded)]
    own = [part for _, part in parts if part.kind != "all_gather"]
    made = iter(_sharded(own, parameters, ranks, slots) if sharded else _placed(own, parameters, sizes, ranks, slots))
    buckets: list[Bucket] = []
    scattered: dict[frozenset[Slice], Bucket] = {}
    for i, part in parts:
        if part.kind == "all_gather":
            bucket = _second_half(part, i, scattered)
        else:
            bucket = next(made)
            if part.kind == "reduce_scatter":
                scattered[frozenset(part.slices)] = bucket
        bucket.index, bucket.owner = len(buckets), owner_of(parameters[part.slices[0].tensor])
        buckets.append(bucket)
    _connect(slots.values(), buckets, sharded)
    return list(slots.values()), buckets


def _connect(slots: Iterable[Slot], buckets: Iterable[Bucket], sharded: bool) -> None:
    """Tell each slot its buckets, and tell each bucket the slots that have no later bucket."""
    for bucket in buckets:
        for slot in dict.fromkeys(piece.slot for piece in (bucket.scattered or bucket).slices):
            slot.buckets.append(bucket)
            bucket.slots += 1
    for slot in slots:
        slot.slices.sort(key=lambda piece: piece.start)
        slot.whole = None if sharded else _whole(slot)
        slot.buckets[-1].last_of.append(slot)
        for piece in slot.slices:
            slot.parts.setdefault(piece.bucket.index, []).append(piece)


def check_plan(plan: Plan, parameters: Mapping[str, nn.Parameter], ranks: int) -> None:
    """Raise the errors that `make_buckets` would raise, without allocating buckets."""
    without_memory = {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in parameters.items()}
    make_buckets(plan, without_memory, ranks)


def _uniform(
    message: Message,
    i: int,
    parameters: Mapping[str, nn.Parameter],
    owner_of: Callable[[nn.Parameter], int],
    sharded: bool,
) -> list[Message]:
    """Split message i of the plan by dtype, device and owner. Only messages of float32 keep the wire format.

    In a sharded plan, a tensor is cut only where updating the parts gives the same result as updating the whole.
    """
    groups: dict[tuple[torch.dtype, torch.device, int], list[Slice]] = {}
    for piece in message.slices:
        p = parameters[piece.tensor]
        if piece.start % p.element_size() or piece.stop % p.element_size():
            raise PlanError(f"messages[{i}]: {piece.tensor!r} is split inside an element of {p.element_size()} bytes")
        kept = realigned(piece, p.nbytes, p.element_size()) if sharded else piece
        if kept is not None:
            groups.setdefault((p.dtype, p.device, owner_of(p)), []).append(kept)
    return [
        msgspec.structs.replace(message, slices=tuple(group), wire=message.wire if dtype == torch.float32 else None)
        for (dtype, _, _), group in groups.items()
    ]


def _second_half(message: Message, i: int, scattered: dict[frozenset[Slice], Bucket]) -> Bucket:
    """Return the bucket of an all_gather, after checking that it matches an earlier reduce_scatter."""
    first = scattered.pop(frozenset(message.slices), None)
    if first is None:
        raise PlanError(f"messages[{i}]: an all_gather whose slices are not one earlier reduce_scatter's")
    there, here = ((m.collective, m.depth, m.wire) for m in (first.message, message))
    if there != here:
        raise PlanError(
            f"messages[{i}]: an all_gather by collective, depth and wire {here}, its reduce_scatter by {there}"
        )
    first.gathered = Bucket(message, first.buffer, scattered=first)
    return first.gathered


def _placed(
    messages: list[Message],
    parameters: Mapping[str, nn.Parameter],
    sizes: Mapping[str, int],
    ranks: int,
    slots: dict[str, Slot],
) -> list[Bucket]:
    """Return the buckets of these messages, in new buffers. A reduce_scatter gives each rank equally many elements."""
    firsts = [parameters[message.slices[0].tensor] for message in messages]
    layouts = [
        buffer_layout(message, sizes, first.element_size(), ranks if message.kind == "reduce_scatter" else 1)
        for message, first in zip(messages, firsts, strict=True)
    ]
    # A gradient in a wire format is copied out of its buffer anyway, so it needs no place next to another buffer.
    layouts = [
        layout if message.wire is None else layout._replace(joins=None, leaves=None)
        for message, layout in zip(messages, layouts, strict=True)
    ]
    dtypes = [_WIRE[m.wire] if m.wire else p.dtype for m, p in zip(messages, firsts, strict=True)]
    buffers = _allocated(layouts, [(dtype, p.device) for dtype, p in zip(dtypes, firsts, strict=True)])
    buckets = []
    for message, layout, buffer in zip(messages, layouts, buffers, strict=True):
        bucket = _make_bucket(message, layout, buffer, slots)
        if layout.flags:
            bucket.flags = buffer[min(layout.flags.values()) : max(layout.flags.values()) + 1]
        buckets.append(bucket)
    return buckets


def _sharded(
    messages: list[Message], parameters: Mapping[str, nn.Parameter], ranks: int, slots: dict[str, Slot]
) -> list[Bucket]:
    """Return the buckets of a sharded plan's reduce_scatters."""
    buckets = []
    for message in messages:
        first = parameters[message.slices[0].tensor]
        layout, share = sharded_layout(message, first.element_size(), ranks)
        buffer = torch.zeros(layout.elements, dtype=first.dtype, device=first.device)
        bucket = _make_bucket(message, layout, buffer, slots)
        chunks = buffer.view(ranks, -1)
        bucket.flags, bucket.marks = chunks[:, share:-1], chunks[:, -1]
        buckets.append(bucket)
    return buckets


def _allocated(layouts: Sequence[BufferLayout], kinds: Sequence[tuple[torch.dtype, torch.device]]) -> list[Tensor]:
    """Return a buffer of zeros for each buffer layout; `kinds` has each buffer's dtype and device."""
    buffers: dict[int, Tensor] = {}
    for chain in chains(layouts):
        dtype, device = kinds[chain[0]]
        sizes = [layouts[i].elements for i in chain]
        memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
        buffers.update(zip(chain, torch.split(memory, sizes), strict=True))
    return [buffers[i] for i in range(len(layouts))]


def _make_bucket(message: Message, layout: BufferLayout, buffer: Tensor, slots: dict[str, Slot]) -> Bucket:
    """Return the bucket of a message that has its own buffer."""
    bucket = Bucket(message, buffer)
    for piece, at in zip(layout.slices, layout.starts, strict=True):
        slot = slots[piece.tensor]
        start, stop = (byte // slot.parameter.element_size() for byte in (piece.start, piece.stop))
        view = buffer[at : at + stop - start]
        whole = stop - start == slot.parameter.numel()
        if whole and slot.parameter.is_contiguous():  # a dimension of size 1 may have any stride
            view = view.as_strided(slot.parameter.shape, slot.parameter.stride())
        elif whole:
            view = view.view(slot.ordered(slot.parameter.detach()).shape)
        at_flag = layout.flags.get(piece)
        flag = None if at_flag is None else buffer[at_flag : at_flag + 1]
        bucket.slices.append(BucketSlice(slot, bucket, start, stop, view, flag, whole))
        slot.slices.append(bucket.slices[-1])
    return bucket


def _order_in_memory(parameter: nn.Parameter) -> tuple[int, ...] | None:
    """Return a parameter's dimensions in the order of memory; None if this is their own order, or if memory has gaps.

    A kernel that updates a whole parameter goes through memory in order, so a kernel for a part must do so, too.
    """
    if parameter.is_contiguous():
        return None
    strides = parameter.stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda d: -strides[d]))
    return order if parameter.detach().permute(order).is_contiguous() else None


def _whole(slot: Slot) -> Tensor | None:
    """Return the whole gradient as one view with the parameter's strides; None if its slices are not adjacent."""
    views = [piece.view for piece in slot.slices]
    for a, b in itertools.pairwise(views):
        together = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        if not together or b.storage_offset() != a.storage_offset() + a.numel():
            return None
    parameter = slot.parameter
    if not parameter.is_contiguous() or any(view.dtype != parameter.dtype for view in views):
        return None
    return views[0].as_strided(parameter.shape, parameter.stride(), views[0].storage_offset())


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Return values that identify a tensor without a reference to it, which would make autograd copy it."""
    return tensor.data_ptr(), version_of(tensor)
