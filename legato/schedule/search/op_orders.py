"""Orders of computation that are worth planning for: orders of the optimizer ops and, if they may move, of all ops.

Gradients that are computed early can be sent early. Caramel's order makes bytes ready as early as possible, which suits
a busy network. If the network has time to spare, gradients that are needed first should be computed first instead. The
best order is often a mixture: gradients that are needed late would only delay gradients for which the forward pass
waits. So gradients that are needed late are computed last, while the urgent gradients are being sent.

So a third order begins with the urgent updates (ops that produce gradients), in Caramel's order: those whose tail (the
computation that waits for them) is at least a limit. All other updates follow, the longest tail first. Several limits
are tried, and the best is kept. Then updates move one at a time, and a move is kept if the order gets better. The value
of an order is the length of Jackson's preemptive schedule for the order's release times. This schedule would be optimal
if messages could be partitioned for free (`jackson.py`).

Finally, single backward, optimizer and forward ops move (`annealed_order`): one branch of the network can be computed
while parameters that another branch needs are still being sent. If other ops may not move, only optimizer ops move from
the captured order, depending on when gradients arrive.
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

#: How many moves of updates to try for every round of the search.
_MOVES = 0.25
#: How many moves of single ops to try for every round, and the largest fraction of the budget for these moves.
OP_MOVES, OP_MOVES_SHARE = 10, 0.2
#: How many limits to try before refining around the best one.
_LIMITS = 8
#: The work to value an order, for each op and each tensor.
_VALUE_S = 5e-7
#: By which fraction an order may be worse than the previous order at the start of the annealing; it falls to 0.
_HEAT = 0.01


def times_in_order(workload: Workload, order: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return, by tensor, when its gradient is ready, and the seconds of computation from its first reader on.

    Readers that are not in the order are ignored.
    """
    until = list(accumulate((workload.ops[i].duration_s for i in order), initial=0.0))
    place = {op: k for k, op in enumerate(order)}
    ready = [until[place[tensor.ready_after] + 1] for tensor in workload.tensors]
    first = [min((place[r] for r in tensor.readers if r in place), default=len(order)) for tensor in workload.tensors]
    return ready, [until[-1] - until[k] for k in first]


class OrderValue:
    """A function that returns a lower bound on the seconds of an iteration with an order of ops."""

    def __init__(self, workload: Workload, line: LinearCost) -> None:
        """Prepare for this workload; the linear cost `line` is a lower bound on the cost of a message."""
        self.workload, self.alpha_s = workload, line.alpha_s
        self.send_s = [line.beta_s_per_byte * tensor.nbytes for tensor in workload.tensors]

    def __call__(self, order: Sequence[int]) -> float:
        """Return the largest sum of a gradient's arrival and tail, even if all computation takes longer than that."""
        ready, tail = times_in_order(self.workload, order)
        arrival = {t: stop for t, _, stop in jackson(ready, self.send_s, tail)}
        return self.alpha_s + max(stop + tail[t] for t, stop in arrival.items())


class _Order(NamedTuple):
    """An order of ops, and the seconds that an iteration takes in this order."""

    seconds: float
    ops: tuple[int, ...]


class _Places:
    """The places that each op can have in an order, within the limits of its dependencies and the runtime.

    Backward ops stay before all other ops, since an optimizer op between them could only make gradients late. Optimizer
    ops may pass all forward ops. Other ops keep the captured order, but adjacent nodes of one graph may swap.
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
        self.stretch = [-1] * len(self.after)  # -1 for optimizer ops, which may pass all forward ops
        fixed = (op for phase in ("backward", "forward") for op in workload.phase_ops(phase))
        key, number = None, 0
        for op in fixed:
            phase, graph = workload.ops[op].phase, workload.ops[op].graph
            last, key = key, (phase, graph or op)
            number += key != last
            self.stretch[op] = number

    def of(self, op: int, place: int, order: Sequence[int]) -> tuple[int, int]:
        """Return the first and the last place to which an op can move from this place."""
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
    """Return the best order found from this one with `rounds` moves of single ops.

    The search ends earlier if the best order's value is at most `enough_s` or the budget is spent. Only optimizer ops
    and the nodes of compiled graphs move.
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
    """Return different orders of all ops of a period; the captured order is not among them.

    `moves` has two numbers: how many moves of updates to try, and how many moves of single ops. The search ends earlier
    if the best order's value is at most `enough_s` or the budget is spent.
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
    """Return orders of computation to plan for, each as (order, bound), and a bound that holds for every allowed order.

    All bounds are for plans of all-reduces. The order () stands for the captured order. The order with the least bound
    is first.
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
