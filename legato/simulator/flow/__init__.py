"""Flow fidelity: every transfer on every link, for every worker (Network Operator Edition, section 5).

A *fabric* turns a plan's messages into transfers that wait for one another
(`fabrics/`, one file per fabric, using `topology.py`); `unroll.py` adds the
workers' computation; the *engine* runs the resulting graph (`graph.py`,
`engine.py`). Where one worker can stand for all, it alone is simulated
(`alone.py`). Links and workers can be disturbed (`disturbances.py`), and several jobs
can share a network (`jobs.py`, `placement.py`, `phases.py`). docs/simulator.md and
docs/shared_networks.md explain the model. Importing this package compiles
nothing.
"""

from __future__ import annotations

from legato.simulator.flow.disturbances import Disturbance
from legato.simulator.flow.fabrics import BASELINE, FABRICS, Fabric, fabric
from legato.simulator.flow.jobs import Job, JobTimes, SharedNetwork, SharedTimes, simulate_jobs
from legato.simulator.flow.network import SHARING, Network
from legato.simulator.flow.phases import Phases, best_shifts
from legato.simulator.flow.placement import PLACEMENTS, place
from legato.simulator.flow.result import FlowResult
from legato.simulator.flow.run import plain_plan, simulate_flow

__all__ = [
    "BASELINE",
    "FABRICS",
    "PLACEMENTS",
    "SHARING",
    "Disturbance",
    "Fabric",
    "FlowResult",
    "Job",
    "JobTimes",
    "Network",
    "Phases",
    "SharedNetwork",
    "SharedTimes",
    "best_shifts",
    "fabric",
    "place",
    "plain_plan",
    "simulate_flow",
    "simulate_jobs",
]
