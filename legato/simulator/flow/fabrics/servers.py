"""Parameter servers: workers push gradients and pull the updated parameters (Network Operator Edition, 3.3.1).

With multicast, a server sends a parameter once for all workers. With in-network aggregation, a server receives one sum
instead of one gradient per worker. Multicast changes only how parameters are distributed, and in-network aggregation
only how gradients are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from legato.core.errors import InputError, unknown_name
from legato.core.workload import Workload
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.switches import HostShape
from legato.simulator.flow.network.topology import Topology

__all__ = ["Servers", "creation_order"]

_AGGREGATION = ("store-and-forward", "cut-through")
_DISTRIBUTION = ("round-robin", "block")
_MOST_SERVERS = 2**16


@dataclass(frozen=True, kw_only=True)
class Servers:
    """A fabric with `servers` server hosts in addition to the workers.

    `placement` says which server holds a tensor. With "round-robin", TensorFlow's default, tensors are assigned to
    servers in turn, in the order in which the model creates them. With "equal", every tensor is split evenly over all
    servers. A mapping gives the server of each tensor. `distribution` is the order in which a server sends: one
    parameter to all workers, then the next parameter ("round-robin"), or all parameters to one worker, then all to the
    next worker ("block"). With `barrier`, servers distribute nothing before all gradients are summed. With `multicast`,
    a server sends once for all workers. With `aggregation`, the switch adds up gradients, and forwards whole fragments
    ("store-and-forward") or bytes as they arrive ("cut-through"). `message_bytes` splits messages into fragments of at
    most that size, which are pushed, summed and distributed independently (message pipelining, 9.2).
    """

    servers: int = 1
    placement: str | Mapping[str, int] = "round-robin"
    distribution: Literal["round-robin", "block"] = "round-robin"
    barrier: bool = True
    multicast: bool = False
    aggregation: Literal["store-and-forward", "cut-through"] | None = None
    message_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= _MOST_SERVERS:
            raise InputError(f"servers: {self.servers} (expected 1 to {_MOST_SERVERS})")
        if isinstance(self.placement, str) and self.placement not in ("round-robin", "equal"):
            raise unknown_name("placement", self.placement, ("round-robin", "equal"))
        if self.distribution not in _DISTRIBUTION:
            raise unknown_name("distribution", self.distribution, _DISTRIBUTION)
        if self.aggregation is not None and self.aggregation not in _AGGREGATION:
            raise unknown_name("aggregation", self.aggregation, _AGGREGATION)
        if self.message_bytes is not None and self.message_bytes < 1:
            raise InputError(f"message_bytes: {self.message_bytes} (expected at least 1)")

    @property
    def synchronous(self) -> bool:
        return self.barrier

    @property
    def in_flight(self) -> None:
        return None

    @property
    def shards(self) -> int:
        """Return the number of servers over which a fragment is split."""
        return self.servers if self.placement == "equal" else 1

    def host_shape(self, network: Network) -> HostShape:
        return network.host_shape

    def symmetric(self, network: Network) -> bool:
        return network.flat

    def simulated(self, network: Network) -> int:
        return network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers, cards = network.workers, network.workers // network.gpus_per_card
        pushed = cards + 1 if self.aggregation else 2 * workers
        pulled = cards + 1 if self.multicast else 2 * workers
        return self.shards * pushed, self.shards * pulled

    def placed(self, workload: Workload) -> Mapping[str, int] | None:
        if self.placement == "equal":
            return None
        names = creation_order(workload)
        if isinstance(self.placement, str):
            return {name: i % self.servers for i, name in enumerate(names)}
        for name in names:
            where = self.placement.get(name, -1)
            if not 0 <= where < self.servers:
                raise InputError(f"placement: {name!r} has no server (expected one of 0 to {self.servers - 1})")
        return self.placement

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        servers, nbytes, key = self._hosts(topology, fragments), self._shard_bytes(fragments), fragments.order[:, None]
        after = np.broadcast_to(ready[:, None, :], (len(fragments), self.shards, topology.size))
        if self.aggregation is None:
            sent = topology.send(
                topology.ranks, servers[..., None], nbytes[..., None], [after], key=key[..., None], adds=True
            )
            return topology.graph.join(sent)
        cut_through = self.aggregation == "cut-through"
        return topology.aggregate(topology.ranks, servers, nbytes, after, key=key, cut_through=cut_through)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        if self.barrier:
            held = topology.graph.join(held.reshape(1, -1))[:, None]
        held = np.broadcast_to(held, (len(fragments), self.shards))
        servers, nbytes, order = (
            self._hosts(topology, fragments),
            self._shard_bytes(fragments),
            fragments.order[:, None],
        )
        if self.multicast:
            sent = topology.multicast(servers, topology.ranks, nbytes, [held], key=order)
        else:
            in_turn = self.distribution == "round-robin"
            key = order * topology.size + topology.ranks if in_turn else topology.ranks * len(fragments) + order
            sent = topology.send(
                servers[..., None], topology.ranks, nbytes[..., None], [held[..., None]], key=key[:, None, :]
            )
        return sent[:, 0] if self.shards == 1 else topology.graph.join(sent, axis=1)

    def _hosts(self, topology: Topology, fragments: Fragments) -> np.ndarray:
        """Return, for each [fragment, shard], the host of its server."""
        if self.shards > 1:
            return np.broadcast_to(topology.server(np.arange(self.servers)), (len(fragments), self.servers))
        if len(fragments) and (worst := int(fragments.server.max())) >= self.servers:
            raise InputError(f"server: {worst} (expected one of 0 to {self.servers - 1})")
        return topology.server(fragments.server)[:, None]

    def _shard_bytes(self, fragments: Fragments) -> np.ndarray:
        """Return the bytes of each [fragment, shard]."""
        return np.broadcast_to(fragments.nbytes[:, None] / self.shards, (len(fragments), self.shards))


def creation_order(workload: Workload) -> list[str]:
    """Return tensors in the order in which the model creates them, inferred from first uses in the forward pass."""
    first = {
        tensor.name: min((r for r in tensor.readers if workload.ops[r].phase == "forward"), default=len(workload.ops))
        for tensor in workload.tensors
    }
    backwards = [tensor.name for tensor in reversed(workload.tensors)]
    return sorted(backwards, key=first.__getitem__)
