"""The memory layout of messages: each has a flat buffer, and messages that share a tensor have adjacent buffers.

[Note: chains] A tensor that a plan partitions over several messages can still be contiguous in memory. To keep the
tensor contiguous, the buffer with the tensor's first bytes must end with these bytes, and the buffer of the next
message must begin with the tensor's next bytes. Therefore a slice that continues a tensor is first in its message, and
a slice that the next message continues is last. Messages that fit together in this way form a chain and share one
allocation. A buffer also has elements that count the ranks with a gradient. These elements come after the slices, but
before a slice that the next message continues.

[Note: shards] In a sharded plan, the buffer of a message has one chunk for each rank, all of the same size. A chunk
begins with parts of tensors; all chunks have about the same number of elements of tensors. After its parts, the chunk
has one element for each part, which counts the ranks that have a gradient for this part. The last element of the chunk
says whether the owner has updated the parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from legato.core.plan import Message, Slice

__all__ = ["BufferLayout", "buffer_layout", "chains", "realigned", "scattered_tensors", "sharded_layout"]


#: A tensor is cut only at multiples of this number of elements. With such cuts, vectorized updates give the same
#: results for the parts as for the whole tensor. Elements that do not fill a vector would be rounded differently.
_ALIGNED_ELEMENTS = 64


class BufferLayout(NamedTuple):
    """The slices of a message in their order in memory; positions count elements from the start of the buffer."""

    slices: tuple[Slice, ...]
    starts: tuple[int, ...]
    # for each slice with a tensor's first byte, the element that counts the ranks with a gradient
    flags: Mapping[Slice, int]
    elements: int
    joins: tuple[str, int] | None  # the tensor, and the byte in it, with which the buffer begins
    leaves: tuple[str, int] | None  # the tensor, and the byte in it, with which the next buffer should begin


def buffer_layout(message: Message, sizes: Mapping[str, int], element_size: int, multiple: int = 1) -> BufferLayout:
    """Return the memory layout of a message whose elements have `element_size` bytes.

    `sizes` has the bytes of each whole tensor, by name. The number of elements of the buffer is a multiple of
    `multiple`.
    """
    slices = sorted(message.slices, key=lambda s: (s.start == 0) * (1 + (s.stop < sizes[s.tensor])))
    first, last = slices[0], slices[-1]
    goes_on = last.stop < sizes[last.tensor]
    starts: list[int] = []
    flags: dict[Slice, int] = {}
    at = 0
    for piece in slices:
        if piece is last and goes_on:
            at = _place_flags(slices, flags, at)
        starts.append(at)
        at += piece.nbytes // element_size
    if not goes_on:
        at = _place_flags(slices, flags, at)
    elements = -(-at // multiple) * multiple
    return BufferLayout(
        tuple(slices),
        tuple(starts),
        flags,
        elements,
        joins=(first.tensor, first.start) if first.start > 0 and starts[0] == 0 else None,
        leaves=(last.tensor, last.stop) if goes_on and at == elements else None,
    )


def _place_flags(slices: Sequence[Slice], flags: dict[Slice, int], at: int) -> int:
    for piece in slices:
        if piece.start == 0:
            flags[piece] = at
            at += 1
    return at


def realigned(piece: Slice, size: int, element_size: int) -> Slice | None:
    """Return the slice with its ends moved to where a sharded plan may cut the tensor, or None if it is then empty.

    Each end of the slice moves towards the beginning of the tensor, by less than 64 elements. The tensor has `size`
    bytes.
    """
    unit = _ALIGNED_ELEMENTS * element_size
    start, stop = (byte if byte == size else byte - byte % unit for byte in (piece.start, piece.stop))
    return Slice(piece.tensor, start, stop) if start < stop else None


def sharded_layout(message: Message, element_size: int, ranks: int) -> tuple[BufferLayout, int]:
    """Return the layout of a sharded plan's message ([Note: shards]), and the elements of tensors in the fullest chunk.

    Slices are cut at the ends of chunks, and every slice has an element (a flag) that counts the ranks with a gradient.
    """
    share, unit = -(-message.nbytes // element_size // ranks), _ALIGNED_ELEMENTS * element_size
    parts: list[list[Slice]] = [[]]
    sizes = [0]
    for piece in message.slices:
        start = piece.start
        while start < piece.stop:
            if sizes[-1] >= share:
                parts.append([])
                sizes.append(0)
            end = start + (share - sizes[-1]) * element_size
            stop = min(piece.stop, -(-end // unit) * unit)
            parts[-1].append(Slice(piece.tensor, start, stop))
            sizes[-1] += (stop - start) // element_size
            start = stop
    most = max(sizes)
    chunk = most + max(map(len, parts)) + 1
    starts: list[int] = []
    flags: dict[Slice, int] = {}
    for i, mine in enumerate(parts):
        at = i * chunk
        for j, piece in enumerate(mine):
            starts.append(at)
            flags[piece] = i * chunk + most + j
            at += piece.nbytes // element_size
    slices = tuple(piece for mine in parts for piece in mine)
    return BufferLayout(slices, tuple(starts), flags, chunk * ranks, None, None), most


def chains(layouts: Sequence[BufferLayout]) -> list[list[int]]:
    """Return chains of layouts whose buffers fit together, as indices. Each chain is one allocation."""
    beginning = {layout.joins: i for i, layout in enumerate(layouts) if layout.joins is not None}
    following = {i: beginning[a.leaves] for i, a in enumerate(layouts) if a.leaves in beginning}
    inner = set(following.values())
    chains: list[list[int]] = []
    seen: set[int] = set()
    for start in sorted(range(len(layouts)), key=lambda i: i in inner):  # layouts that form a circle come last
        chain = []
        at: int | None = start
        while at is not None and at not in seen:
            seen.add(at)
            chain.append(at)
            at = following.get(at)
        if chain:
            chains.append(chain)
    return chains


def scattered_tensors(messages: Sequence[Message], sizes: Mapping[str, int], ranks: int) -> list[str]:
    """Return the partitioned tensors with gradients that are not contiguous in memory and must be assembled.

    `sizes` has the bytes of each whole tensor, by name. A reduce-scatter gives each of the `ranks` the same number of
    elements.
    """
    # All-gathers use the buffers of their reduce-scatters.
    owning = [m for m in messages if m.kind in ("all_reduce", "reduce_scatter")]
    cuts = [slice_ for message in owning for slice_ in message.slices if slice_.nbytes < sizes[slice_.tensor]]
    if not cuts:
        return []
    element_size = math.gcd(4, *(byte for cut in cuts for byte in (cut.start, cut.stop)))
    multiples = {"reduce_scatter": ranks}
    layouts = [buffer_layout(message, sizes, element_size, multiples.get(message.kind, 1)) for message in owning]
    places = _places(layouts)
    return [
        tensor
        for tensor in dict.fromkeys(cut.tensor for cut in cuts)
        if any(
            memory != next_memory or next_at - at != (next_byte - byte) // element_size
            for (byte, memory, at), (next_byte, next_memory, next_at) in itertools.pairwise(sorted(places[tensor]))
        )
    ]


def _places(layouts: Sequence[BufferLayout]) -> dict[str, list[tuple[int, int, int]]]:
    """Return (first byte, index of the allocation, element in the allocation) of each slice, by tensor."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    for memory, chain in enumerate(chains(layouts)):
        at = 0
        for layout in (layouts[i] for i in chain):
            for piece, start in zip(layout.slices, layout.starts, strict=True):
                places.setdefault(piece.tensor, []).append((piece.start, memory, at + start))
            at += layout.elements
    return places
