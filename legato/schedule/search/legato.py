"""legato: merging, partitioning, order and collective planned together, for the real cost of messages.

Idea: each published scheduler decides one thing. MG-WFBP merges and ignores the forward
pass; PACE and P3 order and partition, and do not count the alpha that a message costs.
Here all are decided together. For given sizes of messages, the best contents are known: of what
is ready, what is needed first (`fill.py`). So the search is for sizes.

First come the messages that the bound of nested sets asks for, which are the best ones for
chains of layers (`nested_messages.py`). From these, from messages of equal sizes and from the messages of
the best published scheduler, messages are merged, divided and shifted at random and filled again, until
the iteration is within `gap` of the proven lower bound or the budget is spent (`message_search.py`).
A worker has to put a tensor together whose pieces are scattered over messages. Where this is known
to take time, the search also goes without partitioning, and with partitions that leave
every tensor in one piece of memory. Every message takes the collective and the depth that
are cheapest for its size. Of models with thousands of tensors, the search sends blocks of
neighbours (`blocks.py`).

Where messages and computation share a machine (`Cluster.contention`), all this is done
twice, with the costs of messages during computation and of messages alone, and the
simulator, which knows the contention, judges (`contended.py`).

Where the startup time of a message is a considerable part of the iteration, few messages are
sent. Each of them is then tried in two halves, a reduce-scatter and an all-gather, which are
arranged and improved as for sharded plans (`in_halves/`).

All this is for the captured order of computation. In the graphs of a compiled model the order
is free, and it is also done for other orders (`op_orders.py`). Sharded plans have a search of their own
(`in_halves/sharded_plans.py`), which starts from all of this. Where messages may travel in a wire
format, all is done for what exact and for what rounded ones cost, and then as few as
possible are rounded (`wire_format.py`). The plans of all other schedulers are
candidates too, so none of them is faster. With more than `MOST_BLOCKS` tensors, PACE's plan
comes first, then the search, then the others, as long as the best plan is not within `gap`
of the bound. So none of them is faster by more than `gap`.

Source: ours. Units: seconds and bytes.

`problem.py` has what is asked for, `candidates.py` the fastest plan so far, `message_search.py` the search in one
order of computation, `all_reduces.py` the plans of its messages, and `collectives.py` what each message costs. Imports
go from here to all of them; what searches for other plans first (`contended.py`, `in_halves/sharded_plans.py`,
`wire_format.py`) gets the search as an argument.
"""

from __future__ import annotations

import msgspec

from legato.core.cluster import Cluster
from legato.core.files import identity
from legato.core.plan import Plan, Rounding, Shard
from legato.core.workload import Workload
from legato.schedule.basics.compose import check_partitions, in_halves
from legato.schedule.basics.sharded import check_shard
from legato.schedule.published import PUBLISHED
from legato.schedule.search.candidates import FIRST, Fastest, contenders, published
from legato.schedule.search.contended import contended_plan
from legato.schedule.search.in_halves.paired_halves import pair_halves
from legato.schedule.search.in_halves.sharded_plans import sharded_plan
from legato.schedule.search.message_search import search_order
from legato.schedule.search.op_orders import bounded_orders
from legato.schedule.search.problem import Problem
from legato.schedule.search.rounding import check_rounding
from legato.schedule.search.wire_format import plan_in_wire_format

__all__ = ["legato"]

#: The largest fraction of what is left of the budget for an order of computation, if something follows.
_PART = 0.8


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
    """The best plan found within `rounds` changes or a budget of `work`, or until within `gap` of the bound.

    `work` is counted in seconds of a processor of today (`budget.py`), so the same input
    gives the same plan everywhere, unless the search is ended after `limit_s` seconds,
    which is logged. By default every message takes the cheapest collective; `collective`
    restricts the choice to one. Messages in halves take one that has halves. No message has more than
    `max_message_bytes`;
    tensors are partitioned where that is necessary. With `shard`, it is the best plan that
    shards the optimizer or also the gradients. With `wire`, as few bytes as possible travel
    in a wire format, or all; then `work` and `limit_s` count four times: for exact messages, for
    rounded ones, for some of both, and for the choice between them. Raises `InputError` on a collective the
    cluster lacks, a limit below 16 bytes, or an unknown or impossible `shard` or `wire`, `PlanError`
    on a `shard` where the collective has no halves,
    and `TooLargeError` where the limit makes too many messages.
    """
    check_shard(shard)
    check_rounding(wire, workload, shard=shard)
    within, costs = (gap, work, limit_s, rounds), cluster
    if shard != "none":
        costs = in_halves(cluster, collective, f"shard {shard!r}")
    plan = _solve(Problem(workload, costs, collective, *within, seed, max_message_bytes, shard, wire))
    return msgspec.structs.replace(plan, scheduler="legato", cluster_id=identity(cluster), carrier="legato")


def _solve(problem: Problem) -> Plan:
    """The best plan; formats, contention and shards each make other problems of this one, and solve these."""
    if problem.wire != "none":
        return plan_in_wire_format(problem, _solve)
    check_partitions(problem.workload, "max_message_bytes", problem.most)
    if problem.cluster.contention is not None:
        return contended_plan(problem, _solve)
    if problem.shard != "none":
        return sharded_plan(problem, _solve)
    return _unsharded(problem)


def _unsharded(problem: Problem) -> Plan:
    """The best plan found for an optimizer that every worker runs, of exact messages that disturb no computation."""
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
