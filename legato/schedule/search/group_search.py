"""The search for groups of gradients that are sent in two halves (`groups_in_halves.py`).

Four ways to rank the halves are tried on groups of equal sizes and on those of other plans:
all that is scattered before all that is gathered (DeAR) or the other way round, and what
the forward pass reads first before the rest, whole groups or among those to be gathered
(priorities). The best are improved at random: neighbouring groups are merged and divided,
borders are moved. At the end the orders of the halves and of the updates themselves are
changed, in which the network and the stream may wait for what is urgent.

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from legato.core.plan import Plan
from legato.schedule.basics.compose import compose
from legato.schedule.basics.joined import ALIGNMENT, Joined
from legato.schedule.search.groups_in_halves import Arranged, GroupedPeriod, Groups, Part
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period

__all__ = ["plan_in_groups", "plans_in_groups"]

#: How many changes to try for every round. They cost less than those of all-reduces.
_CHANGES = 16
#: How many groups of equal sizes to try.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
#: How many starts are improved, and the share of the changes for orders.
_IMPROVED, _REORDERED = 3, 0.6
#: Which part of the changes for orders moves a border between two groups, if it can.
_RESIZED = 0.5


def plans_in_groups(
    problem: Problem,
    period: GroupedPeriod,
    starts: Iterable[Groups],
    enough_s: float,
    arranged: Sequence[tuple[Groups, Arranged]] = (),
) -> Iterator[Plan]:
    """Better and better plans, until one takes `enough_s`, or rounds or budget are spent.

    `starts` are groups of other plans, at least one, the best first. Those that are `arranged` are only
    rearranged.
    """
    for groups, found in _found(problem, period, starts, enough_s, arranged):
        yield plan_in_groups(problem, period, groups, found)


def plan_in_groups(problem: Problem, period: GroupedPeriod, groups: Groups, arranged: Arranged) -> Plan:
    """The plan of an iteration that is arranged; each message takes the collective that is cheapest for its size."""
    messages = problem.collectives.fit(period.messages(groups, arranged))
    plan = compose("legato", messages, problem.workload, problem.cluster, forward_overlap=True)
    return msgspec.structs.replace(plan, op_order=arranged.op_order)


def _found(
    problem: Problem,
    period: GroupedPeriod,
    starts: Iterable[Groups],
    enough_s: float,
    given: Sequence[tuple[Groups, Arranged]],
) -> Iterator[tuple[Groups, Arranged]]:
    partition = not problem.cluster.unpack_s_per_byte
    search = _Search(period, partition, enough_s, random.Random(problem.seed), given)
    first, *others = starts
    for groups in itertools.chain([first], _equal_groups(period, partition, len(first)), others):
        search.start(groups)
        if search.done:
            break
    yield from search.improve(_CHANGES * problem.rounds)


def _equal_groups(period: GroupedPeriod, partition: bool, near: int) -> Iterator[Groups]:
    """Groups of about equal sizes, in the order in which gradients are ready; first of whole tensors.

    Numbers of groups that are `near` a given one come first.
    """
    counts = sorted(_COUNTS, key=lambda count: max(count / near, near / count))
    workload = period.workload
    # Of gradients that are ready at once, those that are read last come first, like all others.
    order = sorted(range(len(workload.tensors)), key=lambda t: (period.release_s[t], -period.first_read[t]))
    total = workload.nbytes
    seen = set()
    for count in counts:
        groups: Groups = [[]]
        done = 0
        for t in order:
            nbytes = workload.tensors[t].nbytes
            if groups[-1] and (2 * done + nbytes) * count >= 2 * total * len(groups):
                groups.append([])
            groups[-1].append((t, 0, nbytes))
            done += nbytes
        if len(groups) not in seen:
            seen.add(len(groups))
            yield groups
    if partition:
        joined, tensor_id = Joined([workload.tensors[t] for t in order]), Period.of(workload).tensor_id
        for count in counts:
            cuts = [0, *(joined.aligned(total * k // count) for k in range(1, count)), total]
            yield [
                [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in joined.slices(start, stop)]
                for start, stop in itertools.pairwise(cuts)
                if start < stop
            ]


class _Search:
    """The best iterations so far, each with its groups and its way to rank them."""

    def __init__(
        self,
        period: GroupedPeriod,
        partition: bool,
        enough_s: float,
        rng: random.Random,
        given: Sequence[tuple[Groups, Arranged]],
    ) -> None:
        self.period, self.partition, self.enough_s, self.rng, self.given = period, partition, enough_s, rng, given
        self.found: list[tuple[float, int, int, int, Groups, Arranged]] = []

    @property
    def done(self) -> bool:
        least = min([arranged.seconds for _, arranged in self.given] + [start[0] for start in self.found], default=None)
        return self.period.budget.spent or (least is not None and least <= self.enough_s)

    def start(self, groups: Groups) -> None:
        """Try all ways to rank these groups."""
        for way, rank in enumerate(self.period.ranks(groups)):
            arranged = self.period.arrange(groups, rank)
            self.found.append((arranged.seconds, len(groups), len(self.found), way, groups, arranged))
            if self.period.budget.spent:
                return

    def improve(self, rounds: int) -> Iterator[tuple[Groups, Arranged]]:
        """Improve the best starts by other groups, and then the best of these by other orders."""
        self.found.sort()
        yield from self.given
        ends: list[tuple[float, int, int, Groups, Arranged]] = []
        for _, _, _, way, groups, arranged in self.found[:_IMPROVED]:
            yield groups, arranged
            for _ in range(int(rounds * (1 - _REORDERED) / _IMPROVED)):
                if arranged.seconds <= self.enough_s or self.period.budget.spent:
                    break
                changed = self._change(groups)
                tried = self.period.arrange(changed, self.period.ranks(changed)[way])
                if (tried.seconds, len(changed)) <= (arranged.seconds, len(groups)):
                    groups, arranged = changed, tried
            ends.append((arranged.seconds, len(groups), len(ends), groups, arranged))
            yield groups, arranged
        best = [min(ends)[3:]] if ends else []
        for groups, arranged in [*best, *self.given]:
            yield self._reordered(groups, arranged, int(rounds * _REORDERED))

    def _reordered(self, groups: Groups, arranged: Arranged, rounds: int) -> tuple[Groups, Arranged]:
        """The same with other orders, and borders moved under them."""
        for _ in range(rounds):
            if arranged.seconds <= self.enough_s or self.period.budget.spent:
                break
            changed = self._change(groups) if self.rng.random() < _RESIZED else groups
            if changed == groups or len(changed) != len(groups):
                tried = self.period.moved(groups, arranged, self.rng)
                changed = groups
            else:
                tried = self.period.again(changed, arranged)
            if tried.seconds <= arranged.seconds:
                groups, arranged = changed, tried
        return groups, arranged

    def _change(self, groups: Groups) -> Groups:
        """Merge two neighbours, divide a group, or move parts across a border."""
        rng, k = self.rng, self.rng.randrange(len(groups))
        group, choice = groups[k], self.rng.random()
        if choice < 0.35 and k + 1 < len(groups):
            return [*groups[:k], group + groups[k + 1], *groups[k + 2 :]]
        if choice < 0.6:
            at = rng.randrange(len(group)) if len(group) > 1 else 0
            first, rest = self._cut(group, at)
            return [*groups[:k], first, rest, *groups[k + 1 :]] if first and rest else groups
        if k + 1 < len(groups):
            both = group + groups[k + 1]
            at = min(max(len(group) + rng.choice((-4, -2, -1, 0, 1, 2, 4)), 0), len(both) - 1)
            first, rest = self._cut(both, at)
            return [*groups[:k], *(part for part in (first, rest) if part), *groups[k + 2 :]]
        return groups

    def _cut(self, group: list[Part], at: int) -> tuple[list[Part], list[Part]]:
        """Divide a group before one of its parts, or, where tensors may be partitioned, sometimes inside of it."""
        t, start, stop = group[at]
        inside = start + int((stop - start) * self.rng.random()) // ALIGNMENT * ALIGNMENT
        if not self.partition or inside == start or self.rng.random() < 0.5:
            return group[:at], group[at:]
        return [*group[:at], (t, start, inside)], [(t, inside, stop), *group[at + 1 :]]
