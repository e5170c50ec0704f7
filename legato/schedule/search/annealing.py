"""Simulated annealing of schedules with few messages, for clusters on which each message is expensive.

Where a message costs about as much as the computation between two messages, it matters
most which gradients travel together, and with it the order of computation. Here a
schedule is a sequence of halves of all-reduces, each of whole gradients. It takes as
long as it takes to compute what the reduce-scatters need, in their order, and to send
everything; every all-gather is followed by its tail. The annealing moves gradients
between halves, moves halves, and merges and divides them, from several starts
(`annealing_kernel.py`).

A reduce-scatter followed by the all-gather of the same gradients is an all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec
import numpy as np

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Kind, Message, Plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.compose import compose, message_of
from legato.schedule.basics.op_order import parts, serialized_order, update_order
from legato.schedule.search.annealing_kernel import MOST, AnnealingInstance, Halves, anneal, iteration_s
from legato.schedule.search.budget import Budget
from legato.schedule.search.op_orders import times_in_order
from legato.simulator.period import Period

__all__ = ["annealing", "load_kernel"]

#: The numbers of messages to start from.
_STARTS = (2, 4, 8)
#: The lateness that is accepted at the start and at the end, in startup times of a message.
_HOT, _COLD = 0.35, 1e-4
#: The number of tries between two looks at the budget.
_TRIES = 256
#: What a try costs: for each gradient and each op.
_TRY_S = 12e-9


def annealing(workload: Workload, cluster: Cluster, collective: str, *, rounds: int, budget: Budget, seed: int) -> Plan:
    """The best plan found in `rounds` tries from each start, or until the budget is spent.

    The same seed gives the same plan. The first call in a process also takes the
    time of `load_kernel`.
    """
    problem, rng = _Problem(workload, cluster, collective), np.random.default_rng(seed)
    heats = cluster.cost(collective).startup_s * np.geomspace(_HOT, _COLD, rounds)
    best, least = None, math.inf
    for start in problem.starts():
        found = _annealed(start, problem.instance, heats, budget, rng)
        seconds = iteration_s(problem.instance, found)
        if best is None or seconds < least:
            best, least = found, seconds
        if budget.spent:
            break
    assert best is not None
    return problem.plan(best)


def load_kernel() -> float:
    """Load the compiled loop, or compile it on first use; returns the seconds that this took."""
    began = time.perf_counter()
    workload = Workload("tiny", (Op("b", "backward", 1.0),), (Tensor("t", 1, 0),))
    cluster = Cluster(1, {"c": LinearCost(0.0, 0.0)})
    annealing(workload, cluster, "c", rounds=1, budget=Budget(), seed=0)
    return time.perf_counter() - began


def _annealed(
    start: Halves, instance: AnnealingInstance, heats: np.ndarray, budget: Budget, rng: np.random.Generator
) -> Halves:
    now, best = (Halves(start.place.copy(), start.first.copy(), start.number.copy()) for _ in range(2))
    for k in range(0, len(heats), _TRIES):
        if budget.spent:
            break
        budget.spend(_TRIES * _TRY_S * (len(instance.nbytes) + len(instance.duration_s)))
        anneal(instance, now, best, heats[k : k + _TRIES], rng)
    return best


class _Problem:
    """What has to be sent, by update (a backward op that produces gradients)."""

    def __init__(self, workload: Workload, cluster: Cluster, collective: str) -> None:
        self.workload, self.cluster, self.collective = workload, cluster, collective
        self.updates = update_order(workload)
        made: dict[int, list[int]] = {update: [] for update in self.updates}
        for t, tensor in enumerate(workload.tensors):
            made[tensor.ready_after].append(t)
        self.tensors = list(made.values())
        self.instance = _instance(self.updates, self.tensors, workload, cluster.cost(collective))

    def starts(self) -> Iterator[Halves]:
        """Schedules of messages of about equal size: all-reduces, or all reduce-scatters first."""
        for count in _STARTS:
            for order in self.instance.orders[:2]:
                nbytes = self.instance.nbytes[order]
                message = np.empty(len(order), np.int64)
                message[order] = count * (np.cumsum(nbytes) - nbytes) // nbytes.sum()
                message = np.unique(message, return_inverse=True)[1]
                number = int(message.max()) + 1
                yield _halves(2 * message, 2 * message + 1)
                yield _halves(message, 2 * number - 1 - message)

    def plan(self, halves: Halves) -> Plan:
        """The plan of a schedule with the order of ops that it needs; adjacent halves become all-reduces."""
        messages: list[Message] = []
        order: list[int] = []
        for k in range(halves.number[0]):
            first = bool(halves.first[k])
            updates = np.flatnonzero(halves.place[0 if first else 1] == k).tolist()
            message = message_of(self.workload, sorted(t for i in updates for t in self.tensors[i]), self.collective)
            kind: Kind = "reduce_scatter" if first else "all_gather"
            if messages and messages[-1].kind == "reduce_scatter" != kind and messages[-1].slices == message.slices:
                messages[-1] = message
            else:
                messages.append(msgspec.structs.replace(message, kind=kind))
            if first:
                order += [self.updates[i] for i in updates]
        plan = compose("legato", messages, self.workload, self.cluster, forward_overlap=True)
        return msgspec.structs.replace(plan, op_order=serialized_order(self.workload, order))


def _instance(
    updates: Sequence[int], tensors: Sequence[Sequence[int]], workload: Workload, cost: LinearCost
) -> AnnealingInstance:
    """The updates and the ops that they need, each with its parts."""
    period = Period.of(workload)
    part_of = parts(workload)
    op_id = {op: k for k, op in enumerate(sorted(set(part_of.values())))}
    duration_s, waits = np.zeros(len(op_id)), [set[int]() for _ in op_id]
    for op, whole_op in part_of.items():
        duration_s[op_id[whole_op]] += period.duration_s[op]
        waits[op_id[whole_op]] |= {op_id[part_of[dep]] for dep in period.waits[op]} - {op_id[whole_op]}
    _, tail = times_in_order(workload, period.captured)
    tail_s = np.array([max(tail[t] for t in of) for of in tensors])
    by_tail, ready = np.argsort(-tail_s, kind="stable"), np.arange(len(updates))
    return AnnealingInstance(
        np.array([float(sum(workload.tensors[t].nbytes for t in of)) for of in tensors]),
        tail_s,
        np.array([ready, by_tail, ready[::-1], by_tail[::-1]]),
        np.array([op_id[update] for update in updates]),
        duration_s,
        np.array([0, *accumulate(map(len, waits))]),
        np.array([op for of in waits for op in sorted(of)], np.int64),
        workload.compute_s,
        cost.alpha_s / 2,
        cost.beta_s_per_byte / 2,
        cost.floor_s / 2,
    )


def _halves(collects: np.ndarray, delivers: np.ndarray) -> Halves:
    """The schedule with these positions of the two halves, by gradient."""
    first = np.zeros(MOST, np.bool_)
    first[collects] = True
    return Halves(np.array([collects, delivers]), first, np.array([delivers.max() + 1]))
