"""Deferred steps: the user's own optimizer updates each parameter when it is read (docs/runtime.md).

`optimizer.step()` records the hyper-parameters of its groups and returns. The optimizer's own
`step` updates the parameters later, on a stand-in object that shares the state and holds only the
parameters that are to be updated now. Where that could compute something else, the step updates
all parameters at once, when all gradients have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.pytorch._private import has_step_hooks, mark_as_hooked, rebind_step, without_overrides
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sharding.shards import shards_of
from legato.pytorch.runtime.sharding.state import take_state, whole_state
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import PENDING
from legato.pytorch.runtime.waiting.readers import state_is_held
from legato.pytorch.runtime.waiting.update import Update, reducers_of, zeroing

__all__ = ["Attached", "defer_steps", "is_known", "restore_steps"]

#: Never split: LBFGS mixes parameters and calls its closure several times; sparse gradients are not sent.
_WHOLE = ("LBFGS", "SparseAdam")


class Attached(Protocol):
    """legato on a model, as an optimizer sees it."""

    #: What carries a plan out; None where passes are DDP's.
    reducer: Reducer | None
    #: Whether `step()` was called since this was last set to False.
    stepped: bool


class _DeferredSteps:
    """A mix-in for the class of the user's optimizer, which defers its steps and is otherwise transparent."""

    _legato_base: type[Optimizer]
    _legato_attachments: list[Attached]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer, base = cast(Optimizer, self), self._legato_base
        if any(reducer.in_backward for reducer in reducers_of(self)):
            raise RankError("optimizer.step() inside a backward pass: the gradients are not averaged yet")
        for attachment in self._legato_attachments:
            attachment.stepped = True
        loss = None
        whole = base.__name__ in _WHOLE or has_step_hooks(optimizer) or _mixes_dtypes(optimizer, base)
        if closure is not None and (not whole or shards_of(self) is not None):
            with torch.enable_grad():
                loss = closure()
            closure = None
        reducers: list[Reducer] = reducers_of(self)  # the closure's forward pass may have changed the plan
        if (shards := shards_of(self)) is not None:
            shards.step(optimizer, base)
            return loss
        if reducers and not whole and _divisible(optimizer, reducers):
            _step_later(optimizer, base, reducers)
            return loss
        for reducer in reducers:
            reducer.settle()
        tracers = [reducer.messages.tracer for reducer in reducers if reducer.messages.tracer]
        for tracer in tracers:
            tracer.switch("optimizer")
        result = base.step(optimizer) if closure is None else base.step(optimizer, closure)
        for tracer in tracers:
            tracer.switch(None)
        return result if loss is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        optimizer, reducers = cast(Optimizer, self), reducers_of(self)
        if not reducers:
            return self._legato_base.zero_grad(optimizer, set_to_none)
        zero_of = {
            key: partial(reducer.delivery.zero, slot)
            for reducer in reducers
            for key, slot in reducer.delivery.by_parameter.items()
        }
        for p in (p for g in optimizer.param_groups for p in g["params"]):
            if id(p) in zero_of:
                zero_of[id(p)](set_to_none)
            else:
                zeroing(set_to_none)(p)
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
        shards = shards_of(self)
        if shards is None:
            return self._legato_base.state_dict(cast(Optimizer, self))
        return self._legato_base.state_dict(self._with_state(whole_state(cast(Optimizer, self), shards)))

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the state of whole parameters, of which a rank keeps its shards."""
        self._settle()
        shards = shards_of(self)
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
        if shards_of(self) is not None:
            raise InputError("a sharded optimizer cannot be copied: use its state_dict(), on all ranks")
        return object.__new__, (self._legato_base,), self._legato_base.__getstate__(cast(Optimizer, self))

    def _settle(self) -> None:
        for reducer in reducers_of(self):
            reducer.settle()


mark_as_hooked(_DeferredSteps.step)


def is_known(optimizer: Any) -> bool:
    """Whether the optimizer is one of torch's, or its class says that it treats parameters or elements alone."""
    base = getattr(optimizer, "_legato_base", type(optimizer))
    alone = (getattr(base, name, False) for name in ("steps_parameters_alone", "steps_elements_alone"))
    return f"{base.__module__}.".startswith("torch.optim.") or any(alone)


def _mixes_dtypes(optimizer: Optimizer, base: type[Optimizer]) -> bool:
    """Whether an update depends on the dtype of another parameter: Adafactor takes its epsilon from a group's first."""
    if base is not torch.optim.Adafactor:
        return False
    with without_overrides():
        return any(len({p.dtype for p in group["params"]}) > 1 for group in optimizer.param_groups)


def _divisible(optimizer: Optimizer, reducers: Iterable[Reducer]) -> bool:
    """Whether the optimizer can update some parameters now and others later."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    differentiable = any(g.get("differentiable") for g in optimizer.param_groups)
    return any(reducer.delivery.overlaps for reducer in reducers) and not (scaled or differentiable)


def _step_later(optimizer: Optimizer, base: type[Optimizer], reducers: Iterable[Reducer]) -> None:
    update = Update(optimizer, base)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = vars(optimizer)["state"]
    waiting: set[int] = set()
    for delivery in (reducer.delivery for reducer in reducers):
        slots = [slot for p in parameters if (slot := delivery.by_parameter.get(id(p))) is not None]
        if any(slot.stage == PENDING for slot in slots):
            delivery.settle()  # a second step() before the first one's result was read
        with gate.invisible():
            later = [slot for slot in slots if delivery.may_wait(slot)]
        later = [slot for slot in later if not state_is_held(states, slot.parameter)]
        delivery.postpone(later, update)
        waiting.update(id(slot.parameter) for slot in later)
        delivery.deliver(slot for slot in slots if slot.stage != PENDING)
    if now := [p for p in parameters if id(p) not in waiting]:
        update.apply(now)


def defer_steps(optimizer: Optimizer, attachment: Attached) -> None:
    """Let the optimizer's `step()` return at once and update each parameter when it is read, in legato's passes."""
    if isinstance(optimizer, _DeferredSteps):
        if attachment not in optimizer._legato_attachments:
            optimizer._legato_attachments.append(attachment)
        return
    base = type(optimizer)
    vars(optimizer)["_legato_attachments"] = [attachment]
    overlay = type(base.__name__, (_DeferredSteps, base), {"_legato_base": base, "__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", overlay)
    rebind_step(optimizer, base, overlay)


def restore_steps(optimizer: Any, attachment: Attached) -> None:
    """Defer the optimizer's steps for this model no longer; after the last one, it has its own class again."""
    if not isinstance(optimizer, _DeferredSteps) or attachment not in optimizer._legato_attachments:
        return
    optimizer._settle()
    optimizer._legato_attachments.remove(attachment)
    if not optimizer._legato_attachments:
        base = optimizer._legato_base
        object.__setattr__(optimizer, "__class__", base)
        vars(optimizer).pop("_legato_attachments")
        rebind_step(cast(Optimizer, optimizer), base, base)
