"""The search's task for all-reduces in one order of computation, and the plans made from given messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from legato.core.plan import Message, Plan
from legato.schedule.basics.compose import compose
from legato.schedule.search.blocks import Blocks
from legato.schedule.search.budget import Budget
from legato.schedule.search.fill import Filled, Instance
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period
from legato.simulator.pipelining import message_s

__all__ = ["AllReduces"]

#: The work to arrange updates, for each op.
_ARRANGE_S = 4e-7


class AllReduces:
    """The bytes to send if ops run in `order` (empty: the captured order), and the plans made from given messages."""

    def __init__(
        self,
        problem: Problem,
        times: tuple[Sequence[float], Sequence[float]],
        bound_s: float,
        budget: Budget,
        whole_below: int | None,
        order: tuple[int, ...] = (),
    ) -> None:
        """Prepare the task; `times` has the release times and the tails, by tensor."""
        self.problem, self.order = problem, order
        self.ready_s, tails = times
        self.blocks = blocks = Blocks(problem.workload, self.ready_s, tails)
        sent = blocks.release_s, blocks.tail_s, blocks.nbytes
        self.instance = Instance(*sent, problem.collectives.lines, bound_s, budget, whole_below)
        #: Whether optimizer ops may run while the computation would wait.
        self.moves_updates = not order and bool(problem.workload.phase_ops("optimizer"))

    @cached_property
    def in_idle_time(self) -> WorkConserving:
        return WorkConserving(self.problem.workload)

    def seconds(self, filled: Filled, instance: Instance) -> float:
        """Return the seconds of an iteration with these messages; the tails come from `instance`, not from `self`."""
        if not self.moves_updates or len(self.blocks.nbytes) < len(self.problem.workload.tensors):
            return filled.seconds
        instance.budget.spend(_ARRANGE_S * len(self.problem.workload.ops))
        return self.in_idle_time(instance.arrival_s(filled))[1]

    def plans(self, best: Filled) -> Iterator[Plan]:
        """Yield the plans made from these messages.

        If updates may move, there are also plans that run updates in idle time. In some of these plans, the first
        messages complete tensors early, because an update has to wait for the last byte of its gradient. Such plans are
        left out if several tensors are in one block.
        """
        workload = self.problem.workload
        plan, arrival_s = self._plan(best)
        yield msgspec.structs.replace(plan, op_order=self.order)
        if not self.moves_updates:
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
        """Return a plan that sends these messages, and the times at which tensors arrive."""
        workload, cluster = self.problem.workload, self.problem.cluster
        filled = [Message(slices) for pieces in best.messages if (slices := self.blocks.slices(pieces))]
        tensor_id = Period.of(workload).tensor_id
        messages = []
        arrival_s = [0.0] * len(workload.tensors)
        now = 0.0
        for message in self.problem.collectives.fit(filled):
            tensors = [tensor_id[name] for name in message.tensors]
            takes_s = message_s(cluster, message.collective, message.depth, message.nbytes)
            now = max(now, *(self.ready_s[t] for t in tensors)) + takes_s
            messages.append(message)
            for t in tensors:
                arrival_s[t] = now
        return compose("legato", messages, workload, forward_overlap=True), arrival_s
