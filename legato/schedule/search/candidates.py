"""The fastest plan so far, among the plans of all other schedulers and the plans that the search finds."""

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

#: The schedulers to try first for large models. Startup times matter little there, so preemptive plans are nearly
#: optimal.
FIRST = ("pace",)
#: Schedulers that merge neighbours in ready order without forward overlap. merge-optimal is at least as fast as these.
_MERGING = ("fifo", "single", "ddp", "mg-wfbp", "horovod")


class Fastest:
    """The fastest runnable plan seen so far; if several plans are equally fast, the one with the fewest messages.

    Messages that are too large are divided before a plan is simulated.
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
        """Keep the best of these plans if it is better than the fastest plan so far.

        Returns the seconds of each plan, which are infinite for plans that are not runnable.
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
        """Make and consider one plan after another, until the fastest plan takes at most `enough_s`."""
        while self.seconds > enough_s and (plan := next(plans, None)) is not None:
            self.consider([plan])


def published(problem: Problem, collective: str, names: Iterable[str] = PUBLISHED) -> Iterator[Plan]:
    """Yield the plans of these published schedulers with this collective; skip those that cannot plan the workload."""
    limit = {} if problem.max_message_bytes is None else {"max_message_bytes": problem.max_message_bytes}
    for name in names:
        with suppress(TooLargeError, PlanError):
            plan = PUBLISHED[name](problem.workload, problem.cluster, collective=collective, **limit)
            yield msgspec.structs.replace(plan, carrier="legato")


def contenders(cluster: Cluster) -> list[str]:
    """Return the published schedulers except those in `FIRST` and those that merge-optimal beats.

    If unpacking takes time, merge-optimal may be slower than others, so only the schedulers in `FIRST` are left out.
    """
    beaten = () if cluster.unpack_s_per_byte else _MERGING
    return [name for name in PUBLISHED if name not in (*FIRST, *beaten)]
