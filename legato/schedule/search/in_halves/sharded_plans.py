"""The search for the best sharded plan.

The candidates are the sharded plans of all schedulers, the plan whose groups the lower bound determines, and the plans
of a search that starts from the groups of all these candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order
from legato.schedule.basics.sharded import sharded
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.blocks import too_many_tensors
from legato.schedule.search.candidates import Fastest, published
from legato.schedule.search.in_halves.best_groups import best_groups
from legato.schedule.search.in_halves.group_search import plan_in_groups, plans_in_groups
from legato.schedule.search.in_halves.groups import Arranged, Groups, groups_of
from legato.schedule.search.in_halves.halves import halves
from legato.schedule.search.in_halves.period import GroupedPeriod
from legato.schedule.search.op_orders import times_in_order
from legato.schedule.search.problem import Problem, Solve

__all__ = ["sharded_plan"]

#: The part of the budget for unsharded plans, and the number of plans from which to start.
_UNSHARDED, _STARTS = 0.25, 5


def sharded_plan(problem: Problem, solve: Solve) -> Plan:
    """Return the best plan that shards the optimizer or also the gradients, as `problem.shard` says."""
    workload, cluster, shard = problem.workload, problem.cluster, problem.shard
    budget, captured = problem.budget(1 - _UNSHARDED), workload.iteration_order()
    plans = [sharded(plan, workload, shard) for plan in _known(problem)]
    fastest = Fastest(problem)
    seconds = fastest.consider(plans)
    order: Order = "any" if problem.free_order else "captured"
    bound = lower_bound(workload, cluster, order=order, shard=shard, step_last=True, thorough=False)
    enough_s = bound.seconds * (1 + problem.gap)

    def period_and_best(op_order: tuple[int, ...]) -> tuple[GroupedPeriod, list[tuple[Groups, Arranged]]]:
        period = GroupedPeriod(workload, problem.collectives.half_s, op_order, budget, sharded_among=cluster.workers)
        best = best_groups(period, bound.seconds, fastest.seconds, partition=not cluster.unpack_s_per_byte)
        return period, [best] if best else []

    def consider(plans: Iterable[Plan]) -> None:
        fastest.consider(msgspec.structs.replace(plan, shard=shard) for plan in plans)

    period, given = period_and_best(_with_captured_updates(captured, workload))
    consider(plan_in_groups(problem, period, *best) for best in given)
    if fastest.seconds <= enough_s:
        return fastest.plan
    part = replace(problem, shard="none", work=problem.work * _UNSHARDED, limit_s=problem.limit_s * _UNSHARDED)
    plans.append(sharded(solve(part), workload, shard))
    seconds += fastest.consider(plans[-1:])
    by_time = sorted(range(len(plans)), key=seconds.__getitem__)
    starts = [groups_of(plans[k].messages, workload) for k in by_time[:_STARTS]]
    starts = [starts[0], *(groups for groups in starts[1:] if not too_many_tensors(len(groups)))]
    own = fastest.plan.op_order or captured
    orders = _with_captured_updates(own, workload), _with_captured_updates(captured, workload)
    for op_order in dict.fromkeys(orders):
        if fastest.seconds <= enough_s:
            break
        period, given = period_and_best(op_order)
        consider(plans_in_groups(problem, period, starts, enough_s, given))
    if problem.large:
        default = problem.collectives.lines.choices[0][0]
        fastest.consider_in_turn((sharded(plan, workload, shard) for plan in published(problem, default)), enough_s)
    problem.warn_if_cut(budget)
    return fastest.plan


def _known(problem: Problem) -> Iterator[Plan]:
    """Yield unsharded plans that need no search; for large models, leave out the plans of published schedulers."""
    lines, workload = problem.collectives.lines, problem.workload
    times = times_in_order(workload, workload.iteration_order())
    for name in dict.fromkeys((lines.choices[0][0], lines.choose(workload.nbytes)[0])):
        if not problem.large:
            yield from published(problem, name)
        yield halves(workload, problem.cluster, *times, name, problem.collectives.most)


def _with_captured_updates(order: tuple[int, ...], workload: Workload) -> tuple[int, ...]:
    """Return the backward and forward ops as in `order`, then the optimizer ops in the captured order."""
    updates = [op for op in workload.iteration_order() if workload.ops[op].phase == "optimizer"]
    return (*(op for op in order if workload.ops[op].phase != "optimizer"), *updates)
