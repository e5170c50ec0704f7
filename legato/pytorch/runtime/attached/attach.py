"""Attaches legato to a model: `legato.distribute` for a plan that exists already."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from legato.core import files
from legato.core.errors import InputError, RankError, unknown_name
from legato.core.plan import Plan, Shard
from legato.pytorch.logger import show_lines
from legato.pytorch.network.agreement import describe_model, difference
from legato.pytorch.parameters import sparse_parameters, trained_parameters
from legato.pytorch.runtime.attached.attachment import Attachment, innermost_optimizer
from legato.pytorch.runtime.attached.forward import Hook
from legato.pytorch.runtime.sharding.shards import check_shardable

__all__ = ["attach", "attachment", "attachment_of", "find_ddp"]


def attach(
    model: nn.Module,
    optimizer: Any,
    plan: Plan | str | os.PathLike[str],
    *,
    shard: Shard = "none",
    process_group: Any = None,
    debug: bool | str | None = None,
    flight_dir: str | os.PathLike[str] | None = None,
    current: Sequence[str] = (),
    **options: Any,
) -> tuple[Any, Any]:
    """Average a model's gradients over all ranks as `plan` says.

    `attach` is `legato.distribute` for a plan that exists already, and takes the same arguments; `plan` is a `Plan` or
    the path of a plan file. Returns the model, wrapped in `DistributedDataParallel` if it was not wrapped yet, and the
    same optimizer.

    Raises `InputError` if no process group is initialized or an argument is invalid, and `PlanError` if the plan was
    made for another model. Raises `RankError`, on every rank, if the ranks do not have the same model, plan and
    optimizer; if DDP itself carries out the plan, DDP keeps all passes instead.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    show_lines()
    ddp: Any = find_ddp(model)
    _check_options(ddp, optimizer, process_group, options)
    module = model if ddp is None else ddp.module
    _check_module(module)
    parameters = trained_parameters(module)
    if not parameters and not sparse_parameters(module):
        raise InputError("the model has no parameter that requires a gradient")
    plan = plan if isinstance(plan, Plan) else files.read(Path(plan), Plan)
    if shard != plan.shard:
        plan = plan.sharded(shard, {name: i for i, name in enumerate(parameters)})
    if plan.shard != "none":
        _check_sharded(plan, module, optimizer)
    if ddp is None:
        group = process_group if process_group is not None else dist.group.WORLD
        if (said := difference(describe_model(plan, parameters), group)) and plan.carrier != "ddp":
            raise RankError(said)
        model = ddp = DistributedDataParallel(model, process_group=process_group, **options)
    found = attachment_of(ddp)
    if found is None:
        found = Attachment(ddp, plan, debug=debug, flight_dir=flight_dir, current=current)
    else:
        found.adopt(plan)
    found.manage(optimizer)
    found.begin()
    return model, optimizer


def _check_options(ddp: Any, optimizer: Any, process_group: Any, options: Mapping[str, Any]) -> None:
    """Raise `InputError` for a wrong optimizer, an unknown option, or an option for a model that is wrapped already."""
    ddps = inspect.signature(DistributedDataParallel).parameters if options else ()
    if unknown := [name for name in options if name not in ddps]:
        raise unknown_name("option", unknown[0], [*inspect.signature(attach).parameters, *ddps][3:])
    if ddp is not None and (options or process_group is not None):
        name = next(iter(options), "process_group")
        raise InputError(f"{name}: the model is a DistributedDataParallel already, and keeps its own arguments")
    what = type(optimizer).__name__
    if isinstance(optimizer, LRScheduler):
        raise InputError(f"optimizer: {what} is a learning-rate scheduler (expected the optimizer that it schedules)")
    if optimizer is not None and not hasattr(optimizer, "step"):
        raise InputError(f"optimizer: {what} has no step() (expected a torch.optim.Optimizer)")


def _check_module(module: nn.Module) -> None:
    """Raise `InputError` for a model that `DistributedDataParallel` cannot train."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # an import would be slow
    if fsdp and any(isinstance(m, fsdp.FSDPModule | fsdp.FullyShardedDataParallel) for m in module.modules()):
        raise InputError(
            "model: FSDP shards its parameters, and sends its gradients itself (expected a model for "
            "DistributedDataParallel; for FSDP2, legato.plan(shard='parameters') says which modules to wrap together)"
        )
    for name, p in module.named_parameters():
        if p.is_meta:
            raise InputError(f"model: {name} is on the meta device and has no values (expected the training's device)")


def _check_sharded(plan: Plan, module: nn.Module, optimizer: Any) -> None:
    """Raise `InputError` if the model or the optimizer cannot be sharded."""
    if optimizer is not None:
        check_shardable(innermost_optimizer(optimizer))
    if sparse := sparse_parameters(module):
        raise InputError(f"shard: {plan.shard!r}, but {next(iter(sparse))} has sparse gradients")


def attachment_of(ddp: nn.Module) -> Attachment | None:
    """Return the `Attachment` of a `DistributedDataParallel`; None if legato is not attached to it."""
    hooks = ddp._forward_pre_hooks.values()
    found = (hook.attachment for hook in hooks if isinstance(hook, Hook))
    return next((attachment for attachment in found if attachment is not None and not attachment.is_detached), None)


def attachment(model: nn.Module) -> Attachment:
    """Return the `Attachment` of a model: legato's plan for it, and methods to inspect and control legato.

    Raises `InputError` if legato is not attached to the model.
    """
    ddp = find_ddp(model)
    found = None if ddp is None else attachment_of(ddp)
    if found is None:
        raise InputError("legato is not attached to the model (expected one that legato.distribute() has returned)")
    return found


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that a model is or contains, such as one inside a compiled model, or None.

    Raises `InputError` if the model contains several.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {type(model).__name__} (expected a torch.nn.Module)")
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(found) > 1:
        raise InputError(f"model: it contains {len(found)} DistributedDataParallel models (expected one at a time)")
    return found[0] if found else None
