"""Where autograd adds a gradient to a parameter's `.grad`, and what happens just before and after it.

[Note: accumulators] A parameter has one node of the graph, AccumulateGrad, in
which all of its gradients end. Hooks of that node run outside of everything
that hangs on the parameter itself: `before` when the gradient has come and is
not added yet, `after` when the user's own hooks are done with the sum, also
those that were registered later (so it is in DDP). Both run too where the
gradient is None. The node lives as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.autograd.graph import get_gradient_edge

__all__ = ["Accumulator"]


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
