"""`legato.distribute`: trains by a given plan, or makes the plan from the first steps of training.

docs/runtime.md says what `plan="auto"` and `replan="auto"` do, step by step. No step is lost or run
twice. If there is no plan (for instance, because no two steps agree), all ranks stay with DDP's
passes, and rank 0 says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import CaptureError, InputError, LegatoError, unknown_name
from legato.core.plan import ROUNDINGS, Message, Plan, Rounding, Shard, Slice
from legato.core.workload import Workload
from legato.pytorch._private import without_dispatch_modes
from legato.pytorch.network.agreement import broadcast_bytes, first_said
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.parameters import sparse_parameters, trained_parameters
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of, find_ddp
from legato.pytorch.runtime.attached.attachment import Attachment, innermost_optimizer
from legato.pytorch.runtime.attached.tournament import most_steps
from legato.pytorch.runtime.sharding.shards import check_shardable
from legato.schedule.compare import Contest
from legato.schedule.published.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES

__all__ = ["default_buckets", "distribute", "in_wire"]

#: Steps before the first that counts, and those that count.
WARMUP_STEPS, OBSERVED_STEPS = 2, 10
#: Planning that takes longer fails; the other ranks wait, and give up after ten minutes under NCCL.
PLANNING_S = 300.0
#: Columns of the matrices that the weights are multiplied by, to compute while messages are in flight.
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
        if optimizer is not None:
            attached.manage(optimizer)
        return model, optimizer
    if shard != "none" and optimizer is not None:
        check_shardable(innermost_optimizer(optimizer))
    if automatic:
        plan = msgspec.structs.replace(default_buckets(model), scheduler="ddp", carrier="ddp")
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
        _observe(attached, shard, wire)
    if replan:
        _replan(attached, wire)
    return model, optimizer


def _fallback(attached: Attachment, shard: Shard, wire: Rounding) -> Plan:
    """The plan to stay with where planning fails: DDP's, unless something else was asked for."""
    plan = attached.plan
    if plan.shard != shard:
        plan = plan.sharded(shard, {name: i for i, name in enumerate(attached.parameters)})
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
    fmt = wire.removeprefix("all-")
    return plan.sending(tuple(msgspec.structs.replace(message, wire=fmt) for message in plan.messages))


def _check_wire(wire: str, shard: Shard) -> None:
    """Raise `InputError` unless gradients can travel as `wire` says."""
    if wire not in ROUNDINGS:
        raise unknown_name("wire", str(wire), ROUNDINGS)
    if wire != "none" and shard != "none":
        raise InputError(f"wire: {wire!r} with shard {shard!r} (expected one or the other)")


def _replan(attached: Attachment, wire: Rounding) -> None:
    """Make a new plan whenever the pace changes."""

    def start_again(change: str) -> None:
        attached.say(f"since the first passes under the plan {attached.plan.scheduler}, {change}; replanning")
        _observe(attached, attached.plan.shard, wire)

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
    return _buckets(parameters)


def _buckets(parameters: dict[str, torch.nn.Parameter]) -> Plan:
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


def _observe(attached: Attachment, shard: Shard, wire: Rounding) -> None:
    """Watch steps from now on, plan, and let the best plans compete."""
    steps = WARMUP_STEPS + OBSERVED_STEPS
    attached.say(f"{steps} steps are observed; then the network is measured, and plans are made and tried")
    attached.observe(steps, partial(_decide, attached, shard, wire))


def _decide(attached: Attachment, shard: Shard, wire: Rounding) -> None:
    """Calibrate, plan on rank 0, and let the best plans compete, on all ranks together."""
    group, parameters, observer = attached.process_group, attached.parameters, attached.observer
    assert observer is not None
    workload, plans, problem = None, [_fallback(attached, shard, wire)], ""
    with torch.no_grad(), without_dispatch_modes():
        try:
            compute = _products([p.detach() for p in parameters.values()])
            if group.rank() == 0:
                workload = observer.workload(type(attached.module).__name__, attached.optimizers, WARMUP_STEPS)
        except Exception as error:  # the others must not wait for this rank
            problem = _said(error)
        if problem := first_said(problem, group):
            attached.say(f"no plan could be made: {problem}")
        else:
            attached.say("the network is measured")
            sizes = sizes_up_to(sum(p.nbytes for p in parameters.values()))
            cluster = calibrate(group, sizes=sizes, compute=compute).cluster
            chosen = _contestants(attached, workload, cluster, shard, wire) if workload else []
            encoded = broadcast_bytes(b"\n".join(map(files.encode, chosen)), group).splitlines()
            plans = [files.decode(plan, Plan, "a plan of rank 0") for plan in encoded] or plans
        attached.compete(plans)


def _contestants(
    attached: Attachment, workload: Workload, cluster: Cluster, shard: Shard, wire: Rounding
) -> list[Plan]:
    """The plans to try, the simplest first; none if planning fails."""
    attached.say(f"an all-reduce takes {cluster.cost()}; plans are made, for at most {PLANNING_S:.0f} s")
    try:
        workload = _undisturbed(workload, _buckets(attached.parameters), cluster)
        found = _planned(Contest(workload, cluster, shard, wire, overlap=bool(attached.optimizers)))
    except Exception as error:
        attached.say(f"no plan could be made: {_said(error)}")
        return []
    most = most_steps(len(found), sum(op.duration_s for op in workload.ops))
    names = ", ".join(plan.scheduler for plan in found)
    attached.say(f"these plans take turns for at most {most} steps: {names}")
    return found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"


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
