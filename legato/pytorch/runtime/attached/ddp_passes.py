"""Watches DDP's passes before legato takes over: counts passes, and looks for anything that legato cannot do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from legato.pytorch.private.ddp import on_backward_end
from legato.pytorch.recording.observed import StepObserver
from legato.pytorch.runtime.autograd import Accumulator, BackwardScope

__all__ = ["DdpPasses"]


class DdpPasses:
    """A counter of the backward passes in which DDP sends gradients.

    The counter watches the gradients of `parameters`; a few parameters are enough to see where a backward pass ends.
    `accumulates()` returns whether the running backward pass adds to any gradient. (A pass of `torch.autograd.grad`
    adds to no gradient, so DDP sends nothing in it.) `ended()` is called after each backward pass in which DDP sends
    gradients, when DDP has finished this pass. `unseen()` is called after a backward pass whose forward pass was not
    seen.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        accumulates: Callable[[], bool],
        ended: Callable[[], None],
        unseen: Callable[[], None],
        observer: StepObserver | None = None,
    ) -> None:
        self._ended, self._unseen, self._observer = ended, unseen, observer
        self._in_forward = False
        self._arrived: set[str] = set()
        self._accumulators = [Accumulator(p, self._before, partial(self._after, n, p)) for n, p in parameters.items()]
        self._scope = BackwardScope(accumulates, self._backward_ended)
        #: The number of backward passes that have ended.
        self.done = 0
        #: Whether DDP still has to send the gradients of a forward pass.
        self.running = False
        #: Why legato cannot send this model's gradients; empty if no reason was found.
        self.objection = ""

    def forward_begins(self, sends: bool) -> None:
        """Record that a forward pass begins; `sends` says whether DDP sends gradients in its backward pass."""
        self._in_forward = True
        if self._observer is not None and sends:
            self._observer.forward_begins()

    def forward_ended(self, output: Any, sends: bool) -> None:
        """Record that a forward pass has returned; `sends` says whether DDP sends gradients in its backward pass."""
        self.forward_failed()
        if sends:
            self.running = True
            self._scope.expect(output)

    def forward_failed(self) -> None:
        """Record that a forward pass has raised an exception."""
        self._in_forward = False
        if self._observer is not None:
            self._observer.forward_ended()

    def close(self) -> None:
        """Remove all hooks."""
        for accumulator in self._accumulators:
            accumulator.remove()

    def _before(self, *_: Any) -> None:
        if self._in_forward:
            self.objection = "backward passes run inside forward passes"
        if self._observer is not None:
            self._observer.backward_begins()
        self._scope.notice()

    def _after(self, name: str, parameter: nn.Parameter, *_: Any) -> None:
        if name in self._arrived:
            self.objection = f"{name} gets several gradients in one backward pass"
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            self.objection = f"{name} has a gradient that is not dense"
        self._arrived.add(name)
        if self._observer is not None:
            self._observer.ready(name)

    def _backward_ended(self) -> None:
        self._arrived.clear()
        if self.running:
            self.running = False
            self.done += 1
            on_backward_end(self._ended)  # after DDP's own work at this point
        else:
            self._unseen()
