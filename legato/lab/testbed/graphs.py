"""The emulated accelerator under `torch.compile`: each op of a workload is a graph node that takes the op's time.

dynamo sees one call, which AOTAutograd expands to a forward and a backward graph
with the workload's ops and dependencies. The runtime can therefore sort and cut these
graphs like the graphs of a real model (`legato.pytorch.compiled`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from torch.autograd.function import Function

from legato.core.workload import Phase, Workload
from legato.lab.testbed.accelerator import EmulatedModel

__all__ = ["CompiledModel", "with_nodes"]

_ops: Any = cast(Any, torch.library.Library)("legato_testbed", "DEF")
_ops.define("run(Tensor[] after, Tensor[] reads, int model, int op) -> Tensor")
_ops.define("gradient(Tensor after, int model, int tensor) -> Tensor")
_models: weakref.WeakValueDictionary[int, CompiledModel] = weakref.WeakValueDictionary()


def with_nodes(workload: Workload) -> Workload:
    """Return the workload with each op named after its node in the graphs of a `CompiledModel`."""
    names = iter(["run", *(f"run_{k}" for k in range(1, len(workload.ops)))])
    ops = (
        op if op.phase == "optimizer" else msgspec.structs.replace(op, name=f"graph 0/{op.phase}/{next(names)}")
        for op in workload.ops
    )
    return msgspec.structs.replace(workload, ops=tuple(ops))


class CompiledModel(EmulatedModel):
    """An `EmulatedModel` whose passes are graphs compiled by `aot_eager`."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        super().__init__(workload, **options)
        self.start = torch.zeros(1, requires_grad=True)  # its gradient depends on every op of the backward pass
        self.reads: list[list[int]] = [[] for _ in workload.ops]
        for t, tensor in enumerate(workload.tensors):
            for op in tensor.readers:
                self.reads[op].append(t)
        _models[id(self)] = self
        self.compile(backend="aot_eager")

    def forward(self) -> Tensor:
        """Run the forward pass, which waits for parameters that are not up to date."""
        return cast(Tensor, _passes(id(self), self.start, *self.ordered))  # pyrefly: ignore[not-callable]

    def run_op(self, op: int, reads: bool) -> None:
        """Pass the time that an op takes; if it reads a parameter, wait for the network first."""
        if reads:
            self.clock.meet()
        self.clock.run(self.workload.ops[op].duration_s)
        self.clock.ask()


class _Passes(Function):
    """The autograd function that runs the forward pass and the backward pass op by op."""

    @staticmethod
    def forward(ctx: Any, model: int, start: Tensor, *parameters: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        ctx.model = _models[model]
        reads = [[parameters[t] for t in tensors] for tensors in ctx.model.reads]
        return _run_phase(ctx.model, "forward", start, reads, lambda *_: None)

    @staticmethod
    def backward(ctx: Any, start: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        model: CompiledModel = ctx.model
        gradients: dict[int, Tensor] = {}

        def finished(op: int, token: Tensor) -> None:
            for t, tensor in enumerate(model.workload.tensors):
                if tensor.ready_after == op:
                    gradients[t] = torch.ops.legato_testbed.gradient(token, id(model), t)

        end = _run_phase(model, "backward", start.reshape(1), [[] for _ in model.workload.ops], finished)
        return None, end.reshape(1), *(gradients[t] for t in range(len(gradients)))


@torch.compiler.allow_in_graph
def _passes(model: int, start: Tensor, *parameters: Tensor) -> Tensor:
    return _Passes.apply(model, start, *parameters)


def _run_phase(
    model: CompiledModel,
    phase: Phase,
    start: Tensor,
    reads: Sequence[Sequence[Tensor]],
    finished: Callable[[int, Tensor], None],
) -> Tensor:
    """Run a phase's ops, and call `finished(op, result)` after each; return a number that depends on all results."""
    tokens: dict[int, Tensor] = {}
    unread: dict[int, Tensor] = {}
    for i in model.workload.phase_ops(phase):
        before = [dep for dep in model.workload.ops[i].deps if dep in tokens]
        after = [tokens[dep] for dep in before] or [start]
        tokens[i] = unread[i] = torch.ops.legato_testbed.run(after, reads[i], id(model), i)
        for dep in before:
            unread.pop(dep, None)
        finished(i, tokens[i])
    return torch.cat([start, *unread.values()]).sum()


def _run(after: Sequence[Tensor], reads: Sequence[Tensor], model: int, op: int) -> Tensor:
    _models[model].run_op(op, bool(reads))
    return torch.zeros(1)


def _gradient(after: Tensor, model: int, tensor: int) -> Tensor:
    # A new tensor object: autograd uses it as `.grad` without copying its memory.
    return _models[model].gradients[tensor].detach()


def _like_gradient(after: Tensor, model: int, tensor: int) -> Tensor:
    gradient = _models[model].gradients[tensor]
    return after.new_empty(gradient.shape, dtype=gradient.dtype)


_ops.impl("run", _run, "CPU")
_ops.impl("gradient", _gradient, "CPU")
torch.library.register_fake("legato_testbed::run", lambda after, *_: after[0].new_empty(1), lib=_ops)
torch.library.register_fake("legato_testbed::gradient", _like_gradient, lib=_ops)
