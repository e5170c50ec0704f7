"""Replay the step of a traced job, with traced communications or with predictions for another network.

Computation and idle time are as in the trace. A communication begins when all its workers have started it and the
previous communication of its groups has ended. A communication shares no link, and takes its traced time or the time
that `cost` predicts. docs/traces.md lists the assumptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import TypeAlias

from msgspec.structs import replace as changed

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.core.job import Machine, WorkerGroup
from legato.core.program import Action, Communication, Compute, Lane, Program, Wait, clock
from legato.whole_jobs.cost import Cost, price

__all__ = ["ProgramStep", "Traffic", "means", "predict", "repeated", "replay", "run", "traffic"]


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A step of a program; times and bytes are averages over its workers.

    In a step of `seconds`, a worker computes for `computing_s`, waits for its host for `idle_s`, waits for late workers
    for `late_s`, and waits for each kind of communication for `exposed_s`. All these parts add up to `seconds`. `sent`
    has the bytes that a worker sends, by kind of communication and tier of the network, as in `Step`; if the step was
    not predicted for a machine, `sent` is empty.
    """

    seconds: float
    computing_s: float
    idle_s: float
    late_s: float
    exposed_s: dict[str, float]
    sent: dict[tuple[str, str], float]

    @property
    def parts(self) -> dict[str, float]:
        """Return the parts of the step, in seconds."""
        rest = {"waiting for the host": self.idle_s, "waiting for other workers": self.late_s}
        return {"computing": self.computing_s, **rest, **self.exposed_s}


def replay(program: Program) -> ProgramStep:
    """Return the step with communications as traced. Raises `InputError` if the program is not traced."""
    return run(program, traced_s(program))


def traced_s(program: Program) -> list[float]:
    """Return the traced seconds of each communication. Raises `InputError` if some communications were not traced."""
    if untraced := [k for k, one in enumerate(program.communications) if one.traced_s is None]:
        raise InputError(f"traced_s of {program.describe(untraced[0])}: none (expected a program that was traced)")
    return [one.traced_s or 0.0 for one in program.communications]


@dataclass(frozen=True, slots=True)
class Traffic:
    """A kind of communication in a traced step; times are averages over the workers.

    The communication takes `seconds`, and workers wait for it for `exposed_s`. `win` is the predicted share of the step
    that twice the bandwidth would save. With `at_most`, `win` is an upper bound, because the traced times do not
    distinguish latency from bandwidth.
    """

    kind: str
    seconds: float
    exposed_s: float
    win: float
    at_most: bool


def traffic(program: Program) -> list[Traffic]:
    """Return the kinds of communication, the most exposed first, and a row for all kinds if there are several."""
    base, taken = replay(program), traced_s(program)
    shares = _bandwidth_shares(program)
    members = [len(one.groups) * len(one.groups[0]) for one in program.communications]

    def of(name: str, kinds: set[str]) -> Traffic:
        mine = [one.kind in kinds for one in program.communications]
        halves = [
            0.5 if own and share is None else own * (share or 0.0) / 2 for share, own in zip(shares, mine, strict=True)
        ]
        faster = [s * (1 - half) for s, half in zip(taken, halves, strict=True)]
        return Traffic(
            name,
            sum(s * n for s, n, own in zip(taken, members, mine, strict=True) if own) / program.workers,
            sum(base.exposed_s[kind] for kind in kinds),
            1 - run(program, faster).seconds / base.seconds if base.seconds else 0.0,
            any(share is None for share, own in zip(shares, mine, strict=True) if own),
        )

    found = sorted((of(kind, {kind}) for kind in base.exposed_s), key=lambda one: (-one.exposed_s, one.kind))
    return [*found, of("all kinds", set(base.exposed_s))] if len(found) > 1 else found


def _bandwidth_shares(program: Program) -> list[float | None]:
    """Return the share of each communication's traced time that grows with its bytes, or None if this is unknown.

    The share comes from a straight line through the traced times of all communications with the same kind, operation
    and group size, if the bytes of these communications differ by at least a factor of two.
    """
    points: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    keys = [(one.kind, one.operation, len(one.groups[0])) for one in program.communications]
    for key, one in zip(keys, program.communications, strict=True):
        if one.traced_s and one.nbytes:
            points.setdefault(key, []).append((one.nbytes, one.traced_s))
    lines = {key: LinearCost.fit(own) for key, own in points.items() if max(own)[0] >= 2 * min(own)[0]}

    def share(key: tuple[str, str, int], nbytes: float) -> float | None:
        line = lines.get(key)
        return 0.0 if not nbytes else None if line is None else 1 - line.startup_s / line.cost(nbytes)

    return [share(key, one.nbytes) for key, one in zip(keys, program.communications, strict=True)]


