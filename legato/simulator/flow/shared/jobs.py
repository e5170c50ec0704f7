"""Several training jobs on one network: the iteration time of each job alone on its hosts, and next to the other jobs.

Every job has its own workload, plan, fabric and hosts. If transfers of several jobs need the same link (of a host or a
rack), they share the link. All jobs form one graph, which the engine runs like the graph of one job.

[Note: the window] Jobs have different periods, and their effect on each other depends on the phases in which they meet.
So every job runs many iterations, and jobs with short periods run more. All jobs run at least until the job with the
longest period would have finished its `iterations` iterations without the other jobs. Only the times in a *window* are
measured. The window ends when the first job ends its second to last iteration, because fast workers begin the next
iteration before slow workers have finished. The window is the last three quarters of the time between the start of the
last job and the end of the window. Within the window, all jobs run all the time. The iteration time of a job is a mean:
the time between the first and the last end of an iteration in the window, divided by the number of iterations from the
first end to the last. The time of the job alone is the mean over the same iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError, TooLargeError
from legato.core.plan import Plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Workload
from legato.simulator.flow.engine.graph import MOST_FAIR_SERVICES, Graph
from legato.simulator.flow.engine.services import Ids, Services
from legato.simulator.flow.fabrics import Fabric
from legato.simulator.flow.fabrics import fabric as fabric_named
from legato.simulator.flow.fabrics.hierarchical import Hierarchical
from legato.simulator.flow.fabrics.sharp import Sharp
from legato.simulator.flow.iterations.result import FlowResult, IterationTimes, iteration_end_s
from legato.simulator.flow.iterations.run import Case, checked_plan, run_graph
from legato.simulator.flow.iterations.unroll import Unrolled
from legato.simulator.flow.network.disturbances import check_numbers
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.switches import HostShape
from legato.simulator.flow.shared.placement import Placed

__all__ = ["ITERATIONS", "JobTimes", "SharedJob", "SharedNetwork", "SharedTimes"]

#: The default number of iterations of the job with the longest period.
ITERATIONS = 30
_FEWEST_ITERATIONS, _MOST_ITERATIONS = 4, 1000
#: The most iterations of a job. Jobs with short periods run more iterations than the job with the longest period.
_MOST_OF_ONE = 20_000
_MOST_JOBS = 64
#: The most services. A service takes 64 bytes, is stored twice, and has several edges: 3 GB in all, or 5 GB with
#: priorities.
_MOST_SERVICES = 20_000_000
_LONGEST_S = 1e9
#: The most workers of a job that a timeline shows.
_MOST_DRAWN = 32

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class SharedJob:
    """A training job on a network that jobs share.

    Worker w of the job runs as worker `hosts[w]` of the network, with that worker's host, link and speed. If hosts have
    several GPUs, each worker of the network is one GPU. Workers of several jobs may be on one host. With `plan` None,
    each tensor has its own message (`plain_plan`). The first iteration begins `shift_s` seconds after the start of the
    simulation. Links serve the transfers of jobs with a higher `priority` first.

    Raises `InputError` on values out of range.
    """

    name: str
    workload: Workload
    hosts: tuple[int, ...]
    fabric: Fabric | str = "ring"
    plan: Plan | None = None
    shift_s: float = 0.0
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.hosts or len(set(self.hosts)) < len(self.hosts):
            raise InputError(f"{self.name}: {len(self.hosts)} hosts (expected at least one, and each of them once)")
        if not 0 <= self.shift_s <= _LONGEST_S:
            raise InputError(f"{self.name}: shift_s {self.shift_s} (expected 0 to {_LONGEST_S:.0e} seconds)")

    def machines(self, network: Network, number: int) -> Network:
        """Return the hosts of this job, the `number`-th job on a network, as a separate network with one switch.

        If the job has all GPUs of its hosts, the hosts have as many GPUs as in `network`; otherwise, each host has one
        GPU. The seed is the seed of `network` plus `number`, and there are no disturbances.
        """
        shape = network.host_shape if self._has_whole_hosts(network) else HostShape()
        return replace(
            network,
            workers=len(self.hosts),
            gpus_per_host=shape.gpus,
            gpus_per_card=shape.gpus_per_card,
            topology="leaf-spine",
            racks=1,
            spines=1,
            ports=None,
            core_oversubscription=1.0,
            link_scale=tuple(network.link_scale[h] for h in self.hosts) if network.link_scale else (),
            compute_scale=tuple(network.compute_scale[h] for h in self.hosts) if network.compute_scale else (),
            seed=network.seed + number,
            disturbances=(),
        )

    def _has_whole_hosts(self, network: Network) -> bool:
        """Return whether the job has all GPUs of its hosts, host by host in the order of the network."""
        gpus, hosts = network.gpus_per_host, np.array(self.hosts)
        if len(hosts) % gpus:
            return False
        by_host = hosts.reshape(-1, gpus)
        return bool((by_host == by_host[:, :1] // gpus * gpus + np.arange(gpus)).all())

    def case(self, network: Network, number: int) -> Case:
        """Return one iteration of this job on its `machines`, as a `Case`.

        Raises `InputError` on hosts or a fabric that do not fit, and `PlanError` on a plan that does not fit the
        workload.
        """
        if not 0 <= min(self.hosts) <= max(self.hosts) < network.workers:
            raise InputError(f"{self.name}: host {max(self.hosts)} (expected 0 to {network.workers - 1})")
        fabric = fabric_named(self.fabric)
        if isinstance(fabric, Hierarchical) and network.gpus_per_host == 1:
            raise InputError(f"{self.name}: hierarchical on a shared network (expected gpus_per_host above 1)")
        if isinstance(fabric, Hierarchical | Sharp) and not self._has_whole_hosts(network):
            name, gpus = type(fabric).__name__.lower(), network.gpus_per_host
            raise InputError(f"{self.name}: {name} on parts of hosts (expected all {gpus} GPUs of each host)")
        plan = checked_plan(self.plan, self.workload, fabric)
        return Case([self.workload], plan, fabric, self.machines(network, number), 1, alike=False)


@dataclass(frozen=True)
class JobTimes:
    """A job's times in the window, in seconds.

    `alone_s` is the mean time of an iteration if the job is alone on the same hosts, without disturbances.
    `iteration_s` is the mean time of an iteration next to the other jobs. `alone_s` and `iteration_s` are means over
    the same `iterations` iterations. Next to the other jobs, the shortest iteration took `shortest_s`, and the longest
    `longest_s`. `utilization` is the share of the time in which a worker computes, as a mean over the workers. If a job
    ends fewer than two iterations in the window, it starves, and all fields but `alone_s` are None.
    """

    name: str
    workers: int
    alone_s: float
    iterations: int = 0
    iteration_s: float | None = None
    shortest_s: float | None = None
    longest_s: float | None = None
    utilization: float | None = None

    @property
    def slowdown(self) -> float | None:
        """Return the slowdown, `iteration_s` / `alone_s`."""
        return None if self.iteration_s is None else self.iteration_s / self.alone_s


@dataclass(frozen=True)
class SharedTimes:
    """The times of all jobs in the window from `begin_s` to `end_s`, in seconds from the start.

    `ends_s[j]` has the ends of all iterations of job j.
    """

    begin_s: float
    end_s: float
    jobs: tuple[JobTimes, ...]
    ends_s: tuple[Times, ...]
    unrolled: Sequence[Unrolled] = field(repr=False)
    records: NDArray[Any] = field(repr=False)

    @property
    def slowdown(self) -> float:
        """Return the mean of the jobs' slowdowns, which is infinite if a job starves."""
        every = [job.slowdown for job in self.jobs]
        return math.fsum(math.inf if one is None else one for one in every) / len(every)

    @property
    def utilization(self) -> float:
        """Return the share of time in which workers compute, over all jobs. The share of a job that starves is 0."""
        workers = sum(job.workers for job in self.jobs)
        return math.fsum(job.workers * (job.utilization or 0.0) for job in self.jobs) / workers

    def timelines(self) -> tuple[Timeline, ...]:
        """Return a timeline of each job, with the length of one iteration. All timelines begin at the same moment.

        This moment is the end of an iteration of the first job: the last one after which the longest iteration fits in
        the window. A job that starves has no timeline.
        """
        longest_s = max(job.iteration_s or 0.0 for job in self.jobs)
        moments = [t for t in self.ends_s[0].tolist() if self.begin_s <= t <= self.end_s - longest_s]
        from_s = max(moments, default=self.begin_s)
        return tuple(self._timeline(i, from_s) for i, job in enumerate(self.jobs) if job.iteration_s is not None)

    def _timeline(self, i: int, from_s: float) -> Timeline:
        unrolled, ends_s, iteration_s = self.unrolled[i], self.ends_s[i], self.jobs[i].iteration_s or 0.0
        topology, until_s = unrolled.topology, from_s + iteration_s
        runs = [IterationTimes.of(run, self.records) for run in unrolled.iterations]
        first = int(np.searchsorted(ends_s, from_s, side="right"))
        # an iteration may begin before the previous iteration has ended
        last = int(np.searchsorted(ends_s, until_s)) + 1
        spans = []
        for k in range(first, min(last + 1, len(runs))):
            found = FlowResult.of(unrolled, runs[: k + 1])
            for rank, lane, label, start, end, *rest in found.spans(range(min(topology.size, _MOST_DRAWN))):
                if start < until_s and from_s < end:
                    times = max(start, from_s) - from_s, min(end, until_s) - from_s
                    spans.append(Span(rank, lane, label, *times, *rest))
        spans.sort(key=lambda span: (span.worker, span.start_s, span.end_s))
        return Timeline(self.jobs[i].name, "predicted", iteration_s, tuple(spans), job=self.jobs[i].name)


