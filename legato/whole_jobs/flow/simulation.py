"""A `Program` on the links of a network: every communication is a flow, and flows share links at max-min fair rates.

A communication begins when all that start it have done so and the one before it in its groups has ended. After its
latency it is a flow over all its links at once (`connections.py`). Of workers that are alike, one is simulated
(`quotient.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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

__all__ = ["Flow", "LaneTimes", "run"]

#: Computations, waits, and links of flows: a simulation takes minutes beyond them, and a gigabyte.
_MOST_SERVICES = 2**22


class Flow(NamedTuple):
    """When all workers of a communication had started it, when it began, with its latency, and when it ended."""

    started_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LaneTimes:
    """Workers that do the same at the same times: `workers`, of a `lane` of the program; (begin, end) of each computing
    and wait, and the flow that is waited for, by the number of the action."""

    lane: int
    workers: NDArray[np.int64]
    times: dict[int, tuple[float, float]]
    flows: dict[int, Flow]

    @property
    def end_s(self) -> float:
        """When its last action ends."""
        return max((end for _, end in self.times.values()), default=0.0)


def run(quotient: Quotient, free: Sequence[str] = ()) -> list[LaneTimes]:
    """The times of each class of workers; communication of the `free` kinds takes no time.

    Raises `TooLargeError` on too many classes.
    """
    return _Run(quotient, free).times()


class _Run:
    """The services of one simulation: of the actions of each class of workers, and of each flow."""

    def __init__(self, quotient: Quotient, free: Sequence[str]) -> None:
        self.quotient, self.free, self.program = quotient, free, quotient.program
        self.work_s, self.link, self.weight = array("d"), array("i"), array("q")
        self.befores, self.afters = array("i"), array("i")
        self.heads, self.others = array("i"), array("i")  # what moves as one flow
        self.disturbed: dict[int, list[int]] = {}  # computations of workers that are
        self.flows: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.ordered: set[tuple[int, int]] = set()
        self.walks = [self._walk(worker) for worker in quotient.standing["worker"].tolist()]

    def _add(self, after: Sequence[int], work_s: float = 0.0, link: int = NO_LINK, weight: int = 1) -> int:
        own = len(self.work_s)
        if own >= _MOST_SERVICES:
            raise TooLargeError(
                f"more than {_MOST_SERVICES:,} flows and computations of {self.quotient.num_classes:,} workers "
                "that differ (a smaller job, sprayed packets, or racks and pods of whole hosts make fewer)"
            )
        self.work_s.append(work_s)
        self.link.append(link)
        self.weight.append(weight)
        self._edges(after, own)
        return own

    def _edges(self, befores: Sequence[int], after: int) -> None:
        self.befores.extend(befores)
        self.afters.extend([after] * len(befores))

    def _walk(self, worker: int) -> dict[int, tuple[int, int]]:
        """Add the services of a worker's actions; returns that of each computing and wait, and the one before it."""
        quotient = self.quotient
        last = self._add(())
        ahead: dict[int, int] = {}  # the flow of each of its groups that it started last
        found: dict[int, tuple[int, int]] = {}
        for at, action in enumerate(self.program.lanes[int(quotient.lane_of[worker])].actions):
            if isinstance(action, Compute):
                found[at] = (self._add([last], action.seconds), last)
                last = found[at][0]
                if worker in quotient.profiles.compute:
                    self.disturbed.setdefault(worker, []).append(last)
                continue
            number = action.communication
            key = (number, quotient.group_of(number, worker))
            started, begun, flow = self._flow(key)
            if isinstance(action, Start):
                self._edges([last], started)
                order = quotient.order_of[number]
                if key not in self.ordered and order in ahead:
                    self._edges([ahead[order]], begun)
                self.ordered.add(key)
                ahead[order] = flow
            else:
                found[at] = (self._add([last, flow]), last)
                last = found[at][0]
        return found

    def _flow(self, key: tuple[int, int]) -> tuple[int, int, int]:
        """The services of a flow: all have started it, its latency, and its bytes."""
        if key in self.flows:
            return self.flows[key]
        number, group = key
        quotient, one = self.quotient, self.program.communications[number]
        k = quotient.number_of[number]
        place = int(quotient.standing["group"][group] - quotient.first[k])
        found, takes_time = quotient.found[k], one.kind not in self.free
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

    def times(self) -> list[LaneTimes]:
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
        done = run_fair(
            services, quotient.s_per_byte, profiles if computing else None, changes, weight=np.asarray(self.weight)
        )
        assert done == len(self.work_s)
        return self._read(services.records["begin_s"], services.records["end_s"])

    def _read(self, begin_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> list[LaneTimes]:
        flows = {
            key: Flow(float(end_s[started]), float(begin_s[begun]), float(end_s[flow]))
            for key, (started, begun, flow) in self.flows.items()
        }
        quotient, result = self.quotient, []
        for k, (worker, walk) in enumerate(zip(quotient.standing["worker"].tolist(), self.walks, strict=True)):
            lane = int(quotient.lane_of[worker])
            actions = self.program.lanes[lane].actions
            times = {}
            mine = {}
            for at, (own, last) in walk.items():
                action = actions[at]
                times[at] = (float(end_s[last]), float(end_s[own]))
                if not isinstance(action, Compute):
                    number = action.communication
                    mine[at] = flows[number, quotient.group_of(number, worker)]
            workers = np.flatnonzero(quotient.classes["worker"] == k)
            result.append(LaneTimes(lane, workers, times, mine))
        return result
