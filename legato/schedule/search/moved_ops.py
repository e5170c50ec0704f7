"""Plans that compute in any order: the order and the messages searched together.

`op_orders.py` values an order by Jackson's schedule, in which messages cost nothing to begin, and `arranged.py`
values messages with their updates arranged, but in the captured order. For plans that may compute in any order,
this is followed by three more steps:

1. Single ops of both passes move, where an order is worth the bound for all-reduces in it (`BoundInOrder`), which
   counts messages. Plans of all-reduces come near to this bound.
2. The best order becomes the captured one (`reordered.py`), and all that is searched for in the captured order is
   searched for in this one.
3. Ops and messages change together: single ops move, messages are merged and divided, and bytes go from one to the
   next. After each change the messages are filled again with what is ready and needed first (`fill.py`), and updates
   run in idle time (`optimizer_ops.py`); the iteration that this makes is its value. Slower states are accepted less
   and less often (simulated annealing).

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.reordered import Reordered
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.all_reduces import AllReduces, whole_below
from legato.schedule.search.budget import Budget
from legato.schedule.search.candidates import Fastest
from legato.schedule.search.fill import Filled
from legato.schedule.search.local_search import Instance, change_sizes
from legato.schedule.search.op_orders import Places, times_in_order
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.schedule.search.problem import Problem, Solve

__all__ = ["BoundInOrder", "move_ops", "search_any_order"]

#: The fraction of the budget for orders valued by bounds; the rest is for orders and messages together.
_ORDERS_SHARE = 0.6
#: What it costs to bound an order: once, and for each op and each tensor.
_BOUND_S = (1e-2, 2e-5)
#: The most moves for each bound that the budget allows (many lead to an order that is known), and by how much,
#: relatively, an order may be worse than the one before it at first.
_MOVES, _HOT = 8, 0.01
#: Changes of orders and messages for every round of the local search, and which part of them moves ops.
_CHANGES, _MOVED = 50, 0.5
#: By how much, relatively, a state may be worse than the one before it at the start of the changes; not at their end.
_HEAT = 0.003
#: What it costs to value a state, for each op.
_STATE_S = 7e-7


def search_any_order(fastest: Fastest, least_s: float, budget: Budget, solve: Solve) -> None:
    """Look for faster plans in other orders of computation, until one is good enough or the budget is spent.

    No plan of all-reduces takes less than `least_s`. `solve` plans for one order, with a budget of its own.
    """
    problem = fastest.problem
    workload, enough_s = problem.workload, least_s * (1 + problem.gap)
    value = BoundInOrder(workload, problem.cluster, budget.part(_ORDERS_SHARE))
    captured = _passes(workload.iteration_order(), workload)
    known = dict.fromkeys([captured, _passes(fastest.plan.op_order or captured, workload)])
    order = _best_order(value, known, problem, least_s * (1 + problem.gap / 2))
    starts = [fastest.plan]
    if order not in known:
        other = Reordered(workload, order)
        starts.append(other.restored(solve(replace(problem, workload=other.workload, any_order=False))))
        fastest.consider(starts[1:])
    if fastest.seconds > enough_s:
        fastest.consider(move_ops(problem, starts, least_s, budget))


class BoundInOrder:
    """No plan of all-reduces takes less in an order of backward and forward ops, wherever the optimizer ops stand.

    Each order is bounded once, and spends from a budget.
    """

    def __init__(self, workload: Workload, cluster: Cluster, budget: Budget) -> None:
        self.workload, self.cluster, self.budget = workload, cluster, budget
        self.bound_s = _BOUND_S[0] + _BOUND_S[1] * (len(workload.ops) + len(workload.tensors))
        self.found: dict[tuple[int, ...], float] = {}

    def __call__(self, order: tuple[int, ...]) -> float:
        if order not in self.found:
            self.budget.spend(self.bound_s)
            other = Reordered(self.workload, order).workload
            self.found[order] = lower_bound(other, self.cluster, sends="all_reduces", thorough=False).seconds
        return self.found[order]


def _best_order(
    value: BoundInOrder, starts: Iterable[tuple[int, ...]], problem: Problem, enough_s: float
) -> tuple[int, ...]:
    """The best order found by moves of single ops from the best of some, until one is worth `enough_s` seconds."""
    rng, places = random.Random(problem.seed), Places(problem.workload, anywhere=True)
    count = int(min(problem.rounds, value.budget.work / value.bound_s))
    now = best = min(starts, key=value)
    for _ in range(_MOVES * count):
        if value(best) <= enough_s or value.budget.spent or len(value.found) >= count:
            break
        moved = list(now)
        place = rng.randrange(len(moved))
        moved.insert(rng.randint(*places.of(moved[place], place, moved)), moved.pop(place))
        other = tuple(moved)
        if value(other) <= value(now) + _HOT * value(best) * (1 - len(value.found) / count) * rng.random():
            now = other
            best = min(best, now, key=value)
    return best


def move_ops(problem: Problem, starts: Sequence[Plan], bound_s: float, budget: Budget) -> Iterator[Plan]:
    """Plans of all-reduces in the best order found, from the orders and the sizes of the messages of at least one plan.

    The search ends within `problem.gap` of `bound_s` seconds, or when rounds or budget are spent.
    """
    best = _Search(problem, starts, bound_s, budget).run(starts, _CHANGES * problem.rounds)
    other = Reordered(problem.workload, best.order)
    sent = AllReduces(
        replace(problem, workload=other.workload, any_order=False),
        (best.instance.release_s, best.instance.tail_s),
        bound_s,
        budget,
        whole_below(problem)[0],
    )
    return map(other.restored, sent.plans(best.filled))


def _passes(order: Sequence[int], workload: Workload) -> tuple[int, ...]:
    """The backward and forward ops of an order."""
    return tuple(op for op in order if workload.ops[op].phase != "optimizer")


class _Times(NamedTuple):
    """What an order of both passes decides: release times and forward passes from the first reader on, by tensor."""

    release_s: list[float]
    forward_s: list[float]
    in_idle_time: WorkConserving


class _State(NamedTuple):
    """An order of both passes and messages, and the seconds of the iteration."""

    seconds: float
    number: int  # how many states were valued before, so that those of equal seconds have an order
    order: tuple[int, ...]
    times: _Times
    sizes: list[int]
    first_come: int  # how many messages take what is ready first
    way: int  # what tails count for updates
    instance: Instance
    filled: Filled


class _Search:
    """A search among orders and messages."""

    def __init__(self, problem: Problem, starts: Sequence[Plan], bound_s: float, budget: Budget) -> None:
        workload = self.workload = problem.workload
        self.budget, self.enough_s, self.rng = budget, bound_s * (1 + problem.gap), random.Random(problem.seed)
        self.places, self.in_idle_time = Places(workload, anywhere=True), WorkConserving(workload)
        captured = workload.iteration_order()
        self.instance = AllReduces(
            problem, times_in_order(workload, captured), bound_s, budget, whole_below(problem)[0]
        ).instance
        # The tail of a tensor counts its own updates, or all that a plan has after the first reader of the tensor.
        orders = [captured, *(plan.op_order or captured for plan in starts)]
        tails = [heads_tails(workload, "one", "captured").tail_s]
        tails += [times_in_order(workload, order)[1] for order in orders[1:]]
        self.update_s = []
        for order, tail_s in zip(orders, tails, strict=True):
            forward_s = times_in_order(workload, _passes(order, workload))[1]
            self.update_s.append([both - passed for both, passed in zip(tail_s, forward_s, strict=True)])
        self.valued = 0

    def run(self, starts: Sequence[Plan], changes: int) -> _State:
        """The best state found in so many changes."""
        work = self.budget.work
        state = best = min(self._starts(starts))
        if work < math.inf:  # as many as the budget allows
            changes = min(changes, int(self.valued * self.budget.work / max(work - self.budget.work, 1e-9)))
        for k in range(changes):
            if best.seconds <= self.enough_s or self.budget.spent:
                break
            changed = self._changed(state)
            if changed.seconds <= state.seconds + _HEAT * best.seconds * (1 - k / changes) * self.rng.random():
                state = changed
                if state.seconds < best.seconds:
                    best = state
        return best

    def _starts(self, plans: Sequence[Plan]) -> Iterator[_State]:
        for plan in plans:
            order = _passes(plan.op_order or self.workload.iteration_order(), self.workload)
            times = self._times(order)
            sizes = [message.nbytes for message in plan.messages if message.kind not in ("all_gather", "pull")]
            for first_come in sorted({0, len(sizes) // 2, len(sizes)}):
                for way in range(len(self.update_s)):
                    yield self._state(order, times, sizes, first_come, way)

    def _times(self, order: tuple[int, ...]) -> _Times:
        return _Times(*times_in_order(self.workload, order), self.in_idle_time.in_order(order))

    def _state(self, order: tuple[int, ...], times: _Times, sizes: list[int], first_come: int, way: int) -> _State:
        self.budget.spend(_STATE_S * len(self.workload.ops))
        tail_s = [passed + updating for passed, updating in zip(times.forward_s, self.update_s[way], strict=True)]
        instance = self.instance._replace(release_s=times.release_s, tail_s=tail_s)
        filled = instance.fill(sizes, first_come)
        arrival_s = instance.arrival_s(filled)
        seconds = max(times.in_idle_time(arrival_s)[1], *arrival_s)
        self.valued += 1
        return _State(seconds, self.valued, order, times, sizes, first_come, way, instance, filled)

    def _changed(self, state: _State) -> _State:
        """Move an op, or change one of the things that messages are made from."""
        rng, sizes, first_come, way = self.rng, state.sizes, state.first_come, state.way
        if rng.random() < _MOVED:
            order = self.places.moved(state.order, rng)
            if order is not None:
                return self._state(order, self._times(order), sizes, first_come, way)
        choice = rng.random()
        if choice < 0.1:
            way = rng.randrange(len(self.update_s))
        elif choice < 0.25:
            first_come = rng.randint(0, len(sizes))
        elif choice < 0.4:
            sizes = sizes.copy()
            sizes.insert(rng.randrange(len(sizes)), sizes.pop(rng.randrange(len(sizes))))
        else:
            sizes = change_sizes(sizes, rng)
        return self._state(state.order, state.times, sizes, first_come, way)
