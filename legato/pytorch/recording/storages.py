"""Finds the dependencies between ops from reads and writes of storages, and the parameters that own ranges of bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from legato.core.errors import CaptureError
from legato.pytorch.private.tensors import storage_id

__all__ = ["Owners", "Storages", "byte_range"]


class Storages:
    """Derives dependencies from the reads and writes of ops.

    A storage is identified by the address of its C++ object. A weak reference keeps this address in use, so that no
    other storage can get it; the memory of the storage is still freed.
    """

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}
        self._writer: dict[Hashable, int] = {}
        self._readers: defaultdict[Hashable, list[int]] = defaultdict(list)
        self._fence = -1

    def key(self, tensor: torch.Tensor) -> int:
        """Return the identity of the tensor's storage. Raises `CaptureError` for a tensor without a storage."""
        if tensor.layout is not torch.strided:
            raise CaptureError(f"a tensor of layout {tensor.layout} (expected dense tensors only)")
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key not in self._held:
            self._held[key] = StorageWeakRef(storage)
        return key

    def writer(self, tensor: torch.Tensor) -> int | None:
        """Return the last op that wrote to the tensor's storage; None if no op has."""
        return self._writer.get(self.key(tensor))

    def access(self, op: int, reads: Iterable[Hashable], writes: Iterable[Hashable], *, fence: bool) -> tuple[int, ...]:
        """Record what an op reads and writes; return the ops on which it depends directly, sorted.

        An op depends on the last writers of everything that it reads or writes, and on the later readers of everything
        that it overwrites. With `fence`, every later op depends on this op, because Python has seen the op's result.
        """
        deps = {self._fence} if self._fence >= 0 else set()
        for key in reads:
            deps.add(self._writer.get(key, op))
            self._readers[key].append(op)
        for key in writes:
            deps.add(self._writer.get(key, op))
            deps.update(self._readers.pop(key, ()))
            self._writer[key] = op
        deps.discard(op)
        if fence:
            self._fence = op
        return tuple(sorted(deps))


class Owners:
    """The owners (indices of parameters) of ranges of bytes; parts of one storage may have different owners."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, tensor: torch.Tensor, owner: int) -> None:
        """Record that the memory of a tensor belongs to an owner."""
        entry = (*byte_range(tensor), owner)
        entries = self._ranges.setdefault(self._storages.key(tensor), [])
        if entry not in entries:
            entries.append(entry)

    def of(self, tensor: torch.Tensor) -> list[int]:
        """Return the owners of any byte that the tensor covers."""
        entries = self._ranges.get(self._storages.key(tensor))
        if not entries:
            return []
        start, stop = byte_range(tensor)
        return [owner for first, last, owner in entries if first < stop and start < last]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes that a dense tensor covers in its storage, as (start, stop), with stop exclusive."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return start, start + (reach + 1) * size
