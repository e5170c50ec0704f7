"""Packing: divides gradients that have arrived by the number of ranks, and copies them to the buffers of messages.

[Note: absent gradients] A rank without a gradient sends zeros. Each parameter has one extra element in its first
message: 1 on the ranks that had a gradient, and 0 on the others. If the sum of a parameter's extra elements is 0, no
rank had a gradient; then `.grad` stays as it was (None), as it does in one process. As in DDP without
`find_unused_parameters`, a gradient that a hook has dropped, or that is undefined, counts as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.pytorch.private.tensors import copy_all, multiply_all
from legato.pytorch.runtime.waiting.buckets import ARRIVED, Bucket, BucketSlice, Slot

__all__ = ["PACK_BYTES", "pack"]

#: Gradients of up to this number of bytes are packed together, many in one call.
_SMALL_BYTES = 64 * 2**10
#: A bucket is packed when it is complete, or when gradients of more than this number of bytes wait for it.
PACK_BYTES = 2**20


def pack(bucket: Bucket, ranks: int) -> list[Slot]:
    """Pack a bucket's gradients that have arrived, under `invisible`; return those that are now packed completely.

    An EARLY gradient is not returned.
    """
    arrived, bucket.arrived, bucket.waiting_bytes = bucket.arrived, [], 0
    small: list[tuple[Tensor, Tensor]] = []  # views of the bucket, and their gradients
    for slot in arrived:
        grad = slot.parameter.grad if slot.taken is None else slot.taken
        for part in slot.parts[bucket.index]:
            small += _pack_part(part, grad if slot.has_grad else None, ranks)
        slot.to_pack -= 1
        if not slot.to_pack:
            slot.taken = None
    _pack_small(bucket, small, ranks)
    return [slot for slot in arrived if slot.gradient == ARRIVED and not slot.to_pack]


def _pack_part(part: BucketSlice, grad: Tensor | None, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Copy a part of a gradient, unless the part is small: small parts are returned, to be copied together."""
    if grad is None:
        part.view.zero_()
        if part.flag is not None and not part.slot.has_grad:
            part.flag.zero_()
    elif part.bucket.message.wire:
        part.view.copy_(part.of(grad)).div_(ranks)  # rounded as torch's communication hooks round
    elif part.view.nbytes > _SMALL_BYTES or not part.whole or grad.dtype != part.view.dtype:
        torch.mul(part.of(grad), 1.0 / ranks, out=part.view)
    else:
        return [(part.view, part.of(grad))]
    return []


def _pack_small(bucket: Bucket, small: list[tuple[Tensor, Tensor]], ranks: int) -> None:
    if len(small) == 1:
        [(view, grad)] = small
        torch.mul(grad, 1.0 / ranks, out=view)
    elif small:
        views, grads = map(list, zip(*small, strict=True))
        copy_all(views, grads)
        if bucket.flags is not None and bucket.marks is None and len(views) == len(bucket.slices):
            # The bucket holds whole tensors, followed by the flags.
            data = bucket.flags.storage_offset() - bucket.buffer.storage_offset()
            bucket.buffer[:data].mul_(1.0 / ranks)
        else:
            multiply_all(views, 1.0 / ranks)
