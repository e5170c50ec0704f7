"""The cost that planners assume for a fabric on a network: the time of a message that has the network to itself.

If formulas hold for the fabric (`legato.collectives`) and the network has one switch and hosts of one worker, formulas
give the cost. Otherwise one message is simulated in several sizes, and the cost is fitted to the results.
"""

from __future__ import annotations

from dataclasses import replace

from legato.collectives import COLLECTIVES
from legato.core.cluster import Cluster, LinearCost
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.iterations.run import simulate_flow
from legato.simulator.flow.network.network import PRICED_AS, Network

__all__ = ["cluster_for"]

#: The bytes of the simulated messages.
_SIZES = tuple(2**k for k in range(10, 31, 4))
_IDLE = (Op("forward", "forward", 0.0), Op("backward", "backward", 0.0, (0,)))


def cluster_for(name: str, fabric: Fabric, network: Network) -> Cluster:
    """Return the machines as planners see them, with the cost of a message on `fabric`, which is called `name`.

    For parameter servers, or if formulas give the cost, the result is `Network.cluster`. Raises the same errors as
    `simulate_flow`.
    """
    alike = network.flat and network.sharing == "fifo" and len(set(network.link_scale)) <= 1
    if fabric.servers or (PRICED_AS.get(name, name) in COLLECTIVES and fabric.message_bytes is None and alike):
        return network.cluster(name, fabric.servers)
    quiet = replace(network, compute_scale=(), jitter=0.0, disturbances=())
    samples = []
    for nbytes in _SIZES:
        alone = Workload("one message", _IDLE, (Tensor("w", nbytes, 1, (0,)),))
        seconds = simulate_flow(alone, None, fabric, quiet, iterations=1).iteration_s
        samples.append((nbytes, seconds))
    return Cluster(network.workers, {name: LinearCost.fit(samples)})
