"""Messages valued with their updates arranged: what a tail cannot tell.

The local search values messages by fixed tails: an optimizer op stands where the order of
ops has it. In truth it runs when its gradient has arrived and the stream has time
(`optimizer_ops.py`), so which updates fit into the wait for the last message depends on the
messages. Where messages are few and dear, this decides; here each change of the messages is
valued by the iteration with its updates arranged.

Many starts are valued. The best of them are changed at random, and slower states are accepted less
and less often (simulated annealing); then the best of these are changed further, and so on
(successive halving: Jamieson and Talwalkar, AISTATS 2016). A state is the sizes of the messages and
what decides their contents: one of several tails, how many messages take what is ready first, and
tensors that go as soon as they are ready. A small tensor that is needed late may so be sent
while the network waits for a long one, and its update need not wait for the end.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from legato.core.plan import Plan
from legato.schedule.basics.compose import moves_updates_only
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.bound.lower_bound import cheapest_line
from legato.schedule.search.all_reduces import AllReduces, whole_below
from legato.schedule.search.budget import Budget
from legato.schedule.search.candidates import Fastest
from legato.schedule.search.fill import Filled
from legato.schedule.search.local_search import Instance, change_sizes, local_search
from legato.schedule.search.nested_messages import nested_messages
from legato.schedule.search.op_orders import OP_MOVES, OP_MOVES_SHARE, OrderValue, annealed_order, times_in_order

__all__ = ["arrange_updates"]

#: The most turns of messages and updates, and the largest fraction of the budget for them.
_TURNS, _TURNS_SHARE = 3, 0.6
#: The numbers of messages to start from, all of the same size, and the largest fraction of the budget to value them.
_STARTS, _STARTS_SHARE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), 0.2
#: How many of the best are improved, and in how many changes each for every round; then the best of these, and so on.
_LEVELS = ((8, 0.2), (4, 0.4), (2, 0.8), (1, 3.0))
#: By how much, relatively, a state may be worse than the one before it at the start of the changes; not at their end.
_HEAT = 0.002
#: What it costs to arrange updates, for each op.
_ARRANGE_S = 4e-7


def arrange_updates(fastest: Fastest, bound_s: float, budget: Budget) -> None:
    """Plan messages for the captured order, with each choice of the sizes below which tensors stay whole."""
    for least_divided in whole_below(fastest.problem):
        _in_turns(fastest, bound_s, budget, least_divided)


def _in_turns(fastest: Fastest, bound_s: float, budget: Budget, least_divided: int | None) -> None:
    """Plan messages for the updates of the fastest plan, and updates for these messages, in turns.

    Where the order of the updates is what makes the plan slow, a better one is searched for first. In the last turn,
    every change of the messages is valued with its updates arranged.
    """
    problem = fastest.problem
    workload, cluster, gap, rounds, seed = problem.workload, problem.cluster, problem.gap, problem.rounds, problem.seed
    captured, enough_s = workload.iteration_order(), bound_s * (1 + gap)
    value, annealed = OrderValue(workload, cheapest_line(cluster, workload.nbytes)), False
    turns = budget.part(_TURNS_SHARE)
    for _ in range(_TURNS + 1):
        before = fastest.seconds
        if before <= enough_s or budget.spent:
            return
        order = fastest.plan.op_order if moves_updates_only(fastest.plan, workload) else captured
        if not annealed and before <= value(order) * (1 + gap):  # only another order can win anything
            annealed, part, moves = True, budget.part(OP_MOVES_SHARE), OP_MOVES * rounds
            better = partial(annealed_order, rounds=moves, enough_s=bound_s, budget=part, seed=seed)
            order = better(workload, value, order)
        ready, tails = times_in_order(workload, order)
        sent = AllReduces(problem, (ready, tails), bound_s, turns, least_divided)
        for search in (nested_messages, partial(local_search, gap=gap, rounds=rounds, seed=seed)):
            plans = list(sent.plans(search(sent.instance)))
            fastest.consider([*plans, msgspec.structs.replace(plans[0], op_order=order)])
        if fastest.seconds >= before or turns.spent:
            break
    own = heads_tails(workload, "one", "captured").tail_s
    choices = dict.fromkeys(map(tuple, (tails, times_in_order(workload, captured)[1], own)))
    if fastest.seconds > enough_s:
        ways = [AllReduces(problem, (ready, tail_s), bound_s, budget, least_divided) for tail_s in choices]
        sizes = [message.nbytes for message in fastest.plan.messages if message.kind == "all_reduce"]
        fastest.consider(_Search(ways).run(sizes, rounds))


class _State(NamedTuple):
    """Messages, what they are made from, and the seconds of the iteration with its updates arranged."""

    seconds: float
    number: int  # how many states were valued before, so that those of equal seconds have an order
    sizes: list[int]
    first_come: int  # how many messages take what is ready first
    early: frozenset[int]  # tensors that go before all others once they are ready
    way: int  # which tails, and whether tensors are partitioned
    filled: Filled


class _Search:
    """A search among messages for several tails."""

    def __init__(self, sent: Sequence[AllReduces]) -> None:
        problem, self.instance, self.in_idle_time = sent[0].problem, sent[0].instance, sent[0].in_idle_time
        self.ops, self.total = len(problem.workload.ops), sum(self.instance.nbytes)
        self.rng, self.enough_s = random.Random(problem.seed), self.instance.bound_s * (1 + problem.gap)
        self.ways: list[tuple[AllReduces, Instance]] = []
        for messages in sent:
            self.ways.append((messages, messages.instance))
            # An update waits for the last byte of its gradient, so it may help not to partition.
            if self.instance.whole_below is None:
                self.ways.append((messages, messages.instance._replace(whole_below=self.total + 1)))
        self.valued, self.least_s = 0, math.inf

    @property
    def done(self) -> bool:
        return self.least_s <= self.enough_s or (self.valued > 0 and self.instance.budget.spent)

    def run(self, first: Sequence[int], rounds: int) -> Iterator[Plan]:
        """The plans of the best messages found in some changes for each round.

        It begins with messages of equal sizes, and with the sizes `first` if they add up to all bytes.
        """
        budget, work = self.instance.budget, self.instance.budget.work
        states = sorted(self._starts(first))
        if work < math.inf:  # where it is less than all rounds take, each level gets its share of it
            affordable = self.valued * budget.work / (work - budget.work)
            rounds = min(rounds, int(affordable / sum(count * share for count, share in _LEVELS)))
        for count, share in _LEVELS:
            states = sorted(self._improved(state, int(share * rounds)) for state in states[:count])
        return self.ways[states[0].way][0].plans(states[0].filled)

    def _starts(self, first: Sequence[int]) -> Iterator[_State]:
        sizes = [(list(first), [0])] if sum(first) == self.total else []
        near, work = max(len(first), 1), self.instance.budget.work
        least_work = work * (1 - _STARTS_SHARE) if work < math.inf else 0.0
        for count in sorted(_STARTS, key=lambda count: max(count / near, near / count)):
            equal = [self.total * (k + 1) // count - self.total * k // count for k in range(count)]
            sizes.append(([size for size in equal if size], sorted({0, count // 2, count})))
        for start, counts in sizes:
            for first_come, way in itertools.product(counts, range(len(self.ways))):
                if not self.done and (not self.valued or self.instance.budget.work > least_work):
                    yield self._state(start, first_come, way)

    def _state(self, sizes: list[int], first_come: int, way: int, early: frozenset[int] = frozenset()) -> _State:
        instance = self.ways[way][1]
        if early:
            tail_s = instance.tail_s.copy()
            most = max(tail_s)
            for t in early:
                tail_s[t] += most
            instance = instance._replace(tail_s=tail_s)
        instance.budget.spend(_ARRANGE_S * self.ops)
        filled = instance.fill(sizes, first_come)
        seconds = self.in_idle_time(instance.arrival_s(filled))[1]
        self.valued, self.least_s = self.valued + 1, min(seconds, self.least_s)
        return _State(seconds, self.valued, sizes, first_come, early, way, filled)

    def _improved(self, state: _State, changes: int) -> _State:
        best = state
        for k in range(changes):
            if self.done:
                break
            changed = self._changed(state)
            if changed.seconds <= state.seconds + _HEAT * best.seconds * (1 - k / changes) * self.rng.random():
                state = changed
                if state.seconds <= best.seconds:
                    best = state
        return best

    def _changed(self, state: _State) -> _State:
        """Change one of the things that messages are made from."""
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
            sizes = change_sizes(sizes, rng)
        return self._state(sizes, first_come, way, early)

    def _send_early(self, state: _State) -> tuple[list[int], frozenset[int]]:
        """Let a tensor go with the first message that begins once it is ready, or just before it; or no longer."""
        instance, t = self.instance, self.rng.randrange(len(self.instance.nbytes))
        if t in state.early:
            return state.sizes, state.early - {t}
        sizes: list[int] = []
        place, now = None, 0.0
        for pieces in state.filled.messages:
            now = max(now, *(instance.release_s[p.tensor] for p in pieces))
            if place is None and now >= instance.release_s[t]:
                place = len(sizes)
            now += instance.cost(sum(p.nbytes for p in pieces))
            if size := sum(p.nbytes for p in pieces if p.tensor != t):
                sizes.append(size)
        assert place is not None  # at the latest the message that has it begins when it is ready
        if place < len(sizes) and self.rng.random() < 0.5:
            sizes[place] += instance.nbytes[t]
        else:
            sizes.insert(place, instance.nbytes[t])
        return sizes, state.early | {t}
