"""Finds the module of an op: by the running call in the forward pass, by autograd's numbers in the backward pass."""

from __future__ import annotations

import bisect
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from legato.pytorch.compiled.functions import one_by_one
from legato.pytorch.parameters import named_modules
from legato.pytorch.private.tensors import autograd_node_number, current_node_number

__all__ = ["ModulePaths"]


class ModulePaths:
    """Follows the calls of a model's modules, through global hooks that leave the model unchanged.

    Autograd numbers its nodes in the order in which the forward pass creates them. So each call of a module has a range
    of node numbers, by which the module of a node is found in the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in named_modules(model).items()}
        self._calls: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def follow(self, stack: ExitStack) -> None:
        """Follow the calls of modules until the stack `stack` is closed."""
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            stack.callback(handle.remove)

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._calls.append(self._names.get(id(module), self._calls[-1] if self._calls else ""))
        self._note()

    def _leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._calls:  # empty if following began during the call of a module
            self._calls.pop()
        self._note()

    def _note(self) -> None:
        number = autograd_node_number()
        # Another thread (a device thread that recomputes in its backward pass) has its own numbers, which are skipped.
        if not self._numbers or number >= self._numbers[-1]:
            self._numbers.append(number)
            self._paths.append(self._calls[-1] if self._calls else "")

    def name(self, op: str, phase: str) -> str:
        """Return the name of the op that runs now: "<module path>/<op>", or "<phase>/<op>" outside any module.

        In a compiled graph, the name is "<graph>/<phase>/<node>".
        """
        if one_by_one.node:
            return one_by_one.node
        path = ""
        if self._calls:
            path = self._calls[-1]
        elif (number := current_node_number()) is not None:
            i = bisect.bisect_right(self._numbers, number) - 1
            path = self._paths[i] if i >= 0 and number < 2**63 else ""  # numbers from 2**63 on belong to AccumulateGrad
        return f"{path or phase}/{op}"
