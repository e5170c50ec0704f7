"""The best sharded plan: those of all schedulers, sharded, and what a search makes of their groups."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order
from legato.schedule.basics.sharded import sharded
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published import PUBLISHED
from legato.schedule.search.blocks import too_many_tensors
from legato.schedule.search.candidates import Fastest, published
from legato.schedule.search.group_search import plans_in_groups
from legato.schedule.search.groups_in_halves import groups_of
from legato.schedule.search.halves import halves
from legato.schedule.search.op_orders import times_in_order
from legato.schedule.search.problem import Problem, Solve
from legato.schedule.search.sharded_period import ShardedPeriod

__all__ = ["sharded_plan"]

#: The part of the budget for unsharded plans, and from how many plans to start.
_UNSHARDED, _STARTS = 0.25, 5


def sharded_plan(problem: Problem, solve: Solve) -> Plan:
    """The best plan that shards what the problem says."""
    workload, cluster, shard, collectives = problem.workload, problem.cluster, problem.shard, problem.collectives
    budget, part, captured = problem.budget(1 - _UNSHARDED), _UNSHARDED, workload.iteration_order()
    plans = [solve(replace(problem, shard="none", work=problem.work * part, limit_s=problem.limit_s * part))]
    default, cheapest = (collectives.lines.choices[0][0], collectives.lines.choose(workload.nbytes)[0])
    for name in dict.fromkeys((default, cheapest)):
        if not problem.large:
            plans += published(problem, name)
        plans.append(halves(workload, cluster, *times_in_order(workload, captured), name, collectives.most))
    plans = [sharded(plan, workload, shard) for plan in plans]
    fastest = Fastest(problem)
    seconds = fastest.consider(plans)
    order: Order = "any" if problem.free_order else "captured"
    bound = lower_bound(workload, cluster, order=order, shard=shard, step_last=True, thorough=False)
    enough_s = bound.seconds * (1 + problem.gap)
    by_time = sorted(range(len(plans)), key=seconds.__getitem__)
    starts = [groups_of(plans[k].messages, workload) for k in by_time[:_STARTS]]
    starts = [starts[0], *(groups for groups in starts[1:] if not too_many_tensors(len(groups)))]
    best = fastest.plan.op_order or captured
    for op_order in dict.fromkeys(_with_captured_updates(o, workload) for o in (best, captured)):
        if fastest.seconds <= enough_s:
            break
        period = ShardedPeriod(workload, cluster.workers, collectives.half_s, op_order, budget)
        found = plans_in_groups(problem, period, starts, enough_s)
        fastest.consider(msgspec.structs.replace(plan, shard=shard) for plan in found)
    for scheduler in PUBLISHED if problem.large else ():
        if fastest.seconds > enough_s:
            fastest.consider(sharded(plan, workload, shard) for plan in published(problem, default, [scheduler]))
    problem.warn_if_cut(budget)
    return fastest.plan


def _with_captured_updates(order: tuple[int, ...], workload: Workload) -> tuple[int, ...]:
    """The backward and forward ops in this order, then the optimizer ops in the captured one."""
    updates = [op for op in workload.iteration_order() if workload.ops[op].phase == "optimizer"]
    return (*(op for op in order if workload.ops[op].phase != "optimizer"), *updates)
