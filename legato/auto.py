"""`legato.distribute`: trains by a given plan, or makes the plan from the first steps of training.

docs/runtime.md says what `plan="auto"` and `replan="auto"` do, step by step. No step is lost or run
twice. If rank 0 could not record (for instance, because no two steps agree), all ranks stay with DDP's
passes, and rank 0 says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import CaptureError, InputError, LegatoError, unknown_name
from legato.core.plan import ROUNDINGS, Message, Plan, Rounding, Shard, Slice
from legato.core.workload import Workload
from legato.pytorch._private import not_compiled, without_dispatch_modes
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.parameters import sparse_parameters, trained_parameters
from legato.pytorch.recording.capture import PhaseTimes, agreed_workload
from legato.pytorch.recording.recorder import RecordedStep, Recorder
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of, find_ddp
from legato.pytorch.runtime.attached.attachment import Attachment, innermost_optimizer
from legato.pytorch.runtime.attached.forward import Hook
from legato.pytorch.runtime.sending.tracing import Tracer
from legato.pytorch.runtime.sharding.shards import check_shardable
from legato.schedule.compare import Contest
from legato.schedule.published.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES

__all__ = ["default_buckets", "distribute", "in_wire"]

WARMUP_STEPS = 2
RECORDED_STEPS = 5
#: Planning that takes longer fails; the other ranks wait, and give up after ten minutes under NCCL.
PLANNING_S = 300.0
#: Columns of the matrices with which the weights are multiplied to compute beside messages.
_COLUMNS = 64
_MOST_WEIGHTS = 2**25


def distribute(  # noqa: PLR0913
    model: Any,
    optimizer: Any = None,
    plan: Plan | str | os.PathLike[str] = "auto",
    *,
    shard: Shard = "none",
    wire: Rounding = "none",
    error_feedback: bool = False,
    process_group: Any = None,
    replan: str | None = None,
    current: Sequence[str] = (),
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Let a model train on all ranks as `DistributedDataParallel` does, with its gradients sent as planned.

    Call it on every rank, in a script that was started with torchrun, after
    `torch.distributed.init_process_group`. The model is, and stays, a `DistributedDataParallel`, and passes that
    legato does not want are DDP's own; a line on standard error says so. `legato.attachment(model)` has what legato
    does for it.

    Args:
        model: a `DistributedDataParallel`, or a `torch.nn.Module` that contains one (a compiled model, one of a
            framework); or a module, with its parameters on their final device and in their final dtype, which is
            then wrapped.
        optimizer: a `torch.optim.Optimizer` with parameters of the model. Without one, updates do not wait for their
            parameters to be read; it can be given later, in another call. An optimizer that is not torch's is left
            alone.
        plan: `"auto"` to make plans from the first 12 steps of training, and to stay with the one that is fastest in
            the next steps; a `Plan`; or the path of a plan file.
        shard: `"optimizer"` to keep only a part of the optimizer's states on each rank (ZeRO-1), `"gradients"` to keep
            only a part of the gradients as well (ZeRO-2). See docs/sharding.md. With `plan="auto"`, states are whole
            until there is a plan. A plan that is sharded needs no `shard`.
        wire: `"bf16"` or `"fp16"` to let gradients travel in that format, as many as the planner finds necessary;
            `"all-bf16"` or `"all-fp16"` to let all of them, as torch's compression hooks do. See docs/wire.md. A plan
            that has messages in such a format needs no `wire`.
        error_feedback: whether to add to a gradient what rounding to such a format took from those before.
        process_group: the ranks to train on; None stands for all.
        replan: `"auto"` to make a new plan, on all ranks, when computation or communication has slowed down or
            sped up; with None, rank 0 only logs such a change.
        current: names of parameters, or patterns as in a shell, that are up to date when `step()` returns: something
            reads them that legato cannot see.
        debug: checks during training: True, or names separated by commas (`order`, `finite`, `reads`); None stands for
            the value of `$LEGATO_DEBUG`. See `legato.pytorch.runtime.sending.debug`.
        flight_dir: the directory for the record of the last messages if something fails; None stands for the value
            of `$LEGATO_FLIGHT_DIR`, or the system's directory for temporary files. See
            `legato.pytorch.network.watchdog`.
        options: arguments of `DistributedDataParallel` for a module that is not wrapped yet.

    Returns:
        The model that was given, wrapped in `DistributedDataParallel` if it was not, and the optimizer that was given.

    Raises:
        InputError: no process group is initialized, or an argument is not as described.
        PlanError: the plan is for another model, or this runtime cannot carry it out.
        RankError: on every rank, if the ranks do not have the same model, optimizer and plan.
    """
    if replan not in (None, "auto"):
        raise InputError(f"replan: {replan!r} (expected 'auto' or None)")
    _check_wire(wire, shard)
    ddp = find_ddp(model)
    attached = None if ddp is None else attachment_of(ddp)
    automatic = plan == "auto"
    if automatic and attached is not None:
        _follow(attached, optimizer)
        return model, optimizer
    if shard != "none" and optimizer is not None:
        check_shardable(innermost_optimizer(optimizer))
    if automatic:
        plan = default_buckets(model)
    elif not isinstance(plan, Plan):
        plan = files.read(Path(plan), Plan)
    model, optimizer = attach(
        model,
        optimizer,
        plan if automatic else in_wire(plan, wire),
        shard="none" if automatic else shard,
        error_feedback=error_feedback,
        process_group=process_group,
        current=current,
        debug=debug,
        flight_dir=flight_dir,
        **options,
    )
    attached = attachment(model)
    if automatic and not attached.reason:  # else passes are DDP's for good
        fallback = _fallback(attached, shard, wire)
        _Observer(attached, optimizer, fallback, shard, wire).attach()
    if replan:
        _replan(attached, optimizer, wire)
    return model, optimizer


