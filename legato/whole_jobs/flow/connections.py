"""The links that the groups of a communication use, and the number of connections on each link.

[Note: connections] A group's collective is one flow with several connections of equal speed. A ring passes through each
host once. There is one ring for each worker that the group has on a host, and each ring enters and leaves a host
through the network card of a different worker. So each card carries one connection. Inside a host, each worker's link
carries one connection for each ring. A group inside one host also has one ring for each worker. In an all-to-all, each
worker has a connection to every other worker. A send is one connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.collectives import RING, SHUFFLE
from legato.core.job import Machine
from legato.core.program import Communication, Operation
from legato.simulator.flow.engine.services import NO_LINK
from legato.simulator.flow.network.topology import Topology

__all__ = ["Connections", "connections", "nbytes_of", "shape_of"]

Ints = NDArray[np.int64]
Groups = tuple[tuple[int, ...], ...]


class Connections(NamedTuple):
    """Groups of one shape: how many rings (1 if it has none) and hosts each group has, and which links it uses.

    A row of `uses` has a group, a link, and the number of the group's connections on that link."""

    rings: Ints
    hosts: Ints
    uses: Ints

    def latency_s(self, group: int, machine: Machine) -> float:
        """Return the latency of a collective in a group, including the wait for late workers."""
        further = int(self.hosts[group]) - 1
        return machine.network_latency_s + machine.hop_s * further if further else machine.latency_s


def shape_of(operation: Operation) -> str:
    """Return the shape of an operation's connections: `ring`, `all_to_all` or `send`."""
    return operation if operation in ("all_to_all", "send") else "ring"


def nbytes_of(one: Communication, rings: int) -> float:
    """Return the bytes that cross each connection, summed over all repetitions of a communication."""
    halves = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}.get(one.operation)
    if halves:
        _, sent = RING.half(len(one.groups[0]), 0.0, halves)
    else:
        sent = 1 / len(one.groups[0]) if one.operation == "all_to_all" else 1.0
    return one.nbytes * one.times * sent / rings


def connections(topology: Topology, shape: str, groups: Groups) -> Connections:
    """Return the connections of groups; each group lists its workers in ring order."""
    members = np.array(groups)
    on_host = members // topology.shape.gpus
    hosts = 1 + (np.diff(np.sort(on_host)) != 0).sum(1)
    if shape == "ring":
        rings, hops, inside = _rings(on_host, members)
    else:
        rings, inside = np.ones(len(groups), np.int64), np.empty((0, 3), np.int64)
        if shape == "send":
            hops = np.column_stack([np.arange(len(groups)), members])
        else:
            a, b = np.array(SHUFFLE.pairs(members.shape[1]), np.int64).reshape(-1, 2).T
            number = np.repeat(np.arange(len(groups)), len(a))
            hops = np.column_stack([number, members[:, a].ravel(), members[:, b].ravel()])
    route = topology.route(hops[:, 1], hops[:, 2])
    there = route != NO_LINK
    number = np.broadcast_to(hops[:, :1], route.shape)[there]
    rows = [np.column_stack([number, route[there], np.ones(len(number), np.int64)])]
    local = topology.local_links(inside[:, 1])
    rows += [np.column_stack([inside[:, 0], local[:, side], inside[:, 2]]) for side in range(2)]
    return Connections(rings, hosts, _summed(np.concatenate(rows), topology.num_links))


def _rings(on_host: Ints, members: Ints) -> tuple[Ints, Ints, Ints]:
    """Return three arrays that describe the rings of groups.

    The first array has the number of rings of each group. The second has a row (group, worker, worker) for each hop
    between hosts. The third has a row (group, worker, number of rings) for each worker that shares its host with others
    of the group."""
    rings, hops, inside = [], [(0, 0, 0)][:0], [(0, 0, 0)][:0]
    for number, (own, group) in enumerate(zip(on_host.tolist(), members.tolist(), strict=True)):
        by_host: dict[int, list[int]] = {}
        for host, worker in zip(own, group, strict=True):
            by_host.setdefault(host, []).append(worker)
        rings.append(max(map(len, by_host.values())))
        hops += _hops(number, rings[-1], list(by_host.values()))
        inside += [(number, worker, rings[-1]) for mine in by_host.values() if len(mine) > 1 for worker in mine]
    return np.array(rings), np.array(hops, np.int64).reshape(-1, 3), np.array(inside, np.int64).reshape(-1, 3)


def _hops(number: int, rings: int, by_host: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the hops of a group's rings; each ring leaves and enters a host by the card of one worker."""
    for here, there in RING.pairs(len(by_host)):
        mine, others = by_host[here], by_host[there]
        for ring in range(rings):
            yield number, mine[ring % len(mine)], others[ring % len(others)]


def _summed(rows: Ints, links: int) -> Ints:
    """Return rows of `uses` in which each group and link appears only once, with the sum of its connections."""
    pairs, which = np.unique(rows[:, 0] * links + rows[:, 1], return_inverse=True)
    return np.column_stack([*np.divmod(pairs, links), np.bincount(which, rows[:, 2], len(pairs)).astype(np.int64)])
