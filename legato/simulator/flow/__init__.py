"""Simulation of every transfer on every link, for every worker (Network Operator Edition, section 5).

- `fragments.py` divides a plan's messages into fragments, which are sent independently.
- `fabrics/` turns fragments into transfers that wait for one another, with one file per fabric.
- `network/` describes the hosts, links and switches that carry transfers.
- `iterations/` adds the workers' computation, and simulates one job.
- `shared/` simulates several jobs on one network.
- `engine/` runs the graph that all these parts build.
- `pricing.py` gives planners the cost of a message on a fabric.

docs/simulator.md and docs/shared_networks.md explain the model. No code is compiled when this package is imported.
"""

from __future__ import annotations

from legato.simulator.flow.fabrics import BASELINE, FABRICS, Fabric, fabric
from legato.simulator.flow.iterations.result import FlowResult
from legato.simulator.flow.iterations.run import plain_plan, simulate_flow
from legato.simulator.flow.network.disturbances import Disturbance
from legato.simulator.flow.network.network import SHARING, Network
from legato.simulator.flow.shared.jobs import JobTimes, SharedJob, SharedNetwork, SharedTimes
from legato.simulator.flow.shared.placement import PLACEMENTS, place

__all__ = [
    "BASELINE",
    "FABRICS",
    "PLACEMENTS",
    "SHARING",
    "Disturbance",
    "Fabric",
    "FlowResult",
    "JobTimes",
    "Network",
    "SharedJob",
    "SharedNetwork",
    "SharedTimes",
    "fabric",
    "place",
    "plain_plan",
    "simulate_flow",
]
