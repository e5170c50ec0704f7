"""Aggregation in commercial switches, without servers: NVIDIA's SHARP, which NCCL uses as CollNet.

First, the workers of each host reduce-scatter on the links to the host's inner switch, as in `hierarchical`. After
this, worker l of each host has the sum of part l in its host. The workers l of all hosts send these sums up a tree of
switches. The switches add up the parts that arrive and send the sum back down, so the card of a worker carries its part
once in each direction. A link between switches carries a part once in each direction, whatever the number of hosts.
Switches forward bytes as they arrive. At the end, the workers of each host all-gather inside the host. There are three
differences from the parameter server of the Network Operator Edition with `multicast+aggregation`: each host adds up
gradients before it sends, messages (DDP's buckets) follow each other, and nothing waits for all gradients of an
iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.hierarchical import ring
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = ["Sharp"]


@dataclass(frozen=True, kw_only=True)
class Sharp(Collective):
    def symmetric(self, network: Network) -> bool:
        """Return whether all hosts are alike, because there is only one switch."""
        return network.switches.one

    def simulated(self, network: Network) -> int:
        return network.gpus_per_host

    def services(self, network: Network) -> tuple[int, int]:
        inside = 2 * network.workers * (network.gpus_per_host - 1)
        return inside + 2 * network.workers, inside

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        part, gpus = ring(topology, fragments, ready, local=True, adds=True), topology.shape.gpus
        if topology.workers == gpus:  # all workers are on one host
            return part
        same_place = np.reshape(topology.ranks, (-1, gpus)).T  # as [place in the host, host]
        shape = (len(part), gpus)
        nbytes = np.broadcast_to(fragments.nbytes[:, None] / gpus, shape)
        key = np.broadcast_to(fragments.order[:, None], shape)
        summed = topology.add_up(same_place, nbytes, part[:, same_place], key=key)
        held = np.empty_like(part)
        held[:, same_place] = summed
        return held

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        return ring(topology, fragments, held, local=True, adds=False)
