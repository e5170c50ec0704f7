"""Simulate whole jobs that share a network: the step of each job alone on its GPUs, and next to the other jobs.

[Note: the window of whole jobs]
Jobs have steps of different lengths, and how much they slow each other down depends on which phases overlap. So every
job runs step after step in one simulation. Only steps in the *window* count. The window begins when the last job
begins, and ends when the first job ends its last step. In the window all jobs always run, and each job runs at least
`steps` full steps. A job's times are means over its steps in the window.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from statistics import fmean
from typing import NamedTuple

import numpy as np
from msgspec import structs

from legato.core.errors import InputError
from legato.core.job import Job, Machine
from legato.core.program import Action, Communication, Compute, Lane, Program
from legato.simulator.flow import Network
from legato.whole_jobs.flow.programs import program
from legato.whole_jobs.flow.quotient import Quotient
from legato.whole_jobs.flow.simulation import LaneTimes, run_steps
from legato.whole_jobs.flow.step import FlowStep, busiest, mean_step, program_step, seconds_of, sends_of
from legato.whole_jobs.step import Step
from legato.whole_jobs.traced import ProgramStep

__all__ = ["STEPS", "SharedStep", "simulate_shared", "together"]

#: The default number of steps of each job, and the largest number.
STEPS, _MOST_STEPS = 3, 1000
#: Two moments count as equal if their relative difference is below this number.
_ROUNDING = 1e-9
#: The fields of a machine that describe its network.
_OF_NETWORK = (
    "gpus_per_host", "card_bytes_per_s", "card_share", "link_bytes_per_s", "link_share", "latency_s",
    "network_latency_s", "hop_s",
)  # fmt: skip
Steps = list[list[LaneTimes]]


@dataclass(frozen=True, slots=True)
class SharedStep:
    """A job's step if it runs `alone` on the undisturbed network, and its mean step `beside` other jobs in the window.

    The parts of a job's step are measured on its busiest worker; for a program, they are means over all workers. For
    each part (`computing`, `bubble`, and each kind of communication), `longer_s` says how many seconds longer the part
    takes next to the other jobs than alone. `steps_s` has the seconds of each step. `longest` is the longest step of a
    job, with workers numbered as in the network.
    """

    alone: Step | ProgramStep
    beside: Step | ProgramStep
    longer_s: dict[str, float]
    steps_s: tuple[float, ...]
    longest: FlowStep | None

    @property
    def slowdown(self) -> float:
        return self.beside.seconds / self.alone.seconds


class _Window(NamedTuple):
    """The window from `begin_s` to `end_s`: the number of simulated steps of each job, and the steps `inside` it."""

    begin_s: float
    end_s: float
    counts: list[int]
    inside: list[list[int]]


def together(programs: Sequence[Program], places: Sequence[Sequence[int]], workers: int) -> Program:
    """Join programs: worker w of program j becomes worker `places[j][w]`; the rest of the `workers` workers idle.

    The joined program has the lanes and communications of each program in turn, and a lane for the idle workers.
    """
    lanes: list[Lane] = []
    communications: list[Communication] = []
    for made, place in zip(programs, places, strict=True):
        first, at = len(communications), np.array(place)
        groups = {id(one.groups): one.groups for one in made.communications}
        moved = {key: tuple(map(tuple, at[np.array(own)].tolist())) for key, own in groups.items()}
        like = {
            id(one): structs.replace(
                one, groups=moved[id(one.groups)], after=None if one.after is None else one.after + first
            )
            for one in made.communications
        }
        communications += [like[id(one)] for one in made.communications]
        lanes += [
            Lane(tuple(at[list(lane.workers)].tolist()), tuple(_later(action, first) for action in lane.actions))
            for lane in made.lanes
        ]
    if idle := set(range(workers)).difference(*places):
        lanes.append(Lane(tuple(sorted(idle)), ()))
    return Program("jobs on one network", tuple(lanes), tuple(communications))


def _later(action: Action, first: int) -> Action:
    return action if isinstance(action, Compute) else type(action)(action.communication + first)


def simulate_shared(
    jobs: Sequence[Job | Program],
    places: Sequence[Sequence[int]],
    network: Network,
    machine: Machine,
    *,
    steps: int = STEPS,
    shift_s: Sequence[float] = (),
) -> tuple[tuple[float, float], list[SharedStep]]:
    """Simulate jobs on one network (from `network_of`); return the window, in seconds, and each job's step.

    Worker w of job j runs on GPU `places[j][w]`. The job begins after `shift_s[j]` seconds (by default at once), and
    runs at least `steps` steps in the window. The parts of a step are as in `simulate`: `pipeline` is the difference
    between a job's steps and the same steps without its own pipeline's transfers. Raises `InputError` if a job's
    machine has other links than `machine`, and `TooLargeError` if too many steps of different workers had to be
    simulated.
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise InputError(f"iterations: {steps} (expected 1 to {_MOST_STEPS:,} steps)")
    for (number, job), field in product(enumerate(jobs, 1), _OF_NETWORK):
        own, first = (getattr(job.machine if isinstance(job, Job) else machine, field), getattr(machine, field))
        if own != first:
            raise InputError(f"job {number}, {job.name}: {field} {own:g} (expected {first:g}, as on the network)")
    return _Shared(jobs, places, network, machine, list(shift_s) or [0.0] * len(jobs)).steps(steps)


