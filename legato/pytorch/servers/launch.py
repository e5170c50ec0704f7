"""The face of the parameter-server mode: who is what, everybody's agreement, and the part of each."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from legato.core import files
from legato.core.errors import InputError, RankError
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.pytorch.network.agreement import agree, broadcast_tensors, describe
from legato.pytorch.network.threads import threads_that_wait
from legato.pytorch.network.watchdog import Flight, Watch
from legato.pytorch.parameters import trained_parameters
from legato.pytorch.servers.held import Holdings, check_optimizer, describe_state
from legato.pytorch.servers.model import AgentModel, ServedModel, release, serve_steps
from legato.pytorch.servers.protocol import Layout, Post, join
from legato.pytorch.servers.puller import Puller
from legato.pytorch.servers.server import Server
from legato.pytorch.servers.shards import Share, default_plan, shares_of
from legato.pytorch.servers.worker import Client

__all__ = ["parameter_servers"]


class _Job(NamedTuple):
    """What every rank needs for its part."""

    post: Post
    plan: Plan
    shares: list[Share]
    pulls: list[int]
    parameters: Mapping[str, nn.Parameter]
    seed: int | None


def parameter_servers(
    model: nn.Module,
    optimizer: Optimizer,
    train: Callable[[ServedModel, Optimizer], Any],
    *,
    servers: int = 1,
    agents: int = 0,
    infer: Callable[[AgentModel], Any] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    placement: Placement = "round-robin",
    shuffle: bool = False,
    seed: int = 0,
    patience_s: float = 30.0,
    process_group: Any = None,
) -> Any:
    """Train `model` on workers whose parameters live on `servers`, and are updated there by `optimizer`.

    Called by all ranks with the same arguments. The first ranks are workers and
    run `train(model, optimizer)`, the loop of a single process; the next
    `servers` ranks serve; the last `agents` ranks run `infer(model)`. Returns
    what `train` or `infer` returned, None on a server, once its part is done.

    `plan` is a `Plan` of pushes and pulls or a file's path, and says where the
    parameters lie and in which order they are pulled. None: by `placement`, in
    the order of the model. With `shuffle`, pulls have a new order for every
    worker and iteration, by `seed`, which is what TicTac is compared with;
    "random" is short for no plan and `shuffle`.

    A `process_group` of fewer than all ranks has to be a gloo group that nobody
    else uses meanwhile.

    Raises `InputError` for what cannot be served, `PlanError` for a plan of
    another model, and `RankError`, naming rank and parameter, when a rank
    differs, fails, or says nothing for `patience_s` seconds.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    group: Any = process_group if process_group is not None else dist.group.WORLD
    layout = _layout(group.size(), servers, agents, infer)
    if not (math.isfinite(patience_s) and patience_s > 0):
        raise InputError(f"patience_s: {patience_s} (expected seconds above 0)")
    parameters = trained_parameters(model)
    if isinstance(plan, str) and plan == "random":
        plan, shuffle = None, True
    try:
        chosen = _plan(plan, parameters, servers, placement)
        shares, pulls = shares_of(chosen, parameters, servers)
        check_optimizer(optimizer, parameters, shares)
    except InputError as error:
        with contextlib.suppress(RankError):
            _meet(group, layout, patience_s, str(error))
        raise
    role = _Role()
    own = _meet(group, layout, patience_s)
    watch = Watch(own, Flight(own.rank()), _standing(weakref.ref(role)))
    post = Post(own, layout, patience_s, watch)
    _agree(model, parameters, chosen, optimizer, post)
    job = _Job(post, chosen, shares, pulls, parameters, seed if shuffle else None)
    rank = own.rank()
    if rank < layout.workers:
        return _work(job, role, model, optimizer, train)
    if rank < layout.workers + layout.servers:
        return _serve(job, role, rank - layout.workers, optimizer)
    assert infer is not None
    return _infer(job, role, model, infer)


class _Role:
    """What this rank is; it can say what it is doing."""

    part: Client | Server | None = None


def _standing(of: weakref.ref[_Role]) -> Callable[[], str]:
    def say() -> str:
        role = of()
        part = role.part if role is not None else None
        return part.standing if part is not None else "begins or ends"

    return say


def _layout(size: int, servers: int, agents: int, infer: Any) -> Layout:
    for name, count, least in (("servers", servers, 1), ("agents", agents, 0)):
        if not isinstance(count, int) or count < least:
            raise InputError(f"{name}: {count} (expected at least {least})")
    if size - servers - agents < 1:
        raise InputError(f"{size} ranks, {servers} servers and {agents} agents: there is no worker left")
    if agents and infer is None:
        raise InputError(f"{agents} agents and nothing to do for them (expected infer=, a function of the model)")
    return Layout(size - servers - agents, servers, agents)


def _plan(plan: Any, parameters: Mapping[str, nn.Parameter], servers: int, placement: Placement) -> Plan:
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    if plan is None:
        return default_plan(parameters, servers, placement)
    return plan if isinstance(plan, Plan) else files.read(Path(plan), Plan)


def _meet(group: Any, layout: Layout, patience_s: float, problem: str = "") -> Any:
    """A group of our own, once everybody is there; one that is not everybody's is used as it is."""
    rank, store = group.rank(), _get_default_store()
    prefix = f"legato/servers/{group.group_name}"
    number = store.add(f"{prefix}/calls/{rank}", 1)
    join(torch._C._distributed_c10d.PrefixStore(f"{prefix}/{number}", store), rank, layout.size, patience_s, problem)
    if layout.size < dist.get_world_size():
        return group  # a new one would need the ranks that are not in it
    try:
        with threads_that_wait():
            return dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise RankError(f"rank {rank}: the ranks cannot connect: {str(error).splitlines()[0]}") from error


def _agree(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], plan: Plan, optimizer: Optimizer, post: Post
) -> None:
    """The same job everywhere, and worker 0's values."""
    layout = post.layout
    facts = describe(plan, model, dict(parameters))
    facts["optimizer"] = f"{type(optimizer).__name__} of {len(optimizer.param_groups)} groups"
    facts["optimizer's state"] = describe_state(optimizer, {id(p): name for name, p in model.named_parameters()})
    facts["roles"] = f"{layout.workers} workers, {layout.servers} servers, {layout.agents} agents"
    try:
        agree(facts, post.group)
        values = [*model.parameters(), *model.buffers()]
        broadcast_tensors(values, post.group, lambda work: work.wait())
    except RankError:
        raise
    except RuntimeError as error:
        raise post.watch.failure("the ranks compare their models", error) from error


def _work(job: _Job, role: _Role, model: nn.Module, optimizer: Optimizer, train: Callable[..., Any]) -> Any:
    client = Client(job.post, job.shares, job.pulls, job.parameters)
    role.part = client
    serve_steps(optimizer, client, job.pulls, job.seed)
    result = train(ServedModel(model, client, job.plan), optimizer)
    client.drop()
    release(optimizer)
    client.close()
    return result


def _serve(job: _Job, role: _Role, server: int, optimizer: Optimizer) -> None:
    mine = [share for share in job.shares if share.server == server]
    held = {share.index for share in mine}
    holdings = Holdings(mine, job.parameters, optimizer)
    role.part = Server(job.post, mine, [i for i in job.pulls if i in held], holdings, job.seed)
    role.part.serve()


def _infer(job: _Job, role: _Role, model: nn.Module, infer: Callable[[AgentModel], Any]) -> Any:
    puller = Puller(job.post, job.shares, job.pulls, job.parameters)
    result = infer(AgentModel(model, puller, job.plan))
    puller.leave()
    return result
