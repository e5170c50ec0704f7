"""What FSDP2 does with a wrapping: its collectives in order, the time of a step, and the memory at each moment.

These are the rules of `torch.distributed.fsdp.fully_shard` (torch 2.13), in the order in which the host issues work.
A piece of work starts after the piece before it in its stream, after the events for which its stream was told to
wait, and, if it is a collective, after the one that was issued before it on the same communicator. Gathers and
reduce-scatters share a communicator (gathers inside a host have their own), so there is no queue to search: one pass
over the program gives every time.
Memory does not depend on times: buffers come and go in the order of the program.

docs/fully_sharded.md has the rules in words, and what they leave out. Units: seconds and bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from legato.core.errors import InputError
from legato.core.program import Action, Communication, Compute, Lane, Operation, Program, Start, Wait
from legato.core.text import shorten
from legato.core.timeline import Span, SpanKind, Timeline
from legato.core.wrapping import Sync, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.units import Precision, Unit

__all__ = ["Piece", "Step", "program_of", "resolve", "run"]


class Piece(NamedTuple):
    """A collective or a computation, with the index of its group among `resolve`'s groups."""

    kind: str  # gather | copy_out | forward | backward | reduce_scatter | all_reduce
    group: int
    start_s: float
    end_s: float
    nbytes: int = 0


class Step(NamedTuple):
    """One step of training: `seconds` without the optimizer, the most bytes allocated at once, and its pieces."""

    seconds: float
    peak_nbytes: int
    pieces: list[Piece]

    def timeline(self, units: Sequence[Unit], wrapping: Wrapping) -> Timeline:
        """What one rank does, drawn from the beginning of the forward pass."""
        groups = [", ".join(group.modules) for group in wrapping.groups] + ["root"]
        spans = []
        for piece in self.pieces:
            if piece.kind in ("forward", "backward"):
                phase: SpanKind = "forward" if piece.kind == "forward" else "backward"
                spans.append(Span(0, "compute", units[piece.group].path, piece.start_s, piece.end_s, phase))
            elif piece.kind != "copy_out":
                name = f"{piece.kind.replace('_', '-')} {shorten(groups[piece.group])}"
                lane = "replicas" if piece.kind == "all_reduce" else "network"
                spans.append(Span(0, lane, name, piece.start_s, piece.end_s, "message", piece.nbytes))
        return Timeline(wrapping.name, "predicted", self.seconds, tuple(spans))

    def order(self) -> list[tuple[str, int]]:
        """The gathers, copies out of them and reduce-scatters, in the order in which they are issued."""
        return [(piece.kind, piece.group) for piece in self.pieces if piece.kind not in ("forward", "backward")]


class Resolved(NamedTuple):
    """A group with the units that it holds, and the units around which its hooks run."""

    units: tuple[int, ...]
    first: int
    last: int
    reshard: bool | int
    in_backward: bool
    gathered: int
    scattered: int
    gradients: int


def resolve(units: Sequence[Unit], wrapping: Wrapping) -> list[Resolved]:
    """The groups of a wrapping with their bytes: the root's is the last one, if modules are left for it.

    Raises `InputError` on a module that is none of the units.
    """
    place = {unit.path: k for k, unit in enumerate(units)}
    groups = []
    left = set(range(len(units)))
    for group in wrapping.groups:
        for path in group.modules:
            if path not in place:
                raise InputError(f"groups: {path!r} (expected a module of the workload)")
        held = tuple(sorted(place[path] for path in group.modules))
        left -= set(held)
        reshard = False if wrapping.sync == "gathered-once" else group.reshard
        groups.append(_resolved(units, held, held[0], held[-1], reshard, group.in_backward))
    if any(units[u].gathered for u in left):
        groups.append(_resolved(units, tuple(sorted(left)), 0, len(units) - 1, False, True))
    return groups


def _resolved(
    units: Sequence[Unit], held: tuple[int, ...], first: int, last: int, reshard: bool | int, in_backward: bool
) -> Resolved:
    gathered, scattered, gradients = (sum(sizes) for sizes in zip(*(_sizes(units[u]) for u in held), strict=True))
    return Resolved(held, first, last, reshard, in_backward, gathered, scattered, gradients)


def _sizes(unit: Unit) -> tuple[int, int, int]:
    return unit.gathered, unit.scattered, unit.gradients


def run(
    units: Sequence[Unit],
    wrapping: Wrapping,
    costs: Costs,
    precision: Precision,
    *,
    ends_backward: bool = True,
) -> Step:
    """One step of training under a wrapping, from the end of the optimizer to the end of the last reduction.

    With `ends_backward` false, `set_is_last_backward(False)` holds for all micro-batches but the last.
    """
    return _Run(units, wrapping, costs, precision, ends_backward).step()


