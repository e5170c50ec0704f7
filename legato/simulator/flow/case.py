"""One simulation: its arguments, checked, and how to run it on a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import PlanError, TooLargeError
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.simulator.flow.alone import Alone
from legato.simulator.flow.disturbances import Profiles
from legato.simulator.flow.fabrics.doubling import Butterfly, HalvingDoubling
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.ring import Ring
from legato.simulator.flow.fabrics.shuffle import Shuffle
from legato.simulator.flow.fragments import DISTRIBUTING, REDUCING, num_fragments
from legato.simulator.flow.graph import MOST_FAIR_SERVICES, Graph, Ids, Services
from legato.simulator.flow.network import Network
from legato.simulator.flow.result import FlowResult, IterationTimes, Transfers
from legato.simulator.flow.topology import Topology
from legato.simulator.flow.unroll import Unrolled

__all__ = ["Case", "run_graph"]

#: Fabrics all of whose transfers one worker can make alone. One that is derived from these may send differently.
_ALONE = (Ring, Shuffle, Butterfly, HalvingDoubling)
#: Services that trips stand for; a thousand million take some ten seconds.
_MOST_ON_TRIPS = 4_000_000_000


@dataclass(frozen=True)
class Case:
    """What is simulated: one workload for all workers or one each, a plan, a fabric, a network, and iterations.

    `alike`: whether all workers have the same workload, speed and link.
    """

    workloads: Sequence[Workload]
    plan: Plan
    fabric: Fabric
    network: Network
    iterations: int
    alike: bool

    def __post_init__(self) -> None:
        import_module("legato.simulator.flow.engine")  # an `InputError` where numba is not installed

    @property
    def symmetric(self) -> bool:
        """Whether all workers are alike, and the network looks the same to the fabric from each of them."""
        return self.alike and self.network.sharing == "fifo" and self.fabric.symmetric(self.network)

    @property
    def alone(self) -> bool:
        """Whether one worker can stand for all and make their transfers as trips (`alone.py`)."""
        return self.symmetric and type(self.fabric) in _ALONE and self.fabric.simulated(self.network) == 1

    def _num_fragments(self, kinds: Sequence[str]) -> int:
        messages = [(i, message) for i, message in enumerate(self.plan.messages) if message.kind in kinds]
        return num_fragments(messages, self.fabric.placed(self.workloads[0]), self.fabric.message_bytes)

    def services(self, workers: int) -> int:
        """At least how many services run, all iterations together, on the links of so many of the workers."""
        reduce, distribute = self.fabric.services(self.network)
        total = self._num_fragments(REDUCING) * reduce + self._num_fragments(DISTRIBUTING) * distribute
        return self.iterations * total * workers // self.network.workers

    def topology(self, *, symmetry: bool, keep_transfers: bool) -> Topology:
        """The links of all workers, or, with `symmetry`, of as few as can stand for all.

        Raises `TooLargeError` if they have too many transfers.
        """
        fabric, network = self.fabric, self.network
        if symmetry and self.alone and not keep_transfers:
            if self.services(1) > _MOST_ON_TRIPS:
                raise TooLargeError(f"more than {_MOST_ON_TRIPS:,} transfers to simulate (fewer workers?)")
            return Alone(Graph(), network)
        size = fabric.simulated(network)
        if not (symmetry and self.symmetric):
            size = network.workers
        graph = Graph(MOST_FAIR_SERVICES) if network.sharing == "fair" else Graph()
        # Every worker launches every message, and the times of all its ops are computed.
        launches = self.iterations * max(size * len(self.plan.messages), 1 if self.symmetric else network.workers)
        graph.check_room(max(self.services(size), launches))
        Graph().check_room(size * len(self.workloads[0].ops))
        return Topology(graph, network, size, fabric.servers, fabric.host_shape(network))

    def unroll(self, topology: Topology, begin: Ids | None = None) -> Unrolled:
        """What is simulated on a topology. Iteration k waits for service `begin[k]`, if there is one."""
        size = topology.size
        durations = np.array([[op.duration_s for op in one.ops] for one in self.workloads[:size]])
        if len(durations) < size:
            durations = np.broadcast_to(durations, (size, durations.shape[1]))
        slowdown = self.network.slowdown(self.iterations, size if self.symmetric else None)
        return Unrolled(self.workloads[0], self.plan, self.fabric, topology, durations, slowdown).build(begin)

    def simulate(self, *, symmetry: bool, keep_transfers: bool) -> FlowResult:
        """Simulate all iterations. Raises `TooLargeError`, and `PlanError` on a plan that waits for itself."""
        topology = self.topology(symmetry=symmetry, keep_transfers=keep_transfers)
        unrolled = self.unroll(topology)
        services = unrolled.graph.freeze(topology.num_links)
        done = run_graph(services, topology, unrolled.profiles, unrolled.computing)
        if done < len(services.records):
            left = len(services.records) - done
            raise PlanError(f"the plan waits for itself: {left} transfers or ops never start")
        runs = [IterationTimes.of(run, services.records) for run in unrolled.iterations]
        return FlowResult.of(unrolled, runs, Transfers.of(services.records, topology) if keep_transfers else None)


def run_graph(
    services: Services,
    topology: Topology,
    profiles: Profiles | None = None,
    computing: Sequence[tuple[Ids, NDArray[np.int64]]] = (),
    priority: NDArray[np.int64] | None = None,
) -> int:
    """Run the engine for the topology, and return how many services ran.

    `profiles` are those of what is disturbed, `computing` what computes (`Unrolled.computing`). `priority` is that of
    each service, on links that serve higher ones first.
    """
    found = profiles.of_services(services.records["link"], computing) if profiles else None
    if topology.network.sharing == "fair":
        from legato.simulator.flow.fair import run_fair

        return run_fair(services, topology.s_per_byte(), found, profiles.changes() if profiles else (), priority)
    from legato.simulator.flow.engine import run_services

    return run_services(*services, found, priority, topology.trips() if isinstance(topology, Alone) else None)
