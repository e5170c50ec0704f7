"""legato attached to a `DistributedDataParallel`: DDP runs some passes and legato runs the others.

docs/runtime.md ("Whose pass it is") says who runs which. All ranks make the same decision, because they know the same
facts: the plan, what the program does with the model, and what the ranks tell each other after the first passes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from legato.core.errors import InputError, RankError
from legato.core.plan import Plan
from legato.core.text import one_line
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.pytorch.device import clock_for
from legato.pytorch.logger import logger
from legato.pytorch.network.agreement import (
    agree,
    describe_model,
    describe_optimizer,
    difference,
    first_said,
    told_at_the_store,
    unique_name,
)
from legato.pytorch.network.channel import check_message
from legato.pytorch.network.watchdog import FlightRecorder, Watchdog
from legato.pytorch.parameters import ModuleFingerprint, sparse_parameters, trained_parameters
from legato.pytorch.private.ddp import JOIN_BEGINS, IdleReducer, has_builtin_hook, is_joining, own_feature
from legato.pytorch.private.optimizers import steps_in_backward
from legato.pytorch.private.tensors import drop_accumulator, in_functional_call
from legato.pytorch.recording.observed import StepObserver
from legato.pytorch.runtime.attached.ddp_passes import DdpPasses
from legato.pytorch.runtime.attached.deferred import defer_steps, is_known, restore_steps
from legato.pytorch.runtime.attached.drift import DriftMonitor
from legato.pytorch.runtime.attached.forward import ForwardPasses, Hook
from legato.pytorch.runtime.attached.graph_sender import GraphSender
from legato.pytorch.runtime.attached.kept_gradients import kept_gradients
from legato.pytorch.runtime.attached.tournament import Measured, Tournament
from legato.pytorch.runtime.reducer import Reducer
from legato.pytorch.runtime.sending.debug import chosen_checks
from legato.pytorch.runtime.sending.messages import Connection
from legato.pytorch.runtime.sending.tracing import Tracer
from legato.pytorch.runtime.sharding.shards import Shards, check_shardable
from legato.pytorch.runtime.sharding.state import take_state, whole_state
from legato.pytorch.runtime.waiting import gate
from legato.pytorch.runtime.waiting.buckets import Slot, check_plan

__all__ = ["Attachment", "innermost_optimizer"]

#: The number of backward passes that DDP runs, and in which it sends, before the first one of legato's.
FIRST_PASSES = 2


class Attachment:
    """The connection of legato to one `DistributedDataParallel` on this rank; all ranks' attachments act together.

    `legato.attachment(model)` returns the attachment of a model. Parameters, gradients and the optimizer's state are up
    to date whenever they are read.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        plan: Plan,
        *,
        debug: bool | str | None = None,
        flight_dir: str | os.PathLike[str] | None = None,
        current: Sequence[str] = (),
    ) -> None:
        self.ddp: Any = ddp
        self.module: nn.Module = ddp.module
        self._parameters = trained_parameters(ddp.module)
        self._debug = chosen_checks(debug)
        self._group = cast(Any, ddp.process_group)
        self._name = unique_name(self._group)
        self._kept = kept_gradients(ddp, self._parameters) if ddp.gradient_as_bucket_view else None
        self._idle = IdleReducer(ddp, self._ddp_is_asked, self._prepare_backward, self._moving)
        self._idle.rebuild_now()
        self._fingerprint = ModuleFingerprint(self.module)
        former = self._former_attachments()
        shared = any(other.module is not self.module for other in former)
        reason = "it has a parameter of another model" if shared else self._model_reason()
        #: Why DDP runs all passes from now on; empty if legato may run some.
        self.reason = first_said(reason, self._group).partition(": ")[2]
        #: Whether `detach` was called.
        self.is_detached = False
        if not self.reason and plan.carrier == "ddp":
            self.reason = difference(describe_model(plan, self._parameters), self._group)
        if not self.reason:
            self._check(plan)
        self._flight_dir = flight_dir
        self._optimizers: list[Optimizer] = []
        self._plan = plan
        #: The reducer that sends the plan's messages; None while DDP runs the passes.
        self.reducer: Reducer | None = None
        self._objection = ""  # what this rank has found against legato's passes, and tells the other ranks later
        self._objected = False  # whether any rank has found something during the last turn of a tournament
        self._stepped = False  # whether an optimizer's `step()` was called since the last backward pass that sent
        # The number of backward passes that sent, the number until the last `step()` on this rank, and of these steps.
        self._passes = self._passes_until_step = self._steps = 0
        self._said: set[str] = set()
        self._forward = ForwardPasses(ddp, self._fingerprint, _sender_of, current, strict="reads" in self._debug)
        #: Observes the steps for `plan="auto"`, while DDP runs the passes; None otherwise.
        self.observer: StepObserver | None = None
        self._to_observe = 0  # the number of passes until `decide()` is called, on all ranks
        self._observation: tuple[int, Callable[[], Sequence[Plan]]] = 0, lambda: ()
        # The number of first passes that DDP runs. Under a sharded plan there are none, which saves memory, unless the
        # graph is static.
        self._first = FIRST_PASSES if plan.shard == "none" or ddp.static_graph else 0
        self._ddps: DdpPasses | None = self._watch_ddp()  # while DDP runs the passes and legato may follow
        self._tracer: Tracer | None = None
        self._drift = DriftMonitor(self._gather_numbers, self._new_tracer)
        #: The function that all ranks call, between two steps, with a description of what has slowed down or sped up.
        self.on_drift: Callable[[str], None] = self._log_drift
        self._methods_back: Callable[[], Any] | None = None  # restores the methods that `gate.methods` replaced
        self._trained = False  # whether the last forward pass was in training mode
        self._nested = 0  # the number of open forward passes inside one of legato's
        #: The measurements of the plans that `compete` has tried, by the names of their schedulers.
        self.tournament: dict[str, Measured] = {}
        self._tournament: Tournament | None = None
        self._passes_of_step = 1  # the number of backward passes that send in a step of the tournament
        self._told_rounds = 0
        self._hooks = [
            ddp.register_forward_pre_hook(Hook(self._forward_begins, self), prepend=True),
            ddp.register_forward_hook(Hook(self._forward_failed, self), prepend=True, always_call=True),
            ddp.register_forward_hook(Hook(self._forward_ended, self), prepend=True),  # runs before the previous hook
        ]
        for other in former:
            if other.module is self.module:
                self._idle.succeed(other._idle)
                other._end()
            else:  # DDP runs the passes of both models
                other._leave_to_ddp(self.reason)
        for parameter in self._parameters.values():
            _attachments[parameter] = weakref.ref(self)
        if self.reason:
            self._leave_to_ddp(self.reason)

    # ---- what users do ---------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Return the plan in use. If DDP runs all passes (`reason` says why), the plan has no effect."""
        return self._plan

    @property
    def observed(self) -> bool:
        """Return whether `plan="auto"` has not decided yet: it still observes the steps or tries plans."""
        return self.observer is not None or self._tournament is not None

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients are averaged, by name.

        Only parameters that required a gradient when legato was attached are averaged.
        """
        return self._parameters

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers whose steps legato can defer."""
        return self._optimizers

    def manage(self, optimizer: Any) -> None:
        """Let the plan decide when this optimizer's updates run; call it on all ranks, for each optimizer of the model.

        An optimizer that is not torch's, or has none of the model's parameters, is left alone. If the optimizer's
        settings differ between ranks, DDP keeps all passes under `plan="auto"`. Under a plan that was given, every rank
        raises `RankError`.
        """
        if self.reason:
            return
        optimizer, mine = innermost_optimizer(optimizer), {id(p) for p in self._parameters.values()}
        groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else ()
        facts = {
            "trained parameters of the optimizer": str(sum(id(p) in mine for group in groups for p in group["params"])),
            "times that the optimizer was given": str(sum(optimizer is known for known in self._optimizers)),
        }
        if said := difference(describe_optimizer(optimizer) | facts, self._group):
            if self._plan.carrier != "ddp" and not self._observation[0]:
                raise RankError(said)
            self._leave_to_ddp(said)
        if said or optimizer is None:
            return
        if not isinstance(optimizer, Optimizer) or not is_known(optimizer):
            self.warn(f"{type(optimizer).__name__} is not an optimizer of torch: its updates do not wait")
            return
        if not any(id(p) in mine for group in groups for p in group["params"]):
            self.warn(f"{type(optimizer).__name__} has none of the model's parameters: its updates do not wait")
            return
        if not any(optimizer is known for known in self._optimizers):
            if self._plan.shard != "none":
                check_shardable(optimizer, self._optimizers)
            self._optimizers.append(optimizer)
            if self.observer is not None:
                self.observe(*self._observation)  # from the beginning
        if not self._is_idle:
            defer_steps(optimizer, self)
        if self._shards is not None:
            self._carry_out(self._wanted)  # from now on, the parameters of this optimizer have their own messages

    def begin(self) -> None:
        """Use the plan from the first pass on, unless DDP has to run the first passes."""
        if self._is_due() and not self._pass_reason():
            self._carry_out(self._wanted)

    def observe(self, passes: int, decide: Callable[[], Sequence[Plan]]) -> None:
        """Let DDP run and send `passes` passes, and observe them; then `decide()` on all ranks which plans compete.

        `observer` holds the observations. If `decide` raises a `RankError`, training fails; after any other error, it
        must not have left another rank waiting in a collective: DDP then goes on running the passes.
        """
        self._first, self._to_observe, self._observation = 0, passes, (passes, decide)
        compiled = self._fingerprint.compiled() or self._forward.in_graphs
        self.observer = StepObserver(self.module, self._parameters, compiled)
        if self.reducer is None:
            self._watch_ddp_anew()

    def adopt(self, plan: Plan) -> None:
        """Switch to another plan. Call this between two steps, on all ranks together.

        Raises `PlanError` if the plan was made for another model, and `RankError` if the ranks have different plans.
        """
        self._let_rebuild()
        self._check(plan)
        if plan.shard != "none":
            for i, optimizer in enumerate(self._optimizers):
                check_shardable(optimizer, self._optimizers[:i])
        self._plan, self._stepped = plan, True
        if self._is_idle and not self.reason:
            self._watch_ddp_anew()
            self._forward.compile_graphs()
            for optimizer in self._optimizers:
                defer_steps(optimizer, self)
        self._change_together()

    def compete(self, plans: Sequence[Plan]) -> None:
        """Let plans take turns from now on, and keep the fastest. Call this between two steps, on all ranks.

        DDP itself runs DDP's own plan. Among plans that are equally fast, the first is kept. During the tournament
        `observed` is True; afterwards `tournament` has the measurements. Nothing happens if all passes are left to DDP
        (`reason`). Raises the same errors as `adopt`.
        """
        self._let_rebuild()
        for plan in plans:
            self._check(plan)
        if self.reason:
            return
        clock = clock_for(self._device)
        # Some ranks may leave out steps, or have no optimizer.
        mine = max(1, self._passes_until_step // self._steps) if self._steps else math.inf
        least = min(passes for (passes,) in self._gather_numbers([mine]))
        self._passes_of_step = int(least) if math.isfinite(least) else 1
        self._tournament = Tournament(plans, self._gather_turn, clock)
        self._plan = self._tournament.plan
        self._end_tournament()
        if self.observer is None:  # otherwise the end of the running backward pass changes the plan
            self._change_together()

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is first read."""
        if self.reducer is not None:
            self.reducer.settle()

    def detach(self) -> None:
        """Detach legato, on all ranks: from now on the model is a plain `DistributedDataParallel`.

        If all ranks have run a forward pass whose backward pass is still to come, legato still runs that backward pass.
        Raises `RankError` between a backward pass with sharded gradients and `step()`.
        """
        if self.is_detached:
            return
        if self._shards is not None:
            self._shards.check_used()
        self.reason = self.reason or "legato was detached"
        self.is_detached, self.observer, self._tournament = True, None, None
        self.flush()
        if not self._a_pass_waits():
            self._carry_out(None)
            self._rest()

    def _end(self) -> None:
        """Detach from the model now, because a new DDP around the same model owns the gradients."""
        self.is_detached, self._kept = True, None
        self._fingerprint.keep_nodes()
        self._carry_out(None)
        self._rest(at_once=True)

    @property
    def process_group(self) -> Any:
        """Return the process group of the model's ranks."""
        return self._group

    @property
    def _shards(self) -> Shards | None:
        return None if self.reducer is None else self.reducer.shards

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _new_tracer(self) -> Tracer:
        return Tracer(self._group, self._device)

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Record legato's passes with this tracer from now on; None ends the recording."""
        self._tracer = tracer
        if self.reducer is not None:
            self.reducer.messages.tracer = tracer

    @contextmanager
    def trace(self) -> Iterator[list[Timeline]]:
        """Measure the iterations inside the context.

        The yielded list is filled when the context ends, with one timeline for each iteration that legato ran.
        """
        found: list[Timeline] = []
        self.flush()
        tracer = self._new_tracer()
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
        """Clip like `torch.nn.utils.clip_grad_norm_`, over the gradients of all parameters, sharded or not.

        Call it on all ranks between the backward pass and `optimizer.step()`. Returns the norm before clipping. Raises
        `RankError` if sharded gradients were not averaged since the last step.
        """
        if self._shards is None:
            return nn.utils.clip_grad_norm_(self.ddp.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        return self._shards.clip_norm(float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clip like `torch.nn.utils.clip_grad_value_`, over the gradients of all parameters, sharded or not."""
        found = self.ddp.parameters() if self._shards is None else self._shards.averaged()
        nn.utils.clip_grad_value_(found, clip_value, foreach)

    def say(self, what: str, level: int = logging.INFO) -> None:
        """Log a line on rank 0, unless it was logged before."""
        if self._group.rank() == 0 and what not in self._said:
            self._said.add(what)
            logger.log(level, "%s", one_line(what))

    def warn(self, what: str) -> None:
        """Log, as `say` does, something that costs time or falls back to DDP."""
        self.say(what, logging.WARNING)

    def _check(self, plan: Plan) -> None:
        """Raise `PlanError` if the runtime cannot run the plan, and `RankError` if the ranks have different plans."""
        agree(describe_model(plan, self._parameters), self._group)
        for i, message in enumerate(plan.messages):
            check_message(message, f"messages[{i}]", self._group.name())
        check_plan(plan, self._parameters, self._group.size())

    # ---- whose passes ----------------------------------------------------------------

    def _model_reason(self) -> str:
        """Return why legato can run no pass of this model; empty if nothing prevents it."""
        if sparse := sparse_parameters(self.module):
            return f"the gradients of {next(iter(sparse))} are sparse"
        if any(map(steps_in_backward, self._parameters.values())):
            return "optimizers step in the backward pass"
        if has_builtin_hook(self.ddp):
            return "it has a communication hook"
        return self._fingerprint.hooked()

    def _pass_reason(self) -> str:
        """Return why legato cannot run the pass that begins; empty if nothing prevents it."""
        if is_joining(self.ddp):  # ranks run different numbers of passes, so they cannot agree on later ones
            return "join() was used"
        if self.ddp.module is not self.module:
            return "it has another module"
        if feature := own_feature(self.ddp):
            return f"the model uses {feature}"
        late = self._idle.came_back and self.reducer is None  # DDP's own hooks would run after the program's
        hooked = self._fingerprint.hooked() if late or self._shards is not None else ""
        changed = self._fingerprint.difference()
        return hooked if changed and in_functional_call() else changed or hooked

    def _former_attachments(self) -> list[Attachment]:
        """Return the attachments that the parameters already have.

        If one of these attachments can change what the ranks do, garbage is collected first. Otherwise one rank might
        still find an attachment that the program has dropped, and another rank might not.
        """

        def found() -> dict[int, Attachment]:
            known = (_attachments.get(parameter, lambda: None)() for parameter in self._parameters.values())
            return {id(other): other for other in known if other is not None}

        if any(other.module is not self.module or other.plan.shard != "none" for other in found().values()):
            gc.collect()
        return list(found().values())

    def _choose(self) -> None:
        """Decide whether DDP or legato runs the pass that begins, from facts that all ranks know; nothing is sent.

        One rank alone may run a forward pass, but all ranks run a backward pass, so plans usually change at its end.
        A change to or from a sharded plan happens before a forward pass, because gradients cannot be resharded.
        """
        if not self.reason and (reason := self._pass_reason()):
            if self.reducer is None and (self._first or self.observed) and not is_joining(self.ddp):
                self._objection = reason  # DDP runs this pass in any case
            else:
                self._leave_to_ddp(reason)
        elif self._is_due():
            self._carry_out(self._wanted)
        elif self._shards is not None and any(map(self._shards.has_changed, self._optimizers)):
            for optimizer in self._optimizers:
                agree(describe_optimizer(optimizer), self._group)
            self._carry_out(self._wanted)

    @property
    def _wanted(self) -> Plan | None:
        """Return the plan that the next passes have to follow; None if DDP has to run them."""
        if self.reason or self._first or self.observer is not None or self._plan.carrier == "ddp":
            return None
        return self._plan

    def _is_due(self) -> bool:
        """Return whether the plan in use differs from the wanted one."""
        return (None if self.reducer is None else self.reducer.plan) is not self._wanted

    def _pass_ended(self) -> None:
        """Exchange the facts that decide who runs later passes. Call it on all ranks after a backward pass that sends.

        As under DDP, one rank alone may run forward passes, but not a backward pass that sends.
        """
        if self._stepped:
            self._passes_until_step, self._steps, self._stepped = self._passes, self._steps + 1, False
        self._passes += 1
        if self._ddps is not None:
            self._pass_of_ddp_ended(self._ddps)
        if self.reason and self.reducer is not None:
            self._carry_out(None)
        if self.reason or not (self._wanted or self.reducer or self._first or self.observed):
            self._rest()
            return
        self._decide()
        if self._is_due() and self._shards is None and self._plan.shard == "none":
            self._carry_out(self._wanted)

    def _pass_of_ddp_ended(self, passes: DdpPasses) -> None:
        if not is_joining(self.ddp):
            self._idle.rebuild()
        if self._kept is not None:
            self._kept.note()
        if passes.done >= FIRST_PASSES:  # very short trainings need no watchdog
            _ = self._watchdog

    def _decide(self) -> None:
        """End the current phase (first passes, observation, tournament) if this pass was its last one.

        Phases are counted in backward passes that send, since these are what all ranks have in common.
        """
        if self._first and self._ddps is not None and self._ddps.done >= self._first and self._is_fit():
            self._first = 0
            _ = self._connection
        elif self.observer is not None:
            self._to_observe -= 1
            if not self._to_observe:
                self._observation_ended()
        elif self._tournament is not None:
            if self._passes % self._passes_of_step == 0:
                self._tournament.step_ended()
                self._plan = self._tournament.plan
                if not self._objected or self._is_fit():
                    self._end_tournament()
        elif self.reducer is not None and (change := self._drift.pass_ended(self.reducer.messages)):
            self.on_drift(change)

    def _a_pass_waits(self) -> bool:
        """Return whether all ranks have run a forward pass that has had no backward pass yet. Call it on all ranks."""
        ours = self.reducer is not None and self.reducer.armed
        waits = ours or (self._ddps is not None and self._ddps.running)
        self._let_rebuild()
        return not first_said("" if waits else "nothing waits", self._group)

    def _let_rebuild(self) -> None:
        """Let DDP rebuild its buckets before the ranks communicate, unless it runs a pass: then it has rebuilt them."""
        if self._ddps is None or not self._ddps.running:
            self._idle.rebuild_now()

    def _change_together(self) -> None:
        """Change to the wanted plan now, or after the backward pass of a forward pass that has already run."""
        if self.reason or self._first:
            return
        if self._shards is not None or self._plan.shard != "none":
            if self.reducer is not None:
                self._carry_out(self._wanted)
        elif not self._a_pass_waits() and self._is_due():
            self._carry_out(self._wanted)

    def _observation_ended(self) -> None:
        if not self._is_fit():
            return
        _, decide = self._observation
        try:
            self.compete(decide())
        except RankError:
            raise
        except Exception as error:  # an error in legato itself: training goes on without a plan
            self.warn(f"no plan could be made: {type(error).__name__}: {error}")
        self.observer = None
        if self._tournament is None and self._plan.carrier == "ddp":
            self._rest()
        elif self.reducer is None:
            self._watch_ddp_anew()

    def told_by_all(self, problem: str, limit_s: float) -> str:
        """Return the first problem of any rank, on all ranks; wait for at most `limit_s` seconds, in no collective."""
        return told_at_the_store(problem, self._group, f"{self._name}/{self._passes}", self._watchdog, limit_s)

    def _is_fit(self) -> bool:
        """Return whether legato may run passes: no rank found a reason against it in the model or in DDP's passes."""
        mine = self._objection or (self._ddps.objection if self._ddps is not None else "") or self._model_reason()
        said = first_said(mine, self._group).partition(": ")[2]
        if not said and self._plan.carrier == "ddp":
            said = difference(describe_model(self._plan, self._parameters), self._group)
        if said:
            self._leave_to_ddp(said)
        return not said

    def _leave_to_ddp(self, reason: str) -> None:
        """Leave all passes to DDP from now on."""
        lost = self._fingerprint.without_hooks()
        if self._idle.came_back and self._fingerprint.hooked() and not self._idle.is_away:
            self._idle.put_away()
        self._carry_out(None)
        for parameter in lost:
            drop_accumulator(parameter)  # DDP's reducer registered new hooks when it came back
        self.reason, self.observer, self._tournament = reason, None, None
        self.warn(f"DDP's own passes stay: {reason}")
        self._rest()

    def _rest(self, *, at_once: bool = False) -> None:
        """Once DDP's reducer has rebuilt its buckets, let DDP work without legato until there is another plan."""
        if self._idle.rebuilds and not (at_once or is_joining(self.ddp)):
            return
        self._idle.forward_begins()
        if self._ddps is not None:
            self._ddps.close()
            self._ddps = None
        self._forward.leave_graphs()
        if self._methods_back is not None:
            self._methods_back()
            self._methods_back = None
        for optimizer in self._optimizers:
            restore_steps(optimizer, self)
        if self.is_detached:
            for hook in self._hooks:
                hook.remove()
            self._optimizers.clear()

    @property
    def _is_idle(self) -> bool:
        """Return whether DDP runs all passes until there is another plan."""
        return self.reducer is None and self._ddps is None

    def _watch_ddp_anew(self) -> None:
        if self._ddps is not None:
            self._ddps.close()
        self._ddps = self._watch_ddp()

    def _watch_ddp(self) -> DdpPasses:
        """Watch DDP's passes.

        All parameters are watched in the first and in the observed passes, and only the first and the last parameter in
        other passes.
        """
        names = list(self._parameters)
        watched = names if self._first or self.observer is not None else names[:1] + names[-1:]
        return DdpPasses(
            {name: self._parameters[name] for name in watched},
            self._fingerprint.accumulates,
            _weakly(self._pass_ended),
            _weakly(self._say_unseen),
            self.observer,
        )

    def _say_unseen(self) -> None:
        if not self._trained:
            self.warn("passes stay DDP's while nothing calls the model itself: a call of its forward() runs no hooks")

    def _carry_out(self, plan: Plan | None) -> None:
        """Let legato run the passes under a plan, or DDP if the plan is None."""
        self._change_to(plan)
        _return_freed_memory()  # now that nothing refers to the former plan's buckets and states

    def _change_to(self, plan: Plan | None) -> None:
        if self._shards is not None:
            self._shards.check_used()
        self.flush()
        states = [whole_state(optimizer, self._shards) for optimizer in self._optimizers]
        before, self.reducer = self.reducer, None
        if before is not None:
            before.close()
        if self._ddps is not None:
            self._ddps.close()
        if plan is None:
            if self._idle.is_away:
                with self._fingerprint.hooks_last():
                    self._idle.bring_back()
            self._ddps = self._watch_ddp()
        else:
            if not self._idle.is_away:
                self._idle.put_away()  # before the new reducer allocates: DDP's buckets take as much memory
            if self._methods_back is None:
                gate.methods.begin()
                self._methods_back = weakref.finalize(self, gate.methods.end)
            with self._moving(lambda: [] if self.reducer is None else self.reducer.slots):
                self.reducer, self._ddps = self._make_reducer(plan, before), None
        for optimizer, state in zip(self._optimizers, states, strict=True):
            defer_steps(optimizer, self)
            take_state(optimizer, state, self._shards)
        self._drift = DriftMonitor(self._gather_numbers, self._new_tracer)

    def _make_reducer(self, plan: Plan, before: Reducer | None) -> Reducer:
        with _no_garbage_collection():  # this makes thousands of small objects that all stay
            reducer = Reducer(
                plan,
                self._parameters,
                self._connection,
                self._forward.readers,
                _weakly(self._pass_ended),
                gradient_as_bucket_view=self.ddp.gradient_as_bucket_view,
                optimizers=self._optimizers,
            )
        reducer.messages.tracer = self._tracer
        reducer.find_unused = self.ddp.find_unused_parameters or self.ddp.static_graph
        if before is not None:
            reducer.messages.forwards = before.messages.forwards
            GraphSender(reducer).learn_from(before)
        return reducer

    def _moving(self, slots: Callable[[], Sequence[Slot]] | None = None) -> AbstractContextManager[None]:
        """Return a context for making buckets, which moves the gradients that the program holds to the new buckets."""
        return nullcontext() if self._kept is None else self._kept.moving(slots)

    @cached_property
    def _connection(self) -> Connection:
        return Connection(self._group, self._watchdog, self._debug)

    @cached_property
    def _watchdog(self) -> Watchdog:
        recorder = FlightRecorder(self._group.rank(), self._flight_dir)
        return Watchdog(self._group, recorder, _status(weakref.ref(self)), self._name)

    def _ddp_is_asked(self, name: str) -> None:
        """Prepare for the return of DDP's reducer, because something has asked for the reducer's attribute `name`."""
        if self._shards is not None and name == JOIN_BEGINS:
            raise InputError("join() under a sharded plan: a rank without batches would still have to update its shard")
        if self.reducer is not None and not self.reducer.in_backward:
            self.reducer.settle()

    def _prepare_backward(self) -> None:
        """Record that a framework has announced a backward pass that sends."""
        if self.reducer is not None:
            self.reducer.armed = True

    # ---- forward passes ----------------------------------------------------------------

    def _forward_begins(self, compiled: str, _: Any) -> None:
        """Prepare a forward pass; `compiled` says whether dynamo compiles it."""
        if self._forward.running:
            self._nested += 1
            return
        training = torch.is_grad_enabled()
        if self._is_idle:
            if training and self._idle.came_back and (reason := self._fingerprint.hooked()):
                self._leave_to_ddp(reason)
            return
        waiting = self._ddps.running if self._ddps is not None else self.reducer is not None and self.reducer.armed
        # In evaluation mode, one rank may run a pass alone.
        sends = training and self.ddp.require_backward_grad_sync and self.module.training
        dropped = self._stepped or not self._optimizers  # one rank ran the waiting pass alone
        if sends and not (waiting and self._trained and not dropped):
            self._choose()
        self._trained = self.module.training
        if self._ddps is not None:
            self._ddps.forward_begins(sends)
            if training and self.ddp.require_backward_grad_sync:
                self._idle.forward_begins()
        if self.reducer is None:
            return
        self.reducer.begin_forward()
        if not (training and self.module.training):
            self.reducer.settle()
        if training and self._puts_ddp_away():
            self._forward.begin(self.reducer, compiled)

    def _puts_ddp_away(self) -> bool:
        """Put DDP's own reducer away and return True; if it has a new communication hook, return False instead.

        A program can register a hook only after it has asked for the reducer, which has brought the reducer back.
        """
        if self._idle.is_away:
            return True
        if has_builtin_hook(self.ddp):
            self._leave_to_ddp("it has a communication hook")
            return False
        self._idle.put_away()
        return True

    def _forward_ended(self, _: str, output: Any) -> None:
        """Record that a forward pass has returned."""
        if self._ddps is not None:
            self._ddps.forward_ended(output, torch.is_grad_enabled() and self.ddp.require_backward_grad_sync)
        if self._forward.running and not self._nested:
            self._forward.end(output)

    def _forward_failed(self, *_: Any) -> None:
        """Clean up after any forward pass; if the pass has not ended by now, it has raised an exception."""
        if self._ddps is not None:
            self._ddps.forward_failed()
        if self._nested:
            self._nested -= 1
        elif self._forward.running:
            self._forward.fail()

    # ---- steps -------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Record that an optimizer's `step()` was called."""
        self._stepped = True

    def updates_begin(self) -> None:
        """Record that the optimizer begins its updates."""
        if self.observer is not None:
            self.observer.updates_begin()

    def step_ended(self) -> None:
        """Record that the optimizer's `step()` returns."""
        if self.observer is not None:
            self.observer.updates_end()

    def _end_tournament(self) -> None:
        """Print the measurements after each round, and keep the best plan once the tournament is over."""
        if self._tournament is None or (self._tournament.goes_on and self._tournament.rounds == self._told_rounds):
            return
        measured = self._tournament.measured
        found = ", ".join(
            f"{name} {format_seconds(m.seconds)} +- {format_seconds(m.scatter)}" for name, m in measured.items()
        )
        if self._tournament.goes_on:
            self._told_rounds = self._tournament.rounds
            left = f"at most {self._tournament.most_left} steps to go"
            self.say(f"round {self._told_rounds} of turns is over, {left} (median step of each: {found})")
            return
        self.tournament, self._tournament, self._told_rounds = measured, None, 0
        which = "DDP's own passes stay" if self._plan.carrier == "ddp" else f"the plan {self._plan.scheduler} stays"
        fastest = min(self.tournament, key=lambda name: self.tournament[name].seconds, default=self._plan.scheduler)
        why = "" if fastest == self._plan.scheduler else f"; {fastest} is not faster by more than the scatter"
        self.say(f"{which}{f' (median step of each: {found}{why})' if found else ''}")
        if self._plan.carrier == "ddp" and self.reducer is None:
            self._rest()

    def _gather_turn(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Exchange the numbers of a turn, and whether a rank has found anything against legato's passes in it."""
        found = self._gather_numbers([*numbers, float(bool(self._objection))])
        self._objected = any(objected for *_, objected in found)
        return [tuple(rest) for *rest, _ in found]

    def _gather_numbers(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        return self._connection.gather_numbers(numbers, "comparing times")

    def _log_drift(self, change: str) -> None:
        self.warn(f"since the first passes under the plan {self._plan.scheduler}, {change}; consider replanning")


#: The attachment of the model that owns a parameter, by parameter.
_attachments: Any = WeakIdKeyDictionary()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _return_freed_memory() -> None:
    """Let glibc return to the system what it keeps of freed memory; do nothing where the C library is another one.

    Plans have buckets and states of other sizes than the plans before them, so what one plan frees would stay with the
    process as holes in the heap. What accelerators free stays in torch's own cache, which is reused.
    """
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)


def _sender_of(parameter: nn.Parameter) -> GraphSender | None:
    """Return the object through which compiled graphs send the parameter's gradient; None while DDP runs the passes."""
    reducer: Reducer | None = getattr(_attachments.get(parameter, lambda: None)(), "reducer", None)
    return None if reducer is None else GraphSender(reducer)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls the method while its object exists: autograd's nodes keep hooks forever."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call


def _status(attachment: weakref.ref[Attachment]) -> Callable[[], str]:
    def status() -> str:
        reducer: Reducer | None = getattr(attachment(), "reducer", None)
        return reducer.status() if reducer is not None else "is in a pass of DDP's"

    return status


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of frameworks."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer
