"""Classes of workers that behave alike, for fabrics in which workers do not all play the same role: one worker each.

In a binomial tree no worker has quite the role of another: of two workers with
equal subtrees, the sums reach one over another path. Yet most of them receive
the sums at the same times, because the paths take the same time. Whether they
do depends on the messages, so classes are found by trying:

1. Begin with few classes: workers with subtrees of the same size, at the same
   distance from worker 0, below a child of it that has a subtree of the same size.
2. Simulate one worker of each class. It receives what one of its class's
   parents sends.
3. Compare this with what the other parents send to their children in the class,
   at the simulated times. Where it differs, split the class, and go back to 2.

When no class is split any more, all workers of a class receive the same at the
same times, up to rounding, from the beginning to the end. The simulation of the
classes is then that of all workers: in the order of time, each worker does what
the worker that stands for it does. One thing could be different: the order of
two transfers that become ready on a link at the same time by coincidence, which
rounding decides (`ties.py`). If this happens, all workers are simulated, or, if
they are too many, the order is that of the worker that stands for the class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from legato.simulator.flow.graph import Graph, Ids
from legato.simulator.flow.network import Network
from legato.simulator.flow.topology import Branches, Hosts, Topology

__all__ = ["ROUNDING", "Merged", "TreeClasses"]

#: For a class and the level of its children: when what it sends to them begins and ends.
Sends = dict[tuple[int, int], NDArray[np.float64]]

#: Times that differ by at most this share of the iteration are equal up to rounding.
ROUNDING = 4e-12
#: What the parents of a class send is compared more closely, for a difference may add up from level to level.
_PER_LEVEL = 1e-13


@dataclass
class TreeClasses:
    """Classes of the workers of a binomial tree; class 0 is worker 0 alone.

    A worker at `level` l sends its sum in round l; `children[c]` gives the class
    of the child at each level below. The members of class c are the children, at
    `level[c]`, of the members of the classes `parents[c]`; the first of these
    stands for all.
    """

    workers: int
    level: list[int] = field(default_factory=list)
    children: list[dict[int, int]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known: dict[tuple[int, ...], int] = {}
        self._add((self.workers - 1).bit_length(), [])
        kinds = [(self.workers, 0, 0)]  # of each class: workers below and including one, hops from worker 0, first one
        for c, (size, hops, top) in enumerate(kinds):
            for level in range(self.level[c]):
                if (1 << level) < size:
                    kind = min(1 << level, size - (1 << level)), hops + 1, top if hops else level
                    if (level, *kind) not in known:
                        known[level, *kind] = self._add(level, [])
                        kinds.append(kind)
                    child = known[level, *kind]
                    self.parents[child].append(c)
                    self.children[c][level] = child

    def _add(self, level: int, parents: list[int]) -> int:
        self.level.append(level)
        self.children.append({})
        self.parents.append(parents)
        return len(self.level) - 1

    def __len__(self) -> int:
        return len(self.level)

    @property
    def height(self) -> int:
        return self.level[0]

    def _down(self) -> list[int]:
        """All classes, parents before children."""
        return sorted(range(len(self)), key=lambda c: -self.level[c])

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The worker that stands for each class."""
        rank = np.zeros(len(self), np.int64)
        for c in self._down():
            if self.parents[c]:
                rank[c] = rank[self.parents[c][0]] + (1 << self.level[c])
        return rank

    @property
    def members(self) -> NDArray[np.int64]:
        """The number of workers in each class."""
        count = np.zeros(len(self), np.int64)
        count[0] = 1
        for c in self._down():
            for parent in self.parents[c]:
                count[c] += count[parent]
        return count

    def branches(self, level: int, *, up: bool) -> Branches:
        """The classes that are the senders and the receivers in a round of the tree."""
        parents = [c for c in range(len(self)) if level in self.children[c]]
        children = [c for c in range(1, len(self)) if self.level[c] == level]
        if up:
            senders, receivers = children, parents
            come_from = [self.children[c][level] for c in parents]
        else:
            senders, receivers = parents, children
            come_from = [self.parents[c][0] for c in children]
        at = {c: k for k, c in enumerate(senders)}
        found = np.array([at[c] for c in come_from])
        return Branches(np.array(senders), np.array(receivers), found, None if up else level)

    def split(self, sends: Sends) -> bool:
        """Split classes whose parents send to them at different times; whether there were any."""
        before = len(self)
        rounding_s = _PER_LEVEL * max((float(times.max(initial=0.0)) for times in sends.values()), default=0.0)
        for c in range(1, before):
            groups: list[list[int]] = []
            for parent in self.parents[c]:
                mine = sends[parent, self.level[c]]
                for group in groups:
                    if np.abs(sends[group[0], self.level[c]] - mine).max(initial=0.0) <= rounding_s:
                        group.append(parent)
                        break
                else:
                    groups.append([parent])
            self.parents[c] = groups[0]
            for group in groups[1:]:
                other = self._add(self.level[c], group)
                self.children[other] = dict(self.children[c])
                for level, child in self.children[c].items():
                    self.parents[child].append(other)
                    sends[other, level] = sends[c, level]
                for parent in group:
                    self.children[parent][self.level[c]] = other
        return len(self) > before


