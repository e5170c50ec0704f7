"""legato: plan merging, partitioning, order and collective together, for the real cost of messages.

Idea: each published scheduler decides one thing. MG-WFBP merges gradients, but ignores the forward pass; PACE and P3
order and partition gradients, but ignore the alpha of each message. `legato` decides everything together. For given
sizes of messages, it is best to fill each message with the ready bytes that are needed first (`fill.py`). So the search
only has to find the sizes.

The search starts from the messages that would reach the bound of nested sets; for chains of layers, these messages are
the best (`nested_messages.py`). The search also starts from messages of equal sizes and from the messages of the best
published scheduler. The search merges, divides and shifts messages at random, and assigns bytes to them again, until
the iteration is within `gap` of the proven lower bound or the budget is spent (`message_search.py`). If the pieces of a
tensor are scattered over messages, a worker has to assemble the tensor. If the cluster has a cost for this assembly,
the search also tries messages without partitioning, and with partitions that leave every tensor in one piece of memory.
Every message uses the collective and the depth that are cheapest for its size. For models with thousands of tensors,
the search sends blocks of neighbouring tensors (`blocks.py`).

If messages and computation share a machine (`Cluster.contention`), the whole search runs twice: with the costs of
messages during computation, and with the costs of messages without computation. The simulator, which knows the
contention, then picks the better plan (`contended.py`).

If the startup time of a message is a considerable part of the iteration, few messages are sent. The search then also
tries to send each message in two halves, a reduce-scatter and an all-gather (`in_halves/`).

Everything above is for the captured order of computation. In the graphs of a compiled model, the order is free, so
other orders are planned for as well (`op_orders.py`). Sharded plans start from plans found without shards, whose
messages are divided into halves; the halves are then improved in the same way. If messages are sent in a wire format,
`legato` plans with the costs of exact and of rounded messages, and keeps the faster plan (`wire_format.py`). The plans
of all other schedulers are candidates, too, so no other scheduler is faster. With more than `MOST_BLOCKS` tensors,
PACE's plan comes first, then the search, and then the other schedulers one by one. No more schedulers run once the best
plan is within `gap` of the bound. So no other scheduler is faster by more than `gap`.

Source: ours. Units: seconds and bytes.

`problem.py` defines the task, `candidates.py` keeps the fastest plan so far, `message_search.py` searches in one order
of computation, `all_reduces.py` makes plans from messages, and `collectives.py` computes the cost of each message.
`legato.py` imports all of these modules. Modules that transform the task and then search (`contended.py`,
`wire_format.py`) get the search as an argument.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Plan, Rounding, Shard
from legato.core.workload import Workload
from legato.schedule.basics.compose import check_partitions, in_halves
from legato.schedule.basics.sharded import check_shard, sharded
from legato.schedule.basics.wire import check_wire
from legato.schedule.published import PUBLISHED
from legato.schedule.search.candidates import FIRST, Fastest, contenders, published
from legato.schedule.search.contended import contended_plan
from legato.schedule.search.in_halves.halves import halves
from legato.schedule.search.in_halves.paired_halves import pair_halves
from legato.schedule.search.message_search import search_order
from legato.schedule.search.op_orders import bounded_orders, times_in_order
from legato.schedule.search.problem import Problem
from legato.schedule.search.wire_format import plan_in_wire_format

__all__ = ["legato"]

#: The largest fraction of the remaining budget to spend on an order of computation, if more searches follow.
_PART = 0.8
#: The part of the budget of a sharded plan for the plan without shards from which the search starts.
_UNSHARDED = 0.25


def legato(  # noqa: PLR0913
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    gap: float = 0.005,
    work: float = 1.0,
    limit_s: float = 20.0,
    rounds: int = 400,
    seed: int = 0,
    max_message_bytes: int | None = None,
    shard: Shard = "none",
    wire: Rounding = "none",
) -> Plan:
    """Return the best plan found before `rounds` changes or a budget of `work` are spent.

    The search ends earlier if a plan is within `gap` of the bound. `work` is counted in seconds on a current processor
    (`budget.py`), so the same input gives the same plan everywhere, unless the search is cut off after `limit_s`
    seconds, which is logged. By default, every message uses the cheapest collective; `collective` restricts the choice
    to one. A message in halves uses only collectives that consist of a reduce-scatter and an all-gather. No message has
    more than `max_message_bytes`; tensors are partitioned if necessary. With `shard`, the plan shards the optimizer or
    also the gradients. With `wire`, all messages are sent in a wire format. Then there are two searches (for exact and
    for rounded messages), and each search has the whole `work` and `limit_s`. Raises `InputError` if the cluster lacks
    the collective, the limit is below 16 bytes, or `shard` or `wire` is unknown or impossible. Raises `PlanError` if
    `shard` needs halves that the collective does not have, and `TooLargeError` if the limit makes too many messages.
    """
    check_shard(shard)
    check_wire(wire, workload.tensors, shard=shard)
    within, costs = (gap, work, limit_s, rounds), cluster
    if shard != "none":
        costs = in_halves(cluster, collective, f"shard {shard!r}")
    problem = Problem(workload, costs, collective, *within, seed, max_message_bytes, shard)
    plan = _solve(problem) if wire == "none" else plan_in_wire_format(problem, wire, _solve)
    return msgspec.structs.replace(plan, scheduler="legato", carrier="legato")


def _solve(problem: Problem) -> Plan:
    """Return the best plan; transform a problem with contention or shards into problems without them."""
    check_partitions(problem.workload, "max_message_bytes", problem.most)
    if problem.cluster.contention is not None:
        return contended_plan(problem, _solve)
    if problem.shard != "none":
        return _sharded(problem)
    return _unsharded(problem)


def _unsharded(problem: Problem) -> Plan:
    """Return the best plan found without shards and contention."""
    workload, cluster, gap, large = problem.workload, problem.cluster, problem.gap, problem.large
    budget, collectives, fastest = problem.budget(), problem.collectives, Fastest(problem)
    names, (cheapest, _) = collectives.names, collectives.lines.choose(workload.nbytes)
    tried = dict.fromkeys((names[0], cheapest) if problem.free_order else names[:1])
    for name in tried:
        fastest.consider(published(problem, name, FIRST if large else PUBLISHED))
    halved, _ = collectives.halved.lines.choose(workload.nbytes) if collectives.halved else (None, 0)
    orders, least_s = bounded_orders(problem, budget)
    paired = not large and halved and cluster.cost(halved).startup_s > least_s * gap
    for k, (order, bound_s) in enumerate(orders):
        own = budget.part(_PART if paired or k + 1 < len(orders) else 1.0)
        if not (k and own.spent):
            search_order(fastest, order, bound_s, least_s, own)
    if large:
        for name in tried:
            fastest.consider_in_turn(published(problem, name, contenders(cluster)), least_s * (1 + gap))
    if paired:
        pair_halves(fastest, budget)
    problem.warn_if_cut(budget)
    return fastest.plan


def _sharded(problem: Problem) -> Plan:
    """Return the best plan found that shards the optimizer or also the gradients, as `problem.shard` says."""
    workload, lines, fastest = problem.workload, problem.collectives.lines, Fastest(problem)
    work, limit_s, budget = problem.work, problem.limit_s, problem.budget(1 - _UNSHARDED)
    times = times_in_order(workload, workload.iteration_order())
    plans = [_unsharded(replace(problem, shard="none", work=_UNSHARDED * work, limit_s=_UNSHARDED * limit_s))]
    for name in dict.fromkeys((lines.choices[0][0], lines.choose(workload.nbytes)[0])):
        plans += [] if problem.large else published(problem, name)
        plans.append(halves(workload, problem.cluster, *times, name, problem.collectives.most))
    fastest.consider(sharded(plan, workload, problem.shard) for plan in plans)
    if not problem.large:
        pair_halves(fastest, budget)
    problem.warn_if_cut(budget)
    return fastest.plan
