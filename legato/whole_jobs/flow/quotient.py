"""Classes of workers, groups and links that are alike, with one representative of each class (`symmetry.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.job import Machine
from legato.core.program import Program
from legato.simulator.flow import Network
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.network.disturbances import Profile, Profiles
from legato.simulator.flow.network.topology import Topology
from legato.whole_jobs.flow.connections import connections, shape_of
from legato.whole_jobs.flow.symmetry import Edges, refined

__all__ = ["Quotient"]

Ints = NDArray[np.int64]
#: A link counts as full if at most this share of its bandwidth is unused.
_ROUNDING = 1e-9


class Quotient:
    """A program on a network, with one worker, group and link for each class of equal workers, groups and links.

    For each kind (`worker`, `group`, `link`), `standing` has the numbers of the representatives, one for each class.
    For each class of groups, `links` has the classes of links that can be full, and the number of connections of these
    groups on one link of the class. Groups are numbered across all communications: `found[number_of[n]]` has the
    connections of communication n, and the first group of communication n has the number `first[number_of[n]]`.
    Communications with the same value in `order_of` run in the order in which they are started. With `alike=False`,
    every worker has a class of its own.
    """

    def __init__(self, program: Program, machine: Machine, network: Network, *, alike: bool = True) -> None:
        self.program, self.machine = program, machine
        topology = Topology(Graph(), network, network.workers, 0, network.host_shape)
        self.profiles = Profiles.of(network.disturbances, topology.links_of)
        self.groups = self._numbered_groups()
        self.found = [connections(topology, shape, groups) for groups, shape in self.groups]
        self.first = np.cumsum([0, *(len(groups) for groups, _ in self.groups)])
        self.lane_of = np.empty(program.workers, np.int64)
        for k, lane in enumerate(program.lanes):
            self.lane_of[list(lane.workers)] = k
        uses = [one.uses + np.array([first, 0, 0]) for one, first in zip(self.found, self.first, strict=False)]
        every = np.concatenate([np.empty((0, 3), np.int64), *uses])
        s_per_byte = topology.s_per_byte()
        self.classes = self._classes(every, s_per_byte, alike)
        self.standing = {kind: np.unique(own, return_index=True)[1] for kind, own in self.classes.items()}
        self.s_per_byte = s_per_byte[self.standing["link"]]
        self.links = self._binding(self._weighed(every))
        self._group_of = self._groups_of_workers()

    def _numbered_groups(self) -> list[tuple[Any, str]]:
        """Return each different tuple of groups in the program once, with the shape of its connections."""
        communications, numbers = self.program.communications, dict[tuple[int, str], int]()
        self.order_of, self.afters = self.program.orders(), self.program.afters()
        keys = [(order, shape_of(one.operation)) for order, one in zip(self.order_of, communications, strict=True)]
        self.number_of = [numbers.setdefault(key, len(numbers)) for key in keys]
        groups = dict(zip(keys, (one.groups for one in communications), strict=True))
        return [(groups[key], key[1]) for key in numbers]

    def _classes(self, uses: Ints, s_per_byte: NDArray[np.float64], alike: bool) -> dict[str, Ints]:
        """Return the class of each worker, group and link.

        `refined` divides the first classes: workers by lane and disturbance, links by rate and disturbance, groups by
        communication, rings and hosts.
        """
        workers = len(self.lane_of)
        joins, group_first = [np.empty((0, 2), np.int64)], [np.empty((0, 3), np.int64)]
        for k, ((groups, _), own) in enumerate(zip(self.groups, self.found, strict=True)):
            members = np.array(groups)
            number = (self.first[k] + np.arange(len(members))).repeat(members.shape[1])
            joins.append(np.column_stack([number, members.ravel()]))
            group_first.append(np.column_stack([np.full(len(members), k), own.rings, own.hosts]))
        lanes = np.column_stack([self.lane_of, _numbered(self.profiles.compute, workers)])
        rates = np.unique(s_per_byte, return_inverse=True)[1]
        first = {
            "worker": _rows(lanes) if alike else np.arange(workers),
            "group": _rows(np.concatenate(group_first)),
            "link": _rows(np.column_stack([rates, _numbered(self.profiles.links, len(s_per_byte))])),
        }
        group, worker = np.concatenate(joins).T
        edges = [Edges(("group", "worker"), (group, worker), np.zeros(len(group), np.int64))]
        edges.append(Edges(("group", "link"), (uses[:, 0], uses[:, 1]), uses[:, 2]))
        return refined(first, edges)

    def _weighed(self, uses: Ints) -> dict[int, dict[int, int]]:
        group, link = self.classes["group"][uses[:, 0]], self.classes["link"][uses[:, 1]]
        stands = self.standing["link"][link] == uses[:, 1]
        result: dict[int, dict[int, int]] = {}
        for one, at, weight in np.column_stack([group, link, uses[:, 2]])[stands].tolist():
            mine = result.setdefault(one, {})
            mine[at] = mine.get(at, 0) + weight
        return result

    def _binding(self, links: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
        """Return only the links that can limit a rate; simulating other links would cost time and change nothing.

        Each group has one flow at a time, whose rate is highest if no other group sends. A link that has room for all
        its flows at their highest rates is never full. If the same groups use several links equally, only one of these
        links is kept. Disturbed links are always kept.
        """
        alone = {
            group: min(1 / (weight * self.s_per_byte[link]) for link, weight in own.items())
            for group, own in links.items()
        }
        users: dict[int, list[tuple[int, float]]] = {}
        for group, own in links.items():
            for link, weight in own.items():
                users.setdefault(link, []).append((group, weight * float(self.s_per_byte[link])))
        kept: dict[object, int] = {}
        for link, mine in users.items():
            disturbed = int(self.standing["link"][link]) in self.profiles.links
            if disturbed or sum(used * alone[group] for group, used in mine) > 1 - _ROUNDING:
                kept.setdefault(link if disturbed else tuple(sorted(mine)), link)
        binding = set(kept.values())
        return {
            group: {link: weight for link, weight in own.items() if link in binding} for group, own in links.items()
        }

    def _groups_of_workers(self) -> list[Ints]:
        result = []
        for k, (groups, _) in enumerate(self.groups):
            mine = np.full(len(self.lane_of), -1)
            mine[np.array(groups)] = self.classes["group"][self.first[k] : self.first[k + 1], None]
            result.append(mine)
        return result

    @property
    def num_classes(self) -> int:
        """Return the number of classes of workers."""
        return len(self.standing["worker"])

    def group_of(self, number: int, worker: int) -> int:
        """Return the class of a worker's group in a communication."""
        return int(self._group_of[self.number_of[number]][worker])


def _rows(rows: Ints) -> Ints:
    """Return a number for each row; equal rows have the same number."""
    numbers: Ints = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
    return numbers


def _numbered(profiles: dict[int, Profile], count: int) -> Ints:
    """Return the number of each worker's or link's disturbance profile; 0 means that it has none."""
    known: dict[Profile, int] = {}
    result = np.zeros(count, np.int64)
    for number, profile in profiles.items():
        result[number] = known.setdefault(profile, len(known) + 1)
    return result