def _follow(attached: Attachment, optimizer: Any) -> None:
    """Let another optimizer of an attached model follow; while it is watched without any, watch it again with this."""
    if optimizer is not None:
        attached.manage(optimizer)
        if isinstance(attached.observer, _Observer) and attached.observed:
            attached.observer.take(optimizer)


def _fallback(attached: Attachment, shard: Shard, wire: Rounding) -> Plan:
    """The plan to stay with where planning fails: DDP's, unless something else was asked for."""
    if shard == "none" and not wire.startswith("all-"):
        return msgspec.structs.replace(attached.plan, scheduler="ddp")
    places = {name: i for i, name in enumerate(trained_parameters(attached.module))}
    plan = attached.plan.sharded(shard, places)
    return in_wire(plan, wire) if wire.startswith("all-") else plan


def in_wire(plan: Plan, wire: Rounding) -> Plan:
    """The plan with what `wire` asks for: `all-...` rounds all messages, another format only what the plan says.

    Raises `InputError` where the plan has no message in that format, or one in another, or is sharded.
    """
    if wire == "none":
        return plan
    _check_wire(wire, plan.shard)
    formats = {message.wire for message in plan.messages if message.wire is not None}
    if formats == {wire}:
        return plan
    if not wire.startswith("all-"):
        what = f"has messages in {' and '.join(sorted(formats))}" if formats else "rounds nothing"
        raise InputError(
            f"wire: {wire!r} with a plan that {what} (expected 'none' to carry it out as it is, or 'all-{wire}' to "
            "round all of its messages)"
        )
    rounded = (msgspec.structs.replace(message, wire=wire.removeprefix("all-")) for message in plan.messages)
    return msgspec.structs.replace(plan, messages=tuple(rounded))


def _check_wire(wire: str, shard: Shard) -> None:
    """Raise `InputError` unless gradients can travel as `wire` says."""
    if wire not in ROUNDINGS:
        raise unknown_name("wire", str(wire), ROUNDINGS)
    if wire != "none" and shard != "none":
        raise InputError(f"wire: {wire!r} with shard {shard!r} (expected one or the other)")


def _replan(attached: Attachment, optimizer: Any, wire: Rounding) -> None:
    """Make a new plan whenever the pace changes."""

    def start_again(change: str) -> None:
        before = attached.plan
        attached.say(f"since the first passes under the plan {before.scheduler}, {change}; replanning")
        attached.adopt(default_buckets(attached.module))
        _Observer(attached, optimizer, before, before.shard, wire).attach()

    attached.on_drift = start_again


