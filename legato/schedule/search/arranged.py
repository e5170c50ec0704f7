"""Messages valued with their updates arranged: what a tail cannot tell.

The local search values messages by fixed tails: an optimizer op stands where the order of
ops has it. In truth it runs when its gradient has arrived and the stream has time
(`optimizer_ops.py`), so which updates fit into the wait for the last message depends on the
messages. Where messages are few and dear, this decides; here each change of the messages is
valued by the iteration with its updates arranged.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import msgspec

from legato.core.workload import Workload
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
from legato.schedule.search.optimizer_ops import work_conserving_order

__all__ = ["arrange_updates"]

#: The most turns of messages and updates.
_TURNS = 3
#: The numbers of messages to start from, all of the same size, and how many of the starts are improved.
_STARTS, _IMPROVED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32), 3
#: What it costs to arrange updates, for each op.
_ARRANGE_S = 1.5e-6
#: The probability that a change is one of sizes, not of how many messages take what is ready first.
_SIZES = 0.8


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
    for _ in range(_TURNS + 1):
        before = fastest.seconds
        if before <= enough_s or budget.spent:
            return
        order = fastest.plan.op_order if moves_updates_only(fastest.plan, workload) else captured
        if not annealed and before <= value(order) * (1 + gap):  # only another order can win anything
            annealed, part, moves = True, budget.part(OP_MOVES_SHARE), OP_MOVES * rounds
            better = partial(annealed_order, rounds=moves, enough_s=bound_s, budget=part, seed=seed)
            order = better(workload, value, order, anywhere=False)
        ready, tails = times_in_order(workload, order)
        sent = AllReduces(problem, (ready, tails), bound_s, budget, least_divided)
        for search in (nested_messages, partial(local_search, gap=gap, rounds=rounds, seed=seed)):
            plans = list(sent.plans(search(sent.instance)))
            fastest.consider([*plans, msgspec.structs.replace(plans[0], op_order=order)])
        if fastest.seconds >= before:
            break
    own = heads_tails(workload, "one", "captured").tail_s
    for tail_s in (tails, times_in_order(workload, captured)[1], own):
        if fastest.seconds > enough_s:
            sent = AllReduces(problem, (ready, tail_s), bound_s, budget, least_divided)
            sizes = [message.nbytes for message in fastest.plan.messages if message.kind == "all_reduce"]
            best = _arranged_search(sent.instance, workload, sizes, gap=gap, rounds=rounds, seed=seed)
            fastest.consider(sent.plans(best))


def _arranged_search(
    instance: Instance, workload: Workload, first: Sequence[int], *, gap: float, rounds: int, seed: int
) -> Filled:
    """The best messages found in `rounds` changes, or until within `gap` of the bound, or the budget is spent.

    It begins with messages of equal sizes, and with the sizes `first` if they add up to all bytes, with and
    without partitioning.
    """
    rng, total = random.Random(seed), sum(instance.nbytes)
    enough_s = instance.bound_s * (1 + gap)
    starts: list[tuple[float, int, list[int], int, int, Filled]] = []
    # An update waits for the last byte of its gradient, so it may help not to partition.
    ways = [instance] if instance.whole_below is not None else [instance, instance._replace(whole_below=total + 1)]

    def add(sizes: list[int], first_come: int) -> None:
        for way in range(len(ways)):
            filled = ways[way].fill(sizes, first_come)
            starts.append((_takes(filled, instance, workload), len(starts), sizes, first_come, way, filled))

    if sum(first) == total:
        add(list(first), 0)
    for count in _STARTS:
        for first_come in sorted({0, count // 2, count}):
            if not starts or not instance.budget.spent:
                sizes = [total * (k + 1) // count - total * k // count for k in range(count)]
                add([size for size in sizes if size], first_come)
    starts.sort()
    best_s, *_, best = starts[0]
    for seconds, _, sizes, first_come, way, _ in starts[:_IMPROVED]:
        for _ in range(rounds):
            if best_s <= enough_s or instance.budget.spent:
                return best
            changed = change_sizes(sizes, rng) if rng.random() < _SIZES else sizes
            come = first_come if changed is not sizes else rng.randint(0, len(sizes))
            filled = ways[way].fill(changed, come)
            found_s = _takes(filled, instance, workload)
            if found_s <= seconds:
                seconds, sizes, first_come = found_s, changed, come
                if found_s < best_s:
                    best_s, best = found_s, filled
    return best


def _takes(filled: Filled, instance: Instance, workload: Workload) -> float:
    instance.budget.spend(_ARRANGE_S * len(workload.ops))
    return work_conserving_order(workload, instance.arrival_s(filled))[1]
