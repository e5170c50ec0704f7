"""Records a call of `optimizer.step()`, so that legato can later update a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from legato.pytorch.private.optimizers import unhooked_step, without_step_hooks
from legato.pytorch.private.tensors import without_dispatch_modes, without_overrides

__all__ = ["Update", "reducers_of", "set_to_none", "users_class", "zeroing"]


class Update:
    """A call of `optimizer.step()`, with the hyper-parameters and the autocast settings of that moment.

    `base` is the user's own class of the optimizer. To apply the update, legato calls `base.step` on a stand-in object
    that shares the optimizer's state. `waiting` counts the parameters that wait for this update. `finished()` is called
    when no parameter waits any more.
    """

    def __init__(
        self, optimizer: Optimizer, base: type[Optimizer], finished: Callable[[], None] = lambda: None
    ) -> None:
        self._base, self._finished = base, finished
        self.waiting = 0
        attributes = {k: v for k, v in vars(optimizer).items() if k not in ("step", "load_state_dict", "param_groups")}
        self._shared = without_step_hooks(attributes)
        self._groups = [{k: _snapshot(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
        with without_overrides():
            devices = {p.device.type for g in optimizer.param_groups for p in g["params"]} | {"cpu"}
        self._autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Run the optimizer's step on these parameters only."""
        self.apply_to_shards((p, p) for p in parameters)

    def applied(self, count: int) -> None:
        """Record that `count` waiting parameters were updated."""
        self.waiting -= count
        if not self.waiting:
            self._finished()

    def apply_to_shards(self, shards: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Run the optimizer's step on shards; each shard is given with the parameter to which it belongs."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for shard, parameter in shards:
            by_group.setdefault(self._group_of[id(parameter)], []).append(shard)
        stand_in = object.__new__(self._base)
        vars(stand_in).update(self._shared)
        stand_in.param_groups = [{**self._groups[i], "params": ps} for i, ps in by_group.items()]
        with self._modes_of_the_call():
            unhooked_step(self._base)(stand_in)

    @contextmanager
    def _modes_of_the_call(self) -> Iterator[None]:
        """Restore the modes under which `step()` was called.

        The code that reads a parameter, and so triggers the update, may run under autocast, in inference mode or under
        a dispatch mode.
        """
        with ExitStack() as stack:
            for device, enabled, dtype in self._autocast:
                if (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) != (enabled, dtype):
                    stack.enter_context(torch.autocast(device, dtype, enabled))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(without_dispatch_modes())
            stack.enter_context(torch.enable_grad())  # the optimizer disables gradients where necessary
            yield


def users_class(optimizer: Any) -> type[Optimizer]:
    """Return the user's own class of an optimizer."""
    return getattr(type(optimizer), "_legato_base", type(optimizer))


def reducers_of(optimizer: Any) -> list[Any]:
    """Return the reducers of the models that the optimizer updates and whose passes legato runs."""
    attached = vars(optimizer).get("_legato_attachments", ())
    return [attachment.reducer for attachment in attached if attachment.reducer is not None]


def zeroing(to_none: bool) -> Callable[[nn.Parameter], None]:
    """Return the function by which `zero_grad(to_none)` clears the gradient of one parameter."""
    return set_to_none if to_none else _set_to_zero


def _snapshot(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def set_to_none(parameter: nn.Parameter) -> None:
    """Drop the parameter's gradient."""
    parameter.grad = None


def _set_to_zero(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        if parameter.grad.grad_fn is not None:
            parameter.grad.detach_()
        parameter.grad.requires_grad_(False).zero_()
