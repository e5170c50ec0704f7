"""The model and optimizer of a worker's training loop, and the model of an agent's inference loop."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.core.plan import Plan
from legato.lab.servers.held import check_step, settings
from legato.lab.servers.protocol import PULL, REPLY, STATE
from legato.lab.servers.server import shuffled
from legato.lab.servers.worker.arrivals import Arrivals
from legato.lab.servers.worker.puller import Puller
from legato.lab.servers.worker.worker import Worker
from legato.pytorch.parameters import ModuleFingerprint
from legato.pytorch.private.optimizers import rebind_step
from legato.pytorch.private.tensors import without_overrides

__all__ = ["AgentModel", "Iteration", "ServedModel", "serve_optimizer"]


class Iteration(msgspec.Struct, frozen=True):
    """One measured iteration of a worker or an agent: from one forward pass to the next.

    `waited_s` is the time during which computation waited for parameters. `transfers` is the number of transfers whose
    arrival was observed. `out_of_order` is the number of observed transfers that arrived before a transfer of the same
    server that should have come first. `arrivals` has the seconds from `step()` (or the pull) to each arrival.
    """

    seconds: float
    waited_s: float
    transfers: int
    out_of_order: int
    arrivals: tuple[float, ...]


class _Measured(nn.Module):
    """A model that gets its parameters from a `Puller`, and can record its iterations."""

    def __init__(self, module: nn.Module, puller: Puller, plan: Plan) -> None:
        super().__init__()
        self.module = module
        self.plan = plan
        self._puller = puller
        self._record: list[Iteration] | None = None
        self._since: tuple[float, float] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._record is not None:
            self._mark()
        return self.module(*args, **kwargs)

    @contextmanager
    def measure(self, arrivals: bool = True) -> Iterator[list[Iteration]]:
        """Yield a list to which each iteration in the block, from one forward pass to the next, is appended.

        With `arrivals`, the order in which transfers arrive is observed, which takes part of a CPU core.
        """
        puller = self._puller
        record: list[Iteration] = []
        self._record = record
        self._since = None
        puller.arrivals = Arrivals(puller.values, puller.shards) if arrivals else None
        try:
            yield record
        finally:
            self._record = None
            if puller.arrivals is not None:
                puller.arrivals.stop()
            puller.arrivals = None

    def _mark(self) -> None:
        """End the current iteration, if there is one, and begin the next. This is called when a forward pass begins."""
        now, waited, arrivals = time.perf_counter(), self._puller.waited_s, self._puller.arrivals
        if self._since is not None and self._record is not None:
            late, seconds = arrivals.previous if arrivals is not None else (0, ())
            began, before = self._since
            self._record.append(Iteration(now - began, waited - before, len(seconds), late, seconds))
        self._since = now, waited


class ServedModel(_Measured):
    """A worker's model: it receives its parameters from the servers, and pushes its gradients to them.

    `module` is the user's model, and the names in `state_dict()` have the prefix `module.`, as under
    `DistributedDataParallel`. `worker` (0 to `workers` - 1) selects this worker's part of the data. Each worker keeps
    its own buffers.
    """

    def __init__(self, module: nn.Module, worker: Worker, plan: Plan) -> None:
        super().__init__(module, worker, plan)
        self._worker = worker
        self._fingerprint = ModuleFingerprint(module)
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        self.worker, self.workers = worker.transport.rank, worker.transport.roles.workers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = torch.is_grad_enabled()
        if training and (change := self._fingerprint.difference() or self._unfrozen()):
            raise RankError(
                f"{change}, which the servers do not know; change the model before parameter_servers() is called"
            )
        if training:
            self._worker.begin_forward()
        output = super().forward(*args, **kwargs)
        if training and self._worker.enabled:
            self._worker.backward_scope.expect(output)
        return output

    def _unfrozen(self) -> str:
        trained = (name for name, p in self.module.named_parameters() if p.requires_grad)
        return next((f"{name} was unfrozen or added" for name in trained if name not in self._trained), "")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes inside the block on this worker, and push nothing."""
        before, self._worker.enabled = self._worker.enabled, False
        try:
            yield
        finally:
            self._worker.enabled = before

    def flush(self) -> None:
        """Bring every parameter up to date now, instead of when it is first read."""
        self._worker.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as `nn.Module` does; the servers drop gradients that no `step()` has used."""
        self._worker.drop()
        with without_overrides():
            super().zero_grad(set_to_none)


class AgentModel(_Measured):
    """An inference agent's model: call `pull()`, then run forward passes, while the workers train.

    `training_goes_on` says whether the workers were still training at the last pull. `iteration` is the number of
    updates that the parameters had received by then. All elements of a shard come from the same update. The shards of
    two servers may differ by one update.
    """

    def __init__(self, module: nn.Module, puller: Puller, plan: Plan) -> None:
        super().__init__(module, puller, plan)
        self.training_goes_on, self.iteration = True, 0

    def pull(self) -> None:
        """Request all parameters from the servers. A later read of a parameter waits until its value has arrived."""
        puller = self._puller
        puller.settle()
        puller.transport.finish(puller.tell_servers(PULL, 0))
        ranks = [puller.transport.roles.server_rank(server) for server in puller.servers]
        replies = [puller.transport.next_command(rank, "the parameters") for rank in ranks]
        self.iteration = min(reply.iteration for reply in replies)
        self.training_goes_on = all(json.loads(reply.content)["training"] for reply in replies)
        puller.expect(puller.pulls)


class _ServedOptimizer:
    """A mix-in for the class of a worker's optimizer: its `step()` tells the servers to step."""

    _legato_base: type[Optimizer]
    _legato_worker: Worker
    _legato_order: Callable[[int], Sequence[int]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer, worker, loss = cast(Optimizer, self), self._legato_worker, None
        check_step(optimizer)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        changed = worker.changed()
        worker.step(settings(optimizer, changed), changed, self._legato_order(worker.iteration))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._legato_worker.drop()
        with without_overrides():
            self._legato_base.zero_grad(cast(Optimizer, self), set_to_none)

    def state_dict(self) -> Any:
        """Return the state of whole parameters, as in a single process, collected from all servers."""
        return self._legato_base.state_dict(_with_state(cast(Optimizer, self)))

    @property
    def state(self) -> Any:
        raise InputError("the optimizer's state is on the servers; optimizer.state_dict() fetches a copy")

    def load_state_dict(self, state_dict: Any) -> None:
        raise InputError("load a checkpoint into the optimizer, on every rank, before parameter_servers() is called")

    def add_param_group(self, param_group: Any) -> None:
        raise InputError("add parameters to the optimizer before parameter_servers() is called")


def serve_optimizer(optimizer: Optimizer, worker: Worker, pulls: Sequence[int], seed: int | None) -> None:
    """Let the servers make the optimizer's steps from now on."""

    def order(iteration: int) -> Sequence[int]:
        """Return the order of the pulls in this iteration, which is the order that the servers use."""
        if seed is None:
            return pulls
        parts = [[i for i in pulls if worker.by_index[i].server == server] for server in worker.servers]
        return [i for part in parts for i in shuffled(part, seed, worker.transport.rank, iteration)]

    base = type(optimizer)
    vars(optimizer).update(_legato_worker=worker, _legato_order=order)
    overlay = type(base.__name__, (_ServedOptimizer, base), {"_legato_base": base, "__module__": base.__module__})
    object.__setattr__(optimizer, "__class__", overlay)
    rebind_step(optimizer, base, overlay)


def release(optimizer: Optimizer) -> None:
    """Restore the optimizer's own class, and give it its current state."""
    if isinstance(optimizer, _ServedOptimizer):
        vars(optimizer)["state"] = _with_state(optimizer).state
        overlay = type(optimizer)
        object.__setattr__(optimizer, "__class__", optimizer._legato_base)
        for name in ("_legato_worker", "_legato_order"):
            vars(optimizer).pop(name)
        rebind_step(optimizer, overlay, type(optimizer))


def _with_state(optimizer: Optimizer) -> Optimizer:
    """Return a copy of the optimizer, with the state and the class that it would have in a single process."""
    served = cast(_ServedOptimizer, optimizer)
    whole = object.__new__(served._legato_base)
    vars(whole).update({k: v for k, v in vars(optimizer).items() if not k.startswith("_legato")})
    whole.state = defaultdict(dict, _fetch_state(served._legato_worker))
    return whole


def _fetch_state(worker: Worker) -> dict[Tensor, dict[str, Any]]:
    """Fetch the optimizer's state from all servers, and combine it."""
    worker.settle()
    worker.transport.finish(worker.tell_servers(STATE, worker.iteration))
    found: dict[Tensor, dict[str, Any]] = {}
    for server in worker.servers:
        rank = worker.transport.roles.server_rank(server)
        reply = worker.transport.next_command(rank, "the optimizer's state")
        if reply.kind != REPLY:
            raise RankError(f"{worker.transport.named(rank)}: command {reply.kind} instead of the optimizer's state")
        block = torch.empty(reply.iteration, dtype=torch.uint8)
        if reply.iteration:
            work = worker.transport.receive(block, rank, 0, "the optimizer's state")
            worker.transport.wait(work, rank, "the optimizer's state")
        _unpack_state(worker, json.loads(reply.content), block, found)
    return found


def _unpack_state(worker: Worker, listed: Any, block: Tensor, found: dict[Tensor, dict[str, Any]]) -> None:
    at = 0
    for index, key, dtype, shape, value in listed:
        shard = worker.by_index[index]
        parameter = worker.slots[shard.name].parameter
        state = found.setdefault(parameter, {})
        if dtype is None:
            state[key] = value
            continue
        kind = getattr(torch, dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        part = block[at : at + size].clone().view(kind).view(shape)
        at += size
        if shard.whole or part.numel() != shard.stop - shard.start or part.dim() != 1:
            state[key] = part.to(parameter.device) if part.dim() else part
            continue
        if key not in state:
            state[key] = torch.zeros(parameter.shape, dtype=kind, device=parameter.device)
        state[key].view(-1)[shard.start : shard.stop].copy_(part)
