"""What a worker's script does to gradients and parameters behind the servers' back: brought to them, or refused.

The servers have a gradient as soon as it was pushed, and hold the parameters.
So whoever reads `.grad` between the backward pass and `step()` gets the average
of all workers, as under `DistributedDataParallel`, and what he makes of it is
sent once more, by worker 0. What nobody can see in time is noticed by the
version of a tensor, and refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from legato.core.errors import RankError
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.buckets import Slot
from legato.pytorch.servers.protocol import AVERAGES
from legato.pytorch.servers.puller import Puller
from legato.pytorch.servers.shards import Arena, Shard

__all__ = ["Averages", "ParameterCheck"]

#: Iterations in which all parameters are compared, also those whose version says that nothing happened (`.data`).
_THOROUGH = 3


class Averages:
    """The averaged gradients of an iteration, once somebody asked for them."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._arena: Arena | None = None
        self._here = False
        self._pushed: dict[str, tuple[int, int] | None] = {}  # which tensor, and its version

    def forget(self) -> None:
        """A backward pass begins."""
        self._here = False
        self._pushed.clear()

    def note(self, name: str, gradient: Tensor | None) -> None:
        """This goes out as the gradient of a parameter."""
        self._pushed.setdefault(name, _mark(gradient))

    def fetch(self, iteration: int) -> None:
        """Put the averages in the place of this worker's own gradients."""
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
        """Shards that are not the average any more, and whether there still is a gradient."""
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
                        f"the gradient of {name!r} was changed after it went to the servers, by other means than its "
                        "parameter's .grad (a reference from before, a hook?)"
                    )


class ParameterCheck:
    """Whether the parameters of a worker are what the servers sent."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._versions: dict[str, int] = {}
        with gate.invisible():
            for shard in puller.shards:
                puller.values.elements[shard.index].copy_(shard.of(puller.slots[shard.name].parameter.detach()))

    def note(self, slot: Slot) -> None:
        """This parameter has just come from its servers."""
        self._versions[slot.name] = slot.parameter._version

    def check(self, iteration: int) -> None:
        """Raise `RankError` on a parameter that was changed here: the servers' value would take its place."""
        puller = self._puller
        with gate.invisible():
            for name, slot in puller.slots.items():
                version = slot.parameter._version
                if iteration > _THOROUGH and self._versions.get(name) == version:
                    continue
                if not all(_same(shard, slot.parameter, puller.values) for shard in puller.shards_of[name]):
                    raise RankError(
                        f"parameter {name!r} was changed on this worker, and servers hold it: "
                        "only the optimizer can change parameters there"
                    )
                self.note(slot)


def _mark(gradient: Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _same(shard: Shard, tensor: Tensor, arena: Arena) -> bool:
    """Bit for bit."""
    mine = shard.of(tensor.detach()).contiguous().to(arena.elements[shard.index].device)
    return torch.equal(mine.view(torch.uint8), arena.elements[shard.index].view(torch.uint8))
