"""All-reduces planned for one order of computation, and the plans that have them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec

from legato.core.plan import Message, Plan
from legato.schedule.basics.compose import compose
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.search.blocks import Blocks
from legato.schedule.search.budget import Budget
from legato.schedule.search.candidates import Fastest
from legato.schedule.search.fill import Filled
from legato.schedule.search.local_search import Instance, local_search
from legato.schedule.search.nested_messages import nested_messages
from legato.schedule.search.op_orders import times_in_order
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period
from legato.simulator.pipelining import message_s

__all__ = ["AllReduces", "search_order", "whole_below"]

#: The part of the gap within which a plan should be of the bound in its order, where this is larger than the least one.
_NEARER = 0.2
#: Where partitioning has a price, only tensors of at least this fraction of all bytes are partitioned, in three passes.
_WHOLE_BELOW = (1.0, 1 / 16, 0.0)


class AllReduces:
    """What messages have to carry in this order of ops (empty: the captured one), and the plans of such messages."""

    def __init__(
        self,
        problem: Problem,
        times: tuple[Sequence[float], Sequence[float]],
        bound_s: float,
        budget: Budget,
        whole_below: int | None,
        order: tuple[int, ...] = (),
    ) -> None:
        """`times` are the release times and the tails, by tensor."""
        self.problem, self.order = problem, order
        self.ready_s, tails = times
        self.blocks = blocks = Blocks(problem.workload, self.ready_s, tails)
        sent = blocks.release_s, blocks.tail_s, blocks.nbytes
        self.instance = Instance(*sent, problem.collectives.lines, bound_s, budget, whole_below)

    @cached_property
    def in_idle_time(self) -> WorkConserving:
        return WorkConserving(self.problem.workload)

    def plans(self, best: Filled) -> Iterator[Plan]:
        """The plans of these messages.

        If there are optimizer ops, in the captured order, there are also plans that run
        them in idle time, and plans whose first messages complete tensors early, since an
        update has to wait for the last byte of its gradient. The latter are left out where
        several tensors share a block.
        """
        workload = self.problem.workload
        plan, arrival_s = self._plan(best)
        yield msgspec.structs.replace(plan, op_order=self.order)
        if self.order or not workload.phase_ops("optimizer"):
            return
        yield msgspec.structs.replace(plan, op_order=self.in_idle_time(arrival_s)[0])
        if len(self.blocks.nbytes) < len(workload.tensors):
            return
        sizes = [sum(piece.nbytes for piece in message) for message in best.messages]
        for part in (4, 2, 1):
            filled = self.instance.fill(sizes, first_come=len(sizes) // part)
            plan, arrival_s = self._plan(filled)
            yield msgspec.structs.replace(plan, op_order=self.in_idle_time(arrival_s)[0])

    def _plan(self, best: Filled) -> tuple[Plan, list[float]]:
        """The plan of these messages, and when each tensor arrives."""
        workload, cluster = self.problem.workload, self.problem.cluster
        whole = [Message(slices) for pieces in best.messages if (slices := self.blocks.slices(pieces))]
        tensor_id = Period.of(workload).tensor_id
        messages = []
        arrival_s = [0.0] * len(workload.tensors)
        now = 0.0
        for message in self.problem.collectives.fit(whole):
            tensors = [tensor_id[name] for name in message.tensors]
            takes_s = message_s(cluster, message.collective, message.depth, message.nbytes)
            now = max(now, *(self.ready_s[t] for t in tensors)) + takes_s
            messages.append(message)
            for t in tensors:
                arrival_s[t] = now
        return compose("legato", messages, workload, cluster, forward_overlap=True), arrival_s


def search_order(fastest: Fastest, order: tuple[int, ...], bound_s: float, least_s: float, budget: Budget) -> None:
    """Plan all-reduces for this order of ops (empty: the captured one), until the fastest plan is good enough.

    No plan of all-reduces takes less than `bound_s` in this order, and `least_s` in any.
    """
    problem = fastest.problem
    gap, workload = problem.gap, problem.workload
    ready, in_order = times_in_order(workload, order or workload.iteration_order())
    enough_s = max(least_s * (1 + gap), bound_s * (1 + gap * _NEARER))
    within = gap if bound_s <= least_s else enough_s / bound_s - 1
    for tails, least_divided in _searches(problem, in_order, order):
        if fastest.seconds > enough_s:
            sent = AllReduces(problem, (ready, tails), bound_s, budget, least_divided, order)
            fastest.consider(sent.plans(nested_messages(sent.instance)))
            if fastest.seconds > enough_s:
                best = local_search(sent.instance, gap=within, rounds=problem.rounds, seed=problem.seed)
                fastest.consider(sent.plans(best))


def _searches(
    problem: Problem, in_order: Sequence[float], order: tuple[int, ...]
) -> Iterable[tuple[Sequence[float], int | None]]:
    """The tails, by tensor, and the sizes below which tensors stay whole, to search with: the first for blocks.

    The first tails have every optimizer op in its place. In the captured order there are others, which count only
    the tensor's own optimizer ops.
    """
    if problem.large:
        return [(in_order, whole_below(problem)[0])]
    tails = [in_order]
    if not order and problem.workload.phase_ops("optimizer"):
        tails.append(heads_tails(problem.workload, "one", "captured").tail_s)
    return itertools.product(tails, whole_below(problem))


def whole_below(problem: Problem) -> list[int | None]:
    """The sizes in bytes below which a tensor stays whole; None where partitioning has no price.

    It has one where a gradient that does not lie in one piece of memory has to be put together.
    """
    if not problem.cluster.unpack_s_per_byte:
        return [None]
    return [int(part * problem.workload.nbytes) + 1 for part in _WHOLE_BELOW]
