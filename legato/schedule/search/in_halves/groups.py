"""Groups of gradients that are each sent in two halves: a reduce-scatter, and an all-gather of the same bytes.

How the halves are arranged depends on what is between them: nothing (`paired_period.py`), or the updates
of each worker's shard (`sharded_period.py`). `group_search.py` searches for groups.

Units: seconds and bytes.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from legato.core.plan import Message, Slice
from legato.core.workload import Workload
from legato.schedule.basics.joined import Joined
from legato.schedule.search.budget import Budget
from legato.simulator.period import Period

__all__ = ["EVENT_S", "Arranged", "GroupedPeriod", "Groups", "Part", "groups_between", "groups_of", "move_one"]

#: Bytes of a tensor (its index): from a start to a stop.
Part = tuple[int, int, int]
#: What is scattered together and gathered together.
Groups = list[list[Part]]

#: What it costs to arrange an iteration: for each half, each op and each part.
EVENT_S = 1e-6


class Arranged(NamedTuple):
    """An iteration: its seconds, its halves as they begin (k scatters group k, and k + the number of groups gathers
    it), and the order of its ops.
    """

    seconds: float
    halves: tuple[int, ...]
    op_order: tuple[int, ...]


class GroupedPeriod(ABC):
    """A period whose halves and updates can be arranged; `order` has the backward and the forward ops in their order.

    `half_s(nbytes)` is the cost of a half.
    """

    def __init__(
        self, workload: Workload, half_s: Callable[[int], float], order: Sequence[int], budget: Budget
    ) -> None:
        ops, period = workload.ops, Period.of(workload)
        self.workload, self.half_s, self.budget = workload, half_s, budget
        self.backward = [op for op in order if ops[op].phase == "backward"]
        end: dict[int, float] = {}
        self.backward_s = 0.0
        for op in self.backward:
            self.backward_s += ops[op].duration_s
            end[op] = self.backward_s
        self.release_s = [end[op] for op in period.ready_op]
        self.forward = [op for op in order if ops[op].phase == "forward"]
        self.reads = [period.reads[op] for op in self.forward]
        self.forward_s = [ops[op].duration_s for op in self.forward]
        self.read_by: list[list[int]] = [[] for _ in workload.tensors]
        for k, tensors in enumerate(self.reads):
            for t in tensors:
                self.read_by[t].append(k)
        self.first_read = [min(readers, default=len(self.forward)) for readers in self.read_by]
        self.until_s = [*accumulate(self.forward_s, initial=0.0)]
        self.tail_s = [self.until_s[-1] - self.until_s[first] for first in self.first_read]  # of forward ops
        self.updates = [op for op in order if ops[op].phase == "optimizer"]
        self.update_reads = {op: period.reads[op] for op in self.updates}
        self.update_waits = {op: [dep for dep in period.waits[op] if dep in self.update_reads] for op in self.updates}

    def ranks(self, groups: Groups) -> list[list[tuple[int, int]]]:
        """Ways to rank the halves of groups, in the order of `Arranged.halves`."""
        read = [min(self.first_read[t] for t, _, _ in group) for group in groups]
        numbers = range(len(groups))
        return [
            [(0, k) for k in numbers] + [(1, read[k]) for k in numbers],
            [(0, read[k]) for k in numbers] + [(1, read[k]) for k in numbers],
            [(1, read[k]) for k in numbers] + [(0, read[k]) for k in numbers],
            [(read[k], 0) for k in numbers] + [(read[k], 1) for k in numbers],
        ]

    @abstractmethod
    def arrange(self, groups: Groups, rank: Sequence[tuple[int, int]]) -> Arranged:
        """Arrange an iteration by the ranks of halves."""

    @abstractmethod
    def again(self, groups: Groups, arranged: Arranged) -> Arranged:
        """The iteration of other groups, as many, in the same order of halves and updates."""

    @abstractmethod
    def moved(self, groups: Groups, arranged: Arranged, rng: random.Random) -> Arranged:
        """The iteration with a half or an update in another place; infinite seconds if it waits for itself."""

    def messages(self, groups: Groups, arranged: Arranged) -> Iterator[Message]:
        """The halves as messages, without collectives."""
        slices = [self.slices(group) for group in groups]
        for half in arranged.halves:
            gathers, k = divmod(half, len(groups))
            yield Message(slices[k], "all_gather" if gathers else "reduce_scatter")

    def slices(self, group: Iterable[Part]) -> tuple[Slice, ...]:
        """The slices of a group; parts of a tensor that follow one another are one slice."""
        joined: list[Part] = []
        for t, start, stop in group:
            if joined and joined[-1][0] == t and joined[-1][2] == start:
                joined[-1] = (t, joined[-1][1], stop)
            else:
                joined.append((t, start, stop))
        return tuple(Slice(self.workload.tensors[t].name, start, stop) for t, start, stop in joined)


def move_one(order: list[int], rng: random.Random) -> None:
    """Move something to another place."""
    order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))


def groups_of(messages: Iterable[Message], workload: Workload) -> Groups:
    """The groups of a plan in halves, in the order in which they are scattered."""
    tensor_id = Period.of(workload).tensor_id
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in message.slices]
        for message in messages
        if message.kind == "reduce_scatter"
    ]


def groups_between(workload: Workload, tensors: Sequence[int], cuts: Sequence[int], partition: bool) -> Groups:
    """The bytes of these tensors, end to end, divided at the nearest offsets that are possible.

    Without `partition`, these are borders of tensors. A group may be empty.
    """
    joined, tensor_id = Joined([workload.tensors[t] for t in tensors]), Period.of(workload).tensor_id
    borders = [0, *(_border(joined, at, partition) for at in cuts), joined.nbytes]
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in joined.slices(start, stop)]
        for start, stop in pairwise(borders)
    ]


def _border(joined: Joined, at: int, partition: bool) -> int:
    if partition:
        return joined.aligned(min(max(at, 0), joined.nbytes))
    return min((*joined.starts, joined.nbytes), key=lambda start: abs(start - at))
