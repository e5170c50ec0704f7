"""The shards of a model's parameters: their servers, their order of transfer, and their place in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from legato.core.errors import PlanError
from legato.core.placement import Placement, place
from legato.core.plan import Kind, Message, Plan, Slice, check_messages

__all__ = ["Arena", "Shard", "default_plan", "shards_of"]

#: The size in bytes of the trailer after each shard's elements: two 8-byte integers.
_TRAILER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements `start` to `stop` (exclusive) of a parameter, held by server `server`.

    `index` identifies the shard on all ranks.
    """

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
        """Return the shard's name for error messages."""
        return repr(self.name) if self.whole else f"{self.name!r} ({self.start} to {self.stop})"

    def of(self, tensor: Tensor) -> Tensor:
        """Return this shard of a tensor that has the parameter's shape, as a flat tensor."""
        return tensor.reshape(-1)[self.start : self.stop]


def default_plan(parameters: Mapping[str, nn.Parameter], servers: int, placement: Placement) -> Plan:
    """Return a plan that pulls parameters in the order in which the model creates them, and pushes in reverse order."""
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
    """Return the shards in push order, and their indices in pull order.

    Each slice is a transfer, even if the plan has several slices in one message. Raises `PlanError` if the plan is for
    another model or other servers, if a slice ends inside an element, or if a message is neither a push nor a pull.
    """
    unplanned = set(parameters) - {piece.tensor for m in plan.messages for piece in m.slices}
    if unplanned:
        name = min(unplanned)
        raise PlanError(f"the plan is for another model: it lacks parameter {name!r} ({len(unplanned)} in all)")
    check_messages(plan, {name: p.nbytes for name, p in parameters.items()})
    shards: list[Shard] = []
    index: dict[tuple[str, int, int], int] = {}
    pulls: list[int] = []
    for i, message in enumerate(plan.messages):
        if message.kind not in ("push", "pull"):
            raise PlanError(f"messages[{i}].kind: {message.kind!r} (expected 'push' or 'pull', for parameter servers)")
        if message.server is None or not 0 <= message.server < servers:
            raise PlanError(f"messages[{i}].server: {message.server} (expected 0 to {servers - 1})")
        for piece in message.slices:
            key = (piece.tensor, piece.start, piece.stop)
            if message.kind == "push":
                index[key] = len(shards)
                shards.append(_shard(len(shards), i, piece, parameters[piece.tensor], message.server))
            elif key not in index or shards[index[key]].server != message.server:
                raise PlanError(
                    f"messages[{i}]: {piece.tensor!r} is not pulled as it is pushed (other bytes, or another server)"
                )
            else:
                pulls.append(index[key])
    return shards, pulls


def _shard(index: int, i: int, piece: Slice, parameter: nn.Parameter, server: int) -> Shard:
    size = parameter.element_size()
    if piece.start % size or piece.stop % size:
        raise PlanError(f"messages[{i}]: {piece.tensor!r} is partitioned inside an element of {size} bytes")
    start, stop = piece.start // size, piece.stop // size
    return Shard(index, piece.tensor, start, stop, stop - start == parameter.numel(), server, parameter.dtype)


class Arena:
    """One block of memory that holds the elements of each shard, followed by the shard's trailer.

    A trailer has two integers: the iteration, and whether there is a gradient. The trailer is sent with the elements
    and arrives last, so its iteration shows whether the elements have arrived.
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
        #: The bytes to transfer, by shard index; then the elements, and the trailers.
        self.message = {i: self._memory[a:b] for i, (a, b) in self._place.items()}
        self.elements = {s.index: self.message[s.index][: s.nbytes].view(s.dtype) for s in shards}
        self.trailer = {i: words[b // 8 - 2 : b // 8] for i, (_, b) in self._place.items()}

    def unpack(self, shards: Sequence[Shard], tensor: Tensor) -> None:
        """Copy all shards of a parameter into a tensor that has the parameter's shape."""
        if len(shards) == 1:
            tensor.copy_(self.elements[shards[0].index].view(tensor.shape))
            return
        flat = tensor.reshape(-1)  # a view, or a copy if the tensor is not contiguous
        for shard in shards:
            flat[shard.start : shard.stop].copy_(self.elements[shard.index])
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

    def clear_iterations(self, indices: Sequence[int]) -> None:
        """Mark the elements of these shards as not yet arrived."""
        self._memory.view(torch.int64)[self._iterations(indices)] = -1

    def arrived(self, indices: Sequence[int]) -> list[bool]:
        """Return, for each of these shards, whether its elements have arrived since `clear_iterations`."""
        return (self._memory.view(torch.int64)[self._iterations(indices)] >= 0).tolist()

    def _iterations(self, indices: Sequence[int]) -> list[int]:
        return [self._place[i][1] // 8 - 2 for i in indices]
