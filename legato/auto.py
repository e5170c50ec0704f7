"""`legato.distribute`: train by a given plan, or make the plan from the first steps of training.

docs/runtime.md says what `plan="auto"` and `replan="auto"` do, step by step. Making a plan neither loses a training
step nor repeats one. If no plan can be made (for example, because gradients are complete in another order in each
step), DDP sends the gradients on all ranks, and rank 0 prints the reason.
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
from legato.core.errors import CaptureError, InputError, LegatoError
from legato.core.plan import Message, Plan, Rounding, Shard, Slice
from legato.core.workload import Workload
from legato.pytorch.device import group_device
from legato.pytorch.network.agreement import broadcast_bytes, first_said
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.parameters import sparse_parameters, trained_parameters
from legato.pytorch.private.groups import group_timeout
from legato.pytorch.private.tensors import without_dispatch_modes
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of, find_ddp
from legato.pytorch.runtime.attached.attachment import Attachment, innermost_optimizer
from legato.pytorch.runtime.attached.tournament import most_steps
from legato.pytorch.runtime.sharding.shards import check_shardable
from legato.schedule.basics.wire import check_wire
from legato.schedule.compare import Contest
from legato.schedule.published.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES

__all__ = ["default_buckets", "distribute"]

#: The number of steps that are ignored at the start, and the number of steps that are then observed.
WARMUP_STEPS, OBSERVED_STEPS = 2, 10
#: Planning fails after this time, in seconds, or after half of the process group's timeout. Meanwhile, all ranks but 0
#: wait.
PLANNING_S = 300.0
#: Computation during messages multiplies each weight by a matrix with this number of columns.
_COLUMNS = 64
_MOST_WEIGHTS = 2**25


def distribute(  # noqa: PLR0913
    model: Any,
    optimizer: Any = None,
    plan: Plan | str | os.PathLike[str] = "auto",
    *,
    shard: Shard = "none",
    wire: Rounding = "none",
    process_group: Any = None,
    replan: str | None = None,
    current: Sequence[str] = (),
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Train a model on all ranks as `DistributedDataParallel` does, but send its gradients by a plan.

    Call `distribute` on every rank, in a script that was started with torchrun, after
    `torch.distributed.init_process_group`. The model stays a `DistributedDataParallel`. If legato cannot handle a pass,
    DDP sends the gradients of that pass, and a line on standard error says so. `legato.attachment(model)` returns an
    object that shows and controls what legato does for the model.

    Args:
        model: a `DistributedDataParallel`, or a `torch.nn.Module` that contains one, such as a compiled model. Any
            other module is wrapped; its parameters must be on their final device and in their final dtype.
        optimizer: a `torch.optim.Optimizer` with parameters of the model. Without the optimizer, legato cannot postpone
            the update of a parameter until the parameter is read. The optimizer can also be given later, in another
            call. An optimizer that legato does not know runs as usual.
        plan: `"auto"` to make plans from the first 12 steps of training, and to keep the plan that is fastest in the
            next steps; a `Plan`; or the path of a plan file.
        shard: `"optimizer"` to keep only a part of the optimizer's states on each rank (ZeRO-1), `"gradients"` to keep
            only a part of the gradients as well (ZeRO-2). See docs/sharding.md. With `plan="auto"`, each rank has all
            states until the plan is made. If the plan is sharded, `shard` can be left out.
        wire: `"bf16"` or `"fp16"` to send all gradients in that format, as torch's compression hooks do. See
            docs/wire.md. If the plan's messages have a wire format, `wire` can be left out.
        process_group: the ranks to train on; all ranks if None.
        replan: `"auto"` to make a new plan on all ranks when computation or communication has become slower or faster.
            If `replan` is None, rank 0 only logs that computation or communication has changed.
        current: names of parameters that your code reads where legato cannot see the read (patterns as in a shell are
            allowed). These parameters are up to date when `step()` returns.
        debug: names of checks during training, separated by commas (`order`, `finite`, `reads`), or True for `order`.
            If `debug` is None, the value of `$LEGATO_DEBUG` is used. See `legato.pytorch.runtime.sending.debug`.
        flight_dir: the directory for the record of the last messages after a failure. If `flight_dir` is None,
            `$LEGATO_FLIGHT_DIR` is used, or else the system's directory for temporary files. See
            `legato.pytorch.network.watchdog`.
        options: arguments of `DistributedDataParallel` for a module that is not wrapped yet.

    Returns:
        The given model, wrapped in `DistributedDataParallel` if necessary, and the given optimizer.

    Raises:
        InputError: no process group is initialized, or an argument is not as described.
        PlanError: the plan is for another model, or this runtime cannot run it.
        RankError: the ranks do not have the same model, optimizer and plan; every rank raises this error.
    """
    if replan not in (None, "auto"):
        raise InputError(f"replan: {replan!r} (expected 'auto' or None)")
    check_wire(wire, shard=shard)
    ddp = find_ddp(model)
    attached = None if ddp is None else attachment_of(ddp)
    automatic = plan == "auto"
    if automatic and attached is not None:
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
        plan if automatic else _in_wire_format(plan, wire),
        shard="none" if automatic else shard,
        process_group=process_group,
        current=current,
        debug=debug,
        flight_dir=flight_dir,
        **options,
    )
    attached = attachment(model)
    if automatic and not attached.reason:  # otherwise DDP sends the gradients of all passes
        _observe(attached, shard, wire)
    if replan:
        _replan(attached, wire)
    return model, optimizer


