"""The search for the best messages if computation has a given order; it starts from messages that the bound suggests.

A state has the sizes of the messages, and three choices that decide which bytes are in each message: one of several
sets of tails, the number of messages that take the bytes that are ready first, and the tensors that are sent as soon as
they are ready. Many starting states are valued. The best states are changed at random (`anneal.py`); then fewer and
fewer of the best results are changed further (successive halving, Jamieson and Talwalkar, AISTATS 2016).

If there are optimizer ops, the value of a state is the time of an iteration in which optimizer ops run at their best
places. This time cannot be computed from tails, because tails assume that an optimizer op runs at its place in the
order of ops. In fact an optimizer op runs when its gradient has arrived and the stream is free (`optimizer_ops.py`), so
the messages decide which updates fit into the wait for the last message. For example, a small tensor that is needed
late may be sent while the network waits for a large tensor to become ready. The small tensor's update then need not
wait for the last message.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from legato.core.plan import Plan
from legato.schedule.basics.compose import moves_updates_only
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.joined import ALIGNMENT
from legato.schedule.bound.lower_bound import cheapest_line
from legato.schedule.search.all_reduces import AllReduces
from legato.schedule.search.anneal import anneal
from legato.schedule.search.budget import Budget
from legato.schedule.search.candidates import Fastest
from legato.schedule.search.fill import Filled, Instance
from legato.schedule.search.nested_messages import nested_messages
from legato.schedule.search.op_orders import OP_MOVES, OP_MOVES_SHARE, OrderValue, annealed_order, times_in_order
from legato.schedule.search.problem import Problem

__all__ = ["search_order"]

#: The fraction of the gap by which a good enough plan may exceed the bound in its order, if that is the larger limit.
_NEARER = 0.2
#: If partitioning has a price, only tensors with at least this fraction of all bytes are partitioned. Each is tried.
_WHOLE_BELOW = (1.0, 1 / 16, 0.0)
#: The most times to plan messages and updates in turns.
_TURNS = 4
#: The numbers of equal messages to start from, and the largest fraction of the budget for valuing these starts.
_STARTS, _STARTS_SHARE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), 0.2
#: For each level, how many of the best states are improved, and by how many changes per round each.
_LEVELS = ((8, 0.2), (4, 0.4), (2, 0.8), (1, 3.0))
#: The fraction of these changes that is enough if there are no updates to arrange.
_PLAIN = 0.3
#: By which fraction a state may be worse than the previous state at the start of the changes; it falls to 0.
_HEAT = 0.002


def search_order(fastest: Fastest, order: tuple[int, ...], bound_s: float, least_s: float, budget: Budget) -> None:
    """Plan all-reduces for this order of ops (empty for the captured one), until the fastest plan is good enough.

    `bound_s` is a lower bound on the iteration time of plans of all-reduces in this order of ops, and `least_s` is a
    lower bound for all orders of ops.
    """
    problem = fastest.problem
    enough_s = max(least_s * (1 + problem.gap), bound_s * (1 + problem.gap * _NEARER))
    ready, in_order = times_in_order(problem.workload, order or problem.workload.iteration_order())
    ways: list[AllReduces] = []
    starts: list[list[int]] = []  # sizes of messages

    def begin(tails: Sequence[float], op_order: tuple[int, ...] | None = None) -> None:
        """Try the messages that `nested_messages` finds for these tails; try them also in `op_order` if it is given."""
        for whole in _whole_below(problem):
            if fastest.seconds > enough_s:
                ways.append(AllReduces(problem, (ready, tails), bound_s, budget, whole, order))
                found = nested_messages(ways[-1].instance)
                starts.append([sum(piece.nbytes for piece in message) for message in found.messages])
                plans = [*ways[-1].plans(found)]
                more = [] if op_order is None else [msgspec.structs.replace(plans[0], op_order=op_order)]
                fastest.consider([*plans, *more])

    begin(in_order)
    if ways and ways[0].moves_updates and not problem.large:
        begin(heads_tails(problem.workload, "one", "captured").tail_s)
        for turn in range(_TURNS):
            before = fastest.seconds
            if before > enough_s and not budget.spent:
                op_order = _updates_in_turn(fastest, bound_s, budget, anneal=not turn)
                begin(times_in_order(problem.workload, op_order)[1], op_order)
            if fastest.seconds >= before:
                break
    if fastest.seconds > enough_s:
        starts.insert(0, [message.nbytes for message in fastest.plan.messages if message.kind == "all_reduce"])
        fastest.consider(_Search(ways, enough_s).run(starts, problem.rounds))


def _updates_in_turn(fastest: Fastest, bound_s: float, budget: Budget, *, anneal: bool) -> tuple[int, ...]:
    """Return the fastest plan's order of ops; with `anneal`, move updates in it if the order limits the speed."""
    problem, workload = fastest.problem, fastest.problem.workload
    moved = moves_updates_only(fastest.plan, workload)
    order = fastest.plan.op_order if moved else workload.iteration_order()
    value = OrderValue(workload, cheapest_line(problem.cluster, workload.nbytes))
    if not anneal or fastest.seconds > value(order) * (1 + problem.gap):
        return order
    part, moves = budget.part(OP_MOVES_SHARE), OP_MOVES * problem.rounds
    return annealed_order(workload, value, order, rounds=moves, enough_s=bound_s, budget=part, seed=problem.seed)


