"""The placement of several jobs: the hosts of their workers on one network, and the links that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from legato.core.errors import InputError, unknown_name
from legato.core.text import count
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Hosts, Routes, Topology

__all__ = ["PLACEMENTS", "Placed", "Placement", "check_taken", "num_hosts", "place"]

#: How jobs are placed: one after another; alternately over racks; at random; or all jobs on the same hosts.
Placement = Literal["packed", "spread", "random", "together"]
PLACEMENTS: tuple[Placement, ...] = ("packed", "spread", "random", "together")


def num_hosts(workers: Sequence[int], how: Placement, gpus_per_host: int = 1) -> int:
    """Return the number of hosts that jobs with these numbers of `workers` need."""
    return -(-_places(workers, how) // gpus_per_host)


def _places(workers: Sequence[int], how: Placement) -> int:
    return max(workers, default=0) if how == "together" else sum(workers)


def place(workers: Sequence[int], how: Placement, network: Network) -> list[tuple[int, ...]]:
    """Return the places of each job's workers, in order, as numbers of workers of `network`.

    "packed" places one job after another on neighbouring hosts. "spread" uses the first host of every rack, then the
    second host of every rack, and so on, so neighbours in a ring are in different racks. (On rails, all hosts are
    connected to the same leaves, and "spread" is "packed".) "random" draws hosts from `network.seed`. "packed",
    "spread" and "random" fill one host before the next host, so two jobs can share a host. "together" puts worker w of
    every job at place w, where they share a link. Raises `InputError` on an unknown placement, and if there is too
    little room.
    """
    if how not in PLACEMENTS:
        raise unknown_name("placement of jobs", how, PLACEMENTS)
    if (wanted := _places(workers, how)) > network.workers:
        noun = "host" if network.gpus_per_host == 1 else "GPU"
        raise InputError(f"{count(wanted, 'worker')} of jobs on {count(network.workers, noun)} (expected one each)")
    if how == "together":
        return [tuple(range(count)) for count in workers]
    hosts = np.arange(network.workers).reshape(-1, network.gpus_per_host)
    if how == "random":
        hosts = np.random.default_rng(network.seed).permutation(hosts)
    elif how == "spread":
        leaf = network.switches.leaf_of_worker(hosts[:, 0])
        on_leaf = np.arange(len(leaf)) - np.searchsorted(leaf, leaf)
        hosts = hosts[np.lexsort((leaf, on_leaf))]
    places, ends = hosts.ravel().tolist(), np.cumsum(workers)
    return [tuple(places[end - count : end]) for end, count in zip(ends, workers, strict=True)]


def check_taken(taken: set[int], network: Network) -> None:
    """Raise `InputError` if `network` slows down a GPU that no job has, or a network card that no job uses.

    A slowdown of something unused would change nothing. On rails without spines, transfers also use the cards of GPUs
    without a worker.
    """
    cards = {host // network.gpus_per_card for host in taken}
    for one in network.disturbances:
        used = one.kind not in ("compute", "link") or one.number in taken
        if one.kind == "link":
            used = not network.switches.connected or one.number // network.gpus_per_card in cards
        if not used:
            expected = f"one of the {len(taken)} with a worker, of {network.workers}"
            raise InputError(f"{one.kind}: GPU {one.number}, on which no job has a worker (expected {expected})")


class Placed(Topology):
    """The hosts of one job on a network that jobs share. The job's workers and servers are numbered from 0.

    `hosts` has the host of each worker. All jobs together have `all_servers` servers; the first of the job's own
    servers is number `first_server`. ECMP chooses the paths of the job's flows by `seed`, since each job has its own
    connections.
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
        seed: int,
    ) -> None:
        super().__init__(graph, network, network.workers, all_servers, network.host_shape)
        self.switches = replace(self.switches, seed=seed)
        workers = np.fromiter(hosts, np.int64)
        self.workers = self.size = len(workers)
        self.servers, self.ranks = servers, np.arange(len(workers))
        self._host = np.concatenate([workers, network.workers + first_server + np.arange(servers)])

    @property
    def numbers(self) -> Hosts:
        return self._host[: self.size]

    def _routes(
        self, source: Hosts, target: Hosts, flow: tuple[ArrayLike, ArrayLike], local: bool | None = None
    ) -> Routes:
        """Return the routes between the job's hosts. The numbers of the hosts determine which transfers are local."""
        begin, end = (self._host[np.asarray(host)] for host in flow)
        return super()._routes(self._host[source], self._host[target], (begin, end))
