"""Plans that compute in any order and gather other messages than they scattered: all of it searched together.

`moved_ops.py` does this for all-reduces. Here a plan is a sequence of halves, each with parts of gradients, and an
order of both passes. A single op moves, a half takes another place in the sequence, parts of gradients go from one
half to another one of the same kind, and halves are merged and divided. Updates run in idle time
(`optimizer_ops.py`), and the iteration that this makes is the value. Slower states are accepted less and less often
(simulated annealing), once from a high temperature and once from a low one.

Source: ours. Units: seconds and bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from legato.core.plan import Kind, Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose
from legato.schedule.search.budget import Budget
from legato.schedule.search.op_orders import Places, times_in_order
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.schedule.search.problem import Problem
from legato.simulator.period import Period

__all__ = ["move_halves"]

#: Changes for every round of the local search, in each of the passes.
_CHANGES = 100
#: By how much, relatively, a state may be worse than the one before it at the start of each pass; not at its end.
_HEATS = (0.005, 0.0005)
#: The parts of the changes that move an op, move a half, move parts of gradients, and divide a half; the rest merge.
_MOVE_OP, _MOVE_HALF, _MOVE_PARTS, _DIVIDE = 0.35, 0.5, 0.85, 0.92
#: The most parts of gradients that move at once.
_PARTS = 3
#: What it costs to value a state: for each op, and for each part of a gradient.
_OP_S, _PART_S = 3e-7, 3e-7


class _Half(NamedTuple):
    """A reduce-scatter, or an all-gather, of some parts of gradients; and the seconds that it takes."""

    gathers: bool
    parts: tuple[int, ...]
    cost_s: float


class _Order(NamedTuple):
    """An order of both passes, the release times by tensor, and when updates run."""

    passes: tuple[int, ...]
    release_s: list[float]
    in_idle_time: WorkConserving


class _State(NamedTuple):
    """Halves in an order of computation, and the seconds of the iteration."""

    seconds: float
    halves: tuple[_Half, ...]
    order: _Order


def move_halves(problem: Problem, start: Plan, enough_s: float, budget: Budget) -> Plan:
    """The best plan found from this one, until one takes `enough_s`, or rounds or budget are spent."""
    search = _Search(problem, start, enough_s, budget)
    return search.plan(search.run(_CHANGES * problem.rounds))


class _Search:
    def __init__(self, problem: Problem, start: Plan, enough_s: float, budget: Budget) -> None:
        workload = self.workload = problem.workload
        self.problem, self.enough_s, self.budget = problem, enough_s, budget
        self.rng, self.places = random.Random(problem.seed), Places(workload, anywhere=True)
        self.in_idle_time = WorkConserving(workload)
        self.parts, in_message = _parts(start, workload)
        tensor_id = Period.of(workload).tensor_id
        self.tensor = [tensor_id[part.tensor] for part in self.parts]
        self.state_s = _OP_S * len(workload.ops) + _PART_S * 2 * len(self.parts)
        halves = []
        for message in start.messages:
            parts = in_message(message)
            if message.kind not in ("all_gather", "pull"):
                halves.append(self._half(False, parts))
            if message.kind not in ("reduce_scatter", "push"):
                halves.append(self._half(True, parts))
        passes = (op for op in start.op_order or workload.iteration_order() if workload.ops[op].phase != "optimizer")
        self.start = self._state(tuple(halves), self._order(tuple(passes)))

    def run(self, changes: int) -> _State:
        """The best state found in so many changes from each temperature."""
        best = self.start
        for k, heat in enumerate(_HEATS):
            state = best
            part = self.budget.part(1 / (len(_HEATS) - k))
            count = int(min(changes, part.work / self.state_s))
            for done in range(count):
                if best.seconds <= self.enough_s or part.spent:
                    break
                changed = self._changed(state)
                if changed.seconds <= state.seconds + heat * best.seconds * (1 - done / count) * self.rng.random():
                    state = changed
                    if state.seconds < best.seconds:
                        best = state
        return best

    def plan(self, state: _State) -> Plan:
        """The plan of a state; a half that is gathered at once becomes an all-reduce."""
        messages: list[Message] = []
        for half in state.halves:
            kind: Kind = "all_gather" if half.gathers else "reduce_scatter"
            slices = tuple(_joined(self.parts[part] for part in sorted(half.parts)))
            if half.gathers and messages and messages[-1] == Message(slices, "reduce_scatter"):
                messages[-1] = Message(slices)
            else:
                messages.append(Message(slices, kind))
        fitted = self.problem.collectives.fit(messages)
        plan = compose("legato", fitted, self.workload, self.problem.cluster, forward_overlap=True)
        op_order, _ = state.order.in_idle_time(self._arrival_s(state.halves, state.order))
        return msgspec.structs.replace(plan, op_order=op_order)

    def _half(self, gathers: bool, parts: Sequence[int]) -> _Half:
        nbytes = sum([self.parts[part].stop - self.parts[part].start for part in parts])
        return _Half(gathers, tuple(parts), self.problem.collectives.half_s(nbytes))

    def _order(self, passes: tuple[int, ...]) -> _Order:
        return _Order(passes, times_in_order(self.workload, passes)[0], self.in_idle_time.in_order(passes))

    def _state(self, halves: tuple[_Half, ...], order: _Order) -> _State:
        self.budget.spend(self.state_s)
        arrival_s = self._arrival_s(halves, order)
        seconds = max(order.in_idle_time(arrival_s)[1], *arrival_s) if arrival_s else math.inf
        return _State(seconds, halves, order)

    def _arrival_s(self, halves: Sequence[_Half], order: _Order) -> list[float]:
        """When each tensor has arrived; empty if something would be gathered before it is scattered."""
        arrival_s = [0.0] * len(order.release_s)
        scattered = [False] * len(self.parts)
        now = 0.0
        for gathers, parts, cost_s in halves:
            if gathers:
                now += cost_s
                for part in parts:
                    if not scattered[part]:
                        return []
                    arrival_s[self.tensor[part]] = now
            else:
                for part in parts:
                    scattered[part] = True
                    ready_s = order.release_s[self.tensor[part]]
                    if ready_s > now:
                        now = ready_s
                now += cost_s
        return arrival_s

    def _changed(self, state: _State) -> _State:
        choice = self.rng.random()
        if choice < _MOVE_OP:
            passes = self.places.moved(state.order.passes, self.rng)
            return state if passes is None else self._state(state.halves, self._order(passes))
        halves = list(state.halves)
        if choice < _MOVE_HALF:
            half = halves.pop(self.rng.randrange(len(halves)))
            halves.insert(self.rng.randint(0, len(halves)), half)
        elif choice < _MOVE_PARTS:
            self._move_parts(halves, merge=False)
        elif choice < _DIVIDE:
            self._divide(halves)
        else:
            self._move_parts(halves, merge=True)
        return self._state(tuple(halves), state.order)

    def _move_parts(self, halves: list[_Half], *, merge: bool) -> None:
        """Move some parts of a half to another one of its kind, or all of them to `merge` the two."""
        rng = self.rng
        first = rng.randrange(len(halves))
        gathers, parts, _ = halves[first]
        others = [k for k, half in enumerate(halves) if half.gathers == gathers and k != first]
        if not others:
            return
        other = rng.choice(others)
        moved = set(parts if merge else rng.sample(parts, rng.randint(1, min(_PARTS, len(parts)))))
        halves[other] = self._half(gathers, [*halves[other].parts, *(part for part in parts if part in moved)])
        if len(moved) < len(parts):
            halves[first] = self._half(gathers, [part for part in parts if part not in moved])
        else:
            halves.pop(first)

    def _divide(self, halves: list[_Half]) -> None:
        """Divide a half of several parts, and move some of it."""
        rng = self.rng
        place = rng.randrange(len(halves))
        gathers, parts, _ = halves[place]
        if len(parts) > 1:
            mixed = rng.sample(parts, len(parts))
            cut = rng.randint(1, len(parts) - 1)
            halves[place] = self._half(gathers, mixed[:cut])
            halves.insert(rng.randint(0, len(halves)), self._half(gathers, mixed[cut:]))


def _parts(plan: Plan, workload: Workload) -> tuple[list[Slice], Callable[[Message], list[int]]]:
    """The parts into which the messages of a plan partition the tensors, and those that a message has, by index."""
    cuts: dict[str, set[int]] = {tensor.name: set() for tensor in workload.tensors}
    for message in plan.messages:
        for piece in message.slices:
            cuts[piece.tensor] |= {piece.start, piece.stop}
    parts = [Slice(name, start, stop) for name, at in cuts.items() for start, stop in pairwise(sorted(at))]
    index = {(part.tensor, part.start): k for k, part in enumerate(parts)}

    def of(message: Message) -> list[int]:
        return [
            index[piece.tensor, start]
            for piece in message.slices
            for start in sorted(cuts[piece.tensor])
            if piece.start <= start < piece.stop
        ]

    return parts, of


def _joined(parts: Iterable[Slice]) -> Iterator[Slice]:
    """The same bytes in as few slices as possible; the parts of a tensor come one after another."""
    last = None
    for part in parts:
        if last and last.tensor == part.tensor and last.stop == part.start:
            last = Slice(last.tensor, last.start, part.stop)
        else:
            if last:
                yield last
            last = part
    if last:
        yield last
