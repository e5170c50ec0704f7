"""Run a `Program` on the links of a network: communications are flows, which share links at max-min fair rates.

A communication begins when all its workers have started it and the previous communication of its groups has ended.
After its latency, the communication is a flow that uses all its links at the same time (`connections.py`). Among
workers that are alike, only one is simulated (`quotient.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import TooLargeError
from legato.core.program import Compute, Start
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.services import NO_LINK
from legato.simulator.flow.network.disturbances import Profiles
from legato.whole_jobs.flow.connections import nbytes_of
from legato.whole_jobs.flow.quotient import Quotient

__all__ = ["Flow", "LaneTimes", "run", "run_steps"]

#: The most computations, waits, and links of flows. A larger simulation would take minutes and a gigabyte.
_MOST_SERVICES = 2**22


class Flow(NamedTuple):
    """A communication: when the last worker started it, when its turn came (its latency began), and when it ended."""

    started_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """The times of one class of workers: workers of the same `lane` that do the same things at the same times.

    `times` has the begin and the end of each computation and each wait; `flows` has, for each wait, the communication
    that ends it. The keys of `times` and `flows` are numbers of actions. Seconds count from the beginning of the
    step."""

    lane: int
    workers: NDArray[np.int64]
    times: dict[int, tuple[float, float]]
    flows: dict[int, Flow]

    @property
    def end_s(self) -> float:
        """Return when the last action of these workers ends."""
        return max((end for _, end in self.times.values()), default=0.0)


def run(quotient: Quotient, free: Container[int] = ()) -> list[LaneTimes]:
    """Return the times of each class of identical workers; communications whose numbers are in `free` take no time.

    Raises `TooLargeError` on too many classes.
    """
    return run_steps(quotient, [range(len(quotient.program.lanes))], [1], [0.0], free)[0][0]


def run_steps(
    quotient: Quotient,
    jobs: Sequence[range],
    counts: Sequence[int],
    shift_s: Sequence[float],
    free: Container[int] = (),
) -> list[list[list[LaneTimes]]]:
    """Return the times of classes of workers by job and step; job j has the lanes `jobs[j]` and runs `counts[j]` steps.

    The first step of a job begins after `shift_s[j]` seconds. Each later step begins when all of the job's workers have
    ended the step before. Raises `TooLargeError` on too many classes and steps.
    """
    return _Run(quotient, jobs, counts, shift_s, free).times()


#: The service of each action that takes time, and the service before it, by the number of the action.
_Walk = dict[int, tuple[int, int]]


class _Run:
    """One simulation, with services (pieces of work) for the actions of each class of workers, and for flows."""

    def __init__(
        self,
        quotient: Quotient,
        jobs: Sequence[range],
        counts: Sequence[int],
        shift_s: Sequence[float],
        free: Container[int],
    ) -> None:
        self.quotient, self.free, self.program = quotient, free, quotient.program
        self.work_s, self.link, self.weight = array("d"), array("i"), array("q")
        self.befores, self.afters = array("i"), array("i")
        self.heads, self.others = array("i"), array("i")  # services of one flow
        self.disturbed: dict[int, list[int]] = {}  # computations by disturbed worker
        self.flows: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        self.ordered: set[tuple[int, int, int]] = set()
        self.steps = [self._steps(*job) for job in zip(jobs, counts, shift_s, strict=True)]

    def _steps(self, lanes: range, count: int, shift_s: float) -> list[tuple[int, dict[int, _Walk]]]:
        """Add the steps of a job; return, for each step, the service before the step and its workers' services."""
        standing = self.quotient.standing["worker"].tolist()
        workers = [worker for worker in standing if int(self.quotient.lane_of[worker]) in lanes]
        begun, result = self._add((), shift_s), []
        for step in range(count):
            walks, lasts = {}, []
            for worker in workers:
                walks[worker], last = self._walk(worker, step, begun)
                lasts.append(last)
            result.append((begun, walks))
            begun = self._add(lasts)
        return result

    def _add(self, after: Sequence[int], work_s: float = 0.0, link: int = NO_LINK, weight: int = 1) -> int:
        own = len(self.work_s)
        if own >= _MOST_SERVICES:
            raise TooLargeError(
                f"more than {_MOST_SERVICES:,} flows and computations of {self.quotient.num_classes:,} workers "
                "that differ (a smaller job, fewer steps, sprayed packets, or racks and pods of whole hosts make fewer)"
            )
        self.work_s.append(work_s)
        self.link.append(link)
        self.weight.append(weight)
        self._edges(after, own)
        return own

    def _edges(self, befores: Sequence[int], after: int) -> None:
        self.befores.extend(befores)
        self.afters.extend([after] * len(befores))

    def _walk(self, worker: int, step: int, last: int) -> tuple[_Walk, int]:
        """Add services for a worker's actions in a step, after the service `last`; return them and the last one.

        A program waits, within a step, for all communications that it starts in this step.
        """
        quotient = self.quotient
        ahead: dict[int, int] = {}  # for each group of this worker, the flow that was started last
        found: _Walk = {}
        for at, action in enumerate(self.program.lanes[int(quotient.lane_of[worker])].actions):
            if isinstance(action, Compute):
                found[at] = (self._add([last], action.seconds), last)
                last = found[at][0]
                if worker in quotient.profiles.compute:
                    self.disturbed.setdefault(worker, []).append(last)
                continue
            number = action.communication
            key = (step, number, quotient.group_of(number, worker))
            started, begun, flow = self._flow(key)
            if isinstance(action, Start):
                self._edges([last], started)
                order = quotient.order_of[number]
                if key not in self.ordered and order in ahead:
                    self._edges([ahead[order]], begun)
                self.ordered.add(key)
                ahead[order] = flow
                if (before := quotient.afters.get(number)) is not None:
                    self._edges([self._flow((step, before, quotient.group_of(before, worker)))[2]], begun)
            else:
                found[at] = (self._add([last, flow]), last)
                last = found[at][0]
        return found, last

    def _flow(self, key: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return three services of a flow: the wait until all have started it, its latency, and its bytes."""
        if key in self.flows:
            return self.flows[key]
        _, number, group = key
        quotient, one = self.quotient, self.program.communications[number]
        k = quotient.number_of[number]
        place = int(quotient.standing["group"][group] - quotient.first[k])
        found, takes_time = quotient.found[k], number not in self.free
        latency_s = found.latency_s(place, quotient.machine) * one.times if takes_time else 0.0
        started = self._add(())
        begun = flow = self._add([started], latency_s)
        if takes_time:
            nbytes = nbytes_of(one, int(found.rings[place]))
            for link, weight in quotient.links[group].items():
                own = self._add([begun] if flow == begun else (), nbytes * quotient.s_per_byte[link], link, weight)
                if flow == begun:
                    flow = own
                else:
                    self.heads.append(flow)
                    self.others.append(own)
        self.flows[key] = started, begun, flow
        return self.flows[key]

    def times(self) -> list[list[list[LaneTimes]]]:
        from legato.simulator.flow.engine.fair import run_fair

        graph, quotient = Graph(_MOST_SERVICES), self.quotient
        graph.add((len(self.work_s),), link=np.asarray(self.link), work_s=np.asarray(self.work_s))
        graph.edge(np.asarray(self.befores), np.asarray(self.afters))
        graph.edge(np.asarray(self.heads), np.asarray(self.others), cut_through=True)
        services = graph.freeze(len(quotient.s_per_byte))
        standing = quotient.standing["link"].tolist()
        links = {k: quotient.profiles.links[at] for k, at in enumerate(standing) if at in quotient.profiles.links}
        computing = [(np.array([ids], np.int32).T, np.array([worker])) for worker, ids in self.disturbed.items()]
        profiles = Profiles({}, quotient.profiles.compute).of_services(services.records["link"], computing)
        changes = Profiles(links, {}).changes()
        done = run_fair(services, quotient.s_per_byte, profiles, changes, weight=np.asarray(self.weight))
        assert done == len(self.work_s)
        return self._read(services.records["begin_s"], services.records["end_s"])

    def _read(self, begin_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> list[list[list[LaneTimes]]]:
        class_of = self.quotient.classes["worker"]
        members = [np.flatnonzero(class_of == k) for k in range(self.quotient.num_classes)]

        def lane(worker: int, step: int, walk: _Walk, from_s: float) -> LaneTimes:
            number = int(self.quotient.lane_of[worker])
            actions, times, flows = self.program.lanes[number].actions, {}, {}
            for at, (own, last) in walk.items():
                action = actions[at]
                times[at] = (float(end_s[last]) - from_s, float(end_s[own]) - from_s)
                if not isinstance(action, Compute):
                    group = self.quotient.group_of(action.communication, worker)
                    started, begun, flow = self.flows[step, action.communication, group]
                    moments = end_s[started], begin_s[begun], end_s[flow]
                    flows[at] = Flow(*(float(moment) - from_s for moment in moments))
            return LaneTimes(number, members[class_of[worker]], times, flows)

        return [
            [
                [lane(worker, step, walk, float(end_s[begun])) for worker, walk in walks.items()]
                for step, (begun, walks) in enumerate(steps)
            ]
            for steps in self.steps
        ]
