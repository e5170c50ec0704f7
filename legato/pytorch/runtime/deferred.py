"""The user's own optimizer, stepping later and in parts.

[Note: deferred steps] `optimizer.step()` writes down the hyper-parameters of
its groups and returns; each parameter is updated by the optimizer's own
`step`, on a stand-in object that shares the state and holds just the
parameters whose time has come (`legato.pytorch.runtime.gate` says when that is). Only
optimizers of `torch.optim` whose step treats every parameter by itself are
split. Any other one (LBFGS, a third-party one, one with hooks on its step, a
fused one that GradScaler drives) steps whole, once all gradients are in: slower,
and never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from legato.core.errors import RankError
from legato.pytorch.runtime.buckets import PENDING, SENT
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.update import Update, set_to_none_or_zero

__all__ = ["defer_steps", "rebind_step", "release"]

#: Their step mixes parameters, calls its closure more than once, or takes what is not sent.
_WHOLE = ("LBFGS", "SparseAdam")


class _DeferredSteps:
    """Laid over the class of the user's optimizer; what it overrides behaves as before, only later."""

    _legato_base: type[Optimizer]
    _legato_reducer: Reducer | None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = cast(Optimizer, self)
        reducer, base = self._legato_reducer, self._legato_base
        if reducer is not None and reducer.in_backward:
            raise RankError("optimizer.step() inside a backward pass: the gradients are not averaged yet")
        if reducer is None or not _divisible(optimizer, base, reducer):
            if reducer is not None:
                reducer.settle()
            tracer = reducer.tracer if reducer is not None else None
            if tracer:
                tracer.switch("optimizer")
            result = base.step(optimizer) if closure is None else base.step(optimizer, closure)
            if tracer:
                tracer.switch(None)
            return result
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _step_later(optimizer, base, reducer)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        optimizer, reducer = cast(Optimizer, self), self._legato_reducer
        if reducer is None:
            return self._legato_base.zero_grad(optimizer, set_to_none)
        drop_gradients((p for g in optimizer.param_groups for p in g["params"]), reducer, set_to_none)
        return None

    @property
    def state(self) -> Any:
        self._settle()
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def state_dict(self) -> Any:
        self._settle()
        return self._legato_base.state_dict(cast(Optimizer, self))

    def load_state_dict(self, state_dict: Any) -> None:
        self._settle()
        self._legato_base.load_state_dict(cast(Optimizer, self), state_dict)

    def add_param_group(self, param_group: Any) -> None:
        self._settle()
        self._legato_base.add_param_group(cast(Optimizer, self), param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy (pickle, deepcopy) is an optimizer of the user's own class."""
        self._settle()
        return object.__new__, (self._legato_base,), self._legato_base.__getstate__(cast(Optimizer, self))

    def _settle(self) -> None:
        if self._legato_reducer is not None:
            self._legato_reducer.settle()


#: Loading a state makes torch lay its hooks over a class's `step` that does not say this; the user's class has them.
vars(_DeferredSteps.step)["hooked"] = True


def drop_gradients(parameters: Iterable[nn.Parameter], reducer: Reducer, set_to_none: bool) -> None:
    """`zero_grad` for parameters whose gradients may be on their way or still to be used."""
    zero = set_to_none_or_zero(set_to_none)
    for p in parameters:
        slot = reducer.by_parameter.get(id(p))
        if slot is not None and slot.stage == PENDING and slot.update is not None:
            slot.update.zero_after(set_to_none)
            continue
        if slot is not None and slot.stage == SENT:
            reducer.drop(slot)
        zero(p)


def _divisible(optimizer: Optimizer, base: type[Optimizer], reducer: Reducer) -> bool:
    hooked = (
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    listed = f"{base.__module__}.".startswith("torch.optim.") and base.__name__ not in _WHOLE
    known = listed or getattr(base, "steps_parameters_alone", False)
    differentiable = any(g.get("differentiable") for g in optimizer.param_groups)
    return reducer.overlaps_forward and known and not (hooked or scaled or differentiable)


def _step_later(optimizer: Optimizer, base: type[Optimizer], reducer: Reducer) -> None:
    update = Update(optimizer, base)
    now = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            slot = reducer.by_parameter.get(id(p))
            if slot is not None and slot.stage == PENDING:
                reducer.resolve(slot)  # a second step() before anybody read the first one's result
            if slot is not None and slot.stage == SENT:
                slot.mark_stepped(update)
            else:
                now.append(p)
    if now:
        update.apply(now)


def defer_steps(optimizer: Optimizer, reducer: Reducer) -> None:
    """Make the optimizer's `step()` wait for gradients only when their parameters are read."""
    if isinstance(optimizer, _DeferredSteps):
        release(optimizer)
    base = type(optimizer)
    vars(optimizer)["_legato_reducer"] = reducer
    overlay = type(base.__name__, (_DeferredSteps, base), {"_legato_base": base, "__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", overlay)
    rebind_step(optimizer, base, overlay)


def rebind_step(optimizer: Optimizer, base: type[Optimizer], new: Any) -> None:
    """A scheduler made earlier has bound the optimizer's `step` of then, to count its calls: bind the new one so."""
    bound = vars(optimizer).get("step")
    if getattr(bound, "__wrapped__", None) is not base.step and not hasattr(bound, "_legato_counts"):
        return

    @functools.wraps(new.step)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True
        return new.step(optimizer, closure)

    vars(step).update(_wrapped_by_lr_sched=True, _legato_counts=True)
    vars(optimizer)["step"] = step


def release(optimizer: Optimizer) -> None:
    """Give the optimizer its own class back, everything up to date."""
    if isinstance(optimizer, _DeferredSteps):
        optimizer._settle()
        object.__setattr__(optimizer, "__class__", optimizer._legato_base)
        vars(optimizer).pop("_legato_reducer", None)
        rebind_step(optimizer, type(optimizer), type(optimizer))
