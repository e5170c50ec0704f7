"""Optimizers: their hooks, states and steps, and what wraps their steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from legato.pytorch.private.dynamo import uncompiled

__all__ = [
    "SubstituteScaler",
    "begin_state",
    "begins_with_step",
    "count_steps",
    "counts_steps",
    "has_step_hooks",
    "hooked_step",
    "is_replaced",
    "note_step",
    "observe_step",
    "rebind_step",
    "steps_in_backward",
    "unhooked_step",
    "without_step_hooks",
]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks run around the optimizer's `step()`: the optimizer's own, or hooks of all optimizers."""
    tables = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # not all classes call Optimizer.__init__
    own = any(getattr(optimizer, table, None) for table in tables)
    # Hooks of `legato watch` only observe steps.
    after = any(not getattr(hook, "only_observes", False) for hook in _global_optimizer_post_hooks.values())
    return bool(own or _global_optimizer_pre_hooks or after)


def observe_step(optimizer: Optimizer) -> None:
    """Let `legato watch` count a step for which torch runs no hooks."""
    if not has_step_hooks(optimizer):
        for hook in _global_optimizer_post_hooks.values():
            hook(optimizer, (), {})


def begins_with_step(optimizer: Any) -> bool:
    """Return whether the optimizer creates a parameter's state in the parameter's first step, with a step counter.

    torch's optimizers do so, except Adagrad.
    """
    return hasattr(optimizer, "_init_group") and not isinstance(optimizer, torch.optim.Adagrad)


def begin_state(optimizer: Any, group: dict[str, Any]) -> None:
    """Create the state of a group's parameters without a step, in an optimizer for which `begins_with_step` is true."""
    names = list(inspect.signature(optimizer._init_group).parameters)
    optimizer._init_group(group, *([] for _ in names[1:]))


def without_step_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer (`vars()`), without the hooks on its step."""
    return {**attributes, "_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


def unhooked_step(base: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the `step` of an optimizer's class, not compiled, and without torch's wrapper for hooks and profiles."""
    step: Any = base.step
    return functools.partial(uncompiled, step.__wrapped__ if hasattr(step, "hooked") else step)


#: The code object of every `step` in torch: all of them are wrapped in the same function, which runs hooks.
_HOOKED: Any = Optimizer.profile_hook_step(lambda _: None).__code__


def is_replaced(base: type[Optimizer]) -> bool:
    """Return whether the program has replaced the `step` of an optimizer's class."""
    return getattr(base.step, "__code__", None) is not _HOOKED


def hooked_step(step: Callable[[Optimizer], None]) -> Callable[[Optimizer], Any]:
    """Return a function that runs `step` with the optimizer's hooks around it."""
    return cast("Callable[[Optimizer], Any]", Optimizer.profile_hook_step(step))


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Return whether torch's `_apply_optimizer_in_backward` updates the parameter."""
    return hasattr(parameter, "_in_backward_optimizers")


class SubstituteScaler(torch.amp.GradScaler):
    """A `GradScaler` that unscales the gradients of `substitutes(optimizer)`, not of the optimizer itself."""

    def substitutes(self, optimizer: Optimizer) -> Any:
        """Return the object whose `param_groups` have the gradients to unscale."""
        return optimizer

    def found(self, optimizer: Optimizer, found_inf: dict[torch.device, Tensor]) -> None:
        """Handle the numbers in `found_inf` (nonzero if a gradient is infinite or NaN), and change them if needed."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        found = super()._unscale_grads_(self.substitutes(optimizer), inv_scale, found_inf, allow_fp16)
        self.found(optimizer, found)
        return found


def counts_steps(step: Any) -> bool:
    """Return whether this `step` is a learning-rate scheduler's wrapper, which counts the optimizer's steps."""
    return hasattr(step, "_wrapped_by_lr_sched")


def count_steps(step: Any) -> None:
    """Mark `step`, which calls `note_step`, so that learning-rate schedulers do not wrap it to count its calls."""
    vars(step)["_wrapped_by_lr_sched"] = True


def note_step(optimizer: Optimizer) -> None:
    """Count a step for learning-rate schedulers."""
    vars(optimizer)["_opt_called"] = True


def rebind_step(optimizer: Optimizer, base: type[Optimizer], new: Any) -> None:
    """Make the `step` that a learning-rate scheduler has set on the optimizer call the `step` of the class `new`.

    A scheduler sets a method `step` on the optimizer, to count its calls. If no scheduler has set such a method,
    nothing changes.
    """
    bound = vars(optimizer).get("step")
    if getattr(bound, "__wrapped__", None) is not base.step and not hasattr(bound, "_legato_counts"):
        return

    @functools.wraps(new.step)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True
        return new.step(optimizer, closure)

    vars(step).update(_wrapped_by_lr_sched=True, _legato_counts=True)
    vars(optimizer)["step"] = step
