"""Orders of computation that are worth planning for, where the computation may be reordered.

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
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from legato.core.cluster import LinearCost
from legato.core.workload import Workload
from legato.schedule.basics.coarse_to_fine import coarse_to_fine
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.schedule.search.budget import Budget

__all__ = ["OrderValue", "promising_orders", "times_in_order"]

#: How many limits to try before refining around the best one.
_LIMITS = 8
#: What it costs to value an order: for each op and each tensor.
_VALUE_S = 5e-7


def times_in_order(workload: Workload, order: Sequence[int]) -> tuple[list[float], list[float]]:
    """For each tensor, when its gradient is ready, and the seconds of computation from its first reader on."""
    until = list(accumulate((workload.ops[i].duration_s for i in order), initial=0.0))
    place = {op: k for k, op in enumerate(order)}
    ready = [until[place[tensor.ready_after] + 1] for tensor in workload.tensors]
    first = [min((place[r] for r in tensor.readers), default=len(order)) for tensor in workload.tensors]
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


def promising_orders(
    workload: Workload, value: OrderValue, *, rounds: int, enough_s: float, budget: Budget, seed: int
) -> list[tuple[int, ...]]:
    """Distinct orders of all ops of a period, without the captured one.

    Moves updates `rounds` times, or until the value is `enough_s` seconds or the budget is spent.
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

    best = split(coarse_to_fine(len(limits), lambda k: -takes(split(k)), first=_LIMITS))
    least, rng = takes(best), random.Random(seed)
    for _ in range(rounds):
        if least <= enough_s or budget.spent:
            break
        moved = best.copy()
        moved.insert(rng.randrange(len(best)), moved.pop(rng.randrange(len(best))))
        seconds = takes(moved)
        if seconds < least:
            best, least = moved, seconds
    orders = [serialized_order(workload, chosen) for chosen in (best, updates, urgent)]
    return [order for order in dict.fromkeys(orders) if order != workload.iteration_order()]
