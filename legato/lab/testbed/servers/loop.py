"""Train a workload with real parameter servers and emulated accelerators, and record the times of every worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.lab.servers import AgentModel, ServedModel, parameter_servers
from legato.lab.testbed.accelerator import Clock, EmulatedModel, EmulatedOptimizer

__all__ = ["ServerLoop", "WorkerRun"]

#: Iterations before the ones that count, because workers compare all their parameters in the first three iterations.
WARM = 3
_PATIENCE_S = 120.0


class WorkerRun(msgspec.Struct, frozen=True):
    """The iterations of a worker: `began` and `stepped` have the start and end of each backward pass (host seconds).

    `waited_s` is how long each iteration waited for parameters. `transfers` is
    the number of transfers whose arrival was observed. `out_of_order` is the number of transfers that arrived too
    early: before another transfer of the same server that the plan has first.
    """

    began: tuple[float, ...]
    stepped: tuple[float, ...]
    waited_s: tuple[float, ...]
    transfers: int
    out_of_order: int

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self.began, self.began[1:], strict=False)]


class ServerLoop:
    """A training loop for `workload`: the first ranks are workers, then come `servers` servers and `agents` agents."""

    def __init__(self, workload: Workload, servers: int, agents: int = 0) -> None:
        self.servers, self.agents = servers, agents
        self.workers = dist.get_world_size() - servers - agents
        self._together: Any = dist.new_group(range(self.workers))
        self.clock = Clock()
        self.model = EmulatedModel(workload, clock=self.clock, seed=dist.get_rank())

    def run(self, plan: Plan, iterations: int, *, seed: int = 0, look: bool = False, infer: bool = False) -> list[Any]:
        """Run a plan, and return each rank's result: a worker's `WorkerRun`, a server's None, or an agent's pass times.

        A plan named `random` uses a new order of pulls in every iteration. With `look`, the order in which transfers
        arrive is observed; this takes CPU time, and slows down everything. Agents pull only with `infer`.
        """
        return self._serve(plan, lambda m, o: _train(m, o, self.clock, iterations, look), seed, infer)

    def exchange(self, plan: Plan, iterations: int) -> list[float]:
        """Return the seconds of each iteration's pushes, sums, updates and pulls, on the worker that takes longest."""

        def train(model: ServedModel, optimizer: torch.optim.Optimizer) -> list[float]:
            seconds = []
            for _ in range(WARM + iterations):
                optimizer.zero_grad()
                loss: Any = model()
                dist.barrier(group=self._together)
                start = time.perf_counter()
                loss.backward()
                optimizer.step()
                model.flush()
                seconds.append(time.perf_counter() - start)
            return seconds[WARM:]

        results = self._serve(plan, train, 0, infer=False)
        return [max(each) for each in zip(*results[: self.workers], strict=True)]

    def _serve(self, plan: Plan, train: Callable[..., Any], seed: int, infer: bool) -> list[Any]:
        found = parameter_servers(
            self.model,
            EmulatedOptimizer(self.model),
            train,
            servers=self.servers,
            agents=self.agents,
            infer=lambda model: _infer(model, self.clock) if infer else None,
            plan=plan,
            shuffle=plan.carrier == "unordered",
            seed=seed,
            patience_s=_PATIENCE_S,
        )
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, found)
        return results


def _train(
    model: ServedModel, optimizer: torch.optim.Optimizer, clock: Clock, iterations: int, look: bool
) -> WorkerRun:
    began, stepped = [], []
    clock.begin()
    with model.measure(arrivals=look) as record:
        for _ in range(WARM + iterations + 2):
            loss: Any = model()
            began.append(time.perf_counter())
            optimizer.zero_grad()
            loss.backward()
            stepped.append(time.perf_counter())
            optimizer.step()
    counted = record[WARM + 1 :][:iterations]  # a record begins with the forward pass that ends a counted iteration
    return WorkerRun(
        began=tuple(began[WARM : WARM + iterations + 1]),
        stepped=tuple(stepped[WARM : WARM + iterations]),
        waited_s=tuple(i.waited_s for i in counted),
        transfers=sum(i.transfers for i in counted),
        out_of_order=sum(i.out_of_order for i in counted),
    )


def _infer(model: AgentModel, clock: Clock) -> list[float]:
    seconds = []
    clock.begin()
    while model.training_goes_on:
        start = time.perf_counter()
        model.pull()
        with torch.no_grad():
            model()
        seconds.append(time.perf_counter() - start)
    return seconds[1:-1]
