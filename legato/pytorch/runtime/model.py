"""The wrapper of a model that replaces `DistributedDataParallel`."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer

from legato.core import files
from legato.core.errors import InputError, RankError
from legato.core.plan import Plan, Shard
from legato.core.timeline import Timeline
from legato.pytorch._private import (
    anybody_sends,
    check_comm_hook,
    comm_hooks,
    common_rank,
    compiled_by,
    compiled_module,
    compiles_with,
    group_is_alive,
    group_timeout,
    has_forward_hooks,
    is_compiled,
    is_joining,
    is_left_to_eager_mode,
    is_whole_frame,
    keeps_its_reducer,
    moved_inputs,
    not_compiled,
    on_compilation,
    remove_reducer,
    share_final_model,
)
from legato.pytorch.compiled.compiler import GraphCompiler
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
from legato.pytorch.parameters import (
    ModuleFingerprint,
    extend_plan,
    participating_parameters,
    sparse_parameters,
    trained_parameters,
)
from legato.pytorch.recording.clock import clock_for
from legato.pytorch.runtime.comm_hook import can_be_hooked
from legato.pytorch.runtime.debug import COMPARED, DebugChecks, chosen_checks
from legato.pytorch.runtime.deferred import defer_steps, drop_gradients
from legato.pytorch.runtime.drift import DriftMonitor
from legato.pytorch.runtime.graph_sender import GraphSender, sender_of
from legato.pytorch.runtime.readers import Readers
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sharded_state import take_state, whole_state
from legato.pytorch.runtime.sharding import check_shardable
from legato.pytorch.runtime.tournament import Measured, Tournament
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["DistributedModel", "wrap_model"]

_log = logging.getLogger("legato")


class DistributedModel(nn.parallel.DistributedDataParallel):
    """A `DistributedDataParallel` whose gradients are averaged as a `Plan` says.

    It has DDP's arguments, attributes and keys of `state_dict()`, and what knows
    DDP knows it. In place of DDP's own reducer it has legato's, which sends the
    messages of the plan. Parameters, gradients and the optimizer's state are up
    to date whenever they are read.

    Created by `legato.distribute`, on all ranks of `process_group` together.
    Raises `RankError`, on every rank, if they do not have the same model and plan.
    """

    reducer: Reducer  # type: ignore[assignment]  # legato's, in place of DDP's

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        process_group: Any = None,
        *,
        debug: bool | str | None = None,
        flight_dir: str | os.PathLike[str] | None = None,
        error_feedback: bool = False,
        **options: Any,
    ) -> None:
        for name in ("mixed_precision", "delay_all_reduce_named_params"):
            if options.get(name) is not None:
                raise InputError(f"{name}: not supported")
        groups = _Groups(process_group)
        parameters = trained_parameters(module)
        agree(describe_model(plan, module, parameters), groups.messages)
        super().__init__(module, process_group=groups.ranks, **options)
        self._carry_out(plan, groups, debug, flight_dir, error_feedback)

    @classmethod
    def of(cls, ddp: Any, plan: Plan, **options: Any) -> DistributedModel:
        """Turn a `DistributedDataParallel` into a `DistributedModel` that carries out a plan; it stays one object."""
        if reason := keeps_its_reducer(ddp):
            raise InputError(f"the DistributedDataParallel uses {reason}, which is not supported")
        if comm_hooks(ddp):
            _check_hookable(plan)
        groups = _Groups(ddp.process_group)
        agree(describe_model(plan, ddp.module, trained_parameters(ddp.module)), groups.messages)
        ddp.__class__ = cls
        ddp._carry_out(plan, groups, **options)
        return cast(DistributedModel, ddp)

    def _carry_out(
        self,
        plan: Plan,
        groups: _Groups,
        debug: bool | str | None = None,
        flight_dir: str | os.PathLike[str] | None = None,
        error_feedback: bool = False,
    ) -> None:
        """Take the place of DDP's reducer."""
        remove_reducer(self)
        self._error_feedback = error_feedback
        self._group, self._buffer_group = groups.messages, groups.buffers
        self._parameters_taking_part = trained_parameters(self.module)
        self._watchdog = Watchdog(
            self._group, FlightRecorder(self._group.rank(), flight_dir), _status(weakref.ref(self))
        )
        checks = chosen_checks(debug)
        timeout = group_timeout(self._group, group_device(self._group))
        self._checks = DebugChecks(checks, self._group, timeout) if set(checks) & set(COMPARED) else None
        self._readers = Readers(strict="reads" in checks)
        weakref.finalize(self, _release, [self._group, self._buffer_group], self._watchdog).atexit = False
        self._channel = channel_for(self._group)
        self._optimizers: list[Optimizer] = []
        self.reducer = self._make_reducer(plan)
        self._drift = DriftMonitor(self._gather_numbers)
        #: Called on all ranks, between two iterations, with a description of what has slowed down or sped up.
        self.on_drift: Callable[[str], None] = self._log_drift
        self._fingerprint = ModuleFingerprint(self.module)
        whole_pass = partial(is_whole_frame, function=compiled_module(self.module).forward)
        self._compiler = GraphCompiler(sender_of, whole_pass)
        self._buffers_differ = True
        self.in_graphs = False  # whether the last forward pass was compiled, or parts of it
        self._failed = False
        self.observed = False  # whether `plan="auto"` has not decided yet: it watches the steps, or tries plans
        #: The plans that `compete` has tried, by the names of their schedulers, and what was measured of each.
        self.tournament: dict[str, Measured] = {}
        self._tournament: Tournament | None = None

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self.reducer.plan

    def manage(self, optimizer: Optimizer) -> None:
        """Defer this optimizer's updates as the plan says; call it on all ranks for a second optimizer of the model.

        Raises `RankError`, on every rank, if its settings differ between ranks.
        """
        agree(describe_optimizer(optimizer), self._group)
        if optimizer not in self._optimizers:
            if self.plan.shard != "none":
                check_shardable(optimizer, self._optimizers)
            self._optimizers.append(optimizer)
        if self.plan.shard == "none":
            defer_steps(optimizer, self.reducer)
        else:
            self._switch(self.plan)  # its parameters have messages of their own from now on

    def adopt(self, plan: Plan) -> None:
        """Switch to another plan, between two iterations, on all ranks together.

        Parameters that it does not contain, because they were frozen when it was
        made, are sent in one more message. Raises `PlanError` for a plan of
        another model, and `RankError` if the ranks have different plans.
        """
        plan = extend_plan(plan, self._parameters_taking_part)
        agree(describe_model(plan, self.module, self._parameters_taking_part), self._group)
        self._switch(plan)

    def _switch(self, plan: Plan) -> None:
        """Switch to a plan that all ranks have."""
        plan = extend_plan(plan, self._parameters_taking_part)
        if self.hooked:
            _check_hookable(plan)
        if plan.shard != "none":
            self._check_shardable()
        before = self.reducer
        before.settle()
        states = [whole_state(optimizer, before) for optimizer in self._optimizers]
        before.close()
        self.reducer = self._make_reducer(plan)
        self.reducer.forwards = before.forwards
        GraphSender(self.reducer).learn_from(before)
        self._drift = DriftMonitor(self._gather_numbers)
        for optimizer, state in zip(self._optimizers, states, strict=True):
            defer_steps(optimizer, self.reducer)
            take_state(optimizer, state, self.reducer.shards)

    def _check_shardable(self) -> None:
        for i, optimizer in enumerate(self._optimizers):
            check_shardable(optimizer, self._optimizers[:i])
        if sparse := sparse_parameters(self.module):
            raise InputError(f"shard: the gradients of {next(iter(sparse))!r} are sparse")

    def compete(self, plans: Sequence[Plan]) -> None:
        """Let plans take turns from now on, and stay with the fastest; call it between two iterations, on all ranks.

        The first of equals wins. `observed` is True meanwhile, and `tournament`
        then says what was measured. Raises what `adopt` raises.
        """
        for plan in plans:
            whole = extend_plan(plan, self._parameters_taking_part)
            agree(describe_model(whole, self.module, self._parameters_taking_part), self._group)
        clock = clock_for(next(iter(self._parameters_taking_part.values())).device)
        self._tournament = Tournament(plans, self._gather_numbers, clock)
        self.observed = True
        self._switch(plans[0])
        self._step_begins(self._tournament)

    def _step_begins(self, tournament: Tournament) -> None:
        """Go on with the plan whose turn it is, or stay with the winner."""
        before = tournament.plan
        goes_on = tournament.step_begins()
        if tournament.plan is not before:
            self._switch(tournament.plan)
        if not goes_on:
            self._end(tournament)

    def _end(self, tournament: Tournament) -> None:
        self.tournament, self._tournament, self.observed = tournament.measured, None, False
        if self._group.rank() == 0:
            found = ", ".join(f"{name} {m.seconds * 1e3:.3g} ms" for name, m in self.tournament.items())
            _log.info("the plan %s stays%s", self.plan.scheduler, f"; median step of each: {found}" if found else "")

    def _make_reducer(self, plan: Plan) -> Reducer:
        with _no_garbage_collection():  # thousands of small objects that all stay
            reducer = Reducer(
                plan,
                self._parameters_taking_part,
                self._group,
                self._channel,
                self._watchdog,
                self._checks,
                self.gradient_as_bucket_view,
                self._readers,
                _sends(weakref.ref(self)),
                read_elsewhere=not getattr(self.module, "reads_no_gradients", False),
                sparse=sparse_parameters(self.module),
                static_graph=self.static_graph,
                optimizers=self._optimizers,
                error_feedback=self._error_feedback,
            )
        for hook, state in comm_hooks(self):
            reducer.use_comm_hook(state, hook)
        return reducer

    @not_compiled(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # All but the module's own pass is in functions that dynamo leaves alone.
        compiled = compiled_by(sys._getframe())
        args, kwargs, scope = self._begin_forward(compiled, args, kwargs)
        output = None
        try:
            output = self.module(*args, **kwargs)
        finally:
            self._end_forward(scope, output)
        return output

    @not_compiled  # type: ignore[untyped-decorator]
    def _begin_forward(self, compiled: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare for a forward pass: return its inputs, and a context in which it runs, to be closed at its end."""
        reducer, training = self.reducer, torch.is_grad_enabled()
        Join.notify_join_context(self)
        if reducer.closed:
            raise RankError("the model was distributed again; its former wrapper does not average gradients any more")
        if self._failed:
            raise RankError(
                "the last forward pass raised an exception, and other ranks may have gone on: "
                "call abandon() on all of them, or start again from a checkpoint"
            )
        if training and self._fingerprint.changed():
            reducer = self._module_changed()
        if training and reducer.shards is not None and any(map(reducer.shards.has_changed, self._optimizers)):
            for optimizer in self._optimizers:
                agree(describe_optimizer(optimizer), self._group)
            self._switch(self.plan)
            reducer = self.reducer
        reducer.begin_forward()
        if reducer.enabled and training and not is_joining(self):
            self._pass_begins(reducer)
            reducer = self.reducer
        in_graphs = bool(compiled) or self._fingerprint.compiled()
        if in_graphs:  # compiled code reads parameters without their gates
            if self._may_be_one_graph(compiled):
                GraphSender(reducer).hide_gates()
            else:
                self._readers.never()
                reducer.settle()
        if not (training and self.module.training):
            reducer.settle()
        joining = is_joining(self)
        if self.broadcast_buffers and self._buffers_differ:
            source = common_rank(self, True) if joining else 0
            self._broadcast(self._shared_buffers(), self._buffer_group, source)
        if joining:
            anybody_sends(self, False)
        # As in DDP, buffers are broadcast only after a forward pass whose gradients are averaged.
        self._buffers_differ = reducer.enabled and training
        reducer.forwards += self._buffers_differ
        args, kwargs = moved_inputs(self, args, kwargs)
        if reducer.tracer:
            reducer.tracer.switch("forward")
        scope = ExitStack()
        scope.enter_context(compiles_with(self._compiler, self))
        self._compiler.ran.clear()
        self.in_graphs = in_graphs
        if in_graphs:
            scope.enter_context(on_compilation(reducer.settle))
        elif training and self.module.training:
            scope.enter_context(reducer.watch())
        return args, kwargs, scope

    def _may_be_one_graph(self, compiled: str) -> bool:
        """Whether nothing but compiled code runs in the forward pass, if it has no graph breaks."""
        inner = compiled_module(self.module)
        if compiled == "caller" or not (compiled or is_compiled(self.module)):
            return False
        hooked = has_forward_hooks(self.module) or has_forward_hooks(inner)
        return not hooked and hasattr(inner.forward, "__code__") and not is_left_to_eager_mode(inner.forward)

    @not_compiled  # type: ignore[untyped-decorator]
    def _end_forward(self, scope: ExitStack, output: Any) -> None:
        """Leave the context of a forward pass, which ends or has raised an exception, and expect its backward pass."""
        error = sys.exception()
        scope.__exit__(*sys.exc_info())
        if error is not None:
            self._failed = self.reducer.enabled and torch.is_grad_enabled() and self._group.size() > 1
            GraphSender(self.reducer).show_gates()
            return
        if self.in_graphs and torch.is_grad_enabled() and self.module.training:
            self._readers.note_graphs(self._compiler.ran)
        if waiting := GraphSender(self.reducer).show_gates():
            self._readers.never()
            raise RankError(
                f"{waiting}: its update waits for the compiled graph that read it before, which did not run this time; "
                "use a plan without forward overlap"
            )
        if self._buffers_differ:
            self.reducer.backward_scope.expect(output)
        if self.reducer.tracer:
            self.reducer.tracer.end_forward(output)

    def _pass_begins(self, reducer: Reducer) -> None:
        """Before a pass whose gradients will be sent: let another plan have its turn, or notice a change of pace."""
        if self._tournament is not None:
            if reducer.stepped:  # else another pass of the same step
                reducer.stepped = False
                self._step_begins(self._tournament)
        elif not self.observed and (change := self._drift.pass_begins(reducer)):
            self.on_drift(change)

    def _gather_numbers(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        try:
            return gather_numbers(numbers, self._buffer_group, self._watchdog.wait)
        except RuntimeError as error:
            raise self._watchdog.failure("comparing times before a forward pass", error) from error

    def _log_drift(self, change: str) -> None:
        if self._group.rank() == 0:
            _log.warning(
                "since the first passes under the plan %s, %s; consider replanning", self.plan.scheduler, change
            )

    def _module_changed(self) -> Reducer:
        """Average the gradients of new parameters too from now on; return the reducer that does so."""
        before = self._parameters_taking_part
        self._parameters_taking_part = participating_parameters(self.module, before)
        self._fingerprint = ModuleFingerprint(self.module)
        if len(self._parameters_taking_part) > len(before):
            self.adopt(self.plan)
            self._broadcast([p for n, p in self._parameters_taking_part.items() if n not in before], self._group)
        return self.reducer

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, over the gradients of all parameters, sharded or not.

        Call it on all ranks between the backward pass and `optimizer.step()`.
        Returns the norm from before. Raises `RankError` if sharded gradients were not averaged since the last step.
        """
        if self.reducer.shards is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        return self.reducer.shards.clip_norm(float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does, over the gradients of all parameters, sharded or not."""
        shards = self.reducer.shards
        found = self.parameters() if shards is None else shards.averaged()
        nn.utils.clip_grad_value_(found, clip_value, foreach)

    def abandon(self) -> None:
        """Skip a training step whose forward or backward pass raised an exception on some rank.

        Call it on all ranks, before `optimizer.step()`; the ranks have to tell
        each other first that one has failed. It drops the gradients of the step
        on every rank.
        """

        def furthest(n: int) -> int:
            number = torch.tensor(n, device=group_device(self._group))
            self._watchdog.wait(dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group, async_op=True))
            return int(number.item())

        self.reducer.abandon(furthest)
        self._failed = False

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Send the buckets with `hook(state, bucket)`, as in DDP; only one hook can be registered.

        Raises `InputError` if the plan has messages that a hook cannot send:
        halves, parts of tensors, or collectives made of steps. With
        `plan="auto"`, only plans without them are chosen from then on; a
        tournament ends with its first plan.
        """
        check_comm_hook(self, hook)
        if self.hooked:
            raise InputError("a communication hook is registered already (expected at most one)")
        if self._tournament is not None:
            self._switch(self._tournament.plans[0])
            self._end(self._tournament)
        _check_hookable(self.plan)
        self.flush()
        comm_hooks(self).append((hook, state))
        self.reducer.use_comm_hook(state, hook)

    def join_hook(self, **kwargs: Any) -> Any:
        """What a rank does in `join()`, as in DDP, when it has no batches left: send zeros, as long as others train.

        Raises `InputError` for `divide_by_initial_world_size=False`, and while `plan="auto"` has not decided yet.
        """
        if not kwargs.get("divide_by_initial_world_size", True):
            raise InputError("join(divide_by_initial_world_size=False) is not supported: gradients are divided as sent")
        if self.reducer.shards is not None:
            raise InputError("join() under a sharded plan: a rank without batches would still have to update its shard")
        if self.observed:
            raise InputError(
                'join() while plan="auto" tries plans: give a plan, or wait until `model.observed` is False'
            )
        return _JoinHook(self)

    def shadow_iteration(self) -> None:
        """Take part in an iteration of the other ranks, without a batch."""
        if self.broadcast_buffers and self._buffers_differ:
            self._broadcast(self._shared_buffers(), self._buffer_group, common_rank(self, False))
        self._buffers_differ = anybody_sends(self, True)
        if self._buffers_differ:
            self.reducer.send_zeros()

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is read."""
        self.reducer.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as `nn.Module` does; gradients of a deferred step are zeroed after their use."""
        drop_gradients(self.parameters(), self.reducer, set_to_none)

    @property
    def hooked(self) -> bool:
        """Whether a communication hook sends the buckets."""
        return bool(comm_hooks(self))

    @property
    def message_group(self) -> Any:
        """The group that carries the messages; while any are in flight, no other collective may run on it."""
        return self._group

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Record what happens from now on with this tracer; None ends recording."""
        self.reducer.tracer = tracer

    @contextmanager
    def trace(self) -> Iterator[list[Timeline]]:
        """Measure the iterations inside: the list has one timeline for each when the context ends."""
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

    def _shared_buffers(self) -> list[torch.Tensor]:
        return [b for name, b in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def _broadcast(self, tensors: list[torch.Tensor], group: Any, source: int = 0) -> None:
        try:
            broadcast_tensors(tensors, group, self._watchdog.wait, source)
        except RuntimeError as error:
            raise self._watchdog.failure("making buffers equal before a forward pass", error) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy (deepcopy, pickle, `torch.optim.swa_utils.AveragedModel`) as a model of this process alone."""
        self.flush()
        return Undistributed, (self.module, self.training)


class _JoinHook(JoinHook):
    """In `join()`, on a rank that has no batches left."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model

    def main_hook(self) -> None:
        self._model.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters of one that has trained to the end."""
        self._model.flush()
        share_final_model(self._model, is_last_joiner)


class Undistributed(nn.Module):
    """A copy of a `DistributedModel`, with the same parameter names, that does not communicate."""

    def __init__(self, module: nn.Module, training: bool = True) -> None:
        super().__init__()
        self.module = module
        self.training = training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _check_hookable(plan: Plan) -> None:
    if not can_be_hooked(plan):
        raise InputError(
            f"the plan {plan.scheduler} sends halves, parts of tensors, or rounded ones, which a hook cannot: "
            "use a plan without them"
        )


class _Groups:
    """The ranks that train together, and two groups of theirs that nothing else uses.

    So no other collective comes between two messages of the plan.
    """

    def __init__(self, process_group: Any) -> None:
        self.ranks = process_group if process_group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(self.ranks)
        timeout = group_timeout(self.ranks, group_device(self.ranks))
        with batch_policy_threads():
            self.messages, self.buffers = dist.new_group(ranks, timeout), dist.new_group(ranks, timeout)


def _release(groups: list[Any], watchdog: Watchdog) -> None:
    """Destroy the groups of a model that was deleted, unless a collective failed: that could take their timeout."""
    for group in groups:
        if group.name() == "gloo" and group_is_alive(group) and not watchdog.failed:
            dist.destroy_process_group(group)


def _status(of: weakref.ref[DistributedModel]) -> Callable[[], str]:
    def status() -> str:
        reducer: Reducer | None = getattr(of(), "reducer", None)
        return reducer.status() if reducer is not None else "is between two models"

    return status


def _sends(of: weakref.ref[DistributedModel]) -> Callable[[], bool]:
    def sends() -> bool:
        model = of()
        return model is not None and bool(model.require_backward_grad_sync)

    return sends


def wrap_model(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | str | os.PathLike[str],
    *,
    shard: Shard = "none",
    process_group: Any = None,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    error_feedback: bool = False,
    **options: Any,
) -> tuple[DistributedModel, Optimizer]:
    """Wrap a model so that its gradients are averaged over all ranks as `plan` says.

    This is `legato.distribute` for a plan that exists already, and takes the
    same arguments; `plan` is a `Plan` or the path of a plan file. Returns the
    wrapped model and the same optimizer.

    Raises `InputError` if no process group is initialized, the model is wrapped
    already, or the optimizer has none of its parameters; `PlanError` for a plan
    of another model; `RankError`, on every rank, if the ranks do not have the
    same model, plan and optimizer.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    if isinstance(model, DistributedModel):
        raise InputError("the model is already a DistributedModel (expected the module inside it)")
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"optimizer: {type(optimizer).__name__} (expected a torch.optim.Optimizer)")
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if ddp and (options or process_group is not None):
        name = next(iter(options), "process_group")
        raise InputError(f"{name}: the model is a DistributedDataParallel already, and keeps its own arguments")
    module: Any = model.module if ddp else model
    _check_parameters(trained_parameters(module), optimizer)
    if not isinstance(plan, Plan):
        plan = files.read(Path(plan), Plan)
    if shard != plan.shard:
        plan = plan.sharded(shard, {name: i for i, name in enumerate(trained_parameters(module))})
    if plan.shard != "none":
        check_shardable(optimizer)
        if sparse_parameters(module):
            raise InputError(f"shard: {plan.shard!r}, but {next(iter(sparse_parameters(module)))} has sparse gradients")
    if ddp:
        wrapped = DistributedModel.of(model, plan, debug=debug, flight_dir=flight_dir, error_feedback=error_feedback)
    else:
        options |= {"debug": debug, "flight_dir": flight_dir, "error_feedback": error_feedback}
        wrapped = DistributedModel(model, plan, process_group, **options)
    wrapped.manage(optimizer)
    return wrapped, optimizer


def _check_parameters(parameters: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InputError(f"parameter {name!r} is lazy: run a forward pass before the model is distributed")
    if not {id(p) for g in optimizer.param_groups for p in g["params"]} & {id(p) for p in parameters.values()}:
        raise InputError("the optimizer has none of the model's parameters")
