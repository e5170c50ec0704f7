"""Write a job as a `Program`: the pipeline's schedule with the computation and the exchanges of each pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from legato.core.job import Job
from legato.core.program import Action, Communication, Compute, Lane, Operation, Program, Start, Wait
from legato.whole_jobs import schedules, stages
from legato.whole_jobs.pipeline import around
from legato.zoo.language.layer import Passes
from legato.zoo.language.work import Beside, Exchange, Work

__all__ = ["OPTIMIZER", "program"]

OPTIMIZER = "optimizer"
Groups = tuple[tuple[int, ...], ...]


def program(job: Job) -> Program:
    """Return the program with the actions of each stage's workers in a step.

    A pass runs its parts one after another; a backward pass begins with the last part. Each part computes during its
    hidden exchanges (those that overlap with computation), and then runs its other exchanges. Hidden data-parallel
    exchanges of gradients start at the beginning of the last micro-batch's backward pass. Exchanges of parameters must
    end by the end of the first micro-batch's forward pass.
    """
    return _Program(job).written()


class _Program:
    """A program under construction, lane by lane."""

    def __init__(self, job: Job) -> None:
        self.job, self.workers = job, job.mesh.pipeline
        self.overlapped, self.hidden = ("pipeline" in job.framework.hidden), ("data" in job.framework.hidden)
        self.communications: list[Communication] = []
        self.like: dict[tuple[object, ...], Communication] = {}
        self.parts = stages.passes(job)
        self.last = len(self.parts) - 1 if self.workers > 1 else -1
        self.sent: dict[tuple[int, int, str], int] = {}  # numbers of transfers, by the pass that receives them
        self.known: dict[tuple[object, ...], Groups] = {}
        names = [part for name in job.mesh.order for part in (("replica", "expert") if name == "data" else (name,))]
        mesh = job.divided
        sizes = {"replica": mesh.data // mesh.data_expert, "expert": mesh.data_expert} | {
            name: getattr(mesh, name) for name in ("tensor", "context", "pipeline")
        }
        ranks = np.arange(job.mesh.workers).reshape([sizes[name] for name in names])
        self.names = [name for name in names if name != "pipeline"]
        self.ranks = np.moveaxis(ranks, names.index("pipeline"), 0)  # [worker of the pipeline, other dimensions]

    def written(self) -> Program:
        job = self.job
        plan = schedules.schedule(job.schedule, self.workers, job.microbatches, job.chunks)
        lanes = tuple(
            Lane(tuple(self.ranks[worker].ravel().tolist()), tuple(self._lane(worker, actions)))
            for worker, actions in enumerate(plan)
        )
        return Program(job.name, lanes, tuple(self.communications))

    def _lane(self, worker: int, actions: list[schedules.Action]) -> Iterator[Action]:
        tail, last = stages.tail(self.job, worker), self.job.microbatches - 1
        hides_gradients = self.job.framework.hides_gradients
        gathers = self._numbers(worker, tail.parameters if self.hidden else ())
        yield from map(Start, gathers)
        reduces: list[int] | None = None
        first = max(at for at, one in enumerate(actions) if one.kind == "forward" and one.microbatch == 0)
        for at, action in enumerate(actions):
            if hides_gradients and reduces is None and action.kind == "backward" and action.microbatch == last:
                reduces = self._numbers(worker, tail.gradients)
                yield from map(Start, reduces)
            yield from around(action, self._pass(worker, action), self.last, self._send, overlapped=self.overlapped)
            if at == first:
                yield from map(Wait, gathers)
        yield from map(Wait, reduces or [])
        if not hides_gradients:
            yield from self._blocking(worker, tail.gradients)
        if tail.tied_nbytes:
            yield from self._tied(tail.tied_nbytes)
        yield from _computing(tail.optimizer_s, OPTIMIZER)
        if not self.hidden:
            yield from self._blocking(worker, tail.parameters)

    def _pass(self, worker: int, action: schedules.Action) -> Iterator[Action]:
        stage, microbatch, kind = action
        label = f"{kind} {microbatch}" + (f" of stage {stage}" if self.job.chunks > 1 else "")
        for part, times in self.parts[stage] if kind == "forward" else reversed(self.parts[stage]):
            for _ in range(times):
                yield from self._work(worker, _of(part, kind), label)

    def _work(self, worker: int, work: Work, label: str) -> Iterator[Action]:
        """Yield the computing of a part, and the starts and waits of its hidden exchanges."""
        moments: list[tuple[float, int, Beside]] = []
        for one in work.beside:
            if one.exchanges:
                window_s = work.window_s(one)
                moments += [(one.after_s, 1, one), (one.after_s + window_s, 0 if window_s else 2, one)]
        done, started = 0.0, {}
        for moment, order, one in sorted(moments, key=lambda entry: entry[:2]):
            yield from _computing(moment - done, label)
            done = max(done, moment)
            if order == 1:
                started[id(one)] = self._numbers(worker, one.exchanges)
            yield from map(Start if order == 1 else Wait, started[id(one)])
        yield from _computing(work.computing_s - done, label)
        yield from self._blocking(worker, work.behind)

    def _blocking(self, worker: int, exchanges: Iterable[Exchange]) -> Iterator[Action]:
        for one in exchanges:
            for number in self._numbers(worker, [one]):
                yield from (Start(number), Wait(number))

    def _numbers(self, worker: int, exchanges: Iterable[Exchange]) -> list[int]:
        """Add communications for the exchanges that a stage's worker starts, and return their numbers."""
        every = ((one, self._groups(worker, one.dimensions)) for one in exchanges)
        return [
            self._add(one.kind, one.operation, groups, one.nbytes, one.times)
            for one, groups in every
            if len(groups[0]) > 1
        ]

    def _tied(self, nbytes: float) -> Iterator[Action]:
        """Yield the actions in which the first and the last lane sum the gradients of their shared embedding table."""
        key = (-1, -1, "tied")
        if key not in self.sent:
            self.sent[key] = self._add("pipeline", "all_reduce", self._pairs(0, self.workers - 1), nbytes)
        yield from (Start(self.sent[key]), Wait(self.sent[key]))

    def _send(self, stage: int, target: schedules.Action) -> int:
        """Return the number of the communication that brings the pass `target` its data from a stage."""
        key = (target.stage, target.microbatch, target.kind)
        if key not in self.sent:
            groups = self._pairs(stage % self.workers, target.stage % self.workers)
            nbytes = stages.sent_nbytes(self.job, min(stage, target.stage))
            self.sent[key] = self._add("pipeline", "send", groups, nbytes)
        return self.sent[key]

    def _add(self, kind: str, operation: Operation, groups: Groups, nbytes: float, times: int = 1) -> int:
        key = (kind, operation, id(groups), nbytes, times)
        if key not in self.like:  # most are equal to an earlier one, and checking many groups takes time
            self.like[key] = Communication(kind, operation, groups, nbytes, times)
        self.communications.append(self.like[key])
        return len(self.communications) - 1

    def _groups(self, worker: int, dimensions: tuple[str, ...]) -> Groups:
        """Return the groups of a lane's workers, whose positions in the mesh differ only in these dimensions."""
        key = (worker, dimensions)
        if key not in self.known:
            inside = {*dimensions} | ({"expert", "replica"} if "data" in dimensions else set())
            axes = [axis for axis, name in enumerate(self.names) if name in inside]
            ranks = self.ranks[worker]
            size = math.prod(ranks.shape[axis] for axis in axes)
            moved = np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, size)
            self.known[key] = tuple(map(tuple, moved.tolist()))
        return self.known[key]

    def _pairs(self, worker: int, other: int) -> Groups:
        """Return pairs of each worker of a lane and its counterpart in another lane."""
        key = (worker, other)
        if key not in self.known:
            self.known[key] = tuple(
                zip(self.ranks[worker].ravel().tolist(), self.ranks[other].ravel().tolist(), strict=True)
            )
        return self.known[key]


def _computing(seconds: float, label: str) -> Iterator[Action]:
    if seconds > 0:
        yield Compute(seconds, label)


def _of(passes: Passes, kind: str) -> Work:
    work: Work = getattr(passes, kind)
    return work