class Merged(Topology):
    """The links of one worker of each class."""

    def __init__(self, graph: Graph, network: Network, classes: TreeClasses) -> None:
        super().__init__(graph, network, size=len(classes), servers=0)
        self.classes = classes
        # What goes down: (level, senders, [fragment, sender]), and (receivers, [fragment, receiver]).
        self._sent: list[tuple[int, Hosts, Ids]] = []
        self._received: list[tuple[Hosts, Ids]] = []

    @property
    def stand_ins(self) -> Hosts:
        return self.classes.ranks

    @property
    def members(self) -> Hosts:
        return self.classes.members

    def branches(self, level: int, *, up: bool) -> Branches:
        return self.classes.branches(level, up=up)

    def relay(
        self, branches: Branches, nbytes: NDArray[np.float64], after: Ids, *, key: ArrayLike, adds: bool = False
    ) -> Ids:
        """Each sender's class sends once, and each receiver's class receives once."""
        senders, receivers, come_from, level = branches
        network, sizes, key = self.network, nbytes[:, None], np.asarray(key)[:, None]
        work_s = sizes * self._s_per_byte[0]
        shape, tag = (len(nbytes), len(senders)), self._tags((len(nbytes), 1))
        out = self.graph.add(
            shape,
            link=self.out_link(senders),
            work_s=work_s + network.sending_s,
            delay_s=network.on_the_way_s,
            key=key,
            tag=tag,
        )
        self.graph.edge(after, out)
        shape = (len(nbytes), len(receivers))
        reduce_s = network.reduce_s_per_byte * sizes if adds else 0.0
        inbound = self.graph.add(shape, link=self.in_link(receivers), work_s=work_s, delay_s=reduce_s, key=key, tag=tag)
        self.graph.edge(out[:, come_from], inbound, cut_through=network.cut_through)
        if level is not None:
            self._sent.append((level, senders, out))
            self._received.append((receivers, inbound))
        return inbound

    def sends(self, records: NDArray[Any]) -> Sends:
        """When the transfers begin and end that each class sends to its children at each level."""
        found: dict[tuple[int, int], list[NDArray[np.float64]]] = {}
        for level, senders, out in self._sent:
            times = np.concatenate([records["begin_s"][out], records["end_s"][out]])
            for k, sender in enumerate(senders.tolist()):
                found.setdefault((sender, level), []).append(times[:, k])
        return {which: np.concatenate(times) for which, times in found.items()}

    def rounded(self, records: NDArray[Any]) -> NDArray[np.bool_]:
        """For each service, whether the parents of its class send what it receives at not quite the same times."""
        found = np.zeros(len(records), bool)
        for (_, senders, out), (receivers, inbound) in zip(self._sent, self._received, strict=True):
            begin_s, end_s = records["begin_s"][out], records["end_s"][out]
            at = {sender: k for k, sender in enumerate(senders.tolist())}
            for k, receiver in enumerate(receivers.tolist()):
                parents = [at[parent] for parent in self.classes.parents[receiver]]
                for times in (begin_s[:, parents], end_s[:, parents]):
                    found[inbound[:, k]] |= (times != times[:, :1]).any(axis=1)
        return found
