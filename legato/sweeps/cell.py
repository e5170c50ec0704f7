"""Run one cell of a sweep: plan, simulate, and return the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec

from legato.core.axes import SERVERS
from legato.core.cluster import UNDIVIDED
from legato.core.code import blame
from legato.core.errors import InputError, LegatoError, TooLargeError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.schedule import Scheduler, schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import cluster_for_bound, kind_of
from legato.simulator import collective
from legato.simulator.flow import FABRICS, Fabric, FlowResult, Network, plain_plan, simulate_flow
from legato.simulator.flow.fabrics import fitting
from legato.simulator.flow.iterations.run import check_flow
from legato.simulator.flow.network.network import PRICED_AS
from legato.simulator.flow.pricing import cluster_for
from legato.sweeps.grid import PLAIN, Cell, Fidelity, fabric_names, network_of

__all__ = ["Outcome", "Simulation", "attempt", "plan_for", "run_cell"]


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a cell, or an `error` that says why there is no result. Times are in seconds.

    `lower_bound_s` is a proven bound for plans of this kind; only simulations by formulas have a bound. `parts` are the
    parts of a whole job's step, and `case` is a row of `share`. `final` is False if another attempt might succeed.
    """

    wall_s: float
    iteration_s: float | None = None
    lower_bound_s: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    parts: dict[str, float] = {}
    case: dict[str, Any] = {}
    error: str | None = None
    final: bool = True


#: The workload, the scheduler and the fabric that a cell names.
Parts = tuple[Workload, str | Scheduler, str | Fabric]


def run_cell(cell: Cell, parts: Parts) -> Outcome:
    """Run a cell, and return its result or error."""
    return attempt(lambda: _simulated(cell, *parts))


def attempt(simulate: Callable[[], dict[str, Any]]) -> Outcome:
    """Run a simulation, and return its fields or its error as an outcome, so that no cell can end a long sweep."""
    start = time.perf_counter()
    try:
        found = simulate()
    except LegatoError as error:
        return Outcome(time.perf_counter() - start, error=" ".join(str(error).split()))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(time.perf_counter() - start, error=text, final=False)
    return Outcome(time.perf_counter() - start, **found)


def plan_for(scheduler: str | Scheduler, workload: Workload, name: str, fabric: Fabric, network: Network) -> Plan:
    """Return the scheduler's plan for the named fabric on the network; `PLAIN` plans one message per tensor."""
    if scheduler == PLAIN:
        return plain_plan(workload, fabric)
    return schedule(scheduler, workload, cluster_for(name, fabric, network))


@dataclass(frozen=True)
class Simulation:
    """A simulation of a job on a network, for a cell of a sweep or a row of `legato simulate`.

    All workers have the same workload, or each has its own. Raises `InputError` if the fidelity is `formulas`, but
    hosts differ or there is more than one switch.
    """

    workloads: Sequence[Workload]
    network: Network
    fidelity: Fidelity
    iterations: int | None = None

    def __post_init__(self) -> None:
        if self.fidelity == "formulas" and (len(self.workloads) > 1 or not self.network.plain):
            raise InputError(
                "--fidelity formulas: needs identical hosts behind one switch (expected --fidelity transfers)"
            )

    def run(self, plan: Plan, name: str, fabric: Fabric) -> Timeline | FlowResult:
        """Simulate a plan on the named fabric. Raises `InputError` if a formula is needed but missing."""
        if self.fidelity == "transfers":
            with nullcontext() if name in FABRICS else blame(name):
                return simulate_flow(self._job, plan, fabric, self.network, iterations=self.iterations)
        if why := self.beyond_formulas(plan, name, fabric):
            raise InputError(why)
        # With formulas, a message may name its collective, but this cluster has only one.
        messages = tuple(msgspec.structs.replace(message, collective=None) for message in plan.messages)
        plan = msgspec.structs.replace(plan, scheduler=name, messages=messages)
        return collective.simulate(self.workloads[0], plan, self.network.cluster(name, fabric.servers))

    def check(self, plan: Plan, name: str, fabric: Fabric) -> None:
        """Raise `InputError`, before the simulation, if the simulation would have too many transfers."""
        if self.fidelity == "transfers":
            try:
                check_flow(self._job, plan, fabric, self.network, iterations=self.iterations)
            except TooLargeError as error:
                raise TooLargeError(f"{name}: {error}") from None

    def beyond_formulas(self, plan: Plan | None, name: str, fabric: Fabric) -> str:
        """Return why there is no formula for the fabric, or for this plan on the fabric; "" if there is a formula."""
        if PRICED_AS.get(name, name) not in fabric_names("formulas"):
            return f"--fidelity formulas: {name!r} has no cost formula (expected --fidelity transfers)"
        if plan is None or not (fabric.servers or name in UNDIVIDED):
            return ""
        what = f"shard {plan.shard!r}" if plan.shard != "none" else "wire formats" if plan.wires else ""
        if fabric.servers and what:
            return f"{name}: a plan with {what} on parameter servers (expected a fabric without servers)"
        halves = any(message.kind != "all_reduce" for message in plan.messages)
        return f"{name}: a plan with halves (expected all-reduces)" if halves and not fabric.servers else ""

    @property
    def _job(self) -> Workload | Sequence[Workload]:
        return self.workloads[0] if len(self.workloads) == 1 else self.workloads


def _simulated(cell: Cell, workload: Workload, scheduler: str | Scheduler, given: str | Fabric) -> dict[str, Any]:
    how, servers = cell.settings, cell.axes[SERVERS.field]
    name, network = how["fabric"], network_of(cell.axes)
    fabric = fitting(given, how["options"] | ({SERVERS.field: servers} if servers else {}))
    plan = plan_for(scheduler, workload, name, fabric, network)
    found = Simulation([workload], network, how["fidelity"], how["iterations"]).run(plan, name, fabric)
    bound_s = None
    if how["fidelity"] == "formulas":
        cluster = cluster_for_bound(plan, network.cluster(name, fabric.servers))
        bound_s = lower_bound(workload, cluster, **kind_of(plan, workload)._asdict()).seconds
    return {
        "iteration_s": found.iteration_s,
        "lower_bound_s": bound_s,
        "overlap": found.overlap,
        "utilization": found.utilization,
        "num_messages": len(plan.messages),
    }
