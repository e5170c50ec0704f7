"""The plans among which the fastest is chosen: every other scheduler's, and whatever the search finds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import PlanError, TooLargeError
from legato.core.plan import Plan
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.joined import divided
from legato.schedule.published import PUBLISHED
from legato.schedule.search.problem import Problem
from legato.simulator.collective import iteration_time

__all__ = ["FIRST", "Fastest", "contenders", "published"]

#: In large models, a message costs little compared with its bytes. Then the preemptive optimum is nearly the optimum.
FIRST = ("pace",)
#: These merge neighbours in ready order and do not overlap with the forward pass. merge-optimal is the best of these.
_MERGING = ("fifo", "single", "ddp", "mg-wfbp", "horovod")


class Fastest:
    """The fastest plan seen so far that can be run; of equally fast ones, the one with the fewest messages.

    Messages that are too large are divided first.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.seconds = math.inf
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    def consider(self, plans: Iterable[Plan]) -> list[float]:
        """Keep the best of these plans if it is better than the one so far.

        Returns the seconds of each, infinite for those that do not count.
        """
        problem, times = self.problem, []
        for plan in plans:
            if not is_runnable(plan, problem.workload):
                times.append(math.inf)
                continue
            if any(message.nbytes > problem.most for message in plan.messages):
                plan = msgspec.structs.replace(plan, messages=tuple(divided(plan.messages, problem.most)))
            seconds = iteration_time(problem.workload, plan, problem.cluster)
            shorter = self._plan is None or len(plan.messages) < len(self._plan.messages)
            if seconds < self.seconds or (seconds == self.seconds and shorter):
                self._plan, self.seconds = plan, seconds
            times.append(seconds)
        return times

    def consider_in_turn(self, plans: Iterator[Plan], enough_s: float) -> None:
        """Make and consider one plan after the other, until the fastest is good enough."""
        while self.seconds > enough_s and (plan := next(plans, None)) is not None:
            self.consider([plan])


def published(problem: Problem, collective: str, names: Iterable[str] = PUBLISHED) -> Iterator[Plan]:
    """The plans of all other schedulers (or some of them) that can plan a model of this size, with this collective."""
    limit = {} if problem.max_message_bytes is None else {"max_message_bytes": problem.max_message_bytes}
    for name in names:
        with suppress(TooLargeError, PlanError):
            plan = PUBLISHED[name](problem.workload, problem.cluster, collective=collective, **limit)
            yield msgspec.structs.replace(plan, carrier="legato")


def contenders(cluster: Cluster) -> list[str]:
    """The published schedulers but the first, and but those that merge-optimal beats, where unpacking takes no time."""
    beaten = () if cluster.unpack_s_per_byte else _MERGING
    return [name for name in PUBLISHED if name not in (*FIRST, *beaten)]