def default_buckets(model: torch.nn.Module) -> Plan:
    """Return torch's buckets for the first iteration: parameters in reverse order, 1 MiB and then 25 MiB.

    Raises `InputError` if no parameter requires a gradient.
    """
    ddp = find_ddp(model)
    module = model if ddp is None else ddp.module
    parameters = trained_parameters(module) or sparse_parameters(module)
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    messages: list[Message] = []
    slices: list[Slice] = []
    filled = 0
    for name, p in reversed(parameters.items()):
        nbytes = p.numel() * p.element_size()
        slices.append(Slice(name, 0, nbytes))
        filled += nbytes
        if filled >= (BUCKET_BYTES if messages else FIRST_BUCKET_BYTES):
            messages.append(Message(tuple(slices)))
            slices, filled = [], 0
    if slices:
        messages.append(Message(tuple(slices)))
    return Plan("default-buckets", tuple(messages))


class _Observer:
    """Records the first steps through hooks on the model and the optimizer, plans, and lets the best plans compete.

    Without an optimizer, a step ends where the next forward pass begins, and plans have no forward overlap. If
    recording or planning fails, the plan is `fallback`. All plans that compete shard the same.
    """

    def __init__(self, attached: Attachment, optimizer: Any, fallback: Plan, shard: Shard, wire: Rounding) -> None:
        self._attached = attached
        self._optimizer: Any = None
        self._fallback = fallback
        self._shard, self._wire = shard, wire
        self._hooks: list[Any] = []
        self._given = optimizer
        self._begin()

    def _begin(self) -> None:
        self._done = 0
        self._steps: list[RecordedStep] = []
        self._untraced: list[PhaseTimes] = []
        self._tracer: Tracer | None = None
        self._recorder: Recorder | None = None
        self._problem = ""
        self._began = False  # the forward pass of the step that runs has begun
        self._watched = False  # ... and its passes are legato's

    def attach(self) -> None:
        """Register the hooks; they are removed when the plan is made."""
        self._attached.observed, self._attached.observer = True, self
        self._hooks = [self._attached.ddp.register_forward_pre_hook(Hook(self._forward_begins), prepend=True)]
        if self._given is not None:
            self.take(self._given)

    def take(self, optimizer: Any) -> None:
        """Watch the steps of this optimizer, from the beginning, unless there is one already."""
        optimizer = innermost_optimizer(optimizer)
        if self._optimizer is not None or not isinstance(optimizer, Optimizer):
            return
        self._abandon()
        self._begin()
        self._optimizer = optimizer
        self._hooks += [
            optimizer.register_step_pre_hook(self._step_begins),
            optimizer.register_step_post_hook(self._step_ended),
        ]

    def _is_recorded(self) -> bool:
        """Whether the step that begins is one of those to be recorded."""
        return self._done >= WARMUP_STEPS and (self._done - WARMUP_STEPS) % 2 == 1

    @not_compiled  # type: ignore[untyped-decorator]
    def _forward_begins(self, *_: Any) -> None:
        """Begin to time or to record a step; of several forward passes before a step, the last one counts."""
        attached = self._attached
        if not attached.observed:  # legato leaves the model to DDP
            self._end()
            return
        if not attached.module.training:  # frameworks call train() and eval() on the module, not on its wrapper
            return
        if self._optimizer is None and self._began:
            self._step_ended()
        self._abandon()
        self._began, self._watched = True, attached.observed and attached.reducer is not None
        if not self._watched:
            return
        if self._is_recorded() and not self._problem:
            with self._keeping_problems():
                self._recorder = Recorder(attached.module, self._optimizer, attached.in_graphs)
                self._recorder.begin("forward", follow=True)
        elif self._done >= WARMUP_STEPS:
            self._tracer = Tracer()
            attached.set_tracer(self._tracer)

    def _step_begins(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Begin the optimizer's phase; with a closure, after the forward and backward pass in it."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._updates_begin()
            return None

        def closure_and_updates() -> Any:
            loss = closure()
            self._updates_begin()
            return loss

        return args[:1], {**kwargs, "closure": closure_and_updates}

    def _updates_begin(self) -> None:
        if self._recorder is not None:
            with self._keeping_problems():
                self._recorder.begin("optimizer")
        elif self._tracer is not None:
            self._tracer.switch("optimizer")

    def _step_ended(self, *_: Any) -> None:
        self._began = False
        if self._attached.reason or (self._done >= WARMUP_STEPS and not self._watched):
            self._abandon()  # its passes were DDP's
            return
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            with self._keeping_problems():
                self._steps.append(recorder.finish())
        elif self._tracer is not None:
            tracer, self._tracer = self._tracer, None
            self._attached.set_tracer(None)
            tracer.switch(None)
            self._untraced.append(
                PhaseTimes(tracer.seconds("forward"), tracer.seconds("backward"), tracer.seconds("optimizer"))
            )
        self._done += 1
        if self._done >= WARMUP_STEPS + 2 * RECORDED_STEPS:
            with without_dispatch_modes():  # another model may be recorded in this step
                self._decide()

    def _end(self) -> None:
        """Remove all hooks."""
        self._abandon()
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def _keeping_problems(self) -> Iterator[None]:
        """Whatever goes wrong while recording, training goes on, and no further step is recorded."""
        try:
            yield
        except Exception as error:
            self._problem = str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"
            self._abandon()

    def _abandon(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.abandon()

    def _decide(self) -> None:
        """Calibrate, plan on rank 0, and let the best plans compete, on all ranks together."""
        self._end()
        group, parameters = self._attached.process_group, trained_parameters(self._attached.module)
        compute = _products([p.detach() for p in parameters.values()])
        cluster = calibrate(
            group, sizes=sizes_up_to(sum(p.nbytes for p in parameters.values())), compute=compute
        ).cluster
        chosen = b"\n".join(map(files.encode, self._contestants(cluster))) if group.rank() == 0 else b""
        plans = broadcast_bytes(chosen, group).splitlines()
        self._attached.compete([files.decode(plan, Plan, "a plan of rank 0") for plan in plans])

    def _contestants(self, cluster: Cluster) -> list[Plan]:
        """The plans to try, the simplest first; the fallback alone if planning fails."""
        try:
            workload = _undisturbed(self._workload(), self._attached.plan, cluster)
            contest = Contest(workload, cluster, self._shard, self._wire, overlap=self._optimizer is not None)
            return _planned(contest) or [self._fallback]
        except Exception as error:
            self._attached.say(f"no plan could be made: {self._problem or error}")
            return [self._fallback]

    def _workload(self) -> Workload:
        if not self._steps:
            raise CaptureError(self._problem or "no step was recorded")
        module = self._attached.module
        device = next(iter(trained_parameters(module).values())).device.type
        return agreed_workload(self._steps, name=type(module).__name__, device=device, untraced=self._untraced)


def _planned(contest: Contest) -> list[Plan]:
    """The plans of a contest, made in a process of its own.

    So the training imports no compiler, and what a script has done to its Python does not matter.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from legato.schedule.compare import hold_contest; hold_contest()"],
        input=msgspec.json.encode(contest),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=PLANNING_S,
        check=False,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        raise CaptureError(said[-1] if said else f"planning ended with exit status {done.returncode}")
    return [files.decode(plan, Plan, "a plan") for plan in done.stdout.splitlines()]


def _products(weights: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Computation like the model's, without its inputs: products with its weights; None without matrices.

    The weights have `_MOST_WEIGHTS` elements in all, unless the first has more.
    """
    matrices: list[torch.Tensor] = []
    for weight in weights:
        if weight.dim() > 1 and sum(m.numel() for m in matrices) + weight.numel() * bool(matrices) <= _MOST_WEIGHTS:
            matrices.append(weight.reshape(len(weight), -1))
    factors = [matrix.new_ones(matrix.shape[1], _COLUMNS) for matrix in matrices]

    def compute() -> None:
        for matrix, factor in zip(matrices, factors, strict=True):
            matrix @ factor

    return compute if matrices else None


def _undisturbed(workload: Workload, plan: Plan, cluster: Cluster) -> Workload:
    """The workload without what packing and the messages of the plan took from the observed backward passes.

    The last message goes out when the backward pass ends.
    """
    contention = cluster.contention
    backward_s = sum(workload.ops[i].duration_s for i in workload.phase_ops("backward"))
    if contention is None or not backward_s:
        return workload
    taken_s = sum(contention.overhead.cost(message.wire_nbytes) for message in plan.messages[:-1])
    taken_s += contention.pack_s_per_byte * workload.nbytes
    left = max(0.5, 1 - taken_s / backward_s)
    ops = (
        msgspec.structs.replace(op, duration_s=op.duration_s * left) if op.phase == "backward" else op
        for op in workload.ops
    )
    return msgspec.structs.replace(workload, ops=tuple(ops))
