"""One cell: plan, simulate, and return the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from legato.core.errors import LegatoError
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.simulator import collective
from legato.simulator.flow import Fabric, FlowResult, Network, plain_plan, simulate_flow
from legato.simulator.flow.pricing import cluster_for
from legato.sweep.grid import PLAIN, Cell

__all__ = ["Outcome", "attempt", "plan_for", "run_cell"]


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a cell, or an `error` that says why there is no result. Times are in seconds.

    `lower_bound_s` is proven for plans of this kind, and known by
    formulas only. `parts` are those of a whole job's step. `final` is False if another attempt might succeed.
    """

    wall_s: float
    iteration_s: float | None = None
    lower_bound_s: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    parts: dict[str, float] = {}
    error: str | None = None
    final: bool = True


def run_cell(cell: Cell, workload: Workload) -> Outcome:
    """Run a cell, as `attempt` does."""
    return attempt(lambda: _simulated(cell, workload))


def attempt(simulate: Callable[[], dict[str, Any]]) -> Outcome:
    """The outcome with the fields that a simulation returns, or its error, so that no cell can end a long sweep."""
    start = time.perf_counter()
    try:
        found = simulate()
    except LegatoError as error:
        return Outcome(time.perf_counter() - start, error=" ".join(str(error).split()))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Outcome(time.perf_counter() - start, error=text, final=False)
    return Outcome(time.perf_counter() - start, **found)


def plan_for(scheduler: str, workload: Workload, name: str, fabric: Fabric, network: Network) -> Plan:
    """The scheduler's plan for the fabric, whose name is `name`, on the network; `PLAIN` sends a message per tensor."""
    if scheduler == PLAIN:
        return plain_plan(workload, fabric)
    return schedule(scheduler, workload, cluster_for(name, fabric, network))


def _simulated(cell: Cell, workload: Workload) -> dict[str, Any]:
    network, fabric = cell.network, cell.made_fabric
    plan = plan_for(cell.scheduler, workload, cell.fabric, fabric, network)
    found: Timeline | FlowResult
    bound_s = None
    if cell.fidelity == "formulas":
        cluster = network.cluster(cell.fabric, fabric.servers)
        found = collective.simulate(workload, plan, cluster)
        bound_s = lower_bound(workload, cluster, **kind_of(plan, workload)._asdict()).seconds
    else:
        found = simulate_flow(workload, plan, fabric, network, iterations=cell.iterations, keep_transfers=False)
    return {
        "iteration_s": found.iteration_s,
        "lower_bound_s": bound_s,
        "overlap": found.overlap,
        "utilization": found.utilization,
        "num_messages": len(plan.messages),
    }