def predict(program: Program, machine: Machine) -> ProgramStep:
    """Predict the step on the links of a machine; each host has neighbouring workers."""
    shared = {id(one.groups): one.groups for one in program.communications}
    shapes = {key: _shapes(groups, machine) for key, groups in shared.items()}
    costs = [_cost(one, shapes[id(one.groups)], machine) * one.times for one in program.communications]
    workers = program.workers
    shares = [
        len(one.groups) * (1 if one.operation in ("send", "broadcast") else len(one.groups[0])) / workers
        for one in program.communications
    ]
    total = reduce(Cost.__add__, (cost * share for cost, share in zip(costs, shares, strict=True)), Cost())
    return replace(run(program, [cost.total_s for cost in costs]), sent=dict(sorted(total.sent.items())))


def _shapes(groups: Sequence[Sequence[int]], machine: Machine) -> set[WorkerGroup]:
    """Return the different shapes (size and hosts) of groups."""
    on_hosts = (Counter(worker // machine.gpus_per_host for worker in group) for group in groups)
    return {WorkerGroup(hosts.total(), len(hosts), max(hosts.values())) for hosts in on_hosts}


def _cost(one: Communication, shapes: Iterable[WorkerGroup], machine: Machine) -> Cost:
    """Return the cost of a communication in its slowest group; `shapes` are the sizes and hosts of its groups."""
    costs = (price(one.kind, one.operation, machine, shape, one.nbytes) for shape in shapes)
    return max(costs, key=lambda cost: cost.total_s)


def run(program: Program, seconds: Sequence[float]) -> ProgramStep:
    """Return the step if communication n takes `seconds[n]`."""
    found = clock([lane.actions for lane in program.lanes], program.orders(), seconds, program.afters())

    def walks() -> Iterator[Walk]:
        for lane, ends in zip(program.lanes, found.actions, strict=True):
            waits = (found.started[one.communication] if isinstance(one, Wait) else 0.0 for one in lane.actions)
            yield len(lane.workers), zip(lane.actions, [0.0, *ends], ends, waits, strict=False)

    return means(program, max(found.lanes), walks())


#: A number of workers, and for each of their actions: when it begins, when it ends, and for a wait, when all workers
#: of the communication had started it.
Walk: TypeAlias = tuple[int, Iterable[tuple[Action, float, float, float]]]


def means(program: Program, seconds: float, walks: Iterable[Walk]) -> ProgramStep:
    """Return a step that takes `seconds`; its other times are averages over all workers, whose actions are `walks`."""
    kinds = dict.fromkeys((one.kind for one in program.communications), 0.0)
    rest = dict.fromkeys(("computing", "idle", "late"), 0.0)
    workers = program.workers
    for number, actions in walks:
        weight, last_s = number / workers, 0.0
        for action, begin_s, end_s, started_s in actions:
            last_s = end_s
            if isinstance(action, Compute):
                rest[action.label if action.label in rest else "computing"] += weight * (end_s - begin_s)
            elif isinstance(action, Wait) and end_s > begin_s:
                begun_s = min(end_s, max(begin_s, started_s))
                rest["late"] += weight * (begun_s - begin_s)
                kinds[program.communications[action.communication].kind] += weight * (end_s - begun_s)
        rest["late"] += weight * (seconds - last_s)
    return ProgramStep(seconds, rest["computing"], rest["idle"], rest["late"], kinds, {})


def repeated(program: Program, workers: int) -> Program:
    """Return copies of the program that train in parallel on different data; each `data` group spans all copies.

    Every copy computes the same as the original program, and its communications have the same `nbytes`. Raises
    `InputError` if `workers` is no multiple of the program's workers, or if nothing in the program is of the kind
    `data`.
    """
    own = program.workers
    copies, rest = divmod(workers, own)
    if rest or not copies:
        raise InputError(f"workers: {workers} (expected a multiple of the program's {own})")
    if copies == 1:
        return program
    if all(one.kind != "data" for one in program.communications):
        raise InputError(f"workers: {workers} (expected {own}: nothing in the program is data-parallel)")
    shifts = range(0, workers, own)
    lanes = [Lane(tuple(w + shift for shift in shifts for w in lane.workers), lane.actions) for lane in program.lanes]
    groups: dict[
        tuple[tuple[tuple[int, ...], ...], bool], tuple[tuple[int, ...], ...]
    ] = {}  # equal groups are one object, because they are large
    communications = []
    for one in program.communications:
        data = one.kind == "data"
        if (one.groups, data) not in groups:
            moved = [tuple(tuple(w + shift for w in group) for group in one.groups) for shift in shifts]
            joined = [tuple(chain.from_iterable(same)) for same in zip(*moved, strict=True)] if data else chain(*moved)
            groups[one.groups, data] = tuple(joined)
        traced = None if data else one.traced_s
        communications.append(changed(one, groups=groups[one.groups, data], traced_s=traced))
    return Program(program.name, tuple(lanes), tuple(communications))
