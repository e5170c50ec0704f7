"""Deferred steps: the user's own optimizer updates each parameter when it is read.

[Note: deferred steps] `optimizer.step()` records the hyper-parameters of its
groups and returns. The optimizer's own `step` updates the parameters later, on
a stand-in object that shares the state and holds only the parameters that are
to be updated now (`legato.pytorch.runtime.gate` decides when). Only optimizers
of `torch.optim` whose step treats each parameter separately are split in this
way. Any other optimizer (LBFGS, a third-party one, one with hooks on its step,
a fused one driven by GradScaler) steps all parameters at once, when all
gradients have arrived: slower, but never wrong.

Under a sharded plan, `step()` itself updates this rank's shards, and the parameters
wait for the others' (`legato.pytorch.runtime.sharding`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.pytorch._private import has_step_hooks, hooked_step, mark_as_hooked, rebind_step
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.buckets import PENDING, SENT, Slot
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sharded_state import take_state, whole_state
from legato.pytorch.runtime.update import Update, set_to_none_or_zero

__all__ = ["defer_steps", "drop_gradients"]

#: Never split: LBFGS mixes parameters and calls its closure several times; sparse gradients are not sent.
_WHOLE = ("LBFGS", "SparseAdam")


class _DeferredSteps:
    """A mix-in for the class of the user's optimizer, which defers its steps and is otherwise transparent."""

    _legato_base: type[Optimizer]
    _legato_reducer: Reducer | None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = cast(Optimizer, self)
        reducer, base = self._legato_reducer, self._legato_base
        if reducer is not None and reducer.in_backward:
            raise RankError("optimizer.step() inside a backward pass: the gradients are not averaged yet")
        if reducer is not None:
            reducer.stepped = True
        if reducer is not None and reducer.shards is not None:
            return _step_shards(self, base, closure)
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
        _step_later(optimizer, base, self._legato_reducer or reducer)  # its forward pass may have changed the plan
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
        return vars(self)["state"] if "state" in vars(self) else getattr(super(), "state")  # noqa: B009

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def state_dict(self) -> Any:
        """The state of whole parameters; if it is sharded, all ranks have to call this."""
        self._settle()
        reducer = self._legato_reducer
        if reducer is None or reducer.shards is None:
            return self._legato_base.state_dict(cast(Optimizer, self))
        return self._legato_base.state_dict(self._with_state(whole_state(cast(Optimizer, self), reducer)))

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the state of whole parameters, of which a rank keeps its shards."""
        self._settle()
        shards = None if self._legato_reducer is None else self._legato_reducer.shards
        if shards is None:
            return self._legato_base.load_state_dict(cast(Optimizer, self), state_dict)
        whole = self._with_state({})
        self._legato_base.load_state_dict(whole, state_dict)
        vars(self)["param_groups"] = whole.param_groups
        take_state(cast(Optimizer, self), whole.state, shards)
        return None

    def _with_state(self, state: Any) -> Optimizer:
        """A stand-in of the user's own class, with another state."""
        stand_in = object.__new__(self._legato_base)
        vars(stand_in).update(vars(self), state=defaultdict(dict, state))
        return stand_in

    def add_param_group(self, param_group: Any) -> None:
        self._settle()
        self._legato_base.add_param_group(cast(Optimizer, self), param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy (pickle, deepcopy) as an optimizer of the user's own class."""
        self._settle()
        if self._legato_reducer is not None and self._legato_reducer.shards is not None:
            raise InputError("a sharded optimizer cannot be copied: use its state_dict(), on all ranks")
        return object.__new__, (self._legato_base,), self._legato_base.__getstate__(cast(Optimizer, self))

    def _settle(self) -> None:
        if self._legato_reducer is not None:
            self._legato_reducer.settle()


mark_as_hooked(_DeferredSteps.step)


def drop_gradients(parameters: Iterable[nn.Parameter], reducer: Reducer, set_to_none: bool) -> None:
    """Do what `zero_grad` does, also for gradients that are in flight or not used yet."""
    zero = set_to_none_or_zero(set_to_none)
    for p in parameters:
        slot = reducer.by_parameter.get(id(p))
        if slot is not None and slot.stage == PENDING and slot.update is not None:
            slot.update.zero_after(set_to_none)
            continue
        if slot is not None and slot.stage == SENT:
            if set_to_none or reducer.in_backward or reducer.shards is not None:
                reducer.drop(slot)
            else:  # it may lie in a message in flight; and if only another rank had one, it is a zero here, too
                reducer.resolve(slot)
        if slot is not None and (reducer.shards is not None or slot.spent is not None):
            slot.zero(set_to_none)
        else:
            zero(p)


def _divisible(optimizer: Optimizer, base: type[Optimizer], reducer: Reducer) -> bool:
    """Whether the optimizer can update some parameters now and others later."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    listed = f"{base.__module__}.".startswith("torch.optim.") and base.__name__ not in _WHOLE
    known = listed or getattr(base, "steps_parameters_alone", False)
    differentiable = any(g.get("differentiable") for g in optimizer.param_groups)
    return reducer.plan.forward_overlap and known and not (scaled or differentiable or has_step_hooks(optimizer))


def _step_later(optimizer: Optimizer, base: type[Optimizer], reducer: Reducer) -> None:
    update = Update(optimizer, base)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots = {id(p): slot for p in parameters if (slot := reducer.by_parameter.get(id(p))) is not None}
    if any(slot.stage == PENDING for slot in slots.values()):
        reducer.settle()  # a second step() before the first one's result was read
    with gate.invisible():
        later = [slot for slot in slots.values() if reducer.may_wait(slot)]
    reducer.postpone(later, update)
    now = [p for p in parameters if id(p) not in slots or slots[id(p)].stage != PENDING]
    reducer.deliver([slots[id(p)] for p in now if id(p) in slots])
    if now:
        update.apply(now)


def _step_shards(optimizer: Any, base: type[Optimizer], closure: Callable[[], Any] | None) -> Any:
    """Update this rank's shards now; parameters that wait for other ranks' are up to date when they are read."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    reducer: Reducer = optimizer._legato_reducer  # the closure's forward pass may have changed the plan
    shards = reducer.shards
    assert shards is not None
    if reducer.tracer:
        reducer.tracer.switch("optimizer")
    waiting: list[Slot] = []

    def step(_: Optimizer) -> None:
        waiting.extend(shards.step(optimizer, base))
        others = [p for g in optimizer.param_groups for p in g["params"] if id(p) not in reducer.by_parameter]
        if others:
            Update(optimizer, base).apply(others)

    (hooked_step(step) if has_step_hooks(optimizer) else step)(optimizer)
    if reducer.tracer:
        reducer.tracer.switch(None)
    reducer.expect(waiting)
    return loss


def defer_steps(optimizer: Optimizer, reducer: Reducer) -> None:
    """Make the optimizer's `step()` return at once, and update each parameter when it is read."""
    if isinstance(optimizer, _DeferredSteps):
        _restore(optimizer)
    base = type(optimizer)
    vars(optimizer)["_legato_reducer"] = reducer
    overlay = type(base.__name__, (_DeferredSteps, base), {"_legato_base": base, "__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", overlay)
    rebind_step(optimizer, base, overlay)


def _restore(optimizer: _DeferredSteps) -> None:
    """Bring everything up to date, and give the optimizer its own class back."""
    optimizer._settle()
    base = optimizer._legato_base
    object.__setattr__(optimizer, "__class__", base)
    vars(optimizer).pop("_legato_reducer", None)
    rebind_step(cast(Optimizer, optimizer), base, base)