def _fallback(attached: Attachment, shard: Shard, wire: Rounding) -> Plan:
    """Return a plan with DDP's buckets, sharded or rounded as the user asked, for use if planning fails."""
    plan = attached.plan
    if plan.shard != shard:
        plan = plan.sharded(shard, {name: i for i, name in enumerate(attached.parameters)})
    return _in_wire_format(plan, wire)


def _in_wire_format(plan: Plan, wire: Rounding) -> Plan:
    """Return the plan with all messages rounded; raise `InputError` if the plan is sharded."""
    check_wire(wire, shard=plan.shard)
    return plan if wire == "none" else plan.in_wire_format(wire)


def _replan(attached: Attachment, wire: Rounding) -> None:
    """Make a new plan whenever the pace of computation or communication changes."""

    def start_again(change: str) -> None:
        attached.warn(f"since the first passes under the plan {attached.plan.scheduler}, {change}; replanning")
        _observe(attached, attached.plan.shard, wire)

    attached.on_drift = start_again


def default_buckets(model: torch.nn.Module) -> Plan:
    """Return torch's buckets for the first iteration: parameters in reverse order, first 1 MiB, then 25 MiB each.

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
    """Observe the next steps; then make plans, and let training try the best plans in turn."""
    steps = WARMUP_STEPS + OBSERVED_STEPS
    attached.say(f"{steps} steps are observed; then the network is measured, and plans are made and tried")
    attached.observe(steps, partial(_decide, attached, shard, wire))


def _decide(attached: Attachment, shard: Shard, wire: Rounding) -> list[Plan]:
    """Calibrate on all ranks, plan on rank 0, and return the plans to try on all ranks.

    If anything fails on any rank, all ranks learn why, and the only plan to try is the simplest one.
    """
    group, parameters, observer = attached.process_group, attached.parameters, attached.observer
    assert observer is not None
    workload, chosen, problem = None, list[Plan](), ""
    timeout_s = group_timeout(group, group_device(group)).total_seconds()
    with torch.no_grad(), without_dispatch_modes():
        try:
            compute = _products([p.detach() for p in parameters.values()])
            if group.rank() == 0:
                workload = observer.workload(type(attached.module).__name__, attached.optimizers, WARMUP_STEPS)
        except Exception as error:  # the other ranks must not wait for this one
            problem = _said(error)
        problem = first_said(problem, group)
        if not problem:
            attached.say("the network is measured")
            try:
                sizes = sizes_up_to(sum(p.nbytes for p in parameters.values()))
                cluster = calibrate(group, sizes=sizes, compute=compute).cluster
                if workload:
                    chosen = _contestants(attached, workload, cluster, shard, wire, min(PLANNING_S, timeout_s / 2))
            except Exception as error:
                problem = _said(error)
            problem = attached.told_by_all(problem, PLANNING_S + timeout_s)
        if problem:
            attached.warn(f"no plan could be made: {problem}")
            return [_fallback(attached, shard, wire)]
        encoded = broadcast_bytes(b"\n".join(map(files.encode, chosen)), group).splitlines()
        return [files.decode(plan, Plan, "a plan of rank 0") for plan in encoded]


def _contestants(
    attached: Attachment, workload: Workload, cluster: Cluster, shard: Shard, wire: Rounding, limit_s: float
) -> list[Plan]:
    """Return the plans to try, the simplest first."""
    attached.say(f"an all-reduce takes {cluster.cost()}; plans are made, for at most {limit_s:.0f} s")
    workload = _undisturbed(workload, _buckets(attached.parameters), cluster)
    found = _planned(Contest(workload, cluster, shard, wire, overlap=bool(attached.optimizers)), limit_s)
    most = most_steps(len(found), sum(op.duration_s for op in workload.ops))
    names = ", ".join(plan.scheduler for plan in found)
    attached.say(f"these plans take turns for at most {most} steps: {names}")
    return found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, LegatoError) else f"{type(error).__name__}: {error}"


def _planned(contest: Contest, limit_s: float) -> list[Plan]:
    """Make the plans that will compete in training, in a separate process, and return them.

    The process keeps the compiler (numba) out of training, and plans even if the script has changed parts of Python.
    """
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from legato.schedule.compare import hold_contest; hold_contest()"],
            input=msgspec.json.encode(contest),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": path},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CaptureError(f"planning took more than {limit_s:.3g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        raise CaptureError(said[-1] if said else f"planning ended with exit status {done.returncode}")
    return [files.decode(plan, Plan, "a plan") for plan in done.stdout.splitlines()]


def _products(weights: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that loads the device as the model does: it multiplies weights by matrices of ones.

    Returns None if no weight is a matrix. The function uses the first matrix, and other weights if all have at most
    `_MOST_WEIGHTS` elements in total.
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
    """Return the workload as if packing and messages had not slowed down the observed backward passes.

    The last message does not slow the backward pass down, since it is sent when the pass ends.
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
