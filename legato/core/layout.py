"""Where messages lie in memory: a flat buffer each, and those that share a tensor next to one another.

[Note: chains] A tensor that a plan cuts into several messages can be one piece
of memory all the same, if the message with its beginning ends with it and the
next one begins with what comes then. So slices that go on lie first in a
message and slices that are gone on with lie last, and messages that fit
together in this way share one allocation. Elements that count gradients lie
behind the others, and in front of a slice that is gone on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from legato.core.plan import Message, Slice

__all__ = ["Layout", "allocate", "lay_out"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A message's slices in their order in memory; numbers are elements from the start of its buffer."""

    slices: tuple[Slice, ...]
    starts: tuple[int, ...]
    flags: Mapping[str, int]  # by tensor: where it is counted, in the message that has its beginning
    elements: int
    joins: tuple[str, int] | None  # the tensor, and the byte of it, with which the buffer begins
    leaves: tuple[str, int] | None  # ... and with which the next buffer should begin


def lay_out(message: Message, sizes: Mapping[str, int], element_size: int, multiple: int = 1) -> Layout:
    """The layout of a message of elements of `element_size` bytes; `sizes` are whole tensors, in bytes.

    The buffer has a multiple of so many elements.
    """
    slices = sorted(message.slices, key=lambda s: (s.start == 0) * (1 + (s.stop < sizes[s.tensor])))
    first, last = slices[0], slices[-1]
    goes_on = last.stop < sizes[last.tensor]
    starts: list[int] = []
    flags: dict[str, int] = {}
    at = 0
    for piece in slices:
        if piece is last and goes_on:
            at = _place_flags(slices, flags, at)
        starts.append(at)
        at += piece.nbytes // element_size
    if not goes_on:
        at = _place_flags(slices, flags, at)
    elements = -(-at // multiple) * multiple
    return Layout(
        tuple(slices),
        tuple(starts),
        flags,
        elements,
        joins=(first.tensor, first.start) if first.start > 0 and starts[0] == 0 else None,
        leaves=(last.tensor, last.stop) if goes_on and at == elements else None,
    )


def _place_flags(slices: Sequence[Slice], flags: dict[str, int], at: int) -> int:
    for piece in slices:
        if piece.start == 0:
            flags[piece.tensor] = at
            at += 1
    return at


def allocate(layouts: Sequence[Layout], kinds: Sequence[tuple[torch.dtype, torch.device]]) -> list[Tensor]:
    """A buffer of zeros for each layout, of these dtypes and devices."""
    buffers: dict[int, Tensor] = {}
    for chain in _chains(layouts):
        dtype, device = kinds[chain[0]]
        sizes = [layouts[i].elements for i in chain]
        memory = torch.zeros(sum(sizes), dtype=dtype, device=device)
        buffers.update(zip(chain, torch.split(memory, sizes), strict=True))
    return [buffers[i] for i in range(len(layouts))]


def _chains(layouts: Sequence[Layout]) -> list[list[int]]:
    """All layouts, those next to one another that fit together."""
    beginning = {layout.joins: i for i, layout in enumerate(layouts) if layout.joins is not None}
    following = {i: beginning[a.leaves] for i, a in enumerate(layouts) if a.leaves in beginning}
    inner = set(following.values())
    chains: list[list[int]] = []
    seen: set[int] = set()
    for start in sorted(range(len(layouts)), key=lambda i: i in inner):  # then what goes round in a circle
        chain = []
        at: int | None = start
        while at is not None and at not in seen:
            seen.add(at)
            chain.append(at)
            at = following.get(at)
        if chain:
            chains.append(chain)
    return chains
