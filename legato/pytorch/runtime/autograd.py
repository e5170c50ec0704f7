"""Where autograd adds a gradient to a parameter's `.grad`, and what happens just before and after it.

[Note: accumulators] A parameter has one node of the graph, AccumulateGrad, in
which all of its gradients end. Hooks of that node run outside of everything
that hangs on the parameter itself: `before` when the gradient has come and is
not added yet, `after` when the user's own hooks are done with the sum, also
those that were registered later (so it is in DDP). Both run too where the
gradient is None. The node lives as long as somebody holds it.

When a backward pass begins and ends, whatever runs inside it.

[Note: nested passes] Checkpointing with use_reentrant=True runs a backward pass
inside the backward pass. The first gradient may come from the inner one, whose
end is not the end. So the outer one is caught where it must come by first: at
the output of the model. (A loss that was made without the model's output, from
its parameters alone, is noticed at its first gradient.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["Accumulator", "BackwardScope"]


class Accumulator:
    """Calls `before()` and `after()` around every addition to the gradient of a parameter, which may be frozen now."""

    def __init__(self, parameter: nn.Parameter, before: Callable[[], None], after: Callable[[], None]) -> None:
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        self._node = get_gradient_edge(parameter).node
        if frozen:
            parameter.requires_grad_(False)

        def came(_: object) -> None:
            before()

        def added(_: object, __: object) -> None:
            after()

        self._hooks = [self._node.register_prehook(came), self._node.register_hook(added)]

    def remove(self) -> None:
        """Call nobody any more."""
        for hook in self._hooks:
            hook.remove()


class BackwardScope:
    """Calls `ended()` at the end of the outermost backward pass, once, however it was noticed."""

    def __init__(self, wanted: Callable[[], bool], ended: Callable[[], None]) -> None:
        self._wanted = wanted
        self._ended = ended
        self._noticed = False

    def expect(self, output: Any) -> None:
        """The forward pass gave this: a backward pass begins there."""
        for value in torch.utils._pytree.tree_leaves(output):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(self.notice)

    def notice(self, *_: Any) -> None:
        """A backward pass is running now."""
        if not self._noticed and self._wanted():
            self._noticed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # type: ignore[attr-defined]

    def forget(self) -> None:
        """No backward pass is running: the one that was noticed ended with an exception."""
        self._noticed = False

    def _end(self) -> None:
        self._noticed = False
        self._ended()