class SharedNetwork:
    """Jobs on a network as one graph, which can be run again with other priorities.

    Times of disturbances are relative to the start of the simulation. Workers are numbered as in the network, and the
    servers of all jobs are numbered consecutively.

    Raises `InputError` on jobs that do not fit the network, and `PlanError` on plans that do not fit their workloads or
    can never finish. Raises `TooLargeError`, before a simulation, for more than 64 jobs, more than 20,000 iterations of
    a job, or more than 20 million services (a million if transfers share links fairly).
    """

    def __init__(self, jobs: Sequence[SharedJob], network: Network, *, iterations: int = ITERATIONS) -> None:
        if not 1 <= len(jobs) <= _MOST_JOBS:
            raise TooLargeError(f"{len(jobs)} jobs (expected 1 to {_MOST_JOBS})")
        if not _FEWEST_ITERATIONS <= iterations <= _MOST_ITERATIONS:
            raise InputError(f"iterations: {iterations} (expected {_FEWEST_ITERATIONS} to {_MOST_ITERATIONS})")
        self.jobs, self.network = tuple(jobs), network
        self._cases = [job.case(network, number) for number, job in enumerate(jobs)]
        check_numbers(network.disturbances, {"server": sum(case.fabric.servers for case in self._cases)})
        self._check_size([iterations] * len(jobs))
        few = [self._simulate_alone(i, _FEWEST_ITERATIONS) for i in range(len(jobs))]
        counts = self._enough(iterations, [float(ends_s[-1] - ends_s[-2]) for ends_s in few])
        self._check_size(counts)
        self._alone_ends_s = [self._simulate_alone(i, count) for i, count in enumerate(counts)]
        self._unrolled, self._begins, self._services = self._build(range(len(jobs)), counts, wait=True)

    def _enough(self, iterations: int, period_s: Sequence[float]) -> list[int]:
        """Return the number of iterations of each job, whose iterations take `period_s` if the job is alone."""
        for job, period in zip(self.jobs, period_s, strict=True):
            if period <= 0:
                raise InputError(f"{job.name}: its iterations take no time (expected computation or messages)")
        until_s = iterations * max(period_s) + max(*period_s, *(job.shift_s for job in self.jobs))
        counts = [math.ceil(until_s / period) + 2 for period in period_s]
        for job, count in zip(self.jobs, counts, strict=True):
            if count > _MOST_OF_ONE:
                raise TooLargeError(
                    f"{job.name}: {count:,} iterations while the slowest job has {iterations} "
                    f"(expected at most {_MOST_OF_ONE:,})"
                )
        return counts

    def _check_size(self, counts: Sequence[int]) -> None:
        """Raise `TooLargeError` if these counts of iterations certainly need too many services."""
        total = 0
        for case, count in zip(self._cases, counts, strict=True):
            workers, ops = case.network.workers, len(case.workloads[0].ops)
            # Workers that share a card share transfers. If a job has only parts of hosts, its case does not show these
            # cards.
            cards = workers * case.network.gpus_per_card // self.network.gpus_per_card
            services = replace(case, iterations=count).services(cards)
            total += max(services, count * workers * len(case.plan.messages), workers * ops)
        self._graph().check_room(total)

    def _graph(self) -> Graph:
        return Graph(MOST_FAIR_SERVICES if self.network.sharing == "fair" else _MOST_SERVICES)

    @property
    def num_services(self) -> int:
        return len(self._services.records)

    def run(self, priority: Sequence[int] | None = None) -> SharedTimes:
        """Simulate the jobs. `priority` replaces the jobs' own priorities."""
        records = self._services.records.copy()
        levels = [job.priority for job in self.jobs] if priority is None else list(priority)
        self._run(self._services._replace(records=records), self._unrolled, self._of_services(levels))
        ends = tuple(_ends_s(unrolled, records) for unrolled in self._unrolled)
        end_s = min(float(one[-2]) for one in ends)
        last_s = max(job.shift_s for job in self.jobs)
        begin_s = last_s + (end_s - last_s) / 4
        times = tuple(self._times(i, one, records, begin_s, end_s) for i, one in enumerate(ends))
        return SharedTimes(begin_s, end_s, times, ends, self._unrolled, records)

    def _times(self, i: int, ends_s: Times, records: NDArray[Any], begin_s: float, end_s: float) -> JobTimes:
        name, workers, alone_s = self.jobs[i].name, len(self.jobs[i].hosts), self._alone_ends_s[i]
        inside = np.flatnonzero((begin_s <= ends_s) & (ends_s <= end_s))
        if len(inside) < 3:
            return JobTimes(name, workers, float(alone_s[-1] - alone_s[0]) / (len(alone_s) - 1))
        first, last, count = int(inside[0]), int(inside[-1]), len(inside) - 1
        iteration_s, each = float(ends_s[last] - ends_s[first]) / count, np.diff(ends_s[inside])
        return JobTimes(
            name,
            workers,
            alone_s=float(alone_s[last] - alone_s[first]) / count,
            iterations=count,
            iteration_s=iteration_s,
            shortest_s=float(each.min()),
            longest_s=float(each.max()),
            utilization=_computed_s(self._unrolled[i], records, first + 1, last + 1) / iteration_s,
        )

    def _simulate_alone(self, i: int, count: int) -> Times:
        """Return the ends of `count` iterations of a job alone on its hosts from time 0, without disturbances."""
        (unrolled,), _, services = self._build([i], [count], wait=False)
        self._run(services, [unrolled])
        return _ends_s(unrolled, services.records)

    def _build(
        self, chosen: Sequence[int], counts: Sequence[int], *, wait: bool
    ) -> tuple[list[Unrolled], list[Ids], Services]:
        """Return the graph of `counts` iterations of the chosen jobs.

        The function also returns, for each job, the service for which the job waits. With `wait`, this service delays
        the job by its shift. Without `wait`, there are no shifts and no disturbances.
        """
        graph, unrolled, begins = self._graph(), [], []
        servers = [case.fabric.servers for case in self._cases]
        network = self.network if wait else replace(self.network, disturbances=())
        for i, count in zip(chosen, counts, strict=True):
            topology = Placed(
                graph,
                network,
                self.jobs[i].hosts,
                servers=servers[i],
                first_server=sum(servers[:i]),
                all_servers=sum(servers),
                seed=self._cases[i].network.seed,
            )
            begins.append(graph.add((1,), work_s=self.jobs[i].shift_s if wait else 0.0))
            unrolled.append(replace(self._cases[i], iterations=count).unroll(topology, begins[-1]))
        return unrolled, begins, graph.freeze(unrolled[0].topology.num_links)

    def _of_services(self, levels: Sequence[int]) -> NDArray[np.int64] | None:
        """Return the priority of each service, or None if all are equal. The services of a job have consecutive ids."""
        if len(set(levels)) == 1:
            return None
        starts = [int(begin[0]) for begin in self._begins]
        ranked = {level: rank for rank, level in enumerate(sorted(set(levels)))}
        return np.repeat([ranked[level] for level in levels], np.diff([*starts, self.num_services]))

    def _run(self, services: Services, unrolled: Sequence[Unrolled], priority: NDArray[np.int64] | None = None) -> None:
        computing = [half for one in unrolled for half in one.computing]
        run_graph(services, unrolled[0].topology, unrolled[0].profiles, computing, priority)


def _ends_s(unrolled: Unrolled, records: NDArray[Any]) -> Times:
    runs = (IterationTimes.of(run, records) for run in unrolled.iterations)
    return np.array([iteration_end_s(unrolled.fabric, run) for run in runs])


def _compute_s(unrolled: Unrolled, first: int, last: int) -> float:
    """Return the seconds of computation per worker and iteration, as a mean over workers and iterations in a range."""
    each_s = unrolled.forward.duration_s.sum(axis=1) + unrolled.backward.duration_s.sum(axis=1)
    return float((each_s * unrolled.slowdown[first:last]).mean())


def _computed_s(unrolled: Unrolled, records: NDArray[Any], first: int, last: int) -> float:
    """Return the seconds of `_compute_s` with the effect of disturbances, from the times that the engine found."""
    if not unrolled.disturbed:
        return _compute_s(unrolled, first, last)
    halves = [half for run in unrolled.iterations[first:last] for half in (run.forward, run.backward)]
    each_s = [(records["end_s"][ids] - records["begin_s"][ids]).sum(axis=0).mean() for ids in halves]
    return float(sum(each_s)) / (last - first)
