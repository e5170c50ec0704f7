"""The user's own optimizer, stepping later and in parts.

[Note: deferred steps] `optimizer.step()` writes down the hyper-parameters of
its groups and returns; each parameter is updated by the optimizer's own
`step`, on a stand-in object that shares the state and holds just the
parameters whose time has come (`legato.pytorch.gate` says when that is). Only
optimizers of `torch.optim` whose step treats every parameter by itself are
split. Any other one (LBFGS, a third-party one, one with hooks on its step, a
fused one that GradScaler drives) steps whole, once all gradients are in: slower,
and never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes

from legato.core.errors import RankError
from legato.pytorch.exchange import Exchange
from legato.pytorch.lowering import PENDING, SENT

__all__ = ["Update", "defer_steps", "rebind", "release"]

#: Their step mixes parameters, calls its closure more than once, or takes what is not sent.
_WHOLE = ("LBFGS", "SparseAdam")


class Update:
    """One call of `optimizer.step()`, applied parameter by parameter, with the values of that moment."""

    def __init__(self, optimizer: Optimizer, base: type[Optimizer]) -> None:
        self._base = base
        self._shared = {k: v for k, v in vars(optimizer).items() if k not in ("step", "param_groups")}
        self._shared["_optimizer_step_pre_hooks"] = self._shared["_optimizer_step_post_hooks"] = {}
        self._groups = [{k: _snapshot(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._zero: Callable[[nn.Parameter], None] | None = None
        devices = {p.device.type for g in optimizer.param_groups for p in g["params"]} | {"cpu"}
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    def zero_after(self, set_to_none: bool) -> None:
        """`zero_grad()` was called: drop each gradient once it has been used."""
        self._zero = _set_to_none if set_to_none else _set_to_zero

    @property
    def drops_gradients(self) -> bool:
        """Whether no gradient is left to be seen after it was applied."""
        return self._zero is _set_to_none

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let the optimizer step these parameters and no others."""
        by_group: dict[int, list[nn.Parameter]] = {}
        parameters = list(parameters)
        for p in parameters:
            by_group.setdefault(self._group_of[id(p)], []).append(p)
        stand_in = object.__new__(self._base)
        vars(stand_in).update(self._shared)
        stand_in.param_groups = [{**self._groups[i], "params": ps} for i, ps in by_group.items()]
        with self._as_it_was():
            _plain_step(self._base)(stand_in)
        if self._zero:
            for p in parameters:
                self._zero(p)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Whoever reads a parameter may do so under autocast, in inference mode or under a dispatch mode of his own."""
        with ExitStack() as stack:
            for device, enabled, dtype in self._autocast:
                if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if torch._C._len_torch_dispatch_stack():
                stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.enable_grad())  # the optimizer switches it off where it must
            yield


def _snapshot(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set_to_none(parameter: nn.Parameter) -> None:
    parameter.grad = None


def _set_to_zero(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        if parameter.grad.grad_fn is not None:
            parameter.grad.detach_()
        parameter.grad.requires_grad_(False).zero_()


def _plain_step(base: type[Optimizer]) -> Callable[[Optimizer], Any]:
    step: Any = base.step
    return cast("Callable[[Optimizer], Any]", step.__wrapped__ if hasattr(step, "hooked") else step)


class _DeferredSteps:
    """Laid over the class of the user's optimizer; what it overrides behaves as before, only later."""

    _legato_base: type[Optimizer]
    _legato_exchange: Exchange | None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = cast(Optimizer, self)
        exchange, base = self._legato_exchange, self._legato_base
        if exchange is not None and exchange.in_backward:
            raise RankError("optimizer.step() inside a backward pass: the gradients are not averaged yet")
        if exchange is None or not _divisible(optimizer, base, exchange):
            if exchange is not None:
                exchange.settle()
            tracer = exchange.tracer if exchange is not None else None
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
        _step_later(optimizer, base, exchange)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        optimizer, exchange = cast(Optimizer, self), self._legato_exchange
        if exchange is None:
            return self._legato_base.zero_grad(optimizer, set_to_none)
        drop_gradients((p for g in optimizer.param_groups for p in g["params"]), exchange, set_to_none)
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
        if self._legato_exchange is not None:
            self._legato_exchange.settle()


#: Loading a state makes torch lay its hooks over a class's `step` that does not say this; the user's class has them.
vars(_DeferredSteps.step)["hooked"] = True


def drop_gradients(parameters: Iterable[nn.Parameter], exchange: Exchange, set_to_none: bool) -> None:
    """`zero_grad` for parameters whose gradients may be on their way or still to be used."""
    zero = _set_to_none if set_to_none else _set_to_zero
    for p in parameters:
        slot = exchange.by_parameter.get(id(p))
        if slot is not None and slot.stage == PENDING and slot.update is not None:
            slot.update.zero_after(set_to_none)
            continue
        if slot is not None and slot.stage == SENT:
            exchange.drop(slot)
        zero(p)


def _divisible(optimizer: Optimizer, base: type[Optimizer], exchange: Exchange) -> bool:
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
    return exchange.overlaps_forward and known and not (hooked or scaled or differentiable)


def _step_later(optimizer: Optimizer, base: type[Optimizer], exchange: Exchange) -> None:
    update = Update(optimizer, base)
    now = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            slot = exchange.by_parameter.get(id(p))
            if slot is not None and slot.stage == PENDING:
                exchange.resolve(slot)  # a second step() before anybody read the first one's result
            if slot is not None and slot.stage == SENT:
                slot.stage, slot.update = PENDING, update
            else:
                now.append(p)
    if now:
        update.apply(now)


def defer_steps(optimizer: Optimizer, exchange: Exchange) -> None:
    """Make the optimizer's `step()` wait for gradients only when their parameters are read."""
    if isinstance(optimizer, _DeferredSteps):
        release(optimizer)
    base = type(optimizer)
    vars(optimizer)["_legato_exchange"] = exchange
    overlay = type(base.__name__, (_DeferredSteps, base), {"_legato_base": base, "__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", overlay)
    rebind(optimizer, base, overlay)


def rebind(optimizer: Optimizer, base: type[Optimizer], new: Any) -> None:
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
        vars(optimizer).pop("_legato_exchange", None)
        rebind(optimizer, type(optimizer), type(optimizer))
