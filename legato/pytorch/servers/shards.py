"""A plan of pushes and pulls made concrete for one model: what lies where, and in which order it travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from legato.core.errors import PlanError
from legato.core.placement import Placement, place
from legato.core.plan import Kind, Message, Plan, Slice, check_messages

__all__ = ["Arena", "Shard", "default_plan", "shards_of"]

#: Bytes behind every shard's elements: two 8-byte numbers.
_TRAILER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start` to `stop` of a parameter, which server `server` holds; `index` is its number on all ranks."""

    index: int
    name: str
    start: int
    stop: int
    whole: bool
    server: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize

    @property
    def label(self) -> str:
        """For error messages."""
        return repr(self.name) if self.whole else f"{self.name!r} ({self.start} to {self.stop})"

    def of(self, tensor: Tensor) -> Tensor:
        """This shard of a tensor that is shaped like the parameter, flat."""
        return tensor.reshape(-1)[self.start : self.stop]


def default_plan(parameters: Mapping[str, nn.Parameter], servers: int, placement: Placement) -> Plan:
    """Parameters pulled in the order in which the model creates them, and pushed in the opposite one."""
    placed = place((p.nbytes for p in parameters.values()), servers, placement)
    pieces = [
        (Slice(name, start, stop), server)
        for name, found in zip(parameters, placed, strict=True)
        for start, stop, server in found
    ]
    orders: tuple[tuple[Kind, Sequence[tuple[Slice, int]]], ...] = (("push", pieces[::-1]), ("pull", pieces))
    messages = [Message((piece,), kind, server=server) for kind, order in orders for piece, server in order]
    return Plan("in-order", tuple(messages), forward_overlap=True)


def shards_of(plan: Plan, parameters: Mapping[str, nn.Parameter], servers: int) -> tuple[list[Shard], list[int]]:
    """The shards in the order in which they are pushed, and their indices in the order in which they are pulled.

    Every slice travels by itself, also where the plan has several in a message.
    Raises `PlanError` when the plan is for another model or other servers, cuts
    an element in two, or is not one of pushes and pulls.
    """
    unplanned = set(parameters) - {piece.tensor for m in plan.messages for piece in m.slices}
    if unplanned:
        name = min(unplanned)
        raise PlanError(f"the plan is for another model: it does not have parameter {name!r} ({len(unplanned)} in all)")
    check_messages(plan, {name: p.nbytes for name, p in parameters.items()})
    shards: list[Shard] = []
    index: dict[tuple[str, int, int], int] = {}
    pulls: list[int] = []
    for i, message in enumerate(plan.messages):
        if message.kind not in ("push", "pull"):
            raise PlanError(f"messages[{i}].kind: {message.kind!r} (expected 'push' or 'pull': there are servers)")
        if message.server is None or not 0 <= message.server < servers:
            raise PlanError(f"messages[{i}].server: {message.server} (expected 0 to {servers - 1}, one of the servers)")
        for piece in message.slices:
            key = (piece.tensor, piece.start, piece.stop)
            if message.kind == "push":
                index[key] = len(shards)
                shards.append(_shard(len(shards), i, piece, parameters[piece.tensor], message.server))
            elif key not in index or shards[index[key]].server != message.server:
                raise PlanError(f"messages[{i}]: {piece.tensor!r} is pulled in other pieces, or from another server")
            else:
                pulls.append(index[key])
    return shards, pulls


def _shard(index: int, i: int, piece: Slice, parameter: nn.Parameter, server: int) -> Shard:
    size = parameter.element_size()
    if piece.start % size or piece.stop % size:
        raise PlanError(f"messages[{i}]: {piece.tensor!r} is cut inside an element of {size} bytes")
    start, stop = piece.start // size, piece.stop // size
    return Shard(index, piece.tensor, start, stop, stop - start == parameter.numel(), server, parameter.dtype)


class Arena:
    """One block of memory with a place for each of some shards: its elements, and behind them its trailer.

    A trailer is two numbers: the iteration, and one more. It travels with the
    elements and arrives last, so that whoever looks at it sees what is in.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._place: dict[int, tuple[int, int]] = {}
        at = 0
        for shard in shards:
            size = -(-shard.nbytes // 8) * 8 + _TRAILER_BYTES
            self._place[shard.index] = (at, at + size)
            at += size
        self._memory = torch.zeros(at, dtype=torch.uint8)
        words = self._memory.view(torch.int64)
        #: Of each shard, what travels; its elements; its trailer.
        self.message = {i: self._memory[a:b] for i, (a, b) in self._place.items()}
        self.elements = {s.index: self.message[s.index][: s.nbytes].view(s.dtype) for s in shards}
        self.trailer = {i: words[b // 8 - 2 : b // 8] for i, (_, b) in self._place.items()}

    def unpack(self, shards: Sequence[Shard], tensor: Tensor) -> None:
        """Copy all shards of a parameter into a tensor that is shaped like it."""
        if len(shards) == 1:
            tensor.copy_(self.elements[shards[0].index].view(tensor.shape))
            return
        flat = tensor.reshape(-1)  # a view of it, or a copy where it is not contiguous
        for shard in shards:
            flat[shard.start : shard.stop].copy_(self.elements[shard.index])
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def iterations(self, indices: Sequence[int]) -> Tensor:
        """The iterations that the trailers of these shards name now."""
        words = self._memory.view(torch.int64)
        return words[[self._place[i][1] // 8 - 2 for i in indices]]
