"""legato: merging, partitioning, order and collective planned together, for the real cost of messages.

Idea: each published scheduler decides one thing. MG-WFBP merges and ignores the forward
pass; PACE and P3 order and partition, and do not count the alpha that a message costs.
Here the sizes of the messages and their contents are improved in turns, each step exact
for what the other one has fixed:

- for an order of pieces, the best way to merge neighbours into messages
  (`merge_deadlines.py`: a dynamic program with deadlines, and bisection over the
  iteration time);
- for sizes of messages, the best contents (`fill.py`: of what is ready, what is needed
  first).

First come the messages that the bound of nested sets asks for, which are the best ones for
chains of layers (`nested_messages.py`). The turns start from several orders: ready order,
Jackson's preemptive order (PACE's), and messages of equal sizes (P3's). Then single
messages are merged, divided and shifted at random and filled again, until the iteration is
within `gap` of the proven lower bound or the budget is spent (`local_search.py`). A worker
has to put a tensor together whose pieces are scattered over messages. Where this is known
to take time, everything is done first without partitioning, then with partitions that leave
every tensor in one piece of memory. Every message takes the collective and the depth that
are cheapest for its size. Of models with thousands of tensors, the search sends blocks of
neighbours (`blocks.py`).

Where messages and computation share a machine (`Cluster.contention`), all this is done
twice, with the costs of messages beside computation and of messages alone, and the
simulator, which knows the contention, judges.

Where the startup time of a message is a considerable part of the iteration, few messages are
sent. Each of them is then tried in two halves, a reduce-scatter and an all-gather, which are
arranged and improved like those of sharded plans (`sharded_search.py`).

All this is for the captured order of computation. Where the order is free, it is also
done for other orders (`op_orders.py`), for halves of all-reduces (`halves.py`), and, where
messages are expensive, for both at once (`annealing.py`). The order is free in the graphs of
a compiled model, and where plans need not be run. Sharded plans have a search of their own
(`sharded_search.py`), which starts from all of this. Where messages may travel in a wire
format, all is done for what exact and for what rounded ones cost, and then as few as
possible are rounded (`rounding.py`). The plans of all other schedulers are
candidates too, so none of them is faster. With more than `MOST_BLOCKS` tensors, PACE's plan
comes first, then the search, then the others, as long as the best plan is not within `gap`
of the bound. So none of them is faster by more than `gap`.

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import TooLargeError
from legato.core.files import identity
from legato.core.plan import Message, Plan, Shard, Slice
from legato.core.workload import Op, Workload
from legato.schedule.basics.compose import (
    check_partitions,
    compose,
    has_free_order,
    is_runnable,
    message_limit,
    moves_updates_only,
    resolve_collective,
)
from legato.schedule.basics.heads_tails import Order, heads_tails
from legato.schedule.basics.joined import divided
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.schedule.basics.sharded import check_shard, sharded
from legato.schedule.bound.lower_bound import cheapest_line, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.published import PUBLISHED
from legato.schedule.published.caramel import MAX_DEPTH
from legato.schedule.search.arranged import arranged_search
from legato.schedule.search.blocks import MOST_BLOCKS, Blocks
from legato.schedule.search.budget import Budget
from legato.schedule.search.fill import Filled
from legato.schedule.search.halves import halves
from legato.schedule.search.local_search import CheapestCollective, Instance, local_search
from legato.schedule.search.nested_messages import nested_messages
from legato.schedule.search.op_orders import OrderValue, annealed_order, promising_orders, times_in_order
from legato.schedule.search.optimizer_ops import work_conserving_order
from legato.schedule.search.rounding import MOST_SHARED, TOLERANCE, Rounding, check_rounding, exact_shares, rounded
from legato.schedule.search.sharded_search import ShardedPeriod, groups_of, sharded_search
from legato.simulator.collective import iteration_time
from legato.simulator.period import Period
from legato.simulator.pipelining import message_s

__all__ = ["legato"]

_log = logging.getLogger("legato")
#: For every round of the local search: moves of updates, and tries of the annealing from each start. They cost less.
_MOVES, _ANNEALING_TRIES = 0.25, 64
#: The same for moves of single ops, and the largest fraction of the budget for them.
_OP_MOVES, _OP_MOVES_SHARE = 10, 0.2
#: The largest fraction of the budget for other orders than the captured one, where there are updates to arrange.
_FREE_SHARE = 0.6
#: The part of the gap within which a plan should be of the bound in its order, where this is larger than the least one.
_NEARER = 0.2
#: Where partitioning has a price, only tensors of at least this fraction of all bytes are partitioned, in three passes.
_WHOLE_BELOW = (1.0, 1 / 16, 0.0)
#: The largest fraction of the budget for the annealing.
_ANNEALING_SHARE = 0.8
#: The largest fraction of the budget for messages in two halves, and by how much these should be faster, since they are
#: twice as many.
_PAIRS_SHARE, _WORTH_PAIRS = 0.3, 0.002
#: Of a search for sharded plans: the part of the budget for unsharded ones, from how many plans to start, and how many
#: changes to try for every round. They cost less.
_UNSHARDED, _STARTS, _CHANGES = 0.25, 5, 8
#: Which tensors are exact first, by release time, tail and bytes, and by how much plans for them should be faster than
#: necessary, as messages have startup times; and the part of the work for each of these plans.
_FIRST_EXACT: tuple[Callable[[float, float, int], float], ...] = (
    lambda release_s, tail_s, nbytes: tail_s,
    lambda release_s, tail_s, nbytes: -release_s,
    lambda release_s, tail_s, nbytes: -nbytes,
)
_SLACKS, _REGROUPED = (0.0, 0.01, 0.03), 0.1
#: The most turns of messages and updates.
_TURNS = 3
#: These merge neighbours in ready order and do not overlap with the forward pass. merge-optimal is the best of these.
_MERGING = ("fifo", "single", "ddp", "mg-wfbp", "horovod")
#: Of large models, messages cost little beside their bytes. Then the preemptive optimum is nearly the optimum.
_FIRST = ("pace",)


def legato(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    gap: float = 0.005,
    work: float = 1.0,
    limit_s: float = 20.0,
    rounds: int = 400,
    seed: int = 0,
    any_order: bool = False,
    max_message_bytes: int | None = None,
    shard: Shard = "none",
    wire: Rounding = "none",
) -> Plan:
    """The best plan found within `rounds` changes or a budget of `work`, or until within `gap` of the bound.

    `work` is counted in seconds of a processor of today (`budget.py`), so the same input
    gives the same plan everywhere, unless the search is ended after `limit_s` seconds,
    which is logged. By default every message takes the cheapest collective; `collective`
    restricts the choice to one. With `any_order`, plans count too that can only be
    simulated: those that reorder more than the nodes of compiled graphs, or that gather
    other messages than they scattered, and `work` and `limit_s` count twice: the best plan without
    them is looked for as well. No message has more than `max_message_bytes`;
    tensors are partitioned where that is necessary. With `shard`, it is the best plan that
    shards the optimizer or also the gradients. With `wire`, as few bytes as possible travel
    in a wire format, or all; then `work` and `limit_s` count four times: for exact messages, for
    rounded ones, for some of both, and for the choice between them. Raises `InputError` on a collective the
    cluster lacks, a limit below 16 bytes, or an unknown or impossible `shard` or `wire`,
    and `TooLargeError` where the limit makes too many messages.
    """
    check_shard(shard)
    check_rounding(wire, workload, shard=shard)
    options: dict[str, Any]
    if wire != "none":
        options = {"collective": collective, "gap": gap, "rounds": rounds, "seed": seed}
        options |= {"any_order": any_order, "max_message_bytes": max_message_bytes}
        return _in_wire_format(workload, cluster, wire, work, limit_s, **options)
    most = message_limit(max_message_bytes)
    check_partitions(workload, "max_message_bytes", most)
    if cluster.contention is not None:
        options = {"collective": collective, "gap": gap, "rounds": rounds, "seed": seed}
        options |= {"work": work / 2, "limit_s": limit_s / 2, "max_message_bytes": max_message_bytes, "shard": shard}
        return _contended(workload, cluster, any_order, **options)
    names = tuple(cluster.collectives) if collective is None else (resolve_collective(cluster, collective),)
    collectives = _collectives(cluster, names)._replace(most=most)
    if shard != "none":
        options = {"gap": gap, "rounds": rounds, "seed": seed, "collective": collective}
        options |= {"any_order": any_order, "max_message_bytes": max_message_bytes}
        return _sharded(workload, cluster, shard, collectives, work, limit_s, **options)
    budget = Budget(work, limit_s)
    cheapest, _ = collectives.choose(workload.nbytes)
    fastest = _Fastest(workload, cluster, any_order, most)
    free_order, large = any_order or has_free_order(workload), len(workload.tensors) > MOST_BLOCKS
    published = dict.fromkeys((names[0], cheapest) if free_order else names[:1])
    for name in published:
        fastest.consider(_published(workload, cluster, name, max_message_bytes, _FIRST if large else PUBLISHED))
    anywhere = any_order if free_order else None
    # Arranging updates takes work, too, which only plans in the captured order have.
    arranges = bool(workload.phase_ops("optimizer")) and not large
    free = budget.part(_FREE_SHARE) if free_order and arranges else budget
    orders, least_s = _orders(workload, cluster, anywhere, rounds, gap / 2, free, seed)
    if free_order:
        fastest.consider(_in_halves(workload, cluster, cheapest, most, [order for order, _ in orders]))
        least_in_order_s = orders[0][1]
        dear = cluster.cost(cheapest).startup_s > least_in_order_s * gap
        if dear and not _good_enough(fastest, least_in_order_s, gap):
            # imported here because it compiles: other planning does without numba
            from legato.schedule.search.annealing import annealing, load_kernel

            free.wait(load_kernel())  # takes seconds on its first use on a machine
            part, tries = free.part(_ANNEALING_SHARE), _ANNEALING_TRIES * rounds
            fastest.consider([annealing(workload, cluster, cheapest, rounds=tries, budget=part, seed=seed)])
    for k, (order, bound_s) in enumerate(orders):
        own = free if order else budget
        if k and own.spent:
            continue
        ready, in_order = times_in_order(workload, order or workload.iteration_order())
        enough_s = max(least_s * (1 + gap), bound_s * (1 + gap * _NEARER))
        for tails, whole_below in _searches(workload, cluster, in_order, order):
            if fastest.seconds > enough_s:
                blocks = Blocks(workload, ready, tails)
                times = blocks.release_s, blocks.tail_s, blocks.nbytes
                instance = Instance(*times, collectives, bound_s, own, whole_below)
                nested = nested_messages(instance)
                fastest.consider(_plans(nested, instance, blocks, ready, workload, cluster, order))
                if fastest.seconds > enough_s:
                    within = gap if bound_s <= least_s else enough_s / bound_s - 1
                    best = local_search(instance, gap=within, rounds=rounds, seed=seed)
                    fastest.consider(_plans(best, instance, blocks, ready, workload, cluster, order))
    if large:
        for name in published:
            for scheduler in _contenders(cluster):
                if fastest.seconds > least_s * (1 + gap):
                    fastest.consider(_published(workload, cluster, name, max_message_bytes, [scheduler]))
    elif arranges:
        captured_s = next(bound_s for order, bound_s in orders if not order)
        nbytes = [tensor.nbytes for tensor in workload.tensors]
        for whole_below in _whole_below(workload, cluster):
            instance = Instance([], [], nbytes, collectives, captured_s, budget, whole_below)
            _arrange(fastest, instance, gap, rounds, seed)
    if not large and cluster.cost(cheapest).startup_s > least_s * gap:
        _in_pairs(fastest, collectives, gap, rounds, budget.part(_PAIRS_SHARE), seed)
    if any_order and fastest.seconds > least_s * (1 + gap):
        options = {"collective": collective, "gap": gap, "rounds": rounds, "seed": seed}
        options |= {"work": work, "limit_s": limit_s, "max_message_bytes": max_message_bytes}
        fastest.consider([legato(workload, cluster, **options)])
    _warn_if_cut(budget, limit_s)
    assert fastest.plan is not None
    return msgspec.structs.replace(fastest.plan, scheduler="legato")


def _warn_if_cut(budget: Budget, limit_s: float) -> None:
    if budget.cut:
        _log.warning("the search for a plan was ended after %g s: another run may find another plan", limit_s)


def _sharded(
    workload: Workload,
    cluster: Cluster,
    shard: Shard,
    collectives: CheapestCollective,
    work: float,
    limit_s: float,
    **options: Any,
) -> Plan:
    """The best sharded plan: those of all schedulers, sharded, and what a search makes of their groups."""
    budget, part = Budget(work * (1 - _UNSHARDED), limit_s), _UNSHARDED
    unsharded = legato(workload, cluster, work=work * part, limit_s=limit_s * part, **options)
    any_order, max_message_bytes, gap = options["any_order"], options["max_message_bytes"], options["gap"]
    fastest = _Fastest(workload, cluster, any_order, collectives.most)
    cheapest, _ = collectives.choose(workload.nbytes)
    plans = [unsharded]
    default, large = collectives.choices[0][0], len(workload.tensors) > MOST_BLOCKS
    for name in dict.fromkeys((default, cheapest)):
        if not large:
            plans += _published(workload, cluster, name, max_message_bytes, PUBLISHED)
        ready, tails = times_in_order(workload, workload.iteration_order())
        plans.append(halves(workload, cluster, ready, tails, name, collectives.most))
    plans = [sharded(plan, workload, shard) for plan in plans]
    seconds = fastest.consider(plans)
    assert fastest.plan is not None
    order: Order = "any" if any_order or has_free_order(workload) else "captured"
    bound = lower_bound(workload, cluster, order=order, shard=shard, step_last=True, thorough=False)
    enough_s = bound.seconds * (1 + gap)
    half_s, rounds = _half_s(collectives, cluster), _CHANGES * options["rounds"]
    by_time = sorted(range(len(plans)), key=seconds.__getitem__)
    starts = [groups_of(plans[k].messages, workload) for k in by_time[:_STARTS]]
    starts = [starts[0], *(groups for groups in starts[1:] if len(groups) <= MOST_BLOCKS)]
    best = fastest.plan.op_order or workload.iteration_order()
    for op_order in dict.fromkeys(_with_captured_updates(o, workload) for o in (best, workload.iteration_order())):
        if fastest.seconds <= enough_s:
            break
        period = ShardedPeriod(workload, cluster.workers, half_s, op_order, budget)
        partition = not cluster.unpack_s_per_byte
        for groups, arranged in sharded_search(
            period, starts, partition=partition, enough_s=enough_s, rounds=rounds, seed=options["seed"]
        ):
            messages = _with_ways(period.messages(groups, arranged), collectives, cluster)
            plan = compose("legato", messages, workload, cluster, forward_overlap=True)
            fastest.consider([msgspec.structs.replace(plan, op_order=arranged.op_order, shard=shard)])
    for scheduler in PUBLISHED if large else ():
        if fastest.seconds > enough_s:
            published = _published(workload, cluster, default, max_message_bytes, [scheduler])
            fastest.consider(sharded(plan, workload, shard) for plan in published)
    _warn_if_cut(budget, limit_s)
    return msgspec.structs.replace(fastest.plan, scheduler="legato")


def _in_wire_format(
    workload: Workload, cluster: Cluster, wire: Rounding, work: float, limit_s: float, **options: Any
) -> Plan:
    """The best plan whose messages may be rounded, from plans for what exact and what rounded messages cost."""
    collective, most_bytes = options["collective"], options["max_message_bytes"]
    costs, plans = cluster.while_computing(), []
    for changed in (_unchanged, Cluster.in_wire_format):
        plans.append(legato(workload, changed(cluster), work=work, limit_s=limit_s, **options))
        if len(workload.tensors) <= MOST_BLOCKS:
            name = collective or cluster.default_collective
            found = _published(workload, changed(costs), name, most_bytes, PUBLISHED)
            plans += [plan for plan in found if options["any_order"] or is_runnable(plan, workload)]
    most = message_limit(most_bytes)
    plans = [msgspec.structs.replace(plan, messages=tuple(divided(plan.messages, most))) for plan in plans]
    names = tuple(cluster.collectives) if collective is None else (resolve_collective(cluster, collective),)
    collectives = _collectives(cluster, names)

    def fit(message: Message) -> Message:
        if cluster.contention is not None:  # what is cheapest on the network may take more from computation
            return message
        nbytes = message.wire_nbytes
        name, depth = _way(collectives, cluster, nbytes)
        if message_s(cluster, name, depth, nbytes) >= message_s(cluster, message.collective, message.depth, nbytes):
            return message
        return msgspec.structs.replace(message, collective=name, depth=depth)

    def regroup(seconds: float) -> Iterator[Plan]:
        for plan in _regrouped(
            workload, cluster, seconds, work=work * _REGROUPED, limit_s=limit_s * _REGROUPED, **options
        ):
            yield msgspec.structs.replace(plan, messages=tuple(divided(plan.messages, most)))

    budget = Budget(work, limit_s)
    plan = rounded(plans, workload, cluster, wire, budget, fit=fit, regroup=regroup, divide=True)
    _warn_if_cut(budget, limit_s)
    return msgspec.structs.replace(
        plan, scheduler="legato", workload_id=identity(workload), cluster_id=identity(cluster)
    )


def _regrouped(workload: Workload, cluster: Cluster, seconds: float, **options: Any) -> Iterator[Plan]:
    """Plans for messages of tensors that are all exact, or all rounded, for iterations of so many seconds.

    Which are exact is what would be possible in this time, or somewhat less, without startup times.
    """
    if len(workload.tensors) > MOST_SHARED:
        return
    tried = set()
    options["gap"] = min(options["gap"], TOLERANCE / 2)
    for order, slack in itertools.product(_FIRST_EXACT, _SLACKS):
        shares = exact_shares(workload, cluster, seconds * (1 - slack), order)
        light = tuple(share < 1 for share in shares)
        if light in tried or not any(light) or all(light):
            continue
        tried.add(light)
        tensors = (
            msgspec.structs.replace(tensor, nbytes=tensor.nbytes // 2) if half else tensor
            for tensor, half in zip(workload.tensors, light, strict=True)
        )
        plan = legato(msgspec.structs.replace(workload, tensors=tuple(tensors)), cluster, **options)
        names = {tensor.name for tensor, half in zip(workload.tensors, light, strict=True) if half}
        yield msgspec.structs.replace(plan, messages=tuple(_by_format(plan.messages, names)))


def _by_format(messages: Iterable[Message], rounded: set[str]) -> Iterator[Message]:
    """The messages of a workload in which tensors that will be rounded have half of their bytes, as those of the whole.

    A message of both kinds becomes two. Which format it is does not matter here.
    """
    for message in messages:
        light = [Slice(s.tensor, 2 * s.start, 2 * s.stop) for s in message.slices if s.tensor in rounded]
        exact = [s for s in message.slices if s.tensor not in rounded]
        if light:
            yield msgspec.structs.replace(message, slices=tuple(light), wire="bf16")
        if exact:
            yield msgspec.structs.replace(message, slices=tuple(exact))


def _unchanged(cluster: Cluster) -> Cluster:
    return cluster


def _half_s(collectives: CheapestCollective, cluster: Cluster) -> Callable[[int], float]:
    """The seconds of a half by its bytes."""

    @cache
    def half_s(nbytes: int) -> float:
        if nbytes > collectives.most:
            return float(collectives.cost(nbytes)) / 2
        return message_s(cluster, *_way(collectives, cluster, nbytes), nbytes) / 2

    return half_s


def _with_captured_updates(order: tuple[int, ...], workload: Workload) -> tuple[int, ...]:
    """The backward and forward ops in this order, then the optimizer ops in the captured one."""
    updates = [op for op in workload.iteration_order() if workload.ops[op].phase == "optimizer"]
    return (*(op for op in order if workload.ops[op].phase != "optimizer"), *updates)


def _arrange(fastest: _Fastest, instance: Instance, gap: float, rounds: int, seed: int) -> None:
    """Plan messages for the updates of the fastest plan, and updates for these messages, in turns.

    Where the order of the updates is what makes the plan slow, a better one is searched for first. In the last turn,
    every change of the messages is valued with its updates arranged.
    """
    workload, cluster = fastest.workload, fastest.cluster
    assert fastest.plan is not None
    captured = workload.iteration_order()
    value, annealed = OrderValue(workload, cheapest_line(cluster, workload.nbytes)), False
    for _ in range(_TURNS + 1):
        before = fastest.seconds
        if before <= instance.bound_s * (1 + gap) or instance.budget.spent:
            return
        order = fastest.plan.op_order if moves_updates_only(fastest.plan, workload) else captured
        if not annealed and before <= value(order) * (1 + gap):  # only another order can win anything
            annealed, part, moves = True, instance.budget.part(_OP_MOVES_SHARE), _OP_MOVES * rounds
            better = partial(annealed_order, rounds=moves, enough_s=instance.bound_s, budget=part, seed=seed)
            order = better(workload, value, order, anywhere=False)
        ready, tails = times_in_order(workload, order)
        instance, blocks = instance._replace(release_s=ready, tail_s=tails), Blocks(workload, ready, tails)
        for search in (nested_messages, partial(local_search, gap=gap, rounds=rounds, seed=seed)):
            plans = list(_plans(search(instance), instance, blocks, ready, workload, cluster, ()))
            fastest.consider([*plans, msgspec.structs.replace(plans[0], op_order=order)])
        if fastest.seconds >= before:
            break
    own = heads_tails(workload, "one", "captured").tail_s
    for tails in (instance.tail_s, times_in_order(workload, captured)[1], own):
        if fastest.seconds > instance.bound_s * (1 + gap):
            instance, blocks = instance._replace(tail_s=tails), Blocks(workload, ready, tails)
            sizes = [message.nbytes for message in fastest.plan.messages if message.kind == "all_reduce"]
            best = arranged_search(instance, workload, sizes, gap=gap, rounds=rounds, seed=seed)
            fastest.consider(_plans(best, instance, blocks, ready, workload, cluster, ()))


def _contended(workload: Workload, cluster: Cluster, any_order: bool, **options: Any) -> Plan:
    """The best of the plans for messages and computation that run beside each other, and for each of them alone."""
    slowed, beside, most_bytes = _slowed(workload, cluster), cluster.while_computing(), options["max_message_bytes"]
    fastest = _Fastest(workload, cluster, any_order, message_limit(most_bytes))
    published = _published(slowed, beside, options["collective"] or cluster.default_collective, most_bytes, PUBLISHED)
    fastest.consider(sharded(plan, workload, options["shard"]) for plan in published)
    for ops, costs in ((slowed, beside), (workload, msgspec.structs.replace(cluster, contention=None))):
        fastest.consider([legato(ops, costs, any_order=any_order, **options)])
    assert fastest.plan is not None
    return msgspec.structs.replace(
        fastest.plan, scheduler="legato", workload_id=identity(workload), cluster_id=identity(cluster)
    )


def _slowed(workload: Workload, cluster: Cluster) -> Workload:
    """The workload with the time that packing and one message of all gradients take from computation."""
    assert cluster.contention is not None
    packed = [0] * len(workload.ops)
    for tensor in workload.tensors:
        packed[tensor.ready_after] += tensor.nbytes
    taken = 1 + cluster.contention.overhead.cost(workload.nbytes) / max(workload.compute_s, 1e-9)
    ops = (
        Op(op.name, op.phase, op.duration_s * taken + nbytes * cluster.contention.pack_s_per_byte, op.deps)
        for op, nbytes in zip(workload.ops, packed, strict=True)
    )
    return msgspec.structs.replace(workload, ops=tuple(ops))


class _Fastest:
    """The fastest plan seen so far; of equally fast ones, the one with the fewest messages.

    Unless `simulated` ones count too, it is one that the runtime carries out as predicted.
    Messages of more than `most` bytes are divided first.
    """

    def __init__(self, workload: Workload, cluster: Cluster, simulated: bool, most: float) -> None:
        self.workload, self.cluster, self.simulated, self.most = workload, cluster, simulated, most
        self.plan: Plan | None = None
        self.seconds = math.inf

    def consider(self, plans: Iterable[Plan]) -> list[float]:
        """Keep the best of these plans if it is better than the one so far.

        Returns the seconds of each, infinite for those that do not count.
        """
        times = []
        for plan in plans:
            if not (self.simulated or is_runnable(plan, self.workload)):
                times.append(math.inf)
                continue
            if any(message.nbytes > self.most for message in plan.messages):
                plan = msgspec.structs.replace(plan, messages=tuple(divided(plan.messages, self.most)))
            seconds = iteration_time(self.workload, plan, self.cluster)
            shorter = self.plan is None or len(plan.messages) < len(self.plan.messages)
            if seconds < self.seconds or (seconds == self.seconds and shorter):
                self.plan, self.seconds = plan, seconds
            times.append(seconds)
        return times


def _good_enough(fastest: _Fastest, all_reduces_s: float, gap: float) -> bool:
    """Whether no plan can be much faster, even with halves; all-reduces take at least `all_reduces_s`."""
    if fastest.seconds > all_reduces_s * (1 + gap):
        return False
    bound = lower_bound(fastest.workload, fastest.cluster, order="any", thorough=False)
    return fastest.seconds <= bound.seconds * (1 + gap)


def _collectives(cluster: Cluster, names: Iterable[str]) -> CheapestCollective:
    """The collectives and depths for a message, without those that another one beats at every size."""
    ways = [(name, depth) for name in names for depth in (1, *cluster.depths.get(name, ()))]
    terms = [msgspec.structs.astuple(cluster.cost(*way)) for way in ways]

    def beaten(k: int) -> bool:
        return any(
            all(x <= y for x, y in zip(other, terms[k], strict=True)) and (other != terms[k] or i < k)
            for i, other in enumerate(terms)
        )

    kept = [way for k, way in enumerate(ways) if _priced_by_depth(cluster) or not beaten(k)]
    return CheapestCollective(tuple(kept), tuple(cluster.cost(*way) for way in kept))


def _published(
    workload: Workload,
    cluster: Cluster,
    collective: str,
    max_message_bytes: int | None,
    names: Iterable[str],
) -> Iterator[Plan]:
    """The plans of all other schedulers (or some of them) that can plan so many bytes."""
    limit = {} if max_message_bytes is None else {"max_message_bytes": max_message_bytes}
    for name in names:
        with suppress(TooLargeError):
            yield PUBLISHED[name](workload, cluster, collective=collective, **limit)


def _contenders(cluster: Cluster) -> list[str]:
    """The published schedulers but the first, and but those that merge-optimal beats, where unpacking takes no time."""
    beaten = () if cluster.unpack_s_per_byte else _MERGING
    return [name for name in PUBLISHED if name not in (*_FIRST, *beaten)]


def _orders(
    workload: Workload, cluster: Cluster, anywhere: bool | None, rounds: int, gap: float, budget: Budget, seed: int
) -> tuple[list[tuple[tuple[int, ...], float]], float]:
    """Orders of computation to plan for (empty for the captured one), each with a bound for all-reduces in it.

    The order with the least bound comes first. Also a bound for all-reduces in any order that is allowed. `anywhere`
    is that of `annealed_order`, or None where no op but the optimizer ops may move.
    """
    captured = ((), lower_bound(workload, cluster, sends="all_reduces", thorough=False).seconds)
    if anywhere is None:
        return [captured], captured[1]
    least_s = lower_bound(workload, cluster, order="any", sends="all_reduces", thorough=False).seconds
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    enough_s = least_s * (1 + gap)
    if len(workload.tensors) > MOST_BLOCKS:
        orders = [serialized_order(workload, update_order(workload))]
    else:
        part, moves = budget.part(_OP_MOVES_SHARE), (int(_MOVES * rounds), _OP_MOVES * rounds)
        orders = promising_orders(
            workload, value, anywhere=anywhere, moves=moves, enough_s=enough_s, budget=part, seed=seed
        )
    found = [captured, *((order, max(least_s, value(order))) for order in orders)]
    return sorted(found, key=lambda choice: choice[1]), least_s


def _in_halves(
    workload: Workload, cluster: Cluster, collective: str, most: float, orders: Iterable[tuple[int, ...]]
) -> list[Plan]:
    """The best plans that send all reduce-scatters first, one for each order of computation."""
    plans = []
    for order in orders:
        ready, tails = times_in_order(workload, order or workload.iteration_order())
        plan = halves(workload, cluster, ready, tails, collective, most)
        plans.append(msgspec.structs.replace(plan, op_order=order))
    return plans


def _in_pairs(
    fastest: _Fastest, collectives: CheapestCollective, gap: float, rounds: int, budget: Budget, seed: int
) -> None:
    """Search for plans whose messages are all sent in two halves, each when it is worth most."""
    workload, cluster, plan = fastest.workload, fastest.cluster, fastest.plan
    assert plan is not None
    in_pairs = _Fastest(workload, cluster, fastest.simulated, fastest.most)
    kind, captured = kind_of(plan, workload)._replace(sends="pairs"), workload.iteration_order()
    enough_s = lower_bound(workload, cluster, **kind._asdict()).seconds * (1 + gap)
    messages = [message for message in plan.messages if message.kind != "all_gather"]
    scattered = [msgspec.structs.replace(message, kind="reduce_scatter") for message in messages]
    for order in dict.fromkeys((plan.op_order or captured, captured)):
        if min(fastest.seconds, in_pairs.seconds) <= enough_s or budget.spent:
            break
        period = ShardedPeriod(workload, 1, _half_s(collectives, cluster), order, budget, sharded=False)
        for groups, arranged in sharded_search(
            period,
            [groups_of(scattered, workload)],
            partition=not cluster.unpack_s_per_byte,
            enough_s=enough_s,
            rounds=_CHANGES * rounds,
            seed=seed,
        ):
            found = _with_ways(period.messages(groups, arranged), collectives, cluster)
            paired = compose("legato", found, workload, cluster, forward_overlap=True)
            in_pairs.consider([msgspec.structs.replace(paired, op_order=() if order == captured else order)])
    if in_pairs.plan is not None and in_pairs.seconds < fastest.seconds * (1 - _WORTH_PAIRS):
        fastest.consider([in_pairs.plan])


def _with_ways(messages: Iterable[Message], collectives: CheapestCollective, cluster: Cluster) -> Iterator[Message]:
    """The messages, none too large, each with its cheapest collective and depth."""
    for message in divided(messages, collectives.most):
        name, depth = _way(collectives, cluster, message.nbytes)
        yield msgspec.structs.replace(message, collective=name, depth=depth)


def _searches(
    workload: Workload, cluster: Cluster, in_order: list[float], order: tuple[int, ...]
) -> Iterable[tuple[list[float], int | None]]:
    """The tails, by tensor, and the sizes below which tensors stay whole, to search with: the first for blocks."""
    if len(workload.tensors) > MOST_BLOCKS:
        return [(in_order, _whole_below(workload, cluster)[0])]
    return itertools.product(_tails(workload, in_order, order), _whole_below(workload, cluster))


def _tails(workload: Workload, in_order: list[float], order: tuple[int, ...]) -> list[list[float]]:
    """One or two choices of tails, by tensor.

    The first has every optimizer op in its place. In the captured order there is a
    second, which counts only the tensor's own optimizer ops.
    """
    if order or not workload.phase_ops("optimizer"):
        return [in_order]
    return [in_order, heads_tails(workload, "one", "captured").tail_s]


def _whole_below(workload: Workload, cluster: Cluster) -> list[int | None]:
    """The sizes in bytes below which a tensor stays whole; None where partitioning has no price.

    It has one where a gradient that does not lie in one piece of memory has to be put together.
    """
    if not cluster.unpack_s_per_byte:
        return [None]
    return [int(part * workload.nbytes) + 1 for part in _WHOLE_BELOW]


def _plans(
    best: Filled,
    instance: Instance,
    blocks: Blocks,
    ready_s: list[float],
    workload: Workload,
    cluster: Cluster,
    order: tuple[int, ...],
) -> Iterator[Plan]:
    """The plans of these messages in this order of ops; `ready_s` is by tensor.

    If there are optimizer ops, in the captured order, there are also plans that run
    them in idle time, and plans whose first messages complete tensors early, since an
    update has to wait for the last byte of its gradient. The latter are left out where
    several tensors share a block.
    """
    plan, arrival_s = _plan(best, instance, blocks, ready_s, workload, cluster)
    yield msgspec.structs.replace(plan, op_order=order)
    if order or not workload.phase_ops("optimizer"):
        return
    yield msgspec.structs.replace(plan, op_order=work_conserving_order(workload, arrival_s)[0])
    if len(blocks.nbytes) < len(workload.tensors):
        return
    sizes = [sum(piece.nbytes for piece in message) for message in best.messages]
    for part in (4, 2, 1):
        filled = instance.fill(sizes, first_come=len(sizes) // part)
        plan, arrival_s = _plan(filled, instance, blocks, ready_s, workload, cluster)
        yield msgspec.structs.replace(plan, op_order=work_conserving_order(workload, arrival_s)[0])


def _plan(
    best: Filled, instance: Instance, blocks: Blocks, ready_s: list[float], workload: Workload, cluster: Cluster
) -> tuple[Plan, list[float]]:
    """The plan of these messages, and when each tensor arrives."""
    whole = [Message(slices) for pieces in best.messages if (slices := blocks.slices(pieces))]
    tensor_id = Period.of(workload).tensor_id
    messages = []
    arrival_s = [0.0] * len(workload.tensors)
    now = 0.0
    for message in divided(whole, instance.collectives.most):
        tensors, nbytes = [tensor_id[name] for name in message.tensors], message.nbytes
        name, depth = _way(instance.collectives, cluster, nbytes)
        now = max(now, *(ready_s[t] for t in tensors)) + message_s(cluster, name, depth, nbytes)
        messages.append(Message(message.slices, collective=name, depth=depth))
        for t in tensors:
            arrival_s[t] = now
    return compose("legato", messages, workload, cluster, forward_overlap=True), arrival_s


def _way(collectives: CheapestCollective, cluster: Cluster, nbytes: int) -> tuple[str, int]:
    """The cheapest collective and depth for a message, also where a formula gives the cost of chunks."""
    if not _priced_by_depth(cluster):
        return collectives.choose(nbytes)
    ways = ((name, depth) for name, _ in collectives.choices for depth in range(1, MAX_DEPTH + 1))
    return min(ways, key=lambda way: (message_s(cluster, way[0], way[1], nbytes), way[1]))


def _priced_by_depth(cluster: Cluster) -> bool:
    """Whether a formula gives the cost of chunks, and not a measurement."""
    return cluster.reduce_s_per_byte > 0 and not cluster.depths
