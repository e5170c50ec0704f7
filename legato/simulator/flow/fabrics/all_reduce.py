"""All-reduce by an algorithm of `legato.collectives`: the transfers of its rounds on the links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from legato.collectives import COLLECTIVES
from legato.collectives.rounds import Round, Rounds
from legato.core.errors import unknown_name
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.topology import Hosts, Topology

__all__ = ["AllReduce", "Group", "around"]


@dataclass(frozen=True, kw_only=True)
class AllReduce(Collective):
    algorithm: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm not in COLLECTIVES:
            raise unknown_name("algorithm", self.algorithm, COLLECTIVES)

    def rounds(self, workers: int) -> Rounds:
        return COLLECTIVES[self.algorithm].rounds(workers)

    def simulated(self, network: Network) -> int:
        """Return how many workers are simulated: one if all workers send in every round, and otherwise all."""
        _, *halves = self.rounds(network.workers)
        alike = all(len(one.senders) == network.workers for half in halves for one in half)
        return 1 if alike else network.workers

    def services(self, network: Network) -> tuple[int, int]:
        _, *halves = self.rounds(network.workers)
        reduce, distribute = (sum(2 * one.laps * len(one.shifts) * len(one.senders) for one in half) for half in halves)
        return reduce, distribute

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        rounds = self.rounds(topology.workers)
        held = ready
        for one in rounds.reduce:
            held = _carried(topology, fragments, held, one, rounds.parts, adds=True)
        # A worker that has sent everything away is done when the worker that received it is done.
        for one in reversed(rounds.reduce):
            if one.block == rounds.parts and not one.flip and len(one.senders) < topology.workers:
                for shift in one.shifts:
                    senders, targets = _ends(topology, one, shift)
                    held[:, senders] = held[:, targets]
        return held

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        rounds = self.rounds(topology.workers)
        for one in rounds.distribute:
            held = _carried(topology, fragments, held, one, rounds.parts, adds=False)
        return held


def _carried(topology: Topology, fragments: Fragments, held: Ids, one: Round, parts: int, *, adds: bool) -> Ids:
    """Add a round's transfers; return for each worker a service that ends when it has the bytes of the round."""
    everyone = len(one.senders) == topology.workers
    nbytes = fragments.nbytes * one.block / parts
    if everyone and len(one.shifts) > 1:
        return topology.all_to_all(nbytes, held, one.shifts, key=fragments.order, adds=adds)
    if everyone and not one.flip:
        return around(topology, fragments, held, one, parts, adds=adds)
    for _ in range(one.laps):
        before, held = held, np.broadcast_to(held, (len(fragments), topology.size)).copy()
        for shift in one.shifts:
            senders, targets = _ends(topology, one, shift)
            sent = topology.send(
                senders, targets, nbytes[:, None], [before[:, senders]], key=fragments.order[:, None], adds=adds
            )
            whole = one.block == parts and not adds
            held[:, targets] = sent if whole else topology.graph.join(np.stack([held[:, targets], sent], axis=-1))
    return held


def _ends(topology: Topology, one: Round, shift: int) -> tuple[Hosts, Hosts]:
    """Return the simulated senders of a round and their receivers."""
    everyone = len(one.senders) == topology.workers
    senders = topology.ranks if everyone else np.asarray(one.senders)
    return senders, topology.worker(((senders + shift) % topology.workers) ^ one.flip)


class Group(NamedTuple):
    """Groups of `members` workers, whose numbers are `stride` apart; for `local`, see `Topology.pass_around`."""

    members: int
    stride: int = 1
    local: bool | None = None


def around(
    topology: Topology,
    fragments: Fragments,
    held: Ids,
    one: Round,
    parts: int,
    *,
    adds: bool,
    group: Group | None = None,
) -> Ids:
    """Add a round in which each worker of a group sends to one other worker, and the receivers pass the blocks on."""
    members, stride, local = group or Group(topology.workers)
    place, (shift,) = topology.ranks // stride % members, one.shifts
    target, come_from = (
        topology.worker(topology.ranks + ((place + step) % members - place) * stride) for step in (shift, -shift)
    )
    nbytes = fragments.nbytes * one.block / parts
    arrived = topology.pass_around(
        target, come_from, nbytes, held, one.laps, key=fragments.order, adds=adds, local=local
    )
    # A sum needs the last received block and the worker's own block; distribution needs all blocks.
    needed = [arrived[:, -1:] if adds else arrived, held[:, None]]
    return topology.graph.join(np.concatenate(needed, axis=1), axis=1)