def program_of(
    units: Sequence[Unit],
    wrapping: Wrapping,
    costs: Costs,
    precision: Precision,
    *,
    per_host: int,
    update_s: float = 0.0,
) -> Program:
    """The step that `run` predicts as a program, for ranks of which `per_host` neighbours share a host.

    The optimizer takes `update_s` seconds at the end. The program takes as long, but that gathers inside a host may run
    during others of the network here; and the host's own time is left out. Raises `InputError` with replicas, whose
    sums begin where others end.
    """
    if wrapping.replicas > 1:
        raise InputError(f"replicas: {wrapping.replicas} as a program (expected 1)")
    made = _Run(units, wrapping, costs, precision, ends_backward=True)
    made.step()
    made.actions.append(Compute(update_s, "optimizer"))
    everyone = (tuple(range(costs.ranks)),)
    in_hosts = tuple(tuple(range(first, first + per_host)) for first in range(0, costs.ranks, per_host))
    communications = tuple(
        # A program on more data-parallel workers has more members in groups of the kind data.
        Communication(*(("host", operation, in_hosts) if in_host else ("data", operation, everyone)), nbytes)
        for _, operation, nbytes, in_host in made.collectives
    )
    starts: dict[int, list[Start]] = {}
    for number, (place, *_) in enumerate(made.collectives):
        starts.setdefault(place, []).append(Start(number))
    actions: list[Action] = []
    for place, action in enumerate(made.actions):
        actions += [*starts.get(place, []), action]
    return Program(wrapping.name, (Lane(everyone[0], tuple(actions)),), communications)


class _Shared:
    """What a group has at some moment of the program."""

    def __init__(self) -> None:
        self.pending: float | None = None  # when its gather ends, until its copy out is issued
        self.unsharded = False
        self.in_host = False  # each rank of a host has a part
        self.resharded = 0.0, 0  # when these parts are ready, and where in the program
        self.accumulated = False  # whole gradients of earlier micro-batches
        self.reduced_s = 0.0  # when its last reduction ends
        self.gather = self.reduction = -1  # the numbers of its last collectives
        self.passed: list[int] = []  # its places in the order of the forward passes


