"""Hierarchical all-reduce: rings inside the hosts, and one ring between the hosts for each part.

First, the g workers of each host reduce-scatter on the links to the host's inner switch. Then the workers with the same
place l in their hosts all-reduce part l over the network. Finally, the workers of each host all-gather inside the host.
If every GPU has a network card, only part l uses the l-th cards of all hosts. If the network has rails (one switch
connects the l-th cards of all hosts), part l does not leave rail l. NCCL sends in this way on such machines. If workers
share a card, their parts share the card, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from legato.collectives import RING
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.all_reduce import Group, around
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.switches import HostShape
from legato.simulator.flow.network.topology import Topology

__all__ = ["Hierarchical", "ring"]

#: The most workers that share a host and its network card, if the network does not define hosts.
_WORKERS_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Collective):
    """Hierarchical all-reduce: within hosts and between them.

    A host has `Network.gpus_per_host` workers. If `gpus_per_host` is 1, a host has as many workers as the greatest
    common divisor of 8 and the number of workers in each rack, or one worker if racks differ. The workers of a host
    then share the first worker's network card.
    """

    def host_shape(self, network: Network) -> HostShape:
        if network.gpus_per_host > 1:
            return network.host_shape
        in_a_rack, uneven = divmod(network.workers, network.racks)
        usual = 1 if uneven else math.gcd(_WORKERS_PER_HOST, in_a_rack)
        return HostShape(usual, usual)

    def symmetric(self, network: Network) -> bool:
        """Return whether all hosts are alike, as with one switch, or with rails (nothing is sent between rails)."""
        return network.switches.one or network.topology == "rails"

    def simulated(self, network: Network) -> int:
        return self.host_shape(network).gpus

    def services(self, network: Network) -> tuple[int, int]:
        gpus = self.host_shape(network).gpus
        half = 2 * network.workers * (gpus - 1 + network.workers // gpus - 1)
        return half, half

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        part = ring(topology, fragments, ready, local=True, adds=True)
        return ring(topology, fragments, part, local=False, adds=True)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        part = ring(topology, fragments, held, local=False, adds=False)
        return ring(topology, fragments, part, local=True, adds=False)


def ring(topology: Topology, fragments: Fragments, held: Ids, *, local: bool, adds: bool) -> Ids:
    """Add the reducing or the distributing half of a ring inside each host, or between hosts for each part."""
    gpus = topology.shape.gpus
    group = Group(gpus, 1, local) if local else Group(topology.workers // gpus, gpus, local)
    parts, *halves = RING.rounds(group.members)
    for one in halves[0 if adds else 1]:
        held = around(topology, fragments, held, one, parts * group.stride, adds=adds, group=group)
    return held
