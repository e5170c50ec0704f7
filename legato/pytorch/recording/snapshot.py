"""Saves everything that training steps change, and restores it bit for bit."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from legato.pytorch.device import restorers_of_random_states
from legato.pytorch.private.tensors import module_tables

__all__ = ["Snapshot"]


class Snapshot:
    """A context that saves a model, its optimizer and the random generators, and restores them at its end.

    Everything is restored after errors, too. The context saves parameters, buffers, gradients (inside the context, all
    gradients are None), `requires_grad`, the plain attributes of every module (such as `training`) and of the
    optimizer, the optimizer's state and parameter groups, and the generators of Python, NumPy (if it is imported), the
    CPU and every accelerator. Restored tensors and dictionaries are the same objects as before. The snapshot needs as
    much memory as a copy of the model and of the optimizer's state.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Snapshot:
        try:
            self._save()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with torch.no_grad():
            while self._undo:
                self._undo.pop()()

    def _save(self) -> None:
        self._save_generators()
        for module in self._model.modules():
            self._save_module(module)
        owned = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in {id(p): p for p in [*self._model.parameters(), *owned]}.values():
            self._save_parameter(parameter)
        for buffer in self._model.buffers():
            self._save_values(buffer)
        self._save_optimizer()

    def _save_generators(self) -> None:
        state, cpu = random.getstate(), torch.get_rng_state()
        self._undo += [lambda: random.setstate(state), lambda: torch.set_rng_state(cpu)]
        if numpy := sys.modules.get("numpy"):
            legacy = numpy.random.get_state()
            self._undo.append(lambda: numpy.random.set_state(legacy))
        self._undo += restorers_of_random_states()

    def _save_dict(self, values: dict[Any, Any]) -> None:
        """Save the entries of a dictionary, but not the contents of its values."""
        saved = dict(values)

        def restore() -> None:
            values.clear()
            values.update(saved)

        self._undo.append(restore)

    def _save_values(self, tensor: torch.Tensor) -> None:
        """Save the elements of a tensor."""
        overlapping = any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if not overlapping:  # an expanded tensor cannot be written, so it cannot change
            saved = tensor.detach().clone()
            self._undo.append(lambda: tensor.copy_(saved))

    def _save_module(self, module: nn.Module) -> None:
        self._save_dict(vars(module))
        for entries in module_tables(module, "parameters", "buffers"):
            if isinstance(entries, dict):  # not in a ScriptModule
                self._save_dict(entries)

    def _save_parameter(self, parameter: torch.Tensor) -> None:
        gradient, required = parameter.grad, parameter.requires_grad

        def restore() -> None:
            parameter.requires_grad_(required)
            parameter.grad = gradient

        self._save_values(parameter)
        self._undo.append(restore)
        parameter.grad = None

    def _save_optimizer(self) -> None:
        self._save_dict(vars(self._optimizer))
        for group in self._optimizer.param_groups:
            self._save_tree(group, skip="params")
        self._save_dict(self._optimizer.state)
        for state in self._optimizer.state.values():
            if isinstance(state, dict):
                self._save_tree(state)

    def _save_tree(self, values: dict[Any, Any], skip: str = "") -> None:
        """Save a dictionary of options or states: the elements of its tensors, and copies of everything else."""
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                self._save_values(value)
            elif key != skip:
                self._undo.append(functools.partial(values.__setitem__, key, copy.deepcopy(value)))
        self._save_dict(values)
