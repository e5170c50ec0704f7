"""legato on a `DistributedDataParallel`: each pass is DDP's or legato's.

[Note: passes] The user's model stays a stock `DistributedDataParallel`. legato is
attached to it by two forward hooks. Where a forward pass begins whose gradients DDP
would send, and nothing of a pass before it is still to be sent, it is decided whose
passes the next ones are:

- *DDP's*: nothing is done; its reducer sends. So are the first passes, in which legato
  looks at the model (`ddp_passes`), the turns of DDP in a tournament, and all passes
  from the first one on that uses what only DDP does (`own_feature`, `ModuleFingerprint`).
- *legato's*: DDP's forward pass is told to send nothing (`SilentForward`), and the
  gradients go to a `Reducer`, which carries out the plan. DDP's own reducer is put
  away, with its buckets, and comes back as soon as anything asks for it (`IdleReducer`).

Everything that the decision follows from is known to all ranks: the plan, what the
program does with the model, and what the ranks tell each other after the first passes.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from legato.core import files
from legato.core.errors import InputError, RankError
from legato.core.plan import Plan, Shard
from legato.core.text import one_line
from legato.core.timeline import Timeline
from legato.pytorch._private import (
    JOIN_BEGINS,
    IdleReducer,
    SilentForward,
    compiled_by,
    compiled_module,
    compiles_two_ways,
    has_builtin_hook,
    has_forward_hooks,
    is_compiled,
    is_joining,
    is_left_to_eager_mode,
    is_whole_frame,
    not_compiled,
    on_compilation,
    own_feature,
    steps_in_backward,
)
from legato.pytorch.compiled.compiler import GraphCompiler
from legato.pytorch.network.agreement import (
    agree,
    describe_model,
    describe_optimizer,
    first_said,
)
from legato.pytorch.network.channel import check_message
from legato.pytorch.parameters import ModuleFingerprint, sparse_parameters, trained_parameters
from legato.pytorch.recording.clock import clock_for
from legato.pytorch.runtime import gate
from legato.pytorch.runtime.buckets import check_plan
from legato.pytorch.runtime.ddp_passes import DdpPasses
from legato.pytorch.runtime.debug import chosen_checks
from legato.pytorch.runtime.deferred import defer_steps, is_known, restore_steps
from legato.pytorch.runtime.drift import DriftMonitor
from legato.pytorch.runtime.graph_sender import GraphSender
from legato.pytorch.runtime.messages import Connection
from legato.pytorch.runtime.readers import Readers
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sharded_state import take_state, whole_state
from legato.pytorch.runtime.sharding import Shards, check_shardable
from legato.pytorch.runtime.tournament import Measured, Tournament
from legato.pytorch.runtime.tracing import Tracer

__all__ = ["Attachment", "Hook", "attach", "attachment", "attachment_of", "find_ddp", "innermost_optimizer", "is_ddps"]

#: The number of backward passes that send and are DDP's, before the first of legato's.
FIRST_PASSES = 2


class Attachment:
    """legato on one `DistributedDataParallel`, on all of its ranks together.

    `legato.attachment(model)` returns that of a model. Parameters, gradients and the
    optimizer's state are up to date whenever they are read.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plan: Plan,
        *,
        debug: bool | str | None = None,
        flight_dir: str | os.PathLike[str] | None = None,
        error_feedback: bool = False,
        current: Sequence[str] = (),
    ) -> None:
        self.ddp: Any = ddp
        self.module: nn.Module = ddp.module
        self._parameters = trained_parameters(ddp.module)
        self._debug = chosen_checks(debug)
        self._group: Any = ddp.process_group
        former = self._former_attachments()
        shared = any(other.module is not self.module for other in former)
        reason = "it has a parameter of another model" if shared else self._model_reason()
        #: Why passes are DDP's for good; empty if they are not.
        self.reason = first_said(reason, self._group).partition(": ")[2]
        if not self.reason:
            self._check(plan)
        self._error_feedback, self._flight_dir = error_feedback, flight_dir
        self._readers = Readers(
            self._is_own, current, not getattr(self.module, "reads_no_gradients", False), strict="reads" in self._debug
        )
        self._optimizers: list[Optimizer] = []
        self._plan = plan
        #: What carries the plan out; None while passes are DDP's.
        self.reducer: Reducer | None = None
        self.stepped = False
        self._said: set[str] = set()
        self._fingerprint = ModuleFingerprint(self.module)
        # Passes that are DDP's first. Under a sharded plan none is, which saves memory, unless the graph is static.
        self._first = FIRST_PASSES if plan.shard == "none" or ddp.static_graph else 0
        self._ddps: DdpPasses | None = self._watch_ddp()  # while passes are DDP's and others may follow
        self._idle = IdleReducer(ddp, self._ddp_is_asked, self._prepare_backward)
        self._silent = SilentForward(ddp, self._module_begins, self._module_ends)
        self._scope = ExitStack()
        self._tracer: Tracer | None = None
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are known to contain the model
        self._drift = DriftMonitor(self._gather_numbers)
        #: Called on all ranks, between two iterations, with a description of what has slowed down or sped up.
        self.on_drift: Callable[[str], None] = self._log_drift
        self._compiler = GraphCompiler(
            _sender_of, partial(is_whole_frame, function=compiled_module(self.module).forward)
        )
        self._methods_back: Callable[[], Any] | None = None  # puts back what was replaced (`gate.methods`)
        self._ours = False  # whether the forward pass that runs is legato's
        self._trained = False  # whether the last forward pass was in training mode
        self._nested = 0  # forward passes inside it
        self.in_graphs = False  # whether the last forward pass was compiled, or parts of it
        self.observed = False  # whether `plan="auto"` has not decided yet: it watches the steps, or tries plans
        #: What watches the steps for `plan="auto"`.
        self.observer: Any = None
        #: The plans that `compete` has tried, by the names of their schedulers, and what was measured of each.
        self.tournament: dict[str, Measured] = {}
        self._tournament: Tournament | None = None
        self._hooks = [
            ddp.register_forward_pre_hook(Hook(self._forward_begins, self), prepend=True),
            ddp.register_forward_hook(Hook(self._forward_failed, self), prepend=True, always_call=True),
            ddp.register_forward_hook(Hook(self._forward_ended, self), prepend=True),  # before the other
        ]
        self._compiles_one_way = compiles_two_ways(ddp, self._compiler, lambda: self._ours)
        for other in former:
            if other.module is self.module:
                other.detach()
            else:  # passes are DDP's in both models
                other._leave_to_ddp(self.reason)
        for parameter in self._parameters.values():
            _attachments[parameter] = weakref.ref(self)
        if self.reason:
            self._leave_to_ddp(self.reason)

    # ---- what users do ---------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan in use, as far as passes are not DDP's (`reason`)."""
        return self._plan

    def manage(self, optimizer: Any) -> None:
        """Defer this optimizer's updates as the plan says; call it on all ranks, for each optimizer of the model.

        An optimizer that is not torch's, or has none of the model's parameters, is left alone.
        Raises `RankError`, on every rank, if its settings differ between ranks.
        """
        if self.reason:
            return
        optimizer = innermost_optimizer(optimizer)
        if not isinstance(optimizer, Optimizer) or not is_known(optimizer):
            self.say(f"{type(optimizer).__name__} is not an optimizer of torch: its updates do not wait")
            return
        mine = {id(p) for p in self._parameters.values()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.say(f"{type(optimizer).__name__} has none of the model's parameters: its updates do not wait")
            return
        agree(describe_optimizer(optimizer), self._group)
        if not any(optimizer is known for known in self._optimizers):
            if self._plan.shard != "none":
                check_shardable(optimizer, self._optimizers)
            self._optimizers.append(optimizer)
        if not self._is_idle:
            defer_steps(optimizer, self)
        if self._shards is not None:
            self._carry_out(self._plan)  # its parameters have messages of their own from now on

    def begin(self) -> None:
        """Carry the plan out from the first pass on, if no passes are to be DDP's first."""
        if not self._first and self.reducer is None and not (self.reason or is_ddps(self._plan) or self._pass_reason()):
            self._carry_out(self._plan)

    def adopt(self, plan: Plan) -> None:
        """Switch to another plan, between two iterations, on all ranks together.

        Raises `PlanError` for a plan of another model, and `RankError` if the ranks have different plans.
        """
        self._check(plan)
        if plan.shard != "none":
            for i, optimizer in enumerate(self._optimizers):
                check_shardable(optimizer, self._optimizers[:i])
        self._plan = plan
        if self.reducer is not None:
            self._carry_out(plan)
        elif self._ddps is None and not self.reason:
            self._ddps = self._watch_ddp()
            self._compiles_one_way = compiles_two_ways(self.ddp, self._compiler, lambda: self._ours)

    def compete(self, plans: Sequence[Plan]) -> None:
        """Let plans take turns from now on, and stay with the fastest; call it between two iterations, on all ranks.

        DDP's own plan is carried out by DDP. Of plans that are equally fast, the first wins. `observed` is True
        meanwhile, and `tournament` then says what was measured. Raises what `adopt` raises.
        """
        for plan in plans:
            self._check(plan)
        clock = clock_for(next(iter(self._parameters.values())).device)
        self._tournament = Tournament(plans, self._gather_numbers, clock)
        self.observed, self.stepped = True, False
        self._next_turn(self._tournament)

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is read."""
        if self.reducer is not None:
            self.reducer.settle()

    def detach(self) -> None:
        """End legato's part, between two iterations, on all ranks: from now on the model is DDP's alone."""
        self._carry_out(None)
        self._rest()
        for hook in self._hooks:
            hook.remove()
        self._optimizers.clear()

    @property
    def process_group(self) -> Any:
        """The process group of the model's ranks."""
        return self._group

    @property
    def _shards(self) -> Shards | None:
        return None if self.reducer is None else self.reducer.shards

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Record what happens in legato's passes from now on with this tracer; None ends recording."""
        self._tracer = tracer
        if self.reducer is not None:
            self.reducer.messages.tracer = tracer

    @contextmanager
    def trace(self) -> Iterator[list[Timeline]]:
        """Measure the iterations inside: the list has one timeline for each of legato's when the context ends."""
        found: list[Timeline] = []
        self.flush()
        tracer = Tracer(self._group.rank())
        self.set_tracer(tracer)
        try:
            yield found
        finally:
            self.flush()
            self.set_tracer(None)
            found += tracer.timelines(self._plan.scheduler)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, over the gradients of all parameters, sharded or not.

        Call it on all ranks between the backward pass and `optimizer.step()`.
        Returns the norm from before. Raises `RankError` if sharded gradients were not averaged since the last step.
        """
        if self._shards is None:
            return nn.utils.clip_grad_norm_(self.ddp.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        return self._shards.clip_norm(float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip as `torch.nn.utils.clip_grad_value_` does, over the gradients of all parameters, sharded or not."""
        found = self.ddp.parameters() if self._shards is None else self._shards.averaged()
        nn.utils.clip_grad_value_(found, clip_value, foreach)

    def say(self, what: str) -> None:
        """Print a line on rank 0, once."""
        if self._group.rank() == 0 and what not in self._said:
            self._said.add(what)
            sys.stderr.write(f"legato: {one_line(what)}\n")
            sys.stderr.flush()

    def _check(self, plan: Plan) -> None:
        """Raise `PlanError` for a plan that cannot be carried out, and `RankError` if ranks have different ones."""
        agree(describe_model(plan, self._parameters), self._group)
        for i, message in enumerate(plan.messages):
            check_message(message, f"messages[{i}]", self._group.name())
        check_plan(plan, self._parameters, self._group.size())

    # ---- whose passes ----------------------------------------------------------------

    def _model_reason(self) -> str:
        """Why no pass can be legato's, as far as the model shows it; empty if nothing does."""
        if sparse := sparse_parameters(self.module):
            return f"the gradients of {next(iter(sparse))} are sparse"
        if any(map(steps_in_backward, self._parameters.values())):
            return "optimizers step in the backward pass"
        if has_builtin_hook(self.ddp):
            return "it has a communication hook"
        return ""

    def _pass_reason(self) -> str:
        """Why the pass that begins cannot be legato's; empty if nothing is in the way."""
        if is_joining(self.ddp):  # ranks run different numbers of passes, and cannot agree on later ones
            return "join() was used"
        if self.ddp.module is not self.module:
            return "it has another module"
        if feature := own_feature(self.ddp):
            return f"the model uses {feature}"
        return self._fingerprint.difference()

    def _former_attachments(self) -> list[Attachment]:
        """What is attached to the parameters already.

        Whether the program still has it must not depend on when each rank last collected garbage.
        """

        def found() -> dict[int, Attachment]:
            known = (_attachments.get(parameter, lambda: None)() for parameter in self._parameters.values())
            return {id(other): other for other in known if other is not None}

        if found():
            gc.collect()
        return list(found().values())

    def _choose(self) -> None:
        """Decide whose the pass is that begins; nothing of another pass is still to be sent."""
        if reason := self._pass_reason():
            self._leave_to_ddp(reason)
            return
        if self._first:
            assert self._ddps is not None
            if self._ddps.done < self._first:
                return
            self._first = 0
            if said := first_said(self._ddps.objection or self._model_reason(), self._group):
                self._leave_to_ddp(said.partition(": ")[2])
                return
        stepped, self.stepped = self.stepped or not self._optimizers, False
        if self._tournament is not None and stepped:  # else another pass of the same step
            self._next_turn(self._tournament)
        elif self.reducer is None and not is_ddps(self._plan):
            self._carry_out(self._plan)
        elif self._shards is not None and any(map(self._shards.has_changed, self._optimizers)):
            for optimizer in self._optimizers:
                agree(describe_optimizer(optimizer), self._group)
            self._carry_out(self._plan)
        if self.reducer is None or self.observed:
            return
        if change := self._drift.pass_begins(self.reducer.messages):
            self.on_drift(change)

    def _leave_to_ddp(self, reason: str) -> None:
        """Let passes be DDP's for good."""
        self._carry_out(None)
        self.reason, self.observed = reason, False
        self.say(f"DDP's own passes stay: {reason}")
        self._rest()

    def _rest(self) -> None:
        """Do nothing until there is another plan."""
        if self._ddps is not None:
            self._ddps.close()
            self._ddps = None
        self._compiles_one_way()
        if self._methods_back is not None:
            self._methods_back()
            self._methods_back = None
        for optimizer in self._optimizers:
            restore_steps(optimizer, self)

    @property
    def _is_idle(self) -> bool:
        """Whether passes are DDP's until there is another plan."""
        return self.reducer is None and self._ddps is None

    def _watch_ddp(self) -> DdpPasses:
        """Watch passes of DDP's: all parameters if these are the first passes, else the first and the last one."""
        names = list(self._parameters)
        watched = names if self._first else names[:1] + names[-1:]
        return DdpPasses({name: self._parameters[name] for name in watched})

    def _carry_out(self, plan: Plan | None) -> None:
        """Let passes be legato's under a plan, or DDP's, if it is None or DDP's own."""
        self.flush()
        states = [whole_state(optimizer, self._shards) for optimizer in self._optimizers]
        before, self.reducer = self.reducer, None
        if before is not None:
            before.close()
        if self._ddps is not None:
            self._ddps.close()
        if plan is None or is_ddps(plan):
            if self._idle.is_away:
                self._idle.bring_back()
            self._ddps = self._watch_ddp()
        else:
            if not self._idle.is_away:
                self._idle.put_away()  # first: its buckets take as much memory as the reducer's
            if self._methods_back is None:
                gate.methods.begin()
                self._methods_back = weakref.finalize(self, gate.methods.end)
            self.reducer, self._ddps = self._make_reducer(plan, before), None
        for optimizer, state in zip(self._optimizers, states, strict=True):
            defer_steps(optimizer, self)
            take_state(optimizer, state, self._shards)
        self._drift = DriftMonitor(self._gather_numbers)

    def _make_reducer(self, plan: Plan, before: Reducer | None) -> Reducer:
        with _no_garbage_collection():  # thousands of small objects that all stay
            reducer = Reducer(
                plan,
                self._parameters,
                self._connection,
                self._readers,
                gradient_as_bucket_view=self.ddp.gradient_as_bucket_view,
                optimizers=self._optimizers,
                error_feedback=self._error_feedback,
            )
        reducer.messages.tracer = self._tracer
        if before is not None:
            reducer.messages.forwards = before.messages.forwards
            GraphSender(reducer).learn_from(before)
        return reducer

    @cached_property
    def _connection(self) -> Connection:
        return Connection(self._group, self._flight_dir, self._debug, _status(weakref.ref(self)))

    def _is_own(self, module: nn.Module) -> bool:
        """Whether a module's forward pass is that of the model: it is the model, or contains it."""
        if module is self.ddp or module in self._wrappers:
            return True
        if any(inner is self.ddp for inner in module.modules()):
            self._wrappers.add(module)
            return True
        return False

    def _ddp_is_asked(self, name: str) -> None:
        """DDP's reducer was put away, and comes back because something asks for its attribute `name`."""
        if self._shards is not None and name == JOIN_BEGINS:
            raise InputError("join() under a sharded plan: a rank without batches would still have to update its shard")
        if self.reducer is not None and not self.reducer.in_backward:
            self.reducer.settle()

    def _prepare_backward(self) -> None:
        """A framework says that the next backward pass is to send."""
        if self.reducer is not None:
            self.reducer.armed = True

    # ---- forward passes ----------------------------------------------------------------

    @not_compiled  # type: ignore[untyped-decorator]
    def _forward_begins(self, compiled: str, _: Any) -> None:
        """Before a forward pass; `compiled` says whether dynamo compiles it."""
        if self._ours:
            self._nested += 1
            return
        training = torch.is_grad_enabled()
        if self._is_idle:
            return
        waiting = self._ddps.running if self._ddps is not None else self.reducer is not None and self.reducer.armed
        # In evaluation mode, one rank may run a pass alone.
        sends = training and self.ddp.require_backward_grad_sync
        if sends and self.module.training and not (waiting and self._trained):
            self._choose()
        self._trained = self.module.training
        if self._ddps is not None:
            self._ddps.forward_begins()
        reducer = self.reducer
        if reducer is None:
            return
        reducer.begin_forward()
        if not (training and self.module.training):
            reducer.settle()
        if not training:
            return
        if not self._idle.is_away:
            if has_builtin_hook(self.ddp):
                self._leave_to_ddp("it has a communication hook")
                return
            self._idle.put_away()
        self.in_graphs = bool(compiled) or self._fingerprint.compiled()
        if self.in_graphs:  # compiled code reads parameters without their gates
            if self._may_be_one_graph(compiled):
                GraphSender(reducer).hide_gates()
            else:
                self._readers.never()
                reducer.settle()
        reducer.messages.forwards += self.ddp.require_backward_grad_sync
        if reducer.messages.tracer:
            reducer.messages.tracer.switch("forward")
        self._compiler.ran.clear()
        self._ours = True
        self._silent.begin()

    @not_compiled  # type: ignore[untyped-decorator]
    def _module_begins(self) -> None:
        """Before the module's own part of one of legato's forward passes."""
        assert self.reducer is not None
        if self.in_graphs:
            self._scope.enter_context(on_compilation(self.reducer.settle))
        elif self.module.training:
            self._scope.enter_context(self.reducer.watch())

    @not_compiled  # type: ignore[untyped-decorator]
    def _module_ends(self, completed: bool) -> None:
        """After the module's own part, which has returned or raised an exception."""
        if completed:
            self._scope.close()
        else:
            self._scope.__exit__(*sys.exc_info())

    def _may_be_one_graph(self, compiled: str) -> bool:
        """Whether nothing but compiled code runs in the forward pass, if it has no graph breaks."""
        inner = compiled_module(self.module)
        if compiled == "caller" or not (compiled or is_compiled(self.module)):
            return False
        hooked = has_forward_hooks(self.module) or has_forward_hooks(inner)
        return not hooked and hasattr(inner.forward, "__code__") and not is_left_to_eager_mode(inner.forward)

    @not_compiled  # type: ignore[untyped-decorator]
    def _forward_ended(self, _: str, output: Any) -> None:
        """After a forward pass that has returned."""
        if self._ddps is not None:
            sends = torch.is_grad_enabled() and self.ddp.require_backward_grad_sync
            self._ddps.forward_ended(output, sends)
        if not self._ours or self._nested:
            return
        self._ours = False
        sends = self._silent.end()
        reducer = self.reducer
        assert reducer is not None
        if self.in_graphs and self.module.training:
            self._readers.note_graphs(self._compiler.ran)
        if waiting := GraphSender(reducer).show_gates():
            self._readers.never()
            raise RankError(
                f"{waiting}: its update waits for the compiled graph that read it before, which did not run this time; "
                "use a plan without forward overlap"
            )
        if sends:
            reducer.armed = True
            reducer.backward_scope.expect(output)
        if reducer.messages.tracer:
            reducer.messages.tracer.end_forward(output)

    @not_compiled  # type: ignore[untyped-decorator]
    def _forward_failed(self, *_: Any) -> None:
        """After any forward pass: end what has not ended, because it has raised an exception."""
        if self._ddps is not None:
            self._ddps.forward_failed()
        if self._nested:
            self._nested -= 1
        elif self._ours:
            self._ours = False
            self._silent.end()
            assert self.reducer is not None
            GraphSender(self.reducer).show_gates()

    # ---- steps -------------------------------------------------------------------------

    def _next_turn(self, tournament: Tournament) -> None:
        """Go on with the plan whose turn it is, or stay with the winner."""
        goes_on = tournament.step_begins()
        if tournament.plan is not self._plan or (self.reducer is None) != is_ddps(tournament.plan):
            self._plan = tournament.plan
            self._carry_out(tournament.plan)
        if not goes_on:
            if is_ddps(self._plan):
                self._rest()
            self.tournament, self._tournament, self.observed = tournament.measured, None, False
            found = ", ".join(f"{name} {m.seconds * 1e3:.3g} ms" for name, m in self.tournament.items())
            which = "DDP's own passes stay" if is_ddps(self._plan) else f"the plan {self._plan.scheduler} stays"
            self.say(f"{which}{f' (median step of each: {found})' if found else ''}")

    def _gather_numbers(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        return self._connection.gather_numbers(numbers, "comparing times before a forward pass")

    def _log_drift(self, change: str) -> None:
        self.say(f"since the first passes under the plan {self._plan.scheduler}, {change}; consider replanning")


#: legato on the model that has a parameter.
_attachments: Any = WeakIdKeyDictionary()


class Hook:
    """A forward hook of legato's, of which copies and pickles of a model have only `no_hook`.

    It calls `call(compiled, output)`; `compiled` says whether dynamo compiles the pass.
    """

    def __init__(self, call: Callable[[str, Any], None], attachment: Attachment | None = None) -> None:
        self._call, self.attachment = call, attachment

    @not_compiled(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, _: nn.Module, args: Any, output: Any = None) -> None:
        self._call(compiled_by(sys._getframe()), output)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return partial, (no_hook,)


def no_hook(*_: Any) -> None:
    """Do nothing."""


def attachment_of(ddp: nn.Module) -> Attachment | None:
    """legato on a `DistributedDataParallel`; None if it is not attached."""
    hooks = ddp._forward_pre_hooks.values()
    found = (hook.attachment for hook in hooks if isinstance(hook, Hook))
    return next((attachment for attachment in found if attachment is not None), None)


def attachment(model: nn.Module) -> Attachment:
    """Return what legato does for a model: its plan, and what a user can ask of it.

    Raises `InputError` if legato is not attached to the model.
    """
    ddp = find_ddp(model)
    found = None if ddp is None else attachment_of(ddp)
    if found is None:
        raise InputError("legato is not attached to the model (expected one that legato.distribute() has returned)")
    return found


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The `DistributedDataParallel` that a model is or contains, such as a compiled one or one of a framework.

    Raises `InputError` if there are several.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {type(model).__name__} (expected a torch.nn.Module)")
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(found) > 1:
        raise InputError(f"model: it contains {len(found)} DistributedDataParallel models (expected one at a time)")
    return found[0] if found else None


def is_ddps(plan: Plan) -> bool:
    """Whether a plan is the one that DDP carries out itself."""
    return plan.scheduler == "ddp" and plan.shard == "none" and all(message.wire is None for message in plan.messages)


def innermost_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of frameworks."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _sender_of(parameter: nn.Parameter) -> GraphSender | None:
    """What sends the parameter's gradients, as compiled graphs see it; None in passes of DDP's."""
    reducer: Reducer | None = getattr(_attachments.get(parameter, lambda: None)(), "reducer", None)
    return None if reducer is None else GraphSender(reducer)


def _status(of: weakref.ref[Attachment]) -> Callable[[], str]:
    def status() -> str:
        reducer: Reducer | None = getattr(of(), "reducer", None)
        return reducer.status() if reducer is not None else "is in a pass of DDP's"

    return status


def attach(
    model: nn.Module,
    optimizer: Any,
    plan: Plan | str | os.PathLike[str],
    *,
    shard: Shard = "none",
    process_group: Any = None,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    error_feedback: bool = False,
    current: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """Let a model's gradients be averaged over all ranks as `plan` says.

    This is `legato.distribute` for a plan that exists already, and takes the
    same arguments; `plan` is a `Plan` or the path of a plan file. Returns the
    model, wrapped in `DistributedDataParallel` if it was not, and the same optimizer.

    Raises `InputError` if no process group is initialized, or an argument is not as described; `PlanError` for a plan
    of another model; `RankError`, on every rank, if the ranks do not have the same model, plan and optimizer.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    ddp: Any = find_ddp(model)
    if ddp is not None and (options or process_group is not None):
        name = next(iter(options), "process_group")
        raise InputError(f"{name}: the model is a DistributedDataParallel already, and keeps its own arguments")
    module = model if ddp is None else ddp.module
    parameters = trained_parameters(module)
    if not parameters and not sparse_parameters(module):
        raise InputError("the model has no parameter that requires a gradient")
    if not isinstance(plan, Plan):
        plan = files.read(Path(plan), Plan)
    if shard != plan.shard:
        plan = plan.sharded(shard, {name: i for i, name in enumerate(parameters)})
    if plan.shard != "none":
        if optimizer is not None:
            check_shardable(innermost_optimizer(optimizer))
        if sparse := sparse_parameters(module):
            raise InputError(f"shard: {plan.shard!r}, but {next(iter(sparse))} has sparse gradients")
    if ddp is None:
        agree(describe_model(plan, parameters), process_group if process_group is not None else dist.group.WORLD)
        model = ddp = DistributedDataParallel(model, process_group=process_group, **options)
    found = attachment_of(ddp)
    if found is None:
        found = Attachment(
            ddp, plan, debug=debug, flight_dir=flight_dir, error_feedback=error_feedback, current=current
        )
    else:
        found.adopt(plan)
    if optimizer is not None:
        found.manage(optimizer)
    found.begin()
    return model, optimizer
