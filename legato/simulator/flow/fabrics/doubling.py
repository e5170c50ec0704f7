"""Exchanges with partners at doubling distances: butterfly mixing, recursive doubling, halving-doubling.

If the number of workers is not a power of two, the workers above the largest
power of two first send their gradients to a partner below it, and get the sum
from it at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Collective, is_power_of_two
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Topology

__all__ = ["Butterfly", "HalvingDoubling"]


@dataclass(frozen=True, kw_only=True)
class Butterfly(Collective):
    """Partners at distances 1, 2, 4, ... exchange all their bytes: log2(n) rounds of M bytes.

    Butterfly mixing (Network Operator Edition, 3.3.2) and recursive doubling
    (MG-WFBP, Table II) are the same exchange under two names.
    """

    def simulated(self, network: Network) -> int:
        return 1 if is_power_of_two(network.workers) else network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        rounds = workers.bit_length() - 1
        return 2 * (rounds << rounds), 0

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        held, rounds = _fold(topology, fragments, ready)
        for k in range(rounds):
            held = _exchange(topology, fragments, held, 1 << k, 1.0, adds=True)
        return _unfold(topology, fragments, held)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        return held


@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Collective):
    """Partners exchange halves of the part that they still sum: M/2, M/4, ... M/n bytes, and back (Rabenseifner)."""

    def simulated(self, network: Network) -> int:
        return 1 if is_power_of_two(network.workers) else network.workers

    def services(self, network: Network) -> tuple[int, int]:
        workers = network.workers
        rounds = workers.bit_length() - 1
        return 2 * (rounds << rounds), 2 * (rounds << rounds)

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        held, rounds = _fold(topology, fragments, ready)
        for k in range(rounds):
            held = _exchange(topology, fragments, held, 1 << (rounds - 1 - k), 0.5 ** (k + 1), adds=True)
        extra = topology.size - held.shape[1]
        return np.concatenate([held, held[:, :extra]], axis=1)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        inner = _inner(topology)
        held = held[:, : min(inner, topology.size)]
        rounds = inner.bit_length() - 1
        for k in reversed(range(rounds)):
            held = _exchange(topology, fragments, held, 1 << (rounds - 1 - k), 0.5 ** (k + 1), adds=False)
        return _unfold(topology, fragments, held)


def _inner(topology: Topology) -> int:
    """The largest power of two that is not above the number of workers."""
    return 1 << (topology.workers.bit_length() - 1)


def _exchange(topology: Topology, fragments: Fragments, held: Ids, distance: int, share: float, *, adds: bool) -> Ids:
    """Each worker sends `share` of a fragment to its partner; the result ends when it also has its partner's share."""
    ranks = topology.ranks[: held.shape[1]]
    partner = topology.worker(ranks ^ distance)
    nbytes = fragments.nbytes[:, None] * share
    sent = topology.send(ranks, partner, nbytes, [held], key=fragments.order[:, None], adds=adds)
    return topology.graph.join(np.stack([held, sent[:, partner]], axis=-1))


def _fold(topology: Topology, fragments: Fragments, ready: Ids) -> tuple[Ids, int]:
    """Send the outer workers' gradients to inner workers; return what those hold, and their number of rounds."""
    inner = _inner(topology)
    held = ready[:, : min(inner, topology.size)]
    if inner < topology.workers:
        outer = np.arange(inner, topology.workers)
        nbytes, key = fragments.nbytes[:, None], fragments.order[:, None]
        sent = topology.send(outer, outer - inner, nbytes, [ready[:, outer]], key=key, adds=True)
        held = held.copy()
        held[:, outer - inner] = topology.graph.join(np.stack([held[:, outer - inner], sent], axis=-1))
    return held, inner.bit_length() - 1


def _unfold(topology: Topology, fragments: Fragments, held: Ids) -> Ids:
    """Send the sums to the outer workers; return what all workers have."""
    inner = _inner(topology)
    if inner == topology.workers:
        return held
    outer = np.arange(inner, topology.workers)
    sent = topology.send(
        outer - inner, outer, fragments.nbytes[:, None], [held[:, outer - inner]], key=fragments.order[:, None]
    )
    return np.concatenate([held, sent], axis=1)
