"""Hooks into autograd: before and after a gradient is accumulated, and at the end of a backward pass.

[Note: accumulators] Each parameter has one node in the graph, AccumulateGrad, where all of its gradients end. Hooks on
this node are separate from those that users register on the parameter. `before` runs when a gradient has arrived and
has not been added to `.grad` yet. `after` runs when the gradient has been added and all hooks of the user have run,
even hooks registered later (as in DDP). `before` and `after` also run when the gradient is None. The node exists only
while something refers to it.

[Note: nested passes] Checkpointing with use_reentrant=True runs a backward pass inside the backward pass. With such
checkpointing, the first gradient may come from the inner pass, which ends before the outer pass. The outer pass is
therefore detected where it begins: at the output of the model. (If the loss depends on the parameters but not on the
model's output, the pass is detected at its first gradient.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from legato.pytorch.parameters import OwnHook
from legato.pytorch.private.ddp import on_backward_end
from legato.pytorch.private.tensors import hooks_on, leaves, will_run

__all__ = ["Accumulator", "BackwardScope"]


class Accumulator:
    """Two hooks, `before(gradients)` and `after(inputs, outputs)`, on each addition to a parameter's gradient.

    The parameter may be frozen when this object is created.
    """

    def __init__(self, parameter: nn.Parameter, before: Callable[..., None], after: Callable[..., None]) -> None:
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        self._node = get_gradient_edge(parameter).node
        if frozen:
            parameter.requires_grad_(False)
        self._hooks = [self._node.register_prehook(before), self._node.register_hook(OwnHook(after))]
        hooks: Any = hooks_on(self._node)
        for key in list(hooks)[:-1]:  # as under DDP, hooks of the program on the node run later
            hooks[key] = hooks.pop(key)

    @property
    def will_run(self) -> bool:
        """Return whether the running backward pass adds to this parameter's gradient."""
        return will_run(self._node)

    def remove(self) -> None:
        """Remove both hooks."""
        for hook in self._hooks:
            hook.remove()


class BackwardScope:
    """Calls `ended()` at the end of each outermost backward pass, if `wanted()` was true when the pass was noticed."""

    def __init__(self, wanted: Callable[[], bool], ended: Callable[[], None]) -> None:
        self._wanted = wanted
        self._ended = ended
        self._noticed = False

    def expect(self, output: Any) -> None:
        """Watch for a backward pass that begins at `output`, the output of a forward pass."""
        for value in leaves(output):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(self.notice)

    def notice(self, *_: Any) -> None:
        """Record that a backward pass is running, so that `ended()` is called at its end."""
        if not self._noticed and self._wanted():
            self._noticed = True
            on_backward_end(self._end)

    def forget(self) -> None:
        """Forget the backward pass that was noticed, because it has raised an exception."""
        self._noticed = False

    def _end(self) -> None:
        self._noticed = False
        self._ended()
