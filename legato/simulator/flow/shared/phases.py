"""The shifts with which jobs on one network slow each other down least, and the slowdowns at other shifts.

The idea is from CASSINI (Rajasekaran, Ghobadi and Akella, NSDI 2024): a training job alternates between computation and
communication. If two jobs with similar periods share a link, a shift between them lets one job communicate while the
other computes.

A shift is between 0 and the period of its job. With two jobs, the second job's shift is tried at `GRID` equally distant
points of its period. With more jobs, shifts are tried for one job after another, with all other jobs fixed, until no
shift changes. If several neighbouring shifts are equally good, the middle of the longest row of such shifts is chosen,
because there a small error of the shift does least harm. If the best shift is better than both its neighbours, shifts
near it are tried too, at a half, a quarter and so on of the distance between neighbours.

Without a pace (a fixed period of each job), jobs begin with these shifts, but may drift later. On links that serve one
transfer at a time, jobs may drift by themselves until their transfers do not meet; on links that transfers share
fairly, jobs keep their shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from legato.core.errors import InputError, TooLargeError
from legato.core.workload import Workload
from legato.simulator.flow.shared.jobs import SharedNetwork, SharedTimes

__all__ = ["DRIFTS", "GRID", "Phases", "best_shifts"]

#: The number of shifts of a job that are tried at first.
GRID = 32
_REFINEMENTS = 4
#: The most rounds over all jobs, if there are more than two jobs.
_MOST_ROUNDS = 3
#: Mean slowdowns that differ by less than this are equally good.
_SAME = 1e-3
#: The errors of a shift that are tried, as shares of a period.
DRIFTS = (0.01, 0.05, 0.10)
#: The share by which the last job's period is made longer, and the number of iterations in which the job then drifts
#: through all phases. The window contains three quarters of these iterations.
_LONGER, _BEAT = 0.01, 134
#: The most services of all simulations together. With fair sharing, a simulation takes a hundred times as long.
_MOST_SERVICES, _MOST_FAIR = 2_000_000_000, 20_000_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Phases:
    """The best shifts of all jobs (in seconds; the first job's is 0), and the slowdowns at other shifts.

    All slowdowns are means over the jobs (`SharedTimes.slowdown`). `phases` has pairs (shift, slowdown) for all shifts
    that were tried for the last job, from 0 to its period. `drift` has pairs (share, slowdown): the worst slowdown if
    one job's shift is too small or too large by this share of its period. `longer` is the slowdown if the period of the
    last job is 1% longer, so that the job drifts through all phases; `longer` is None if this simulation needs too many
    transfers.
    """

    shift_s: tuple[float, ...]
    times: SharedTimes
    phases: tuple[tuple[float, float], ...]
    drift: tuple[tuple[float, float], ...]
    longer: float | None

    @property
    def mean(self) -> float:
        """Return the mean slowdown over all phases."""
        return sum(slowdown for _, slowdown in self.phases) / len(self.phases)

    @property
    def worst(self) -> float:
        """Return the slowdown in the worst phase."""
        return max(slowdown for _, slowdown in self.phases)


def best_shifts(
    shared: SharedNetwork, *, priority: Sequence[int] | None = None, progress: Progress = lambda done, total: None
) -> Phases:
    """Return the shifts with the smallest mean slowdown of the jobs. The jobs' own shifts are ignored.

    `priority` replaces the jobs' own priorities.

    Raises `InputError` if there are disturbances. Raises `TooLargeError`, before the first simulation, if all
    simulations together need too many services.
    """
    if shared.network.disturbed:
        raise InputError("best shifts: of jobs in a steady state (expected no disturbances)")
    levels = [job.priority for job in shared.jobs] if priority is None else list(priority)
    search = _Search(shared, levels, progress)
    shift_s, phases = search.best()
    drift = tuple((share, search.worst_off(shift_s, share)) for share in DRIFTS)
    return Phases(tuple(shift_s), shared.run(shift_s, levels), tuple(phases), drift, _longer(shared, shift_s, levels))


class _Search:
    def __init__(self, shared: SharedNetwork, priority: list[int], progress: Progress) -> None:
        self.shared, self.priority, self.progress, self.count = shared, priority, progress, len(shared.jobs)
        self.rounds = 1 if self.count <= 2 else _MOST_ROUNDS
        moved = self.count - 1
        drifting = len(DRIFTS) * 2 * self.count
        self.done, self.total = 0, self.rounds * moved * (GRID + 2 * _REFINEMENTS) + drifting + 1
        most = _MOST_FAIR if shared.network.sharing == "fair" else _MOST_SERVICES
        if self.total * shared.num_services > most:
            raise TooLargeError(
                f"{self.total} simulations of {shared.num_services:,} transfers and computations to find the best "
                f"shifts (expected at most {most:,} in all: fewer iterations, workers or jobs?)"
            )

    def slowdown(self, shift_s: list[float], job: int, shift: float) -> float:
        """Return the jobs' mean slowdown if this job has this shift, and the other jobs have theirs in `shift_s`."""
        self.progress(self.done, self.total)
        self.done += 1
        tried = list(shift_s)
        tried[job] = shift % self.shared.period_s[job]
        return self.shared.run(tried, self.priority).slowdown

    def best(self) -> tuple[list[float], list[tuple[float, float]]]:
        shift_s, phases = [0.0] * self.count, [(0.0, 1.0)]
        for _ in range(self.rounds):
            before = list(shift_s)
            for job in range(1, self.count):
                step = self.shared.period_s[job] / GRID
                found = [self.slowdown(shift_s, job, step * k) for k in range(GRID)]
                phases = [(step * k, slowdown) for k, slowdown in enumerate(found)]
                first, length = _longest_row(found)
                if length < GRID:
                    shift_s[job] = step * ((first + (length - 1) / 2) % GRID)
                if length == 1:
                    shift_s[job] = self._refined(shift_s, job, step, found[first])
            if shift_s == before:
                break
        return shift_s, phases

    def _refined(self, shift_s: list[float], job: int, step: float, least: float) -> float:
        at = shift_s[job]
        for _ in range(_REFINEMENTS):
            step /= 2
            for near in (at - step, at + step):
                if (slowdown := self.slowdown(shift_s, job, near)) < least:
                    at, least = near, slowdown
        return at % self.shared.period_s[job]

    def worst_off(self, shift_s: list[float], share: float) -> float:
        off = [(job, sign * share * self.shared.period_s[job]) for job in range(self.count) for sign in (1, -1)]
        return max(self.slowdown(shift_s, job, shift_s[job] + by) for job, by in off)


def _longest_row(found: list[float]) -> tuple[int, int]:
    """Return (first, length) of the longest row of values as good as the best; after the last value comes the first."""
    good = [value <= min(found) + _SAME for value in found]
    if all(good):
        return 0, len(found)
    best = (0, 0)
    for first in range(len(found)):
        length = 0
        while good[(first + length) % len(found)]:
            length += 1
        best = max(best, (length, -first))
    return -best[1], best[0]


def _longer(shared: SharedNetwork, shift_s: list[float], priority: list[int]) -> float | None:
    """Return the slowdown if the last job's computation takes longer by 1% of its period."""
    *others, last = (replace(job, shift_s=shift) for job, shift in zip(shared.jobs, shift_s, strict=True))
    compute_s = last.workload.compute_s
    if compute_s == 0:
        return None
    longer = _stretched(last.workload, 1 + _LONGER * shared.period_s[-1] / compute_s)
    try:
        drifting = SharedNetwork([*others, replace(last, workload=longer)], shared.network, iterations=_BEAT)
    except TooLargeError:
        return None
    return drifting.run(priority=priority).slowdown


def _stretched(workload: Workload, factor: float) -> Workload:
    """Return the workload with the durations of all ops multiplied by a factor."""
    ops = tuple(msgspec.structs.replace(op, duration_s=op.duration_s * factor) for op in workload.ops)
    return msgspec.structs.replace(workload, ops=ops)
