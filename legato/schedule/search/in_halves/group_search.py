"""The search for groups of gradients that are sent in two halves (`groups.py`).

A ranking says which half is sent first if several are ready. Four rankings are tried, on groups of equal sizes and on
the groups of other plans. The first two rankings send reduce-scatters before all-gathers, in ready order (DeAR) or in
the order in which the forward pass reads the groups. The third ranking prefers all-gathers. The fourth ranking prefers
both halves of groups that are read earlier (priorities). The best groups are improved at random: neighbouring groups
are merged or divided, and borders are moved. Finally, the orders of the halves and of the updates are changed. In the
changed orders, the network may stay idle until a more urgent half is ready, and the stream until a more urgent update
is ready.

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from legato.core.plan import Plan
from legato.schedule.basics.compose import compose
from legato.schedule.basics.joined import ALIGNMENT, Joined
from legato.schedule.search.anneal import anneal
from legato.schedule.search.in_halves.groups import Arranged, Groups, Part
from legato.schedule.search.in_halves.period import GroupedPeriod
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period

__all__ = ["plans_in_groups"]

#: How many changes to try for every round. A change is cheaper than a change of all-reduces.
_CHANGES = 32
#: The numbers of equal groups to try.
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256)
#: How many starting states are improved, and the share of the changes that change orders.
_IMPROVED, _REORDERED = 6, 0.6
#: The fraction of these changes that move a border between two groups if possible.
_RESIZED = 0.5
#: By which fraction a state may be slower than the previous state at the start of the changes; it falls to 0.
_HEAT = 0.005


def plans_in_groups(
    problem: Problem,
    period: GroupedPeriod,
    starts: Iterable[Groups],
    enough_s: float,
) -> Iterator[Plan]:
    """Yield plans from the search, until one takes at most `enough_s`, or the rounds or the budget are spent.

    `starts` has the groups of other plans, at least one, the best first.
    """
    search = _Search(period, not problem.cluster.unpack_s_per_byte, enough_s, random.Random(problem.seed))
    first, *others = starts
    for groups in itertools.chain([first], _equal_groups(period, search.partition, len(first)), others):
        search.start(groups)
        if search.done:
            break
    for state in search.improve(_CHANGES * problem.rounds):
        messages = problem.collectives.fit(period.messages(state.groups, state.arranged))
        plan = compose("legato", messages, problem.workload, forward_overlap=True)
        yield msgspec.structs.replace(plan, op_order=state.arranged.op_order)


def _equal_groups(period: GroupedPeriod, partition: bool, near: int) -> Iterator[Groups]:
    """Yield groups of about equal sizes, in the order in which gradients are ready.

    Groups of whole tensors come first, and then, with `partition`, groups that divide tensors. In both cases, divisions
    into about `near` groups come first.
    """
    counts = sorted(_COUNTS, key=lambda count: max(count / near, near / count))
    workload = period.workload
    # If gradients are ready at the same time, those that are read last come first, as usual in ready order.
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


class _State(NamedTuple):
    """Groups, the iteration that results from them, and the index of the ranking that was used."""

    seconds: float
    number: int  # the number of groups
    groups: Groups
    arranged: Arranged
    way: int


def _state(groups: Groups, arranged: Arranged, way: int = 0) -> _State:
    return _State(arranged.seconds, len(groups), groups, arranged, way)


def _rank(state: _State) -> tuple[float, int]:
    return state.seconds, state.number


class _Search:
    """The search: the iterations found so far, and the methods that improve these iterations."""

    def __init__(self, period: GroupedPeriod, partition: bool, enough_s: float, rng: random.Random) -> None:
        self.period, self.partition, self.enough_s, self.rng = period, partition, enough_s, rng
        self.found: list[_State] = []

    @property
    def done(self) -> bool:
        return self.period.budget.spent or any(map(self._is_enough, self.found))

    def _is_enough(self, state: _State) -> bool:
        return state.seconds <= self.enough_s or self.period.budget.spent

    def start(self, groups: Groups) -> None:
        """Try all rankings of the halves of these groups."""
        for way, rank in enumerate(self.period.ranks(groups)):
            self.found.append(_state(groups, self.period.arrange(groups, rank), way))
            if self.period.budget.spent:
                return

    def improve(self, changes: int) -> Iterator[_State]:
        """Yield the best starting states, states with improved groups, and then the best state with improved orders."""
        ends = []
        best: dict[int, _State] = {}  # by number of groups, for starts that differ
        for state in sorted(self.found, key=_rank):
            best.setdefault(state.number, state)
        for state in [*best.values()][:_IMPROVED]:
            yield state
            ends.append(self._anneal(state, self._regrouped, int(changes * (1 - _REORDERED) / _IMPROVED)))
            yield ends[-1]
        for state in sorted(ends, key=_rank)[:1]:
            yield self._anneal(state, self._reordered, int(changes * _REORDERED))

    def _anneal(self, state: _State, change: Callable[[_State], _State], changes: int) -> _State:
        return anneal(state, change, changes=changes, heat=_HEAT, rng=self.rng, done=self._is_enough)

    def _regrouped(self, state: _State) -> _State:
        groups = self._change(state.groups)
        return _state(groups, self.period.arrange(groups, self.period.ranks(groups)[state.way]), state.way)

    def _reordered(self, state: _State) -> _State:
        """Move a half or an update to another place, or move a border and keep the order; return the new state."""
        groups = self._change(state.groups) if self.rng.random() < _RESIZED else state.groups
        if groups != state.groups and len(groups) == state.number:
            return _state(groups, self.period.again(groups, state.arranged), state.way)
        return _state(state.groups, self.period.moved(state.groups, state.arranged, self.rng), state.way)

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
        """Divide a group before one of its parts, or, if tensors may be partitioned, sometimes within that part."""
        t, start, stop = group[at]
        inside = start + int((stop - start) * self.rng.random()) // ALIGNMENT * ALIGNMENT
        if not self.partition or inside == start or self.rng.random() < 0.5:
            return group[:at], group[at:]
        return [*group[:at], (t, start, inside)], [(t, inside, stop), *group[at + 1 :]]
