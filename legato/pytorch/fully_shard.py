"""Wraps a model with torch's own `fully_shard` (FSDP2) as a plan says."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as wrap

from legato.core.errors import InputError, PlanError
from legato.core.text import count
from legato.core.wrapping import Wrapping

__all__ = ["fully_shard"]

Model = TypeVar("Model", bound=nn.Module)


def fully_shard(model: Model, wrapping: Wrapping, **options: Any) -> Model:
    """Shard a model in place, as the lines of `wrapping.as_code()` do, and return it.

    Training is then torch's own FSDP2. Make the optimizer afterwards. If the last lines of `as_code()` are a training
    loop, your loop must make the same calls.

    The last module of each group must reach the loss: if the output of that module gets no gradient, the backward pass
    of the group fails. `legato capture` records which outputs reach the loss; `fully_shard` cannot check it.

    Args:
        model: a `torch.nn.Module` that is not sharded yet.
        wrapping: the plan, made for this model.
        options: arguments of torch's `fully_shard` for all calls, such as `mp_policy`. Without `mesh`, all ranks take
            part; a plan with replicas gets a mesh of two dimensions, on the accelerator if there is one.

    Raises:
        PlanError: the plan does not fit the model or the ranks. Nothing has been wrapped.
        InputError: there is no process group, there is only one rank, or torch lacks what the plan needs.
    """
    groups = _modules(model, wrapping)
    _check_torch(wrapping)
    mesh = _mesh(wrapping, options.get("mesh"))
    if mesh is not None:
        options["mesh"] = mesh

    for modules, reshard in zip(groups, wrapping.reshards(), strict=True):
        wrap(modules, reshard_after_forward=reshard, **options)
    root: Any = wrap(model, **options)

    firsts: list[Any] = [modules[0] for modules in groups]
    forward, backward = wrapping.forward_prefetch, wrapping.backward_prefetch
    for k, module in enumerate(firsts):
        if forward:
            module.set_modules_to_forward_prefetch(firsts[k + 1 : k + 1 + forward])
        if backward:
            module.set_modules_to_backward_prefetch(firsts[max(k - backward, 0) : k][::-1])
        if not wrapping.groups[k].in_backward:
            module.set_unshard_in_backward(False)
    if wrapping.buffers > 1:
        root.set_reduce_scatter_max_input_buffers(wrapping.buffers)
    return model


def _modules(model: nn.Module, wrapping: Wrapping) -> list[list[nn.Module]]:
    """Return the modules of each group. Raises `PlanError` if a module cannot be wrapped."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise PlanError("the model is sharded already (expected one that fully_shard has not wrapped)")
    groups = [[_module(model, path, wrapping) for path in group.modules] for group in wrapping.groups]
    group_of: dict[int, int] = {}
    for k, group in enumerate(wrapping.groups):
        for path, whole in zip(group.modules, groups[k], strict=True):
            for module in whole.modules():
                if id(module) in group_of:
                    raise PlanError(f"groups: a module of {path!r} is in another one, too (expected it in one)")
                group_of[id(module)] = k
    _check_ties(model, group_of)
    return groups


def _module(model: nn.Module, path: str, wrapping: Wrapping) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        of = f"; is it a plan for another model than {wrapping.name!r}?"
        raise PlanError(f"groups: {path!r} (expected a module of {type(model).__name__}{of})") from None
    if type(module).forward is nn.Module.forward:
        raise PlanError(f"groups: {path!r} is a {type(module).__name__}, which is never called (expected its elements)")
    return module


def _check_ties(model: nn.Module, group_of: dict[int, int]) -> None:
    """Raise `PlanError` if two groups share a parameter; modules outside all groups count as a group."""
    found: dict[int, tuple[int, str]] = {}
    for path, module in model.named_modules():
        k = group_of.get(id(module), -1)
        for name, parameter in module.named_parameters(path, recurse=False):
            other, first = found.setdefault(id(parameter), (k, name))
            if other != k:
                raise PlanError(f"groups: {first!r} is also {name!r} (expected tied parameters in one group)")


def _check_torch(wrapping: Wrapping) -> None:
    call = "set_reduce_scatter_max_input_buffers"
    if wrapping.buffers > 1 and not hasattr(FSDPModule, call):
        raise InputError(f"buffers: {wrapping.buffers} (expected 1: torch {torch.__version__} has no {call})")


def _mesh(wrapping: Wrapping, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh to give to torch, or None to let torch choose.

    Raises an error if the plan does not fit the ranks.
    """
    if not dist.is_initialized():
        raise InputError("no process group (expected torch.distributed.init_process_group before fully_shard)")
    ranks, replicas = dist.get_world_size() if mesh is None else mesh.size(), wrapping.replicas
    if ranks == 1:
        raise InputError("1 rank: there is nothing to shard (expected at least 2)")
    if ranks % replicas:
        raise PlanError(f"replicas: {replicas} (expected a divisor of the {ranks} ranks)")
    if mesh is not None and (given := mesh.size(0) if mesh.ndim == 2 else 1) != replicas:
        raise PlanError(f"mesh: {count(given, 'replica')} (expected {replicas}, as the plan has)")
    for group in wrapping.groups:
        if not isinstance(group.reshard, bool) and ranks // replicas % group.reshard:
            raise PlanError(
                f"reshard: {group.reshard} (expected a divisor of the {ranks // replicas} ranks that shard)"
            )
    if mesh is not None or replicas == 1:
        return mesh
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if device is None else device.type
    return init_device_mesh(kind, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
