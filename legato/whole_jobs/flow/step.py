"""The step of a job on a network that its communication shares (docs/whole_jobs.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from msgspec import structs

from legato.core.errors import InputError
from legato.core.job import Job, Machine
from legato.core.program import Communication, Compute, Program
from legato.core.timeline import Span, SpanKind, Timeline
from legato.simulator.flow import Network
from legato.simulator.flow.network.disturbances import UNDISTURBED, parse_disturbances
from legato.whole_jobs import traced
from legato.whole_jobs.cost import KINDS
from legato.whole_jobs.flow.programs import OPTIMIZER, program
from legato.whole_jobs.flow.quotient import Quotient
from legato.whole_jobs.flow.simulation import LaneTimes, run
from legato.whole_jobs.step import Step, beyond_rounding, predict
from legato.whole_jobs.traced import ProgramStep, Walk

__all__ = [
    "FlowStep", "busiest", "mean_step", "network_of", "program_step", "seconds_of", "sends_of", "simulate",
    "simulate_program",
]  # fmt: skip

#: The most lanes that a timeline shows.
_MOST_DRAWN = 32
_KINDS: dict[str, SpanKind] = {
    "forward": "forward", "backward": "backward", "weights": "backward", OPTIMIZER: "optimizer"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FlowStep:
    """A simulated step, with one lane for each class of workers that are alike.

    The parts of the step are the times of the busiest worker in the program's lane `lane`.
    """

    step: Step
    program: Program
    lanes: list[LaneTimes]
    lane: int

    @property
    def worker(self) -> int:
        """Return the first of the busiest workers, to which the parts of the step belong."""
        of_lane = (one for one in self.lanes if one.lane == self.lane)
        return int(max(of_lane, key=lambda one: _busy_s(self.program, one)).workers[0])

    def timeline(self, network: str = "") -> Timeline:
        """Return a timeline of all lanes or, if there are many, of the one lane of each stage that ends last.

        `network` describes the network in words. A lane is named after its first worker, and `members` is the number
        of workers that it represents.
        Communication is drawn where the worker waits for it.
        """
        drawn = sorted(self.lanes, key=lambda lane: (lane.lane, -lane.end_s))
        if len(drawn) > _MOST_DRAWN:
            drawn = [next(lane for lane in drawn if lane.lane == stage) for stage in range(len(self.program.lanes))]
        return Timeline(
            self.step.job.schedule,
            "predicted",
            self.step.seconds,
            tuple(span for lane in drawn for span in self._spans(lane)),
            members=tuple((int(lane.workers[0]), len(lane.workers)) for lane in drawn),
            job=self.step.job.name,
            network=network,
            whole=True,
        )

    def _spans(self, lane: LaneTimes) -> list[Span]:
        worker, spans = int(lane.workers[0]), [Span(0, "", "", 0.0, 0.0, "forward")][:0]
        for at, (begin_s, end_s) in lane.times.items():
            action = self.program.lanes[lane.lane].actions[at]
            if not isinstance(action, Compute):
                one, flow = self.program.communications[action.communication], lane.flows[at]
                name, nbytes = f"{one.kind} {one.operation}", round(one.nbytes * one.times)
                spans.append(Span(worker, one.kind, name, flow.begin_s, flow.end_s, "message", nbytes))
            elif spans and spans[-1].name == action.label and spans[-1].end_s == begin_s:
                spans[-1] = structs.replace(spans[-1], end_s=end_s)
            else:
                spans.append(
                    Span(worker, "compute", action.label, begin_s, end_s, _KINDS[action.label.partition(" ")[0]])
                )
        return spans


def network_of(machine: Machine, workers: int, *, disturb: str = UNDISTURBED, **options: Any) -> Network:
    """Return the network of a machine for this number of workers, with full hosts.

    `options` are further fields of `Network`, and `disturb` has disturbances as `parse_disturbances` reads them. Raises
    `InputError`.
    """
    hosts = -(-workers // machine.gpus_per_host)
    further: dict[str, Any] = {"disturbances": parse_disturbances(disturb)} | options
    return Network(
        workers=hosts * machine.gpus_per_host,
        gpus_per_host=machine.gpus_per_host,
        bandwidth_bps=8 * machine.card_bytes_per_s * machine.card_share,
        local_bandwidth_bps=8 * machine.link_bytes_per_s * machine.link_share,
        sharing="fair",
        **further,
    )


def simulate(job: Job, network: Network, *, lane: int | None = None, alike: bool = True) -> FlowStep:
    """Simulate a step on a network from `network_of`; without `alike`, simulate every worker (for tests).

    The parts of the step belong to the busiest worker (of a `lane`, if given). The worker computes, waits for
    communication that all its workers have started, and is otherwise idle. As in `predict`, the part `pipeline` is the
    time by which the pipeline's transfers make the step longer. The bubble is the remaining idle time. Raises
    `InputError` if the network has too few workers, and `TooLargeError` on too many workers that are not alike.
    """
    _check_room(network, job.mesh.workers)
    made = program(job)
    quotient = Quotient(made, job.machine, network, alike=alike)
    lanes, sends = run(quotient), sends_of(made)
    free = [run(quotient, sends)] if sends else []
    lane = busiest(made, [lanes]) if lane is None else lane
    return FlowStep(mean_step(job, made, [lanes], free, lane), made, lanes, lane)


def seconds_of(lanes: Sequence[LaneTimes]) -> float:
    """Return how long a step takes."""
    return max(lane.end_s for lane in lanes)


def sends_of(made: Program) -> set[int]:
    """Return the numbers of the pipeline's communications."""
    return {number for number, one in enumerate(made.communications) if one.kind == "pipeline"}


