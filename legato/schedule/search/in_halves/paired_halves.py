"""Plans that divide each message into two halves, and send each half when it is best for the iteration.

If the startup time of a message is a considerable part of the iteration, fast plans have few messages, and all
computation waits for the last message. To shorten this wait, the search divides each message into two halves, a
reduce-scatter during the backward pass and an all-gather when its result is needed. All messages of sharded plans are
sent in halves, so for sharded plans the search only regroups and reorders them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from legato.core.workload import Workload
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.search.budget import Budget
from legato.schedule.search.candidates import Fastest
from legato.schedule.search.in_halves.group_search import plans_in_groups
from legato.schedule.search.in_halves.groups import groups_of
from legato.schedule.search.in_halves.period import GroupedPeriod

__all__ = ["pair_halves"]

#: By which fraction plans in halves must be faster, since they have twice as many messages.
_WORTH = 0.002


def pair_halves(fastest: Fastest, budget: Budget) -> None:
    """Search for plans that send messages in two halves, starting from the fastest plan, and keep a faster plan."""
    problem, plan = fastest.problem, fastest.plan
    workload, cluster, sharded = problem.workload, problem.cluster, problem.shard != "none"
    paired = Fastest(problem)
    kind, captured = kind_of(plan, workload)._replace(sends="pairs"), workload.iteration_order()
    enough_s = lower_bound(workload, cluster, **kind._asdict(), thorough=False).seconds * (1 + problem.gap)
    updates = [op for op in captured if workload.ops[op].phase == "optimizer"]
    messages = [message for message in plan.messages if message.kind != "all_gather"]
    scattered = [msgspec.structs.replace(message, kind="reduce_scatter") for message in messages]
    among = cluster.workers if sharded else None
    for order in dict.fromkeys(_without_updates(order, workload) for order in (plan.op_order or captured, captured)):
        if min(fastest.seconds, paired.seconds) <= enough_s or budget.spent:
            break
        period = GroupedPeriod(workload, problem.collectives.half_s, (*order, *updates), budget, sharded_among=among)
        found = plans_in_groups(problem, period, [groups_of(scattered, workload)], enough_s)
        paired.consider(
            msgspec.structs.replace(
                plan, shard=problem.shard, op_order=() if plan.op_order == captured else plan.op_order
            )
            for plan in found
        )
    if paired.seconds < fastest.seconds * (1 if sharded else 1 - _WORTH):
        fastest.consider([paired.plan])


def _without_updates(order: Sequence[int], workload: Workload) -> tuple[int, ...]:
    return tuple(op for op in order if workload.ops[op].phase != "optimizer")
