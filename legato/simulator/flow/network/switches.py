"""The switches above the hosts' links: the links between switches, their speeds, and the route of each transfer.

All topologies are folded Clos networks with different numbers of switches. Each network card is connected to a *leaf*.
Every leaf of a pod is connected to every *spine* of the pod, and spine j of every pod is connected to the same `cores`
core switches. A transfer goes up only as far as necessary, and down again. On the way up, there is a choice of spines
and of cores; on the way down, there is only one path. So the paths from one host to all others form a tree, and the
paths from all hosts to one also form a tree.

- *leaf-spine*: hosts in racks, a leaf for each rack, and one pod. One rack is one switch that never blocks.
- *fat tree* (Al-Fares et al., SIGCOMM 2008): switches with k ports, k pods of k/2 leaves
  and k/2 spines, (k/2)^2 cores, k/2 cards at each leaf.
- *rails* (NVIDIA's rail-optimized topology): card i of every host is connected to leaf i.

[Note: balance] With ECMP, a flow is all traffic from one host to another. A hash of the two hosts and the seed chooses
the path of a flow once, and several flows may share a link while other links are idle. Sprayed packets use all paths
equally: the links from a leaf to its spines, or from the spines of a pod to the cores, then act like one link with
their total bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.core.errors import InputError, TooLargeError, unknown_name
from legato.simulator.flow.engine.services import NO_LINK

__all__ = ["BALANCES", "TOPOLOGIES", "Balance", "HostShape", "Switches", "TopologyName"]

Links = NDArray[np.int64]

#: The way in which the switches are connected.
TopologyName = Literal["leaf-spine", "fat-tree", "rails"]
TOPOLOGIES: tuple[TopologyName, ...] = ("leaf-spine", "fat-tree", "rails")
#: The way in which flows are spread over the paths: by a hash, or packet by packet.
Balance = Literal["ecmp", "spray"]
BALANCES: tuple[Balance, ...] = ("ecmp", "spray")
_LARGEST_OVERSUBSCRIPTION = 1e6
_MOST_SPINES = 2**16
_MOST_PORTS = 256
_MOST_LINKS = 2**25


class HostShape(NamedTuple):
    """The shape of hosts: the numbers of workers (GPUs) that share a host, and that share a network card."""

    gpus: int = 1
    gpus_per_card: int = 1


class _Tiers(NamedTuple):
    """The numbers of leaves, pods, spines per pod, cores per spine, and cards that all leaves together can connect."""

    leaves: int
    pods: int
    spines: int
    cores: int
    cards: int


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The switches for `workers` workers in hosts of a `shape`. `Network` explains all other fields.

    Raises `InputError` on numbers that do not fit together, and `TooLargeError` on too many links.
    """

    topology: TopologyName
    workers: int
    shape: HostShape
    racks: int
    spines: int
    ports: int | None
    balance: Balance
    oversubscription: float
    core_oversubscription: float
    seed: int

    def __post_init__(self) -> None:
        gpus, cards = self.shape
        if self.topology not in TOPOLOGIES:
            raise unknown_name("topology", self.topology, TOPOLOGIES)
        if self.balance not in BALANCES:
            raise unknown_name("balance", self.balance, BALANCES)
        if gpus < 1 or self.workers % gpus:
            raise InputError(f"gpus_per_host: {gpus} (expected a divisor of the {self.workers} workers)")
        if cards < 1 or gpus % cards:
            raise InputError(f"gpus_per_card: {cards} (expected a divisor of the {gpus} GPUs of a host)")
        for field in ("oversubscription", "core_oversubscription"):
            if not 1 <= getattr(self, field) <= _LARGEST_OVERSUBSCRIPTION:
                limit = f"expected 1 to {_LARGEST_OVERSUBSCRIPTION:.0e}"
                raise InputError(f"{field}: {getattr(self, field)} ({limit})")
        self._check_racks()
        self._check_spines()
        self._check_ports()
        if self.topology == "rails" and gpus == cards:
            raise InputError(f"topology: rails for hosts of {gpus} on one card (expected several cards a host)")
        if self.num_links > _MOST_LINKS:
            raise TooLargeError(f"{self.num_links:,} links between switches (expected at most {_MOST_LINKS:,})")

    def _check_racks(self) -> None:
        gpus = self.shape.gpus
        if not 1 <= self.racks <= self.workers // gpus:
            hosts = f"{self.workers} workers" if gpus == 1 else f"{self.workers // gpus} hosts"
            raise InputError(f"racks: {self.racks} (expected 1 to the {hosts})")
        if self.racks > 1 and self.topology != "leaf-spine":
            raise InputError(f"racks: {self.racks} in topology {self.topology} (expected leaf-spine)")

    def _check_spines(self) -> None:
        least = 0 if self.topology == "rails" else 1
        if not least <= self.spines <= _MOST_SPINES:
            raise InputError(f"spines: {self.spines} (expected {least} to {_MOST_SPINES})")
        if self.spines > 1 and self.topology == "fat-tree":
            raise InputError(f"spines: {self.spines} in topology fat-tree (expected ports, which say how many)")
        if self.spines > 1 and self.topology == "leaf-spine" and self.racks == 1:
            raise InputError(f"spines: {self.spines} above one rack (expected several racks)")

    def _check_ports(self) -> None:
        if self.topology != "fat-tree":
            for field, usual in (("ports", None), ("core_oversubscription", 1)):
                if (value := getattr(self, field)) != usual:
                    raise InputError(f"{field}: {value} in topology {self.topology} (expected fat-tree)")
        elif self.ports is not None:
            least = _fewest_ports(self._cards)
            if not (least <= self.ports <= _MOST_PORTS and self.ports % 2 == 0):
                room = f"an even number, {least} to {_MOST_PORTS}, for {self._cards} network cards"
                raise InputError(f"ports: {self.ports} (expected {room})")

    @property
    def one(self) -> bool:
        """Return whether the network has only one switch, which never blocks."""
        return self.topology == "leaf-spine" and self.racks == 1

    @property
    def num_ports(self) -> int:
        """Return the number of ports of each switch of a fat tree."""
        return self.ports or _fewest_ports(self._cards)

    @property
    def has_choice(self) -> bool:
        """Return whether there are several paths between some leaves."""
        return self.spines > 1 or (self.topology == "fat-tree" and self.num_ports > 2)

    @property
    def connected(self) -> bool:
        """Return whether all leaves are connected, which is true except on rails without spines."""
        return self.spines > 0

    @property
    def _cards(self) -> int:
        """Return the number of the workers' network cards."""
        return self.workers // self.shape.gpus_per_card

    @property
    def _tiers(self) -> _Tiers:
        """Return the numbers of switches. If packets are sprayed, one spine and one core represent all others."""
        sprayed = self.balance == "spray"
        if self.topology == "fat-tree":
            half = self.num_ports // 2
            choices = 1 if sprayed else half
            return _Tiers(2 * half * half, 2 * half, choices, choices, 2 * half**3)
        leaves = self.racks if self.topology == "leaf-spine" else self.shape.gpus // self.shape.gpus_per_card
        return _Tiers(leaves, 1, min(self.spines, 1) if sprayed else self.spines, 0, self._cards)

    def leaf_of_worker(self, worker: ArrayLike) -> Links:
        """Return the leaf of a worker's card. Cards are connected host by host, and racks have whole hosts."""
        worker = np.asarray(worker)
        gpus, gpus_per_card = self.shape
        if self.topology == "fat-tree":
            half = self.num_ports // 2
            return worker // gpus_per_card // half
        if self.topology == "rails":
            return worker % gpus // gpus_per_card
        return worker // gpus * gpus * self.racks // self.workers

    def leaf_of_server(self, server: ArrayLike) -> Links:
        """Return the leaf of a server. Servers are connected to leaves in turn."""
        return np.asarray(server) % self._tiers.leaves

    # Links go up and down between each leaf and each spine of its pod, and between each spine of a pod and each of its
    # cores.

    @property
    def num_links(self) -> int:
        leaves, pods, spines, cores, _ = self._tiers
        return 0 if self.one else 2 * (leaves * spines + pods * spines * cores)

    def up_link(self, leaf: Links, spine: Links) -> Links:
        """Return the link from a leaf to a spine. The link from the spine to the leaf has the next number."""
        return 2 * (leaf * self._tiers.spines + spine)

    def core_link(self, pod: Links, spine: Links, core: Links) -> Links:
        """Return the link from a pod's spine to a core. The link from the core to the spine has the next number."""
        leaves, _, spines, cores, _ = self._tiers
        return 2 * (leaves * spines + (pod * spines + spine) * cores + core)

    @property
    def num_leaves(self) -> int:
        """Return the number of leaves that have links to spines."""
        return 0 if self.one or not self.connected else self._tiers.leaves

    @property
    def num_spines(self) -> int:
        """Return the number of spines of all pods. If packets are sprayed, one spine represents all."""
        return 0 if self.one else self._tiers.pods * self._tiers.spines

    def links_of_leaf(self, leaf: int) -> Links:
        """Return the links between a leaf and its spines, in both directions."""
        return _both_ways(self.up_link(np.asarray(leaf), np.arange(self._tiers.spines)))

    def links_of_spine(self, number: int) -> Links:
        """Return the links between a spine and its leaves and cores, in both directions.

        Spines are numbered pod by pod.
        """
        leaves, pods, spines, cores, _ = self._tiers
        pod, spine = (np.asarray(part) for part in divmod(number, spines))
        below = self.up_link(pod * (leaves // pods) + np.arange(leaves // pods), spine)
        return _both_ways(np.concatenate([below, self.core_link(pod, spine, np.arange(cores))]))

    def s_per_byte(self, host_s_per_byte: float) -> NDArray[np.float64]:
        """Return the seconds that a byte takes on each link between switches, given its seconds on a host's link.

        Together, the links from a leaf to its spines have the bandwidth of the leaf's cards, divided by
        `oversubscription`. Together, the links from a pod's spines to the cores have the bandwidth of the links from
        the pod's leaves to its spines, divided by `core_oversubscription`.
        """
        if self.one:
            return np.empty(0)
        leaves, pods, spines, cores, _ = self._tiers
        # If every leaf has the same number of cards, the divisor is the number of all cards.
        leaf = host_s_per_byte * self.oversubscription * (leaves * spines) / (leaves * self._cards_of_leaves)
        core = leaf[0] * self.core_oversubscription * cores * pods / leaves
        return np.concatenate([np.repeat(leaf, 2 * spines), np.full(2 * pods * spines * cores, core)])

    @property
    def _cards_of_leaves(self) -> NDArray[np.int64]:
        """Return the number of cards that each leaf can connect. Racks may differ by one host."""
        leaves, _, _, _, cards = self._tiers
        if self.topology == "leaf-spine":
            return np.bincount(self.leaf_of_worker(np.arange(0, self.workers, self.shape.gpus_per_card)))
        return np.full(leaves, cards // leaves)

    def choice(self, source: ArrayLike, target: ArrayLike) -> Links:
        """Return the number of the path of the flow from `source` to `target` ([Note: balance])."""
        _, _, spines, cores, _ = self._tiers
        paths = spines * max(cores, 1)
        if paths <= 1:
            return np.zeros(np.broadcast_shapes(np.shape(source), np.shape(target)), np.int64)
        return (_hashed(self.seed, source, target) % np.uint64(paths)).astype(np.int64)

    def path(self, here: ArrayLike, there: ArrayLike, choice: ArrayLike) -> Links:
        """Return the links of path `choice` between two leaves, one link per hop; NO_LINK stands for unused hops."""
        here, there, choice = np.broadcast_arrays(here, there, choice)
        leaves, pods, spines, _, _ = self._tiers
        if self.one or not spines:
            return np.empty((*here.shape, 0), np.int64)
        spine, core = choice % spines, choice // spines
        hops = [self.up_link(here, spine), self.up_link(there, spine) + 1]
        if pods > 1:
            from_pod, to_pod = here // (leaves // pods), there // (leaves // pods)
            across = [self.core_link(from_pod, spine, core), self.core_link(to_pod, spine, core) + 1]
            hops[1:1] = [np.where(from_pod != to_pod, link, NO_LINK) for link in across]
        return np.where((here != there)[..., None], np.stack(hops, axis=-1), NO_LINK)

    def climb(self, leaf: Links, choice: ArrayLike) -> Links:
        """Return the links from each host's leaf up to the lowest switch that connects all hosts: [..., host, hop].

        `leaf` is [..., host]. The links form the tree of path `choice`. Hops above the lowest switch that connects all
        leaves are NO_LINK. The link down between two switches has the next number after the link up.
        """
        leaves, pods, spines, _, _ = self._tiers
        if self.one or not spines:
            return np.empty((*leaf.shape, 0), np.int64)
        choice = np.broadcast_to(np.asarray(choice)[..., None], leaf.shape)
        hops, parts = [self.up_link(leaf, choice % spines)], [leaf]
        if pods > 1:
            pod = leaf // (leaves // pods)
            hops.append(self.core_link(pod, choice % spines, choice // spines))
            parts.append(pod)
        apart = (part.min(axis=-1, keepdims=True) != part.max(axis=-1, keepdims=True) for part in parts)
        return np.stack([np.where(far, hop, NO_LINK) for far, hop in zip(apart, hops, strict=True)], axis=-1)


def _both_ways(up: Links) -> Links:
    """Return the links up, each followed by the link down between the same switches, which has the next number."""
    return np.stack([up, up + 1], axis=-1).ravel()


def _fewest_ports(cards: int) -> int:
    """Return the smallest even k with room for this number of cards; a fat tree has room for k^3 / 4 cards."""
    half = max(1, int((cards / 2) ** (1 / 3)) - 1)
    while 2 * half**3 < cards:
        half += 1
    return 2 * half


def _hashed(seed: int, *numbers: ArrayLike) -> NDArray[np.uint64]:
    """Return 64 pseudorandom bits that depend only on the numbers (the finalizer of SplitMix64, once per number)."""
    with np.errstate(over="ignore"):
        bits = np.asarray(seed, np.uint64)
        for number in numbers:
            bits = bits + np.uint64(0x9E3779B97F4A7C15) * (np.asarray(number).astype(np.uint64) + np.uint64(1))
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            bits = bits ^ (bits >> np.uint64(31))
    return bits
