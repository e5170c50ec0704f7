"""The cost of work for one worker: the seconds that each kind of work takes, and the bytes that each kind sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from legato.collectives import RING
from legato.core.job import Job, Machine, WorkerGroup
from legato.core.program import Operation
from legato.zoo.language.work import Exchange, Work

__all__ = ["COMPUTING", "KINDS", "Cost", "all_to_all", "collective", "cost_of", "cost_of_work", "price", "send"]

COMPUTING = "computing"
#: The kinds of communication, and the optimizer's step.
KINDS = ("tensor", "context", "expert", "pipeline", "data", "optimizer")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of work: for each kind of work its `seconds`, and for each kind and tier the bytes `sent`.

    A kind is computing or a kind of exposed communication. A tier is `host` or `network`: the links that carry the
    bytes.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    sent: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def computing(cls, seconds: float) -> Cost:
        return cls({COMPUTING: seconds})

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def of(self, kind: str) -> float:
        """Return the seconds of a kind of work, or 0 if the cost has no such work."""
        return self.seconds.get(kind, 0.0)

    def __add__(self, other: Cost) -> Cost:
        return Cost(_sum(self.seconds, other.seconds), _sum(self.sent, other.sent))

    def __mul__(self, times: float) -> Cost:
        return Cost(
            {kind: times * seconds for kind, seconds in self.seconds.items()},
            {key: times * nbytes for key, nbytes in self.sent.items()},
        )

    def behind(self, seconds: float, hidden: bool = True) -> Cost:
        """Return this cost without the `seconds` that other work hides (with `hidden`); the bytes do not change."""
        left = max(0.0, 1 - seconds / self.total_s) if hidden and self.total_s else 1.0
        return Cost({kind: left * own for kind, own in self.seconds.items()}, self.sent)


def _sum(a: dict[Any, float], b: dict[Any, float]) -> dict[Any, float]:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in a | b}


def cost_of_work(work: Work, job: Job, stage: int) -> Cost:
    """Return the cost of a piece of work on a pipeline stage, assuming that each exchange has the network to itself."""
    total = Cost.computing(work.computing_s) + cost_of(job, stage, work.behind)
    for one in work.beside:
        total += cost_of(job, stage, one.exchanges).behind(work.window_s(one))
    return total


def cost_of(job: Job, stage: int, exchanges: Iterable[Exchange]) -> Cost:
    """Return the cost of a stage's exchanges if they run one after another, each with the network to itself."""
    each = (
        price(one.kind, one.operation, job.machine, job.group(*one.dimensions, stage=stage), one.nbytes) * one.times
        for one in exchanges
    )
    return reduce(Cost.__add__, each, Cost())


def price(kind: str, operation: Operation, machine: Machine, group: WorkerGroup, nbytes: float) -> Cost:
    """Return the cost of a communication in a group; `nbytes` has the same meaning as in `Communication`."""
    if operation == "send":
        return send(kind, machine, nbytes, group.hosts > 1)
    if operation == "all_to_all":
        return all_to_all(kind, machine, group, nbytes)
    if operation == "broadcast":  # a ring carries each byte once over each of its links
        nbytes *= group.size / (group.size - 1)
    return collective(kind, machine, group, nbytes, 2 if operation == "all_reduce" else 1)


def collective(kind: str, machine: Machine, group: WorkerGroup, nbytes: float, halves: int = 1) -> Cost:
    """Return the cost of a ring all-gather or reduce-scatter of `nbytes` together; if `halves` is 2, of an all-reduce.

    The time is latency + halves x bytes x (g-1)/g / bus.
    """
    if group.size == 1:
        return Cost()
    ring = machine.ring(group)
    _, sent = RING.half(group.size, 0.0, halves * nbytes)
    away = group.hosts / group.size if group.hosts > 1 else 0.0
    seconds = ring.alpha_s + sent * ring.beta_s_per_byte
    return Cost({kind: seconds}, {(kind, "host"): sent * (1 - away), (kind, "network"): sent * away})


def all_to_all(kind: str, machine: Machine, group: WorkerGroup, nbytes: float) -> Cost:
    """Return the cost of an all-to-all: each worker sends 1/g of its `nbytes` to every other worker of the group."""
    if group.size == 1:
        return Cost()
    near, away = nbytes * (group.per_host - 1) / group.size, nbytes * (group.size - group.per_host) / group.size
    seconds = near / (machine.link_bytes_per_s * machine.link_share)
    if away:
        seconds = max(seconds, away / (machine.card_bytes_per_s * machine.card_share))
    latency_s = machine.ring(group).alpha_s
    return Cost({kind: latency_s + seconds}, {(kind, "host"): near, (kind, "network"): away})


def send(kind: str, machine: Machine, nbytes: float, away: bool) -> Cost:
    """Return the cost of a transfer to one worker, which is on another host (`away`) or on the same host."""
    link = machine.ring(WorkerGroup(2, 2, 1) if away else WorkerGroup(2, 1, 2))
    return Cost({kind: link.cost(nbytes)}, {(kind, "network" if away else "host"): nbytes})