def busiest(made: Program, steps: Sequence[Sequence[LaneTimes]]) -> int:
    """Return the lane of the worker that computes and waits for communication for the longest time in any step."""
    return max((lane for lanes in steps for lane in lanes), key=lambda lane: _busy_s(made, lane)).lane


def mean_step(
    job: Job, made: Program, steps: Sequence[Sequence[LaneTimes]], free: Sequence[Sequence[LaneTimes]], lane: int
) -> Step:
    """Return the mean of a job's simulated steps, as the busiest worker of a lane sees them.

    `free` has the same steps, simulated with pipeline communications that take no time; it is empty without a pipeline.
    """
    seconds, free_s = (fmean(map(seconds_of, every)) for every in (steps, free or steps))
    of_lane = ([_of_worker(made, one) for one in lanes if one.lane == lane] for lanes in steps)
    works = [max(every, key=lambda one: one[0] + sum(one[1].values())) for every in of_lane]
    computing_s = fmean(computing for computing, _ in works)
    exposed_s = {kind: fmean(exposed[kind] for _, exposed in works) for kind in KINDS}
    idle_s = max(0.0, seconds - computing_s - sum(exposed_s.values()))
    exposed_s["pipeline"] = min(idle_s, max(0.0, seconds - free_s))
    return replace(
        predict(job),
        seconds=seconds,
        computing_s=computing_s,
        bubble_s=beyond_rounding(idle_s - exposed_s["pipeline"], seconds),
        exposed_s=exposed_s,
    )


def simulate_program(made: Program, machine: Machine, network: Network) -> ProgramStep:
    """Simulate a step of a program on a network from `network_of`, with the latencies of the machine.

    Raises the same errors as `simulate`.
    """
    _check_room(network, made.workers)
    step = program_step(made, run(Quotient(made, machine, network)))
    return replace(step, sent=traced.predict(made, machine).sent)


def program_step(made: Program, lanes: Sequence[LaneTimes]) -> ProgramStep:
    """Return a simulated step of a program, without its sent bytes."""

    def walks() -> Iterator[Walk]:
        for lane in lanes:
            actions = made.lanes[lane.lane].actions
            started = (lane.flows[at].started_s if at in lane.flows else 0.0 for at in lane.times)
            spans = zip(lane.times.items(), started, strict=True)
            yield len(lane.workers), ((actions[at], *times, started_s) for (at, times), started_s in spans)

    return traced.means(made, seconds_of(lanes), walks())


def _check_room(network: Network, workers: int) -> None:
    if network.workers < workers:
        raise InputError(f"workers: {network.workers} (expected at least the job's {workers})")
    for one in network.disturbances:
        if one.kind in ("link", "compute") and one.number >= workers:
            raise InputError(f"{one.kind}: {one.number} (expected 0 to {workers - 1})")


def _busy_s(made: Program, lane: LaneTimes) -> float:
    computing_s, exposed_s = _of_worker(made, lane)
    return computing_s + sum(exposed_s.values())


def _of_worker(made: Program, lane: LaneTimes) -> tuple[float, dict[str, float]]:
    """Return a worker's seconds of computing, and its seconds of updates and waits by kind, except for the pipeline."""
    actions = made.lanes[lane.lane].actions
    computing_s, exposed_s = 0.0, dict.fromkeys(KINDS, 0.0)
    for at, (begin_s, end_s) in lane.times.items():
        action = actions[at]
        if isinstance(action, Compute):
            if action.label == OPTIMIZER:
                exposed_s[OPTIMIZER] += end_s - begin_s
            else:
                computing_s += end_s - begin_s
            continue
        one: Communication = made.communications[action.communication]
        if one.kind != "pipeline":
            exposed_s[one.kind] += max(0.0, end_s - max(begin_s, lane.flows[at].started_s))
    return computing_s, exposed_s
