"""A worker's side: gradients out as they appear, parameters in as they are read.

An iteration of a worker:

    backward            announces its gradients, and pushes each when its turn in the plan has come
    optimizer.step()    says where the new values are to be put, tells the servers the settings, and returns
    next forward        the first read of a parameter waits for its value (`legato.pytorch.gate`)

[Note: in step] A worker begins an iteration's gradients only when all values of
the one before are in. So no server changes a parameter while its value is on
the way to somebody, and a worker is at most one step ahead of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from legato.core.errors import RankError
from legato.pytorch import gate
from legato.pytorch.lowering import Slot
from legato.pytorch.servers.post import GRADIENTS, STEP, Post
from legato.pytorch.servers.puller import Puller
from legato.pytorch.servers.shares import Arena, Share

__all__ = ["Client"]


class Client(Puller):
    """A worker: it also pushes."""

    def __init__(
        self, post: Post, shares: Sequence[Share], pulls: Sequence[int], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        super().__init__(post, shares, pulls, parameters)
        self.enabled = True  # False under no_sync()
        self.iteration = 0  # backward passes that push
        self._scale = 1.0 / post.layout.workers
        self._gradients = Arena(shares)
        self._sent: list[tuple[Any, Share]] = []
        self._in_backward = self._unstepped = False
        self._next = 0
        self._ready: set[str] = set()
        self._hooks = [self._watch(slot) for slot in self.slots.values()]

    @property
    def standing(self) -> str:
        """What it is doing, for the others' error messages."""
        if not self._in_backward:
            return f"works, {self.iteration} iterations begun"
        return f"works, is in backward pass {self.iteration} and lacks the gradient of {self.shares[self._next].label}"

    def close(self) -> None:
        """Let go of the parameters, all up to date."""
        for hook in self._hooks:
            hook.remove()
        self.leave()

    def _watch(self, slot: Slot) -> Any:
        parameter: Any = slot.parameter
        return parameter.register_post_accumulate_grad_hook(lambda _: self._gradient_ready(slot))

    def _gradient_ready(self, slot: Slot) -> None:
        if not self.enabled:
            return
        if not self._in_backward:
            self._begin_backward(slot)
        elif slot.name in self._ready:
            raise RankError(
                f"{slot.name}: a second gradient in one backward pass (checkpointing with use_reentrant=True over a "
                "shared parameter?); use use_reentrant=False, or no_sync() around all but the last backward pass"
            )
        self._ready.add(slot.name)
        self._advance()

    def _begin_backward(self, first: Slot) -> None:
        if self._unstepped:
            raise RankError(
                f"{first.name}: a backward pass began before the gradients of the one before were used; "
                "call optimizer.step() in between, or put the earlier one under no_sync()"
            )
        self.settle()
        for work, share in self._sent:
            self.post.wait(work, self.post.layout.server_rank(share.server), f"the gradient of {share.label}")
        self._sent.clear()
        self._in_backward = self._unstepped = True
        self.iteration += 1
        self._next = 0
        self._ready.clear()
        self.tell_servers(GRADIENTS, self.iteration)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _end_backward(self) -> None:
        self._ready.update(self.slots)
        self._advance()
        self._in_backward = False

    def _advance(self) -> None:
        while self._next < len(self.shares) and self.shares[self._next].name in self._ready:
            self._push(self.shares[self._next])
            self._next += 1

    def _push(self, share: Share) -> None:
        gradient = self.slots[share.name].parameter.grad
        elements, stamp = self._gradients.elements[share.index], self._gradients.stamp[share.index]
        with gate.unseen():
            if gradient is None:
                elements.zero_()
            elif gradient.layout != torch.strided:
                raise RankError(f"{share.name}: its gradient is {gradient.layout}; only dense gradients can be sent")
            else:
                part = share.of(gradient.detach())
                if part.device == elements.device:
                    torch.mul(part, self._scale, out=elements)
                else:
                    elements.copy_(part * self._scale)
            stamp[0], stamp[1] = self.iteration, int(gradient is not None)
        to, what = self.post.layout.server_rank(share.server), f"the gradient of {share.label}"
        self._sent.append((self.post.send(self._gradients.message[share.index], to, 1 + share.index, what), share))

    def step(self, content: bytes, order: Sequence[int]) -> None:
        """Let the servers update with these settings; the values come in this order."""
        if self._in_backward or not self._unstepped:
            raise RankError("optimizer.step() without a backward pass before it, whose gradients went to the servers")
        self._unstepped = False
        self.expect(self.iteration, order)
        self.tell_servers(STEP, self.iteration, content)
        for slot in self.slots.values():
            if slot.plain_class is not nn.Parameter:  # cannot be gated
                self.resolve(slot)
