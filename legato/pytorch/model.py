"""The wrapper that takes the place of `DistributedDataParallel`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.optim import Optimizer

from legato.core import files
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.pytorch.agreement import agree, describe
from legato.pytorch.deferred import defer_steps, drop_gradients
from legato.pytorch.exchange import Exchange
from legato.pytorch.link import in_order
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.tracing import Tracer

__all__ = ["DistributedModel", "distribute"]

_BROADCAST_BYTES = 250 * 2**20


class DistributedModel(nn.Module):
    """A model whose gradients are averaged over all ranks as a `Plan` says.

    It has the habits of `DistributedDataParallel`: `module` is the user's
    model, `state_dict()` has the prefix `module.`, `no_sync()` accumulates
    gradients without sending them, buffers are rank 0's at each forward pass.
    Parameters, their gradients and the optimizer's state are up to date
    whenever somebody looks at them.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, plan: Plan, group: Any, *, broadcast_buffers: bool = True) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        ranks = dist.get_process_group_ranks(group)
        # Groups of our own: nobody else's collectives come between two messages of the plan.
        self._group = dist.new_group(ranks)
        self._buffer_group = dist.new_group(ranks)
        agree(describe(plan, trained_parameters(module)), self._group)
        self._broadcast([*module.parameters(), *module.buffers()])
        self._send = in_order(self._group)
        self._exchange = Exchange(plan, trained_parameters(module), self._group, self._send)
        self._optimizers: list[Optimizer] = []
        self._buffers_differ = True

    @property
    def plan(self) -> Plan:
        """The plan that is being carried out."""
        return self._exchange.plan

    def manage(self, optimizer: Optimizer) -> None:
        """Let the plan say when this optimizer's updates are applied."""
        defer_steps(optimizer, self._exchange)
        self._optimizers.append(optimizer)

    def adopt(self, plan: Plan) -> None:
        """Go over to another plan, between two iterations, all ranks together."""
        agree(describe(plan, trained_parameters(self.module)), self._group)
        self._exchange.close()
        self._exchange = Exchange(plan, trained_parameters(self.module), self._group, self._send)
        for optimizer in self._optimizers:
            defer_steps(optimizer, self._exchange)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        exchange = self._exchange
        exchange.begin_forward()
        if self.broadcast_buffers and self._buffers_differ:
            self._broadcast(list(self.module.buffers()), self._buffer_group)
        # As DDP has it: only a forward pass whose gradients will be averaged leaves buffers to be made equal.
        self._buffers_differ = exchange.enabled and torch.is_grad_enabled()
        if exchange.tracer is None:
            return self.module(*args, **kwargs)
        exchange.tracer.switch("forward")
        output = self.module(*args, **kwargs)
        exchange.tracer.watch(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone, as in DDP."""
        before, self._exchange.enabled = self._exchange.enabled, False
        try:
            yield
        finally:
            self._exchange.enabled = before

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is read."""
        self._exchange.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `nn.Module`; gradients that are still to be used are dropped after it."""
        drop_gradients(self.parameters(), self._exchange, set_to_none)

    @property
    def process_group(self) -> Any:
        """The group that the messages go through; no collective but those of the plan may be in flight on it."""
        return self._group

    def set_tracer(self, tracer: Tracer | None) -> None:
        """From here on, this tracer writes down what happens (None: nobody does)."""
        self._exchange.tracer = tracer

    @contextmanager
    def trace(self) -> Iterator[list[Timeline]]:
        """Measure the iterations inside; the list is filled when the context ends, one timeline each."""
        found: list[Timeline] = []
        self.flush()
        tracer = Tracer(self._group.rank())
        self.set_tracer(tracer)
        try:
            yield found
        finally:
            self.flush()
            self.set_tracer(None)
            found += tracer.timelines(self.plan.scheduler)

    def _broadcast(self, tensors: list[torch.Tensor], group: Any = None) -> None:
        values = [t.detach() for t in tensors]
        if values:
            _broadcast_coalesced(group or self._group, values, _BROADCAST_BYTES, 0)


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | str | os.PathLike[str],
    *,
    process_group: Any = None,
    broadcast_buffers: bool = True,
) -> tuple[DistributedModel, Optimizer]:
    """Train `model` on all ranks of a process group, its gradients sent as `plan` says.

    `plan` is a `Plan` or the path of a plan file. Returns the wrapped model and
    the same optimizer. Raises `PlanError` for a plan of another model, and
    `RankError`, on every rank, when the ranks do not have the same model and
    plan.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    if isinstance(model, DistributedModel | nn.parallel.DistributedDataParallel):
        raise InputError(f"the model is a {type(model).__name__} already; give the one inside it")
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer: a {type(optimizer).__name__} (expected a torch.optim.Optimizer)")
    _check_parameters(trained_parameters(model), optimizer)
    if not isinstance(plan, Plan):
        plan = files.read(Path(plan), Plan)
    group = process_group if process_group is not None else dist.group.WORLD
    wrapped = DistributedModel(model, plan, group, broadcast_buffers=broadcast_buffers)
    wrapped.manage(optimizer)
    return wrapped, optimizer


def _check_parameters(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InputError(f"parameter {name!r} is lazy: run the model once before it is distributed")
    if not {id(p) for g in optimizer.param_groups for p in g["params"]} & {id(p) for p in parameters.values()}:
        raise InputError("the optimizer has none of the model's parameters")
