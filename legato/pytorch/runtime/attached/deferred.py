"""Defers optimizer steps: the user's own optimizer updates each parameter when it is read (docs/runtime.md).

`optimizer.step()` records the hyper-parameters of its groups and returns. The optimizer's own `step` updates the
parameters later, on a stand-in object that shares the state and holds only the parameters that are to be updated now.
Where deferring could change the result, the step updates all parameters at once, when all gradients have arrived.

[Note: the user's optimizer] legato sets `step` on the optimizer instance, once and for good, so that schedulers and
wrappers that hold this method keep working. This new `step` defers updates in legato's passes, and in all other passes
it does what the old `step` did. A step that bypasses this method is also correct, because its reads of `.grad` wait for
the gradients, but it updates all parameters at once. While updates wait, a stand-in replaces the optimizer's `state`,
and any access to the stand-in applies all updates first. The optimizer gets another class only while states are
sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.pytorch.private.dynamo import not_compiled, runs_compiled
from legato.pytorch.private.optimizers import (
    count_steps,
    counts_steps,
    has_step_hooks,
    is_replaced,
    note_step,
    observe_step,
)
from legato.pytorch.private.tensors import without_overrides
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sending.delivery import Delivery
from legato.pytorch.runtime.sharding.shards import shards_of
from legato.pytorch.runtime.sharding.state import take_state, whole_state
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import PENDING
from legato.pytorch.runtime.waiting.readers import state_is_held
from legato.pytorch.runtime.waiting.update import Update, reducers_of, users_class

__all__ = ["Attached", "defer_steps", "is_known", "restore_steps"]

#: Optimizers that are never split. LBFGS mixes parameters and calls its closure several times; sparse gradients are not
#: sent.
_WHOLE = ("LBFGS", "SparseAdam")


class Attached(Protocol):
    """The part of an `Attachment` (legato's part of one model) that optimizers use."""

    #: The reducer that sends a plan's messages; None while DDP runs the passes.
    reducer: Reducer | None

    def step_begins(self) -> None:
        """Record that `step()` was called."""

    def updates_begin(self) -> None:
        """Record that the optimizer's own part of the step begins: after the closure, if there is one."""

    def step_ended(self) -> None:
        """Record that `step()` returns."""


def defer_steps(optimizer: Optimizer, attachment: Attached) -> None:
    """Let `optimizer.step()` return at once in legato's passes, and update each parameter when it is read."""
    mine = vars(optimizer)
    if "_legato_attachments" not in mine:
        before = mine.get("step")
        mine["_legato_attachments"] = []
        mine["step"] = MethodType(_own_step(before, type(optimizer)), optimizer)
        mine["load_state_dict"] = MethodType(_own_load(mine.get("load_state_dict")), optimizer)
    if attachment not in mine["_legato_attachments"]:
        mine["_legato_attachments"].append(attachment)
    _settle(optimizer)


def restore_steps(optimizer: Any, attachment: Attached) -> None:
    """Stop deferring the optimizer's steps for this model."""
    attached = vars(optimizer).get("_legato_attachments", [])
    if attachment in attached:
        _settle(optimizer)
        attached.remove(attachment)
        _show(optimizer)


def _own_step(before: Any, base: type[Optimizer]) -> Callable[..., Any]:
    """Return the new `step` of an optimizer. `before` is a `step` that was set on the instance before, or None."""

    @wraps(base.step)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        call = _Step(self, before, runs_compiled(), args, kwargs)
        try:
            if call.defers():
                return call.loss
            loss = call.plain(*call.args, **call.kwargs)  # this is compiled if the user has compiled it
            return loss if call.loss is None else call.loss
        finally:
            call.ends()

    if counts_steps(before):
        count_steps(step)
    return step


class _Step:
    """One call of an optimizer's `step()`; `compiled` says whether compiled code makes this call."""

    def __init__(
        self, optimizer: Optimizer, before: Any, compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._optimizer, self._base = optimizer, users_class(optimizer)
        self._before = before
        self.plain: Callable[..., Any] = before or MethodType(self._base.step, optimizer)
        self.args, self.kwargs, self.loss = args, kwargs, None
        self._closure = kwargs.get("closure", args[0] if args else None)
        odd = len(args) > 1 or bool(kwargs.keys() - {"closure"}) or not (before is None or counts_steps(before))
        self._attached: list[Attached] = list(vars(optimizer)["_legato_attachments"])
        self._whole = (
            not self._attached
            or odd
            or compiled
            or self._base.__name__ in _WHOLE
            or is_replaced(self._base)
            or has_step_hooks(optimizer)
            or _depends_on_others(optimizer, self._base)
        )

    @not_compiled
    def defers(self) -> bool:
        """Begin the step; return False if the caller must now run the optimizer's own step."""
        optimizer, base, closure = self._optimizer, self._base, self._closure
        if any(reducer.in_backward for reducer in reducers_of(optimizer)):
            raise RankError("optimizer.step() inside a backward pass: the gradients are not averaged yet")
        for attachment in self._attached:
            attachment.step_begins()
        if closure is not None and (not self._whole or shards_of(optimizer) is not None):
            with torch.enable_grad():
                self.loss = closure()
            self.args, self.kwargs, closure = (), {}, None
        if closure is None:
            self._updates_begin()
        else:
            self.args, self.kwargs = self.args[1:], {**self.kwargs, "closure": self._then_updates(closure)}
        reducers: list[Reducer] = reducers_of(optimizer)  # the closure's forward pass may have changed the plan
        if (shards := shards_of(optimizer)) is not None:
            shards.step(optimizer, base)
        elif reducers and not self._whole and _divisible(optimizer, reducers):
            _step_later(optimizer, base, reducers)
        else:
            for reducer in reducers:
                reducer.settle()
            return False
        if counts_steps(self._before):
            note_step(optimizer)
        observe_step(optimizer)
        return True

    def _then_updates(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_and_updates() -> Any:
            loss = closure()
            self._updates_begin()
            return loss

        return closure_and_updates

    def _updates_begin(self) -> None:
        for attachment in self._attached:
            attachment.updates_begin()

    def ends(self) -> None:
        """Tell the attachments that the step has ended."""
        for attachment in self._attached:
            attachment.step_ended()


def _own_load(before: Any) -> Callable[..., None]:
    """Return the new `load_state_dict` of an optimizer, which first applies all updates that wait."""

    @wraps(Optimizer.load_state_dict)
    def load_state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _settle(self)
        load = before or MethodType(type(self).load_state_dict, self)
        load(*args, **kwargs)

    return load_state_dict


class _WaitingState(defaultdict[Any, Any]):
    """A stand-in for an optimizer's state while updates wait: any use of the state applies the updates first."""

    def __init__(self, optimizer: Optimizer, state: Any) -> None:
        super().__init__(dict)
        self._optimizer, self.state = optimizer, state


def _up_to_date(name: str) -> Callable[..., Any]:
    def method(self: _WaitingState, *args: Any, **kwargs: Any) -> Any:
        _settle(self._optimizer)
        return getattr(self.state, name)(*args, **kwargs)

    return method


for _name in ({*vars(dict), *vars(defaultdict)} - {*vars(object)}) | {"__eq__", "__ne__", "__repr__", "__reduce__"}:
    if _name not in ("__class_getitem__", "fromkeys", "default_factory"):
        setattr(_WaitingState, _name, _up_to_date(_name))


class _Sharded:
    """A mix-in for the class of the user's optimizer while its states are sharded."""

    _legato_base: type[Optimizer]

    @property
    def state(self) -> Any:
        _settle(self)
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(self)["state"] = value

    def state_dict(self) -> Any:
        """Return the state of whole parameters. All ranks must call this."""
        optimizer = _settle(self)
        return self._legato_base.state_dict(self._with_state(whole_state(optimizer, shards_of(self))))

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state of whole parameters; this rank keeps only its shards."""
        optimizer = _settle(self)
        whole = self._with_state({})
        self._legato_base.load_state_dict(whole, state_dict)
        vars(self)["param_groups"] = whole.param_groups
        take_state(optimizer, whole.state, shards_of(self))

    def _with_state(self, state: Any) -> Optimizer:
        """Return a stand-in of the user's own class, with another state."""
        stand_in = object.__new__(self._legato_base)
        vars(stand_in).update(vars(self), state=defaultdict(dict, state))
        return stand_in

    def add_param_group(self, param_group: Any) -> None:
        """Add a parameter group, as the user's own class does."""
        self._legato_base.add_param_group(_settle(self), param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("a sharded optimizer cannot be copied: use its state_dict(), on all ranks")


@cache
def _overlay(base: Any) -> type[Any]:
    return type(base.__name__, (_Sharded, base), {"_legato_base": base, "__module__": base.__module__})


def _settle(optimizer: Any) -> Any:
    """Bring all parameters and states of an optimizer up to date, and return the optimizer."""
    for reducer in reducers_of(optimizer):
        reducer.settle()
    _show(optimizer)
    return optimizer


def _show(optimizer: Any, waits: bool = False) -> None:
    """Set the optimizer's class, which hides sharded states, and its `state`, which hides that updates wait."""
    base, mine = users_class(optimizer), vars(optimizer)
    object.__setattr__(optimizer, "__class__", base if shards_of(optimizer) is None else _overlay(cast(Any, base)))
    if type(mine["state"]) is _WaitingState:
        mine["state"] = mine["state"].state
    if waits:
        mine["state"] = _WaitingState(optimizer, mine["state"])


def is_known(optimizer: Any) -> bool:
    """Return whether the optimizer is torch's, or its class says that it updates parameters or elements separately."""
    base = users_class(optimizer)
    alone = (getattr(base, name, False) for name in ("steps_parameters_alone", "steps_elements_alone"))
    return f"{base.__module__}.".startswith("torch.optim.") or any(alone)


def _depends_on_others(optimizer: Optimizer, base: type[Optimizer]) -> bool:
    """Return whether the update of a parameter depends on the optimizer's other parameters.

    Adafactor takes its epsilon from the dtype of the first parameter of a group. With torch's default (`foreach=None`),
    one kernel updates many parameters only if all parameters of a group have a plain class and a device that has such
    kernels.
    """
    with without_overrides():
        for group in optimizer.param_groups:
            if base is torch.optim.Adafactor and len({p.dtype for p in group["params"]}) > 1:
                return True
            if group.get("foreach", False) is None and len({(type(p), p.device.type) for p in group["params"]}) > 1:
                return True
    return False


def _divisible(optimizer: Optimizer, reducers: Iterable[Reducer]) -> bool:
    """Return whether the optimizer can update some parameters now and others later."""
    scaled = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    differentiable = any(g.get("differentiable") for g in optimizer.param_groups)
    return any(reducer.delivery.overlaps for reducer in reducers) and not (scaled or differentiable)


def _postpone(delivery: Delivery, parameters: Iterable[torch.Tensor], states: Any, update: Update) -> set[int]:
    """Postpone the updates that may wait, and return the ids of their parameters."""
    slots = [slot for p in parameters if (slot := delivery.by_parameter.get(id(p))) is not None]
    if any(slot.stage == PENDING for slot in slots):
        delivery.settle()  # this is a second step() before the result of the first was read
    with gate.invisible():
        later = [slot for slot in slots if delivery.may_wait(slot)]
    later = [slot for slot in later if not state_is_held(states, slot.parameter)]
    delivery.postpone(later, update)
    delivery.deliver(slot for slot in slots if slot.stage != PENDING)
    return {id(slot.parameter) for slot in later}


def _step_later(optimizer: Optimizer, base: type[Optimizer], reducers: Iterable[Reducer]) -> None:
    _show(optimizer)  # updates of the previous step may still wait
    update = Update(optimizer, base, partial(_show, optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    waiting: set[int] = set()
    for reducer in reducers:
        waiting |= _postpone(reducer.delivery, parameters, vars(optimizer)["state"], update)
    if now := [p for p in parameters if id(p) not in waiting]:
        update.apply(now)
    update.waiting = len(waiting)
    _show(optimizer, waits=bool(waiting))
