"""One call of `optimizer.step()`, written down so that it can be applied to one parameter after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Update", "set_to_none_or_zero"]


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
        self._zero = set_to_none_or_zero(set_to_none)

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


def set_to_none_or_zero(set_to_none: bool) -> Callable[[nn.Parameter], None]:
    """What `zero_grad(set_to_none)` does to one parameter."""
    return _set_to_none if set_to_none else _set_to_zero


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
