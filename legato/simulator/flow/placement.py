"""Where the workers of several jobs are: on which hosts of one network, and the links that they share there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from legato.core.errors import InputError, unknown_name
from legato.simulator.flow.graph import Graph, Ids
from legato.simulator.flow.network import Network
from legato.simulator.flow.topology import Hosts, Topology

__all__ = ["PLACEMENTS", "Placed", "Placement", "num_hosts", "place"]

#: How jobs are placed: one after the other; alternately over racks; anyhow; all of them on the same hosts.
Placement = Literal["packed", "spread", "random", "together"]
PLACEMENTS: tuple[Placement, ...] = ("packed", "spread", "random", "together")


def num_hosts(workers: Sequence[int], how: Placement) -> int:
    """The number of hosts that jobs with so many `workers` take."""
    return max(workers, default=0) if how == "together" else sum(workers)


def place(
    workers: Sequence[int], how: Placement, network: Network, *, group: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """The hosts of the workers of each job, in the order of its workers.

    Host h is that of worker h of `network`. "packed" places one job after the other on neighbouring hosts. "spread"
    deals out hosts, first the first one of every rack, then the second ones: neighbours of a ring are in different
    racks. "random" draws from `network.seed`. "together" places worker w of every job on host w: their workers share
    its link. If job j keeps `group[j]` workers in one host (the hierarchical fabric), these stay neighbours. Raises
    `InputError` on an unknown placement, and if there are too few hosts.
    """
    if how not in PLACEMENTS:
        raise unknown_name("placement of jobs", how, PLACEMENTS)
    if (wanted := num_hosts(workers, how)) > network.workers:
        raise InputError(f"{wanted:,} workers of jobs on {network.workers:,} hosts (expected a host each)")
    if how == "together":
        return [tuple(range(count)) for count in workers]
    sizes = group or [1] * len(workers)
    if how != "packed" and len(set(sizes)) > 1:
        raise InputError(f"placement of jobs: {how!r} with groups of {sizes} workers (expected groups of one size)")
    blocks = np.arange(network.workers // sizes[0] * sizes[0]).reshape(-1, sizes[0])
    if how == "random":
        blocks = np.random.default_rng(network.seed).permutation(blocks)
    elif how == "spread":
        rack = network.rack_of_workers()[blocks[:, 0]]
        in_rack = np.arange(len(rack)) - np.searchsorted(rack, rack)
        blocks = blocks[np.lexsort((rack, in_rack))]
    hosts = list(range(network.workers)) if how == "packed" else blocks.ravel().tolist()
    ends = np.cumsum(workers)
    return [tuple(hosts[end - count : end]) for end, count in zip(ends, workers, strict=True)]


class Placed(Topology):
    """The hosts of one job on a network that jobs share. Its workers and servers are numbered from 0, as if alone.

    `hosts` are those of its workers; of `all_servers` servers of all jobs, its own begin with `first_server`.
    """

    def __init__(
        self,
        graph: Graph,
        network: Network,
        hosts: Iterable[int],
        *,
        servers: int,
        first_server: int,
        all_servers: int,
        local_bandwidth_bps: float,
    ) -> None:
        super().__init__(graph, network, network.workers, all_servers, local_bandwidth_bps)
        workers = np.fromiter(hosts, np.int64)
        self.workers = self.size = len(workers)
        self.servers, self.ranks = servers, np.arange(len(workers))
        self._host = np.concatenate([workers, network.workers + first_server + np.arange(servers)])

    def _transfers(
        self, source: Hosts, target: Hosts, nbytes: ArrayLike, key: ArrayLike, adds: bool, local: bool
    ) -> tuple[Ids, Ids]:
        return super()._transfers(self._host[source], self._host[target], nbytes, key, adds, local)

    def multicast(
        self, source: ArrayLike, targets: ArrayLike, nbytes: ArrayLike, after: Iterable[Ids], *, key: ArrayLike
    ) -> Ids:
        here, there = self._host[np.asarray(source)], self._host[np.asarray(targets)]
        return super().multicast(here, there, nbytes, after, key=key)

    def aggregate(
        self, sources: ArrayLike, target: ArrayLike, nbytes: ArrayLike, after: Ids, *, key: ArrayLike, cut_through: bool
    ) -> Ids:
        here, there = self._host[np.asarray(sources)], self._host[np.asarray(target)]
        return super().aggregate(here, there, nbytes, after, key=key, cut_through=cut_through)
