"""Orders of computation that are worth planning for: of all ops where they may be reordered, and of the updates.

What is computed early can be sent early. Caramel's order makes bytes ready as early as
possible, which suits a busy network. Where the network has time to spare, what is needed
first should come first instead. The best order is often between the two: what is needed
late, and would only delay the gradients that the forward pass waits for, is computed after
them, while they travel.

So a third order puts all updates with a tail of at least some limit first, in Caramel's
order, and the others after them by falling tail, for the best such limit. Then updates move
one at a time, as long as this helps. The value of an order comes from Jackson's preemptive
schedule for the release times that the order gives: its optimum if messages could be
partitioned for free (`jackson.py`).

Last, single ops move (`annealed_order`), backward, optimizer and forward ops: a branch of the
network can be computed while what another one needs is still on its way. In the captured
order, only the optimizer ops move. Which update waits for which message is then decided
together with the order in which the gradients arrive, and not only after it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from legato.core.cluster import LinearCost
from legato.core.workload import Workload
from legato.schedule.basics.coarse_to_fine import coarse_to_fine
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.schedule.bound.lower_bound import cheapest_line, lower_bound
from legato.schedule.search.anneal import anneal
from legato.schedule.search.budget import Budget
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period

__all__ = [
    "OP_MOVES",
    "OP_MOVES_SHARE",
    "OrderValue",
    "annealed_order",
    "bounded_orders",
    "promising_orders",
    "times_in_order",
]

#: Moves of updates for every round of the local search. They cost less.
_MOVES = 0.25
#: The same for moves of single ops, and the largest fraction of the budget for them.
OP_MOVES, OP_MOVES_SHARE = 10, 0.2
#: How many limits to try before refining around the best one.
_LIMITS = 8
#: What it costs to value an order: for each op and each tensor.
_VALUE_S = 5e-7
#: By how much, relatively, an order may be worse than the one before it at the start of the annealing; not at its end.
_HEAT = 0.01


def times_in_order(workload: Workload, order: Sequence[int]) -> tuple[list[float], list[float]]:
    """For each tensor, when its gradient is ready, and the seconds of computation from its first reader on.

    Readers that are not in the order do not count.
    """
    until = list(accumulate((workload.ops[i].duration_s for i in order), initial=0.0))
    place = {op: k for k, op in enumerate(order)}
    ready = [until[place[tensor.ready_after] + 1] for tensor in workload.tensors]
    first = [min((place[r] for r in tensor.readers if r in place), default=len(order)) for tensor in workload.tensors]
    return ready, [until[-1] - until[k] for k in first]


class OrderValue:
    """A lower bound on the seconds of an iteration that computes in some order."""

    def __init__(self, workload: Workload, line: LinearCost) -> None:
        """`line` is the least cost of a message."""
        self.workload, self.alpha_s = workload, line.alpha_s
        self.send_s = [line.beta_s_per_byte * tensor.nbytes for tensor in workload.tensors]

    def __call__(self, order: Sequence[int]) -> float:
        """The latest arrival plus tail, also where computation alone takes longer, so that orders can be compared."""
        ready, tail = times_in_order(self.workload, order)
        arrival = {t: stop for t, _, stop in jackson(ready, self.send_s, tail)}
        return self.alpha_s + max(stop + tail[t] for t, stop in arrival.items())


class _Order(NamedTuple):
    """Some ops in an order, and what it is worth."""

    seconds: float
    ops: tuple[int, ...]


class _Places:
    """Where an op can stand, from its dependencies and from what may change places.

    Backward ops stay before all others: an update among them could only make gradients late.
    All but the optimizer ops stay in the captured order, or inside their stretch of nodes of one graph.
    """

    def __init__(self, workload: Workload) -> None:
        period = Period.of(workload)
        self.after = [set(ops) for ops in period.waits]
        for op, tensors in enumerate(period.reads):
            self.after[op].update(period.ready_op[t] for t in tensors)
        self.before: list[set[int]] = [set() for _ in self.after]
        for op, ops in enumerate(self.after):
            for other in ops:
                self.before[other].add(op)
        self.backward = [op.phase == "backward" for op in workload.ops]
        self.stretch = [-1] * len(self.after)  # optimizer ops pass all forward ops
        fixed = (op for phase in ("backward", "forward") for op in workload.phase_ops(phase))
        key, number = None, 0
        for op in fixed:
            phase, graph = workload.ops[op].phase, workload.ops[op].graph
            last, key = key, (phase, graph or op)
            number += key != last
            self.stretch[op] = number

    def of(self, op: int, place: int, order: Sequence[int]) -> tuple[int, int]:
        """The first and the last place at which an op that stands at this place can stand."""
        first = last = place
        while first > 0 and self._may_pass(op, order[first - 1], self.after[op]):
            first -= 1
        while last + 1 < len(order) and self._may_pass(op, order[last + 1], self.before[op]):
            last += 1
        return first, last

    def _may_pass(self, op: int, other: int, bound: set[int]) -> bool:
        if other in bound or self.backward[op] != self.backward[other]:
            return False
        mine, its = self.stretch[op], self.stretch[other]
        return mine == its or mine < 0 or its < 0


def annealed_order(
    workload: Workload,
    value: OrderValue,
    order: Sequence[int],
    *,
    rounds: int,
    enough_s: float,
    budget: Budget,
    seed: int,
) -> tuple[int, ...]:
    """The best order found from this one by `rounds` moves of single ops, or until it is worth `enough_s` seconds.

    Only optimizer ops and the nodes of compiled graphs move.
    """
    places, rng = _Places(workload), random.Random(seed)
    movable = [op for op in order if places.stretch[op] < 0 or workload.ops[op].graph]

    def moved(state: _Order) -> _Order | None:
        budget.spend(_VALUE_S * (len(workload.ops) + len(workload.tensors)))
        op = rng.choice(movable)
        place = state.ops.index(op)
        first, last = places.of(op, place, state.ops)
        if first == last:
            return None
        ops = list(state.ops)
        ops.insert(rng.randint(first, last), ops.pop(place))
        return _Order(value(ops), tuple(ops))

    return anneal(
        _Order(value(order), tuple(order)),
        moved,
        changes=rounds if movable else 0,
        heat=_HEAT,
        rng=rng,
        done=lambda best: best.seconds <= enough_s or budget.spent,
    ).ops


def promising_orders(
    workload: Workload, value: OrderValue, *, moves: tuple[int, int], enough_s: float, budget: Budget, seed: int
) -> list[tuple[int, ...]]:
    """Distinct orders of all ops of a period, without the captured one.

    Moves updates, and then single ops, until the value is `enough_s` seconds or the number of moves or the
    budget is spent.
    """
    updates = update_order(workload)
    tail: dict[int, float] = {}
    for tensor, tail_s in zip(workload.tensors, heads_tails(workload, "one", "any").tail_s, strict=True):
        tail[tensor.ready_after] = max(tail.get(tensor.ready_after, 0.0), tail_s)
    urgent = sorted(updates, key=tail.__getitem__, reverse=True)
    limits = sorted(set(tail.values()))

    def split(k: int) -> list[int]:
        return [u for u in updates if tail[u] >= limits[k]] + [u for u in urgent if tail[u] < limits[k]]

    def takes(sequence: Sequence[int]) -> float:
        budget.spend(_VALUE_S * (len(workload.ops) + len(workload.tensors)))
        return value(serialized_order(workload, sequence))

    def moved(state: _Order) -> _Order:
        order = list(state.ops)
        order.insert(rng.randrange(len(order)), order.pop(rng.randrange(len(order))))
        return _Order(takes(order), tuple(order))

    start, rng = split(coarse_to_fine(len(limits), lambda k: -takes(split(k)), first=_LIMITS)), random.Random(seed)
    best = anneal(
        _Order(takes(start), tuple(start)),
        moved,
        changes=moves[0],
        heat=0.0,
        rng=rng,
        done=lambda best: best.seconds <= enough_s or budget.spent,
    ).ops
    orders = [serialized_order(workload, chosen) for chosen in (best, updates, urgent)]
    captured = workload.iteration_order()
    found = annealed_order(workload, value, captured, rounds=moves[1], enough_s=enough_s, budget=budget, seed=seed)
    orders.insert(0, found)
    return [order for order in dict.fromkeys(orders) if order != captured]


def bounded_orders(problem: Problem, budget: Budget) -> tuple[list[tuple[tuple[int, ...], float]], float]:
    """Orders of computation to plan for (empty for the captured one), each with a bound for all-reduces in it.

    The order with the least bound comes first. Also a bound for all-reduces in any order that is allowed.
    """
    workload, cluster = problem.workload, problem.cluster
    captured = ((), lower_bound(workload, cluster, sends="all_reduces", thorough=False).seconds)
    if not problem.free_order:
        return [captured], captured[1]
    least_s = lower_bound(workload, cluster, order="any", sends="all_reduces", thorough=False).seconds
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    if problem.large:
        orders = [serialized_order(workload, update_order(workload))]
    else:
        orders = promising_orders(
            workload,
            value,
            moves=(int(_MOVES * problem.rounds), OP_MOVES * problem.rounds),
            enough_s=least_s * (1 + problem.gap / 2),
            budget=budget.part(OP_MOVES_SHARE),
            seed=problem.seed,
        )
    found = [captured, *((order, max(least_s, value(order))) for order in orders)]
    return sorted(found, key=lambda choice: choice[1]), least_s
