"""Detects a script's changes of gradients and parameters, and sends them to the servers or refuses them.

The servers receive each gradient as soon as it is pushed, and they hold the parameters. Reading `.grad` between the
backward pass and `step()` therefore returns the average over all workers, as under `DistributedDataParallel`. If the
script then changes this average (to clip it, for example), worker 0 sends the changed gradient to the servers. Changes
that cannot be intercepted in time are detected by the tensor's version counter, and raise an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.core.errors import RankError
from legato.lab.servers.protocol import AVERAGES
from legato.lab.servers.shards import Arena, Shard
from legato.lab.servers.worker.puller import Puller
from legato.pytorch.private.tensors import version_of
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import Slot

__all__ = ["Averages", "ParameterCheck"]

#: In this number of first iterations every parameter is compared, because changes through `.data` leave its version
#: unchanged.
_THOROUGH = 3


class Averages:
    """The averaged gradients of an iteration, fetched when the script first reads a gradient."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._arena: Arena | None = None
        self._here = False
        self._pushed: dict[str, tuple[int, int] | None] = {}  # by name: the tensor's address and version

    def forget(self) -> None:
        """Forget the previous iteration, because a backward pass begins."""
        self._here = False
        self._pushed.clear()

    def note(self, name: str, gradient: Tensor | None) -> None:
        """Remember which tensor is pushed as the gradient of a parameter."""
        self._pushed.setdefault(name, _mark(gradient))

    def fetch(self, iteration: int) -> None:
        """Replace this worker's own gradients by the averages."""
        puller = self._puller
        self._check_pushed()
        if self._arena is None:
            self._arena = Arena(puller.shards)
        puller.receive_all(AVERAGES, iteration, self._arena)
        with gate.invisible():
            for slot in puller.slots.values():
                shards = puller.shards_of[slot.name]
                if any(int(self._arena.trailer[shard.index][1]) for shard in shards):
                    if slot.parameter.grad is None:
                        slot.parameter.grad = torch.empty_like(slot.parameter)
                    self._arena.unpack(shards, slot.parameter.grad)
        for slot in puller.slots.values():
            gate.remove(slot)
        self._here = True

    def changed(self) -> list[tuple[int, bool]]:
        """Return (shard index, whether a gradient exists) for each shard that the script changed."""
        self._check_pushed()
        if not self._here or self._arena is None:
            return []
        found = []
        with gate.invisible():
            for shard in self._puller.shards:
                gradient = self._puller.slots[shard.name].parameter.grad
                was = bool(self._arena.trailer[shard.index][1])
                if gradient is None:
                    found += [(shard.index, False)] * was
                elif not was or not _same(shard, gradient, self._arena):
                    found.append((shard.index, True))
        return found

    def _check_pushed(self) -> None:
        if self._here:
            return
        with gate.invisible():
            for name, slot in self._puller.slots.items():
                if _mark(slot.parameter.grad) != self._pushed.get(name):
                    raise RankError(
                        f"the gradient of {name!r} was changed after it went to the servers, and not through its "
                        "parameter's .grad (by an older reference or a hook?)"
                    )


class ParameterCheck:
    """Checks that a worker's parameters still have the values that the servers sent."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._versions: dict[str, int] = {}
        with gate.invisible():
            for shard in puller.shards:
                puller.values.elements[shard.index].copy_(shard.of(puller.slots[shard.name].parameter.detach()))

    def note(self, slot: Slot) -> None:
        """Remember the version of a parameter that has just received its value."""
        self._versions[slot.name] = version_of(slot.parameter)

    def check(self, iteration: int) -> None:
        """Raise `RankError` if the script changed a parameter: the servers' next value would overwrite the change."""
        puller = self._puller
        with gate.invisible():
            for name, slot in puller.slots.items():
                version = version_of(slot.parameter)
                if iteration > _THOROUGH and self._versions.get(name) == version:
                    continue
                if not all(_same(shard, slot.parameter, puller.values) for shard in puller.shards_of[name]):
                    raise RankError(
                        f"parameter {name!r} was changed on this worker, but the servers hold it: "
                        "only the optimizer may change parameters"
                    )
                self.note(slot)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (gradient.data_ptr(), version_of(gradient))


def _same(shard: Shard, tensor: Tensor, arena: Arena) -> bool:
    """Return whether a shard has the same bits in the tensor as in the arena, which holds the received shards."""
    mine = shard.of(tensor.detach()).contiguous().to(arena.elements[shard.index].device)
    return torch.equal(mine.view(torch.uint8), arena.elements[shard.index].view(torch.uint8))