class _Shared:
    """Jobs on a network, and on the same network without disturbances."""

    def __init__(
        self,
        jobs: Sequence[Job | Program],
        places: Sequence[Sequence[int]],
        network: Network,
        machine: Machine,
        shift_s: list[float],
    ) -> None:
        self.jobs, self.shift_s = jobs, shift_s
        self.made = [program(job) if isinstance(job, Job) else job for job in jobs]
        every = together(self.made, places, network.workers)
        quiet = replace(network, disturbances=())
        quotients = {one: Quotient(every, machine, one) for one in {quiet, network}}
        self.quiet, self.network = quotients[quiet], quotients[network]
        self.lanes = [range(*ends) for ends in pairwise(accumulate((len(one.lanes) for one in self.made), initial=0))]
        firsts = accumulate((len(one.communications) for one in self.made), initial=0)
        self.sends = [
            {first + n for n in sends_of(made)} if isinstance(job, Job) else set[int]()
            for job, made, first in zip(jobs, self.made, firsts, strict=False)
        ]

    def steps(self, steps: int) -> tuple[tuple[float, float], list[SharedStep]]:
        every = range(len(self.jobs))
        counts = [[int(other == j) for other in every] for j in every]
        alone = [self._run(self.quiet, counts[j])[j] for j in every]
        window, found = self._window(steps, [seconds_of(lanes) for (lanes,) in alone])
        result = []
        for j, inside in enumerate(window.inside):
            free = self._free(j, self.network, window.counts)
            beside = [found[j][k] for k in inside], [free[k] for k in inside if free]
            result.append(self._shared(j, (alone[j], self._free(j, self.quiet, counts[j])), beside))
        return (window.begin_s, window.end_s), result

    def _shared(self, j: int, alone: tuple[Steps, Steps], beside: tuple[Steps, Steps]) -> SharedStep:
        """Return a job's mean step; `alone` and `beside` are pairs: steps with its pipeline's transfers and without."""
        job, made, steps_s = self.jobs[j], self.made[j], tuple(map(seconds_of, beside[0]))
        if isinstance(job, Program):
            first, mean = (_mean([program_step(job, lanes) for lanes in steps]) for steps, _ in (alone, beside))
            return SharedStep(first, mean, _longer_s(first, mean), steps_s, None)
        lane = busiest(made, beside[0])
        first, same = (mean_step(job, made, *alone, own) for own in (busiest(made, alone[0]), lane))
        mean, longest = mean_step(job, made, *beside, lane), max(beside[0], key=seconds_of)
        drawn = FlowStep(replace(mean, seconds=seconds_of(longest)), made, longest, lane)
        return SharedStep(first, mean, _longer_s(same, mean), steps_s, drawn)

    def _free(self, j: int, quotient: Quotient, counts: list[int]) -> Steps:
        """Return the steps that a job would have if its pipeline sent nothing ([] if it has no pipeline)."""
        return self._run(quotient, counts, self.sends[j])[j] if self.sends[j] else []

    def _run(self, quotient: Quotient, counts: list[int], free: Container[int] = ()) -> list[Steps]:
        """Return the steps of all jobs, with lanes numbered as in each job's own program."""
        found = run_steps(quotient, self.lanes, counts, self.shift_s, free)
        return [
            [[replace(lane, lane=lane.lane - lanes.start) for lane in step] for step in own]
            for own, lanes in zip(found, self.lanes, strict=True)
        ]

    def _window(self, steps: int, each_s: Sequence[float]) -> tuple[_Window, list[Steps]]:
        """Simulate until the window has enough steps of each job, whose steps take about `each_s` seconds."""
        counts, early = [0] * len(each_s), [False] * len(each_s)
        while True:
            until_s = max(self.shift_s) + steps * max(each_s)
            enough = (
                math.ceil((until_s - shift) / seconds - _ROUNDING)
                for shift, seconds in zip(self.shift_s, each_s, strict=True)
            )
            counts = [max(own + last, least) for own, last, least in zip(counts, early, enough, strict=True)]
            found = self._run(self.network, counts)
            ends_s = [
                [*accumulate(map(seconds_of, own), initial=shift)]
                for own, shift in zip(found, self.shift_s, strict=True)
            ]
            window = _window_of(ends_s, max(self.shift_s), counts)
            if min(map(len, window.inside)) >= steps:
                return window, found
            each_s = [(own[-1] - own[0]) / count for own, count in zip(ends_s, counts, strict=True)]
            early = [own[-1] <= window.end_s * (1 + _ROUNDING) for own in ends_s]


def _longer_s(alone: Step | ProgramStep, beside: Step | ProgramStep) -> dict[str, float]:
    return {part: seconds - alone.parts[part] for part, seconds in beside.parts.items()}


def _mean(steps: Sequence[ProgramStep]) -> ProgramStep:
    computing, idle, late, *kinds = (fmean(own) for own in zip(*(one.parts.values() for one in steps), strict=True))
    exposed_s = dict(zip(steps[0].exposed_s, kinds, strict=True))
    return ProgramStep(fmean(one.seconds for one in steps), computing, idle, late, exposed_s, {})


def _window_of(ends_s: list[list[float]], begin_s: float, counts: list[int]) -> _Window:
    """Return the window, given the begin of the first step and the ends of all steps of each job."""
    end_s = min(own[-1] for own in ends_s)
    least_s, most_s = begin_s * (1 - _ROUNDING), end_s * (1 + _ROUNDING)
    inside = [
        [k for k, (begin, end) in enumerate(pairwise(own)) if least_s <= begin and end <= most_s] for own in ends_s
    ]
    return _Window(begin_s, end_s, counts, inside)