def _whole_below(problem: Problem) -> list[int | None]:
    """Return the least sizes of partitioned tensors (bytes) to try; [None] if partitioning costs no time.

    Partitioning costs time if a gradient has to be assembled from several pieces of memory.
    """
    if not problem.cluster.unpack_s_per_byte:
        return [None]
    sizes: list[int | None] = [int(part * problem.workload.nbytes) + 1 for part in _WHOLE_BELOW]
    return sizes[:1] if problem.large else sizes


class _State(NamedTuple):
    """Messages, the choices that determine them, and the seconds of an iteration if updates have their best places."""

    seconds: float
    number: int  # how many states were valued up to this one, to break ties
    sizes: list[int]
    first_come: int  # how many messages take the bytes that are ready first
    early: frozenset[int]  # tensors that are sent before all others once they are ready
    way: int  # index of a set of tails and a way to partition tensors
    filled: Filled


class _Search:
    """A search for the best messages, with one or more sets of tails, and one or two ways to partition tensors."""

    def __init__(self, sent: Sequence[AllReduces], enough_s: float) -> None:
        problem, instance = sent[0].problem, sent[0].instance
        self.nbytes, self.release_s, self.budget = instance.nbytes, instance.release_s, instance.budget
        self.cost, self.total = instance.cost, sum(instance.nbytes)
        self.rng, self.enough_s = random.Random(problem.seed), enough_s
        self.ways: list[tuple[AllReduces, Instance]] = []
        for messages in sent:
            self.ways.append((messages, messages.instance))
            # An update waits for the last byte of its gradient, so it may help not to partition.
            if messages.moves_updates and messages.instance.whole_below is None:
                self.ways.append((messages, messages.instance._replace(whole_below=self.total + 1)))
        self.valued, self.least_s = 0, math.inf

    def _is_done(self, best: _State | None = None) -> bool:
        return self.least_s <= self.enough_s or (self.valued > 0 and self.budget.spent)

    def run(self, starts: Sequence[list[int]], rounds: int) -> Iterator[Plan]:
        """Return the plans of the best messages found; `rounds` limits the number of changes to messages.

        The search starts from messages of equal sizes, and from the sizes in each of `starts` if these add up to all
        bytes.
        """
        budget, work = self.budget, self.budget.work
        states = sorted(self._starts(starts))
        rounds = rounds if self.ways[0][0].moves_updates else int(_PLAIN * rounds)
        if work < math.inf:  # if it is too little for all rounds, each level gets a share
            affordable = self.valued * budget.work / (work - budget.work)
            rounds = min(rounds, int(affordable / sum(count * share for count, share in _LEVELS)))
        for count, share in _LEVELS:
            states = sorted(
                anneal(s, self._changed, changes=int(share * rounds), heat=_HEAT, rng=self.rng, done=self._is_done)
                for s in states[:count]
            )
        return self.ways[states[0].way][0].plans(states[0].filled)

    def _starts(self, given: Sequence[list[int]]) -> Iterator[_State]:
        sizes = [(start, [0]) for k, start in enumerate(given) if sum(start) == self.total and start not in given[:k]]
        near, work = max(len(given[0]), 1), self.budget.work
        least_work = work * (1 - _STARTS_SHARE) if work < math.inf else 0.0
        for count in sorted(_STARTS, key=lambda count: max(count / near, near / count)):
            equal = [self.total * (k + 1) // count - self.total * k // count for k in range(count)]
            sizes.append(([size for size in equal if size], sorted({0, count // 2, count})))
        for start, counts in sizes:
            for first_come, way in itertools.product(counts, range(len(self.ways))):
                if not self._is_done() and (not self.valued or self.budget.work > least_work):
                    yield self._state(start, first_come, way)

    def _state(self, sizes: list[int], first_come: int, way: int, early: frozenset[int] = frozenset()) -> _State:
        instance = self.ways[way][1]
        if early:
            tail_s = instance.tail_s.copy()
            most = max(tail_s)
            for t in early:
                tail_s[t] += most
            instance = instance._replace(tail_s=tail_s)
        filled = instance.fill(sizes, first_come)
        seconds = self.ways[way][0].seconds(filled, instance)
        self.valued, self.least_s = self.valued + 1, min(seconds, self.least_s)
        return _State(seconds, self.valued, sizes, first_come, early, way, filled)

    def _changed(self, state: _State) -> _State:
        """Return the state after a random change of the sizes, or of one of the three choices."""
        rng, sizes, early = self.rng, state.sizes, state.early
        first_come, way, choice = state.first_come, state.way, rng.random()
        if choice < 0.05:
            way = rng.randrange(len(self.ways))
        elif choice < 0.2:
            first_come = rng.randint(0, len(sizes))
        elif choice < 0.3:
            sizes, early = self._send_early(state)
        elif choice < 0.4:
            sizes = sizes.copy()
            sizes.insert(rng.randrange(len(sizes)), sizes.pop(rng.randrange(len(sizes))))
        else:
            sizes = _change_sizes(sizes, rng)
        return self._state(sizes, first_come, way, early)

    def _send_early(self, state: _State) -> tuple[list[int], frozenset[int]]:
        """Choose a tensor, and send it with the first message that starts once it is ready, or before that message.

        If the tensor is already sent early, stop doing so.
        """
        t = self.rng.randrange(len(self.nbytes))
        if t in state.early:
            return state.sizes, state.early - {t}
        sizes: list[int] = []
        place, now = None, 0.0
        for pieces in state.filled.messages:
            now = max(now, *(self.release_s[p.tensor] for p in pieces))
            if place is None and now >= self.release_s[t]:
                place = len(sizes)
            now += self.cost(sum(p.nbytes for p in pieces))
            if size := sum(p.nbytes for p in pieces if p.tensor != t):
                sizes.append(size)
        assert place is not None  # the message that holds it begins once it is ready
        if place < len(sizes) and self.rng.random() < 0.5:
            sizes[place] += self.nbytes[t]
        else:
            sizes.insert(place, self.nbytes[t])
        return sizes, state.early | {t}


def _change_sizes(sizes: list[int], rng: random.Random) -> list[int]:
    """Merge two successive messages, divide a message, or move some bytes between two successive messages."""
    k = rng.randrange(len(sizes))
    choice = rng.random()
    if choice < 0.35 and k + 1 < len(sizes):
        return [*sizes[:k], sizes[k] + sizes[k + 1], *sizes[k + 2 :]]
    if choice < 0.6 and sizes[k] > 2 * ALIGNMENT:
        part = int(sizes[k] * rng.uniform(0.2, 0.8)) // ALIGNMENT * ALIGNMENT
        return [*sizes[:k], part, sizes[k] - part, *sizes[k + 1 :]] if part else sizes
    if k + 1 < len(sizes):
        moved = int(rng.uniform(-sizes[k], sizes[k + 1]) * rng.random()) // ALIGNMENT * ALIGNMENT
        both = (sizes[k] + moved, sizes[k + 1] - moved)
        return [*sizes[:k], *(size for size in both if size > 0), *sizes[k + 2 :]]
    return sizes
