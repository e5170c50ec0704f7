"""Which gradients can be sent in a wire format."""

from __future__ import annotations

from collections.abc import Iterable

from legato.core.errors import InputError, unknown_name
from legato.core.plan import ROUNDINGS
from legato.core.workload import Tensor

__all__ = ["check_wire"]

#: The size in bytes of an element that can be rounded.
_ELEMENT = 4


def check_wire(wire: str, tensors: Iterable[Tensor] = (), *, servers: bool = False, shard: str = "none") -> None:
    """Raise `InputError` unless the gradients of these tensors can be sent in the format `wire`."""
    if wire not in ROUNDINGS:
        raise unknown_name("wire", str(wire), ROUNDINGS)
    if wire == "none":
        return
    if servers:
        raise InputError(f"wire: {wire!r} with parameter servers (expected none)")
    if shard != "none":
        raise InputError(f"wire: {wire!r} with shard {shard!r} (expected one or the other)")
    for tensor in tensors:
        if tensor.nbytes % _ELEMENT:
            raise InputError(
                f"wire: {wire!r}, but tensor {tensor.name!r} has {tensor.nbytes} bytes "
                f"(expected float32 elements, of {_ELEMENT} bytes each)"
            )