class _Run:
    """The clocks, the memory and the program of one step."""

    def __init__(
        self, units: Sequence[Unit], wrapping: Wrapping, costs: Costs, precision: Precision, ends_backward: bool
    ) -> None:
        self.units, self.wrapping, self.costs, self.ends_backward = units, wrapping, costs, ends_backward
        self.casts = precision.gathered != precision.stored
        self.upcasts = precision.reduced != precision.gathered
        self.groups = resolve(units, wrapping)
        self.root = len(self.groups) - 1 if len(self.groups) > len(wrapping.groups) else -1
        self.group_of = {u: k for k, group in enumerate(self.groups) for u in group.units}
        self.state = [_Shared() for _ in self.groups]
        self.host = self.compute = self.wire = self.replica_wire = 0.0
        self.gather_stream = self.scatter_stream = self.gather_after = 0.0
        # The group whose gather's output is still held, and since when, and where in the program.
        self.last_copied: tuple[int, float, int] | None = None
        # Inputs of reduce-scatters: when these end, their bytes and numbers.
        self.buffers: deque[tuple[float, int, int]] = deque()
        self.forward_order: list[int] = []
        self.nbytes = self.peak = 0
        self.pieces: list[Piece] = []
        # The same as a program: what the compute stream does; and each collective, with its place among these at which
        # it can begin.
        self.actions: list[Compute | Wait] = []
        self.collectives: list[tuple[int, Operation, int, bool]] = []
        self.gather_from = self.wire_from = 0  # as `gather_after` and `wire`
        self.hook_s = costs.host_s / 4  # before and after each of both passes
        self.first, self.last = self._by_unit()

    def _by_unit(self) -> tuple[list[list[int]], list[list[int]]]:
        """By unit, the groups that begin before it, and those that end after it; the root around all others."""
        first: list[list[int]] = [[] for _ in self.units]
        last: list[list[int]] = [[] for _ in self.units]
        for k in sorted(range(len(self.groups)), key=lambda k: (k != self.root, k)):
            first[self.groups[k].first].append(k)
            last[self.groups[k].last].insert(0, k)
        return first, last

    def step(self) -> Step:
        sync: Sync = self.wrapping.sync
        for k in range(self.wrapping.micro_batches):
            final = k == self.wrapping.micro_batches - 1
            self._gather_later(self.compute, len(self.actions))  # the root waits for the optimizer
            self._forward()
            self._backward(
                reduce=final or sync != "last",
                everywhere=final or sync in ("each", "gathered-once"),
                reshard=final or sync != "gathered-once",
                ends=final or self.ends_backward,
            )
        return Step(self.compute, self.peak, self.pieces)

    # The forward pass

    def _forward(self) -> None:
        for u, unit in enumerate(self.units):
            for k in self.first[u]:
                self._before_forward(k)
            self._compute("forward", u, unit.forward_s)
            for k in self.last[u]:
                self._after_forward(k)
        self._release_copied()

    def _before_forward(self, k: int) -> None:
        self._hook()
        self._gather(k)
        self._copy_out(k, forward=True)
        if k != self.root and self.wrapping.forward_prefetch:
            # the groups are in the order of the wrapping, which is that of the forward pass
            most = len(self.wrapping.groups)
            for target in range(k + 1, min(k + 1 + self.wrapping.forward_prefetch, most)):
                self._gather(target)

    def _after_forward(self, k: int) -> None:
        self._hook()
        group, state = self.groups[k], self.state[k]
        if group.reshard:
            if group.reshard is not True:
                self._allocate(group.gathered // group.reshard)
                state.in_host, state.resharded = True, (self.compute, len(self.actions))
            self._free(group.gathered)
            state.unsharded = False
        state.passed.append(len(self.forward_order))
        self.forward_order.append(k)

    # The backward pass

    def _backward(self, *, reduce: bool, everywhere: bool, reshard: bool, ends: bool) -> None:
        done = set()
        trained = [u for u, unit in enumerate(self.units) if unit.trained]
        reached = min(trained, default=len(self.units))  # no gradient is needed before it
        if trained and self.root >= 0:
            self._before_backward(self.root)
        for u in reversed(range(reached, len(self.units))):
            if not (self.units[u].trained or self.units[u].input_needs_gradient):
                continue  # a frozen embedding: its output needs no gradient
            self._unit_backward(u)
            for k in reversed(self.first[u]):
                if self.units[u].input_needs_gradient and u > reached and k != self.root:
                    self._after_backward(k, reduce, everywhere, reshard)
                    done.add(k)
        for k in self._by_name():
            if k not in done:
                self._after_backward(k, reduce, everywhere, reshard)
        if ends:
            self._end_backward()

    def _unit_backward(self, u: int) -> None:
        for k in reversed(self.last[u]):
            if k != self.root:
                self._before_backward(k)
        self._compute("backward", u, self.units[u].backward_s, gradients=self._new_gradients(u))

    def _new_gradients(self, u: int) -> int:
        """The bytes of a unit's gradients, unless they are added to those of earlier micro-batches one by one."""
        k = self.group_of.get(u)  # no group if it has no parameters
        adds = k is not None and self.state[k].accumulated and not self.upcasts
        return 0 if adds else self.units[u].gradients

    def _by_name(self) -> list[int]:
        """All groups in the order of `named_modules()`: the root first, the others as their first modules are named."""
        named = sorted((k for k in range(len(self.groups)) if k != self.root), key=lambda k: self._named(k))
        return ([self.root] if self.root >= 0 else []) + named

    def _named(self, k: int) -> int:
        return min(self.units[u].named for u in self.groups[k].units)

    def _before_backward(self, k: int) -> None:
        self._hook()
        if self.groups[k].in_backward:
            self._gather(k)
        self._copy_out(k, forward=False)
        passed, depth = self.state[k].passed, self.wrapping.backward_prefetch
        named = range(k - 1, max(k - 1 - depth, -1), -1) if k != self.root else ()
        for target in named:
            self._prefetch(target)
        if not named and passed:
            place = passed.pop()
            if place > 0:
                self._prefetch(self.forward_order[place - 1])

    def _prefetch(self, k: int) -> None:
        if self.groups[k].in_backward:
            self._gather(k)

    def _after_backward(self, k: int, reduce: bool, everywhere: bool, reshard: bool) -> None:
        self._hook()
        group, state = self.groups[k], self.state[k]
        if reshard and state.unsharded:
            self._free(group.gathered)
            state.unsharded = False
        if not reduce:
            if self.upcasts and group.gradients:
                self._free(group.gradients)
                self._allocate(0 if state.accumulated else group.scattered)
            state.accumulated = group.gradients > 0
            return
        while len(self.buffers) >= self.wrapping.buffers:
            self._reduced(*self.buffers.popleft())
        if not group.gradients:
            return
        self._wait(state.reduction, state.reduced_s)
        self._copy(group.scattered)
        whole = group.gradients
        if state.accumulated and self.upcasts:
            self._free(group.gradients)  # they are added to those of earlier micro-batches
            whole = group.scattered
        state.accumulated = False
        self._allocate(group.scattered)
        self._free(whole)
        self._reduce(k, everywhere)

    def _reduce(self, k: int, everywhere: bool) -> None:
        group, state = self.groups[k], self.state[k]
        start = max(self.compute, self.scatter_stream, self.wire, self.host)
        end = self.wire = self.scatter_stream = start + self.costs.scatter.cost(group.scattered)
        self.pieces.append(Piece("reduce_scatter", k, start, end, group.scattered))
        if not state.reduced_s:
            self._allocate(group.scattered // self.costs.ranks)  # the shard of the gradients, which stays
        state.reduction = self._begun("reduce_scatter", len(self.actions), group.scattered)
        self.buffers.append((end, group.scattered, state.reduction))
        if self.costs.all_reduce is not None and everywhere:
            part = group.scattered // self.costs.ranks
            start = max(end, self.replica_wire)
            end = self.replica_wire = start + self.costs.all_reduce.cost(part)
            self.pieces.append(Piece("all_reduce", k, start, end, part))
        state.reduced_s = end

    def _end_backward(self) -> None:
        for state in self.state:
            self._wait(state.reduction, state.reduced_s)
            if state.pending is not None:
                self._wait(state.gather, state.pending)
                self._free(self.groups[self.state.index(state)].gathered)
                state.pending = None
            state.passed.clear()
        self.forward_order.clear()
        for end, nbytes, number in self.buffers:
            self._reduced(end, nbytes, number)
        self.buffers.clear()

    # What both passes do

    def _gather(self, k: int) -> None:
        """Issue the gather of a group, unless it is pending or not needed."""
        group, state = self.groups[k], self.state[k]
        if state.pending is not None or state.unsharded:
            return
        if state.in_host:  # on a communicator of its own
            self._gather_later(*state.resharded)
            start = max(self.gather_after, self.gather_stream, self.host)
            end = start + self.costs.gather_in_host.cost(group.gathered)
        else:
            start = max(self.gather_after, self.gather_stream, self.wire, self.host)
            end = self.wire = start + self.costs.gather.cost(group.gathered)
        state.pending = self.gather_stream = end
        state.gather = self._begun("all_gather", self.gather_from, group.gathered, in_host=state.in_host)
        cast = group.gathered // self.costs.ranks if self.casts else 0  # the shard, in the gathered precision
        self._allocate(cast)
        self._allocate(group.gathered)
        self._free(cast)
        self.pieces.append(Piece("gather", k, start, end, group.gathered))

    def _copy_out(self, k: int, *, forward: bool) -> None:
        group, state = self.groups[k], self.state[k]
        if state.pending is None:
            return
        held = None
        if forward and self.last_copied is not None:
            held, since, place = self.last_copied
            self._gather_later(since, place)
            self.last_copied = None
        self._wait(state.gather, state.pending)
        start = self.compute
        self._copy(group.gathered)
        self.pieces.append(Piece("copy_out", k, start, self.compute, group.gathered))
        self._allocate(group.gathered)
        if state.in_host:
            self._free(group.gathered // int(group.reshard))
        state.pending, state.unsharded, state.in_host = None, True, False
        if held is not None:
            self._free(self.groups[held].gathered)
        if forward:
            self.last_copied = k, self.compute, len(self.actions)
        else:
            self._gather_later(self.compute, len(self.actions))
            self._free(group.gathered)

    def _release_copied(self) -> None:
        """The root's forward pass ends: the last output of a gather is free."""
        if self.last_copied is not None:
            held, since, place = self.last_copied
            self._gather_later(since, place)
            self._free(self.groups[held].gathered)
            self.last_copied = None

    def _compute(self, kind: str, u: int, seconds: float, *, gradients: int = 0) -> None:
        start = max(self.compute, self.host)
        self.compute = start + seconds
        self.pieces.append(Piece(kind, u, start, self.compute))
        self.actions.append(Compute(seconds, self.units[u].path))
        self._allocate(gradients)

    def _copy(self, nbytes: int) -> None:
        if seconds := self.costs.copy_s_per_byte * nbytes:
            self.compute += seconds
            self.actions.append(Compute(seconds, "copy"))

    def _wait(self, number: int, end: float) -> None:
        """The compute stream waits for a collective, if there is one."""
        self.compute = max(self.compute, end)
        if number >= 0:
            self.actions.append(Wait(number))

    def _reduced(self, end: float, nbytes: int, number: int) -> None:
        self._wait(number, end)
        self._free(nbytes)

    def _gather_later(self, moment: float, place: int) -> None:
        """Gathers that are issued from now on begin at this moment, and at this place of the program, or later."""
        self.gather_after, self.gather_from = max(self.gather_after, moment), max(self.gather_from, place)

    def _begun(self, operation: Operation, place: int, nbytes: int, *, in_host: bool = False) -> int:
        """Note a collective, and return its number."""
        if not in_host:
            place = self.wire_from = max(self.wire_from, place)
        self.collectives.append((place, operation, nbytes, in_host))
        return len(self.collectives) - 1

    def _hook(self) -> None:
        self.host += self.hook_s

    def _allocate(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)

    def _free(self, nbytes: int) -> None:
        self.nbytes -= nbytes
