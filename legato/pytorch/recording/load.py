"""Loads the user's training step from a file, and checks it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from legato.core import code
from legato.core.errors import CaptureError
from legato.core.text import with_article
from legato.pytorch.device import can_time

__all__ = ["blame", "check_loss", "check_training", "load_training"]

#: A context that turns an exception in the user's code into a `CaptureError` (`legato.core.code.blame`).
blame = partial(code.blame, kind=CaptureError)
_EXPECTED = "expected (model, optimizer, loss): a torch.nn.Module, a torch.optim.Optimizer, a function of no arguments"


def load_training(spec: str) -> tuple[nn.Module, Optimizer, Callable[[], torch.Tensor]]:
    """Import FILE.py and call FUNCTION, where `spec` is "FILE.py:FUNCTION".

    FUNCTION() returns (model, optimizer, loss); `loss()` runs the forward pass and returns the scalar loss. Raises
    `CaptureError` if this fails, even if the user's code raises another exception.
    """
    build = code.load(spec, CaptureError)
    path, _, function = spec.rpartition(":")
    with blame(f"{path}: {function}()"):
        made = build()
    if not (isinstance(made, tuple) and len(made) == 3):
        raise CaptureError(f"{path}: {function}() returned {_kind(made)} ({_EXPECTED})")
    model, optimizer, loss = made
    for what, value, good in (
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, isinstance(optimizer, Optimizer)),
        ("loss", loss, callable(loss)),
    ):
        if not good:
            raise CaptureError(f"{path}: {function}() returned {_kind(value)} as {what} ({_EXPECTED})")
    return model, optimizer, loss


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else with_article(type(value).__qualname__)


def check_training(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise `CaptureError` if a step of this model and optimizer cannot be recorded op by op."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise CaptureError(f"given {_kind(model)} and {_kind(optimizer)} (expected a Module and an Optimizer)")
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureError(f"{where} is a DistributedDataParallel (expected the module inside it)")
    _check_parameters(model, optimizer)
    for parameter in inspect.signature(optimizer.step).parameters.values():
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if parameter.default is inspect.Parameter.empty and not variadic:
            raise CaptureError(f"{type(optimizer).__name__}.step needs a {parameter.name} (expected one without)")


def _check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise CaptureError("the model has lazy parameters without values (expected one forward pass before)")
    mine = {id(p): p for p in model.parameters() if p.requires_grad}
    if not mine:
        raise CaptureError("the model has no trainable parameter (expected at least one that requires grad)")
    devices = sorted({str(p.device) for p in mine.values()})
    if len(devices) > 1 or not can_time(torch.device(devices[0])):
        raise CaptureError(f"the model is on {', '.join(devices)} (expected cpu or one device of an accelerator)")
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise CaptureError("the optimizer has none of the model's trainable parameters (expected at least one)")


def check_loss(value: Any) -> torch.Tensor:
    """Return the loss. Raises `CaptureError` if a backward pass cannot start from the loss."""
    expected = "expected a scalar tensor that requires grad"
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"loss() returned {_kind(value)} ({expected})")
    if value.numel() != 1:
        raise CaptureError(f"loss() returned a tensor of shape {tuple(value.shape)} ({expected})")
    if not value.requires_grad:
        raise CaptureError(f"loss() returned a tensor that does not require grad ({expected})")
    return value
