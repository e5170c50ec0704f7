"""Starts the parameter-server mode: assigns roles, checks that all ranks agree, and runs each rank's part."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from legato.core import files
from legato.core.errors import InputError, RankError
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.text import count
from legato.lab.servers.held import HeldState, check_optimizer, describe_state
from legato.lab.servers.model import AgentModel, ServedModel, release, serve_optimizer
from legato.lab.servers.protocol import Roles, Transport, join
from legato.lab.servers.server import Server
from legato.lab.servers.shards import Shard, default_plan, shards_of
from legato.lab.servers.worker.puller import Puller
from legato.lab.servers.worker.worker import Worker
from legato.pytorch.network.agreement import agree, broadcast_tensors, describe_model
from legato.pytorch.network.threads import batch_policy_threads
from legato.pytorch.network.watchdog import FlightRecorder, Watchdog
from legato.pytorch.parameters import named_parameters, sparse_parameters, trained_parameters
from legato.pytorch.private.groups import PrefixStore, default_store

__all__ = ["parameter_servers"]


class _Setup(NamedTuple):
    """Everything that a rank needs to run its part."""

    transport: Transport
    plan: Plan
    shards: list[Shard]
    pulls: list[int]
    parameters: Mapping[str, nn.Parameter]
    seed: int | None


def parameter_servers(  # noqa: PLR0913
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
    """Train `model` on workers, with its parameters on `servers` servers that apply `optimizer`.

    All ranks call this with the same arguments. The first ranks are workers and run `train(model, optimizer)`, which is
    written like the training loop of a single process. The next `servers` ranks are servers, and the last `agents`
    ranks run `infer(model)`. On each rank, the call returns when that rank's part is done. The call returns the result
    of `train` or `infer`, and None on a server.

    `plan` is a `Plan` of pushes and pulls, or the path of its file. The plan says which server holds which parameters,
    and in which order they are pulled. Without a plan, `placement` assigns the parameters to servers, and they are
    pulled in the order of the model. With `shuffle`, every worker pulls in a new random order in each iteration, as in
    TicTac's baseline; `seed` determines the orders. `plan="random"` is the same as `shuffle` without a plan.

    `process_group` must include all ranks, or be a gloo group that nothing else uses at the same time.

    Raises `InputError` for a model or optimizer that cannot be served, and `PlanError` for a plan of another model.
    Raises `RankError`, which names the rank and the parameter, if a rank fails, has another model, plan or optimizer
    than rank 0, or does not respond for `patience_s` seconds.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    group: Any = process_group if process_group is not None else dist.group.WORLD
    roles = _roles(group.size(), servers, agents, infer)
    if not (math.isfinite(patience_s) and patience_s > 0):
        raise InputError(f"patience_s: {patience_s} (expected seconds above 0)")
    parameters = trained_parameters(model)
    if sparse_parameters(model):
        raise InputError("embeddings with sparse=True: not supported with parameter servers")
    if isinstance(plan, str) and plan == "random":
        plan, shuffle = None, True
    try:
        chosen = _plan(plan, parameters, servers, placement)
        shards, pulls = shards_of(chosen, parameters, servers)
        check_optimizer(optimizer, parameters, shards)
    except InputError as error:
        with contextlib.suppress(RankError):
            _rendezvous(group, roles, patience_s, str(error))
        raise
    role = _Role()
    own = _rendezvous(group, roles, patience_s)
    watchdog = Watchdog(own, FlightRecorder(own.rank()), _status(weakref.ref(role)), own.group_name)
    transport = Transport(own, roles, patience_s, watchdog)
    _agree(model, parameters, chosen, optimizer, transport)
    setup = _Setup(transport, chosen, shards, pulls, parameters, seed if shuffle else None)
    rank = own.rank()
    if rank < roles.workers:
        return _work(setup, role, model, optimizer, train)
    if rank < roles.workers + roles.servers:
        return _serve(setup, role, rank - roles.workers, optimizer)
    assert infer is not None
    return _infer(setup, role, model, infer)


class _Role:
    """The worker or the server that this rank runs; None until it has begun."""

    part: Worker | Server | None = None


