"""The wrapper that takes the place of `DistributedDataParallel`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from legato.core import files
from legato.core.errors import InputError, RankError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.pytorch.network.agreement import (
    agree,
    broadcast_tensors,
    describe_model,
    describe_optimizer,
    gather_numbers,
    group_device,
)
from legato.pytorch.network.channel import channel_for
from legato.pytorch.network.threads import batch_policy_threads
from legato.pytorch.network.watchdog import FlightRecorder, Watchdog
from legato.pytorch.parameters import ModuleFingerprint, extend_plan, participating_parameters, trained_parameters
from legato.pytorch.runtime.debug import DebugChecks, chosen_checks
from legato.pytorch.runtime.deferred import defer_steps, drop_gradients
from legato.pytorch.runtime.drift import DriftMonitor
from legato.pytorch.runtime.reducer import Reducer, abandon, standing
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["DistributedModel", "wrap_model"]

_log = logging.getLogger("legato")


class DistributedModel(nn.Module):
    """A model whose gradients are averaged over all ranks as a `Plan` says.

    It has the habits of `DistributedDataParallel`: `module` is the user's
    model, `state_dict()` has the prefix `module.`, `no_sync()` accumulates
    gradients without sending them, buffers are rank 0's at each forward pass.
    Parameters, their gradients and the optimizer's state are up to date
    whenever somebody looks at them.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        group: Any,
        *,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        debug: bool | str | None = None,
        flight_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        ranks = dist.get_process_group_ranks(group)
        # Groups of our own: nobody else's collectives come between two messages of the plan.
        timeout = group._get_backend(group_device(group)).options._timeout
        with batch_policy_threads():
            self._group = dist.new_group(ranks, timeout)
            self._buffer_group = dist.new_group(ranks, timeout)
        self._parameters_taking_part = trained_parameters(module)
        agree(describe_model(plan, module, self._parameters_taking_part), self._group)
        self._watchdog = Watchdog(
            self._group, FlightRecorder(self._group.rank(), flight_dir), _standing(weakref.ref(self))
        )
        checks = chosen_checks(debug)
        self._checks = DebugChecks(checks, self._group, timeout) if checks else None
        self._broadcast([*module.parameters(), *module.buffers()], self._group)
        weakref.finalize(self, _release, [self._group, self._buffer_group], self._watchdog).atexit = False
        self._send = channel_for(self._group)
        self._reducer = self._make_reducer(plan)
        self._drift = DriftMonitor(self._everyones)
        #: Called on all ranks, between two iterations, with what goes at another pace than at first under this plan.
        self.on_drift: Callable[[str], None] = self._say
        self._fingerprint = ModuleFingerprint(module)
        self._optimizers: list[Optimizer] = []
        self._buffers_differ = True
        self._failed = False

    @property
    def plan(self) -> Plan:
        """The plan that is being carried out."""
        return self._reducer.plan

    def manage(self, optimizer: Optimizer) -> None:
        """Let the plan say when this optimizer's updates are applied; call it for a second optimizer of the model."""
        agree(describe_optimizer(optimizer), self._group)
        defer_steps(optimizer, self._reducer)
        self._optimizers.append(optimizer)

    def adopt(self, plan: Plan) -> None:
        """Go over to another plan, between two iterations, all ranks together.

        Parameters that it does not know, because they are frozen or were
        unfrozen since, go out in one more message.
        """
        plan = extend_plan(plan, self._parameters_taking_part)
        agree(describe_model(plan, self.module, self._parameters_taking_part), self._group)
        before = self._reducer
        before.close()
        self._reducer = self._make_reducer(plan)
        self._reducer.forwards, self._reducer.enabled = before.forwards, before.enabled
        self._drift = DriftMonitor(self._everyones)
        for optimizer in self._optimizers:
            defer_steps(optimizer, self._reducer)

    def _make_reducer(self, plan: Plan) -> Reducer:
        return Reducer(
            plan,
            self._parameters_taking_part,
            self._group,
            self._send,
            self._watchdog,
            self._checks,
            self.gradient_as_bucket_view,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_forward()
        tracer = self._reducer.tracer
        if tracer:
            tracer.switch("forward")
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self._failed = self._reducer.enabled and torch.is_grad_enabled() and self._group.size() > 1
            raise
        self._end_forward(output)
        return output

    @torch._disable_dynamo  # type: ignore[untyped-decorator, attr-defined]
    def _begin_forward(self) -> None:
        reducer, training = self._reducer, torch.is_grad_enabled()
        if self._failed:
            raise RankError(
                "the last forward pass raised an exception, and other ranks may have gone on: "
                "call abandon() on all of them, or start again from a checkpoint"
            )
        if training and self._fingerprint.changed():
            reducer = self._changed()
        reducer.begin_forward()
        if reducer.enabled and training and (change := self._drift.pass_begins(reducer)):
            self.on_drift(change)
            reducer = self._reducer
        if self._fingerprint.compiled():
            reducer.settle()  # compiled code takes parameters as they are
        if self.broadcast_buffers and self._buffers_differ:
            self._broadcast(list(self.module.buffers()), self._buffer_group)
        # As DDP has it: only a forward pass whose gradients will be averaged leaves buffers to be made equal.
        self._buffers_differ = reducer.enabled and training
        reducer.forwards += self._buffers_differ

    @torch._disable_dynamo  # type: ignore[untyped-decorator, attr-defined]
    def _end_forward(self, output: Any) -> None:
        if self._buffers_differ:
            self._reducer.backward_scope.expect(output)
        if self._reducer.tracer:
            self._reducer.tracer.watch(output)

    def _everyones(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        try:
            return gather_numbers(numbers, self._buffer_group, self._watchdog.wait)
        except RuntimeError as error:
            raise self._watchdog.failure("comparing paces before a forward pass", error) from error

    def _say(self, change: str) -> None:
        if self._group.rank() == 0:
            _log.warning("since the first passes under the plan %s, %s; plan anew", self.plan.scheduler, change)

    def _changed(self) -> Reducer:
        """The module is not what it was: its new parameters take part from now on."""
        before = self._parameters_taking_part
        self._parameters_taking_part = participating_parameters(self.module, before)
        self._fingerprint = ModuleFingerprint(self.module)
        if len(self._parameters_taking_part) > len(before):
            self.adopt(self.plan)
            self._broadcast([p for n, p in self._parameters_taking_part.items() if n not in before], self._group)
        return self._reducer

    def abandon(self) -> None:
        """Skip a training step in which some rank's forward or backward pass raised; all ranks call it together.

        Call it before `optimizer.step()`, once the ranks know of each other that
        one has failed. Gradients of the step are dropped, on every rank.
        """

        def furthest(n: int) -> int:
            number = torch.tensor(n, device=group_device(self._group))
            self._watchdog.wait(dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True))
            return int(number.item())

        abandon(self._reducer, furthest)
        self._failed = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients of this rank alone, as in DDP."""
        before, self._reducer.enabled = self._reducer.enabled, False
        try:
            yield
        finally:
            self._reducer.enabled = before

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is read."""
        self._reducer.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `nn.Module`; gradients that are still to be used are dropped after it."""
        drop_gradients(self.parameters(), self._reducer, set_to_none)

    @property
    def process_group(self) -> Any:
        """The group that the messages go through; no collective but those of the plan may be in flight on it."""
        return self._group

    def set_tracer(self, tracer: Tracer | None) -> None:
        """From here on, this tracer writes down what happens (None: nobody does)."""
        self._reducer.tracer = tracer

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

    def _broadcast(self, tensors: list[torch.Tensor], group: Any) -> None:
        try:
            broadcast_tensors(tensors, group, self._watchdog.wait)
        except RuntimeError as error:
            raise self._watchdog.failure("making buffers equal before a forward pass", error) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy (deepcopy, pickle, `torch.optim.swa_utils.AveragedModel`) is of this process alone."""
        self.flush()
        return Undistributed, (self.module, self.training)


class Undistributed(nn.Module):
    """A copy of a `DistributedModel`: the same names, and no other ranks."""

    def __init__(self, module: nn.Module, training: bool = True) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _release(groups: list[Any], watchdog: Watchdog) -> None:
    """The model is gone: end its groups, unless something failed in them, for that could take all of their time."""
    known = dist.distributed_c10d._world.pg_map
    for group in groups:
        if group.name() == "gloo" and group in known and not watchdog.failed:
            dist.destroy_process_group(group)


def _standing(of: weakref.ref[DistributedModel]) -> Callable[[], str]:
    def say() -> str:
        model = of()
        reducer = getattr(model, "_reducer", None)
        return standing(reducer) if reducer is not None else "is between two models"

    return say


def wrap_model(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | str | os.PathLike[str],
    *,
    process_group: Any = None,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = False,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
) -> tuple[DistributedModel, Optimizer]:
    """Train `model` on all ranks of a process group, its gradients sent as `plan` says.

    `plan` is a `Plan` or the path of a plan file. Returns the wrapped model and
    the same optimizer. `gradient_as_bucket_view` saves the memory of one copy of
    the gradients, and has DDP's conditions: who keeps a `.grad` from one step to
    the next sees it overwritten. `debug` asks for checks at run time
    (`legato.pytorch.runtime.debug`; None: as `$LEGATO_DEBUG` says), `flight_dir` says
    where the record of the last messages goes when something fails
    (`legato.pytorch.network.watchdog`).

    Raises `PlanError` for a plan of another model, and `RankError`, on every
    rank, when the ranks do not have the same model, plan and optimizer.
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
    wrapped = DistributedModel(
        model,
        plan,
        group,
        broadcast_buffers=broadcast_buffers,
        gradient_as_bucket_view=gradient_as_bucket_view,
        debug=debug,
        flight_dir=flight_dir,
    )
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