def _status(role_ref: weakref.ref[_Role]) -> Callable[[], str]:
    def say() -> str:
        role = role_ref()
        part = role.part if role is not None else None
        return part.status if part is not None else "is starting or ending"

    return say


def _roles(size: int, servers: int, agents: int, infer: Any) -> Roles:
    for name, number, least in (("servers", servers, 1), ("agents", agents, 0)):
        if not isinstance(number, int) or number < least:
            raise InputError(f"{name}: {number} (expected at least {least})")
    if size - servers - agents < 1:
        given = ", ".join([count(size, "rank"), count(servers, "server"), count(agents, "agent")])
        raise InputError(f"{given}: no rank is left for a worker")
    if agents and infer is None:
        raise InputError(f"{count(agents, 'agent')} without infer= (expected a function of the model)")
    return Roles(size - servers - agents, servers, agents)


def _plan(plan: Any, parameters: Mapping[str, nn.Parameter], servers: int, placement: Placement) -> Plan:
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    if plan is None:
        return default_plan(parameters, servers, placement)
    return plan if isinstance(plan, Plan) else files.read(Path(plan), Plan)


def _rendezvous(group: Any, roles: Roles, patience_s: float, problem: str = "") -> Any:
    """Wait for the ranks of `group`; return a new group of these ranks, or `group` if the job has other ranks, too."""
    rank, store = group.rank(), default_store()
    prefix = f"legato/servers/{group.group_name}"
    number = store.add(f"{prefix}/calls/{rank}", 1)
    join(PrefixStore(f"{prefix}/{number}", store), rank, roles.size, patience_s, problem)
    if roles.size < dist.get_world_size():
        return group  # all ranks would have to take part in making a new group
    try:
        with batch_policy_threads():
            return dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s))
    except RuntimeError as error:
        raise RankError(f"rank {rank}: the ranks cannot connect: {str(error).splitlines()[0]}") from error


def _agree(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], plan: Plan, optimizer: Optimizer, transport: Transport
) -> None:
    """Check that all ranks have the same model, plan and optimizer, and give all ranks the values of rank 0."""
    roles = transport.roles
    facts = describe_model(plan, dict(parameters))
    for kind, found in (("parameter", named_parameters(model).items()), ("buffer", model.named_buffers())):
        facts |= {f"{kind} {name!r}": f"{tuple(t.shape)} {t.dtype}" for name, t in found if name not in parameters}
    facts["optimizer"] = f"{type(optimizer).__name__} of {count(len(optimizer.param_groups), 'group')}"
    facts["optimizer's state"] = describe_state(optimizer, {id(p): name for name, p in named_parameters(model).items()})
    facts["roles"] = str(roles)
    try:
        agree(facts, transport.group)
        values = [*model.parameters(), *model.buffers()]
        broadcast_tensors(values, transport.group, lambda work: work.wait())
    except RankError:
        raise
    except RuntimeError as error:
        raise transport.watchdog.failure("the ranks compare their models", error) from error


def _work(setup: _Setup, role: _Role, model: nn.Module, optimizer: Optimizer, train: Callable[..., Any]) -> Any:
    worker = Worker(setup.transport, setup.shards, setup.pulls, setup.parameters)
    role.part = worker
    serve_optimizer(optimizer, worker, setup.pulls, setup.seed)
    result = train(ServedModel(model, worker, setup.plan), optimizer)
    worker.drop()
    release(optimizer)
    worker.close()
    return result


def _serve(setup: _Setup, role: _Role, server: int, optimizer: Optimizer) -> None:
    mine = [shard for shard in setup.shards if shard.server == server]
    indices = {shard.index for shard in mine}
    held = HeldState(mine, setup.parameters, optimizer)
    role.part = Server(setup.transport, mine, [i for i in setup.pulls if i in indices], held, setup.seed)
    role.part.serve()


def _infer(setup: _Setup, role: _Role, model: nn.Module, infer: Callable[[AgentModel], Any]) -> Any:
    puller = Puller(setup.transport, setup.shards, setup.pulls, setup.parameters)
    result = infer(AgentModel(model, puller, setup.plan))
    puller.leave()
    return result
