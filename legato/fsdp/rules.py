"""The rules of FSDP2 for a wrapping: its collectives in order, the time of a step, and the memory.

The module has the rules of `torch.distributed.fsdp.fully_shard` (torch 2.13), in the order in which the host issues
work. The rules produce a program, which `legato.core.program.clock` runs. A piece of work starts after the previous
piece in its stream and after the events for which its stream waits. A collective also starts after the collective that
was issued before it on the same communicator. Gathers and reduce-scatters share a communicator. Gathers inside a host
have a communicator of their own, but run in the same stream as all other gathers. Memory does not depend on times:
buffers are allocated and freed in the order of the program.

docs/fully_sharded.md explains the rules and what they leave out. Units: seconds and bytes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from legato.core.errors import InputError
from legato.core.program import Action, Communication, Compute, Lane, Operation, Program, Start, Wait, clock
from legato.core.text import shorten
from legato.core.timeline import Span, SpanKind, Timeline
from legato.core.wrapping import Sync, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.units import Precision, Unit

__all__ = ["Piece", "Step", "program_of", "resolve", "run"]


class Piece(NamedTuple):
    """A collective or a computation, with the index of its group in the list that `resolve` returns."""

    kind: str  # gather | copy_out | forward | backward | reduce_scatter | all_reduce
    group: int
    start_s: float
    end_s: float
    nbytes: int = 0


class Step(NamedTuple):
    """A training step: its `seconds` without the optimizer, the peak of allocated bytes, and its pieces of work."""

    seconds: float
    peak_nbytes: int
    pieces: list[Piece]

    def timeline(self, units: Sequence[Unit], wrapping: Wrapping) -> Timeline:
        """Return one rank's timeline, starting with the forward pass."""
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
        """Return the gathers, the copies of gathered parameters and the reduce-scatters, in the order of issue."""
        return [(piece.kind, piece.group) for piece in self.pieces if piece.kind not in ("forward", "backward")]


class Resolved(NamedTuple):
    """A group with its units; its hooks run before the `first` unit and after the `last` unit."""

    units: tuple[int, ...]
    first: int
    last: int
    reshard: bool | int
    in_backward: bool
    gathered: int
    scattered: int
    gradients: int


def resolve(units: Sequence[Unit], wrapping: Wrapping) -> list[Resolved]:
    """Return the groups of a wrapping with their bytes; the last group is the root, if it has modules of its own.

    Raises `InputError` on a module that is not a unit.
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
    gathered, scattered, gradients = (sum(sizes) for sizes in zip(*(units[u].sizes for u in held), strict=True))
    return Resolved(held, first, last, reshard, in_backward, gathered, scattered, gradients)


def run(units: Sequence[Unit], wrapping: Wrapping, costs: Costs, precision: Precision) -> Step:
    """Return a step of training under a wrapping, from the end of the optimizer to the end of the last reduction."""
    return _Rules(units, wrapping, costs, precision).step()


def program_of(
    units: Sequence[Unit],
    wrapping: Wrapping,
    costs: Costs,
    precision: Precision,
    *,
    per_host: int,
    update_s: float = 0.0,
) -> Program:
    """Return, as a program, the step that `run` predicts, with `per_host` neighbouring ranks on each host.

    The optimizer takes `update_s` seconds at the end. The CPU time of the host is left out.
    """
    made = _Rules(units, wrapping, msgspec.structs.replace(costs, host_s=0.0), precision)
    made.write()
    made.actions.append(Compute(update_s, "optimizer"))
    workers = range(costs.ranks * wrapping.replicas)
    shards, hosts = (
        tuple(tuple(workers[first : first + number]) for first in range(0, len(workers), number))
        for number in (costs.ranks, per_host)
    )
    # With more data-parallel workers, only the groups of the kind `data` have more members.
    groups = {
        "wire": ("data" if wrapping.replicas == 1 else "shard", shards),
        "host": ("host", hosts),
        "replicas": ("data", tuple(zip(*shards, strict=True))),
    }
    communications = tuple(
        Communication(kind, _OPERATIONS[one.kind], members, one.nbytes, after=one.after)
        for one in made.collectives
        for kind, members in [groups[one.line]]
    )
    return Program(wrapping.name, (Lane(tuple(workers), tuple(made.lane())),), communications)


_OPERATIONS: dict[str, Operation] = {
    "gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"
}  # fmt: skip


class _Issued(NamedTuple):
    """A `Piece` before its times are known; a place is a position in the list of the compute stream's actions.

    A collective has a `number`. A collective begins when the compute stream has reached its `place`, the previous
    collective of its `line` has ended, and so has the collective with the number `after`. A computation begins at its
    `place` and ends at `until`.
    """

    kind: str
    group: int
    nbytes: int
    place: int
    until: int = 0
    number: int = -1
    line: str = ""  # wire, host or replicas; or issue, for the host's issue of a computation
    after: int | None = None


class _Shared:
    """The state of a group at some moment of the program."""

    def __init__(self) -> None:
        self.pending: int | None = None  # the number of its gather, until its copy out is issued
        self.unsharded = False
        self.in_host = False  # whether each rank of a host has a part
        self.resharded = 0  # the place in the program at which the parts in the host are ready
        self.accumulated = False  # whether it has whole gradients of earlier micro-batches
        self.reduction: int | None = None  # the number of its last reduction
        self.passed: list[int] = []  # its places in the order of the forward passes


class _Rules:
    """The program and the memory of one step, under construction."""

    def __init__(self, units: Sequence[Unit], wrapping: Wrapping, costs: Costs, precision: Precision) -> None:
        self.units, self.wrapping, self.costs = units, wrapping, costs
        self.casts = precision.gathered != precision.stored
        self.upcasts = precision.reduced != precision.gathered
        self.groups = resolve(units, wrapping)
        self.root = len(self.groups) - 1 if len(self.groups) > len(wrapping.groups) else -1
        self.group_of = {u: k for k, group in enumerate(self.groups) for u in group.units}
        self.state = [_Shared() for _ in self.groups]
        # The group that was copied out last, with the output of its gather still allocated, and its place in the
        # program.
        self.last_copied: tuple[int, int] | None = None
        # The reduce-scatters whose inputs are allocated: their numbers and bytes.
        self.buffers: deque[tuple[int, int]] = deque()
        self.forward_order: list[int] = []
        self.nbytes = self.peak = 0
        self.issued: list[_Issued] = []
        self.collectives: list[_Issued] = []
        # The actions of the compute stream. If the host's work takes time, a second list has this work and the
        # collectives that the host starts.
        self.actions: list[Compute | Wait] = []
        self.host: list[Compute | Start] = []
        # The earliest places of the next collective on the wire and of the next gather, and the number of the last
        # gather.
        self.wire_from = self.gather_from = 0
        self.last_gather: int | None = None
        self.hook_s = costs.host_s / 4  # the time of each of four hooks: before and after both passes
        self.first, self.last = self._by_unit()

    def _by_unit(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the groups by their first units, and the groups by their last units, with the root outermost."""
        first: list[list[int]] = [[] for _ in self.units]
        last: list[list[int]] = [[] for _ in self.units]
        for k in sorted(range(len(self.groups)), key=lambda k: (k != self.root, k)):
            first[self.groups[k].first].append(k)
            last[self.groups[k].last].insert(0, k)
        return first, last

    def write(self) -> None:
        sync: Sync = self.wrapping.sync
        for k in range(self.wrapping.micro_batches):
            final = k == self.wrapping.micro_batches - 1
            self._gather_later(len(self.actions))  # the root waits for the optimizer
            self._forward()
            self._backward(
                reduce=final or sync != "last",
                everywhere=final or sync in ("each", "gathered-once"),
                reshard=final or sync != "gathered-once",
            )

    def lane(self) -> list[Action]:
        """Return the actions of the compute stream; each collective starts as early as its place allows."""
        starts: dict[int, list[Start]] = defaultdict(list)
        for one in self.collectives:
            starts[one.place] += [Start(one.number)] if one.line != "issue" else []
        return [part for place, action in enumerate(self.actions) for part in (*starts[place], action)]

    def step(self) -> Step:
        self.write()
        lane, costs = self.lane(), self.costs
        cost_of = {"reduce_scatter": costs.scatter, "all_reduce": costs.all_reduce, "host": costs.gather_in_host}
        priced = [(one, cost_of.get(one.kind) or cost_of.get(one.line) or costs.gather) for one in self.collectives]
        times = clock(
            [lane, self.host],
            [one.line for one in self.collectives],
            [cost.cost(one.nbytes) if one.line != "issue" else 0.0 for one, cost in priced],
            {one.number: one.after for one in self.collectives if one.after is not None},
        )
        ends = [end for action, end in zip(lane, times.actions[0], strict=True) if not isinstance(action, Start)]
        self.moments = [0.0, *ends]  # the time at each place of the program
        pieces = []
        for one in self.issued:
            begin, end = self.moments[one.place], self.moments[one.until]
            if one.number >= 0:
                begin, end = times.begins[one.number], times.ends[one.number]
            pieces.append(Piece(one.kind, one.group, begin, end, one.nbytes))
        return Step(self.moments[-1], self.peak, pieces)

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
            # the groups are in the order of the wrapping, which is the order of the forward pass
            most = len(self.wrapping.groups)
            for target in range(k + 1, min(k + 1 + self.wrapping.forward_prefetch, most)):
                self._gather(target)

    def _after_forward(self, k: int) -> None:
        self._hook()
        group, state = self.groups[k], self.state[k]
        if group.reshard:
            if group.reshard is not True:
                self._allocate(group.gathered // group.reshard)
                state.in_host, state.resharded = True, len(self.actions)
            self._free(group.gathered)
            state.unsharded = False
        state.passed.append(len(self.forward_order))
        self.forward_order.append(k)

    # The backward pass

    def _backward(self, *, reduce: bool, everywhere: bool, reshard: bool) -> None:
        done = set()
        trained = [u for u, unit in enumerate(self.units) if unit.trained]
        reached = min(trained, default=len(self.units))  # the units before this one need no gradient
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
        self._end_backward()

    def _unit_backward(self, u: int) -> None:
        for k in reversed(self.last[u]):
            if k != self.root:
                self._before_backward(k)
        self._compute("backward", u, self.units[u].backward_s, gradients=self._new_gradients(u))

    def _new_gradients(self, u: int) -> int:
        """Return the bytes of memory for a unit's gradients, which is 0 if they are added to existing gradients."""
        k = self.group_of.get(u)  # None if the unit has no parameters
        adds = k is not None and self.state[k].accumulated and not self.upcasts
        return 0 if adds else self.units[u].gradients

    def _by_name(self) -> list[int]:
        """Return the groups in the order of their first modules in `named_modules()`, the root first."""
        named = sorted(
            (k for k in range(len(self.groups)) if k != self.root),
            key=lambda k: min(self.units[u].named for u in self.groups[k].units),
        )
        return ([self.root] if self.root >= 0 else []) + named

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
        self._wait_for_buffers(self.wrapping.buffers - 1)
        if not group.gradients:
            return
        self._wait(state.reduction)
        self._copy(group.scattered)
        whole = group.gradients
        if state.accumulated and self.upcasts:
            self._free(group.gradients)  # they are added to the gradients of earlier micro-batches
            whole = group.scattered
        state.accumulated = False
        self._allocate(group.scattered)
        self._free(whole)
        self._reduce(k, everywhere)

    def _reduce(self, k: int, everywhere: bool) -> None:
        group, state = self.groups[k], self.state[k]
        if state.reduction is None:
            self._allocate(group.scattered // self.costs.ranks)  # the shard of the gradients, which stays allocated
        state.reduction = number = self._begin("reduce_scatter", "wire", k, group.scattered)
        self.buffers.append((number, group.scattered))
        if self.costs.all_reduce is not None and everywhere:
            state.reduction = self._begin("all_reduce", "replicas", k, group.scattered // self.costs.ranks, number)

    def _end_backward(self) -> None:
        for k, state in enumerate(self.state):
            self._wait(state.reduction)
            if state.pending is not None:
                self._wait(state.pending)
                self._free(self.groups[k].gathered)
                state.pending = None
            state.passed.clear()
        self.forward_order.clear()
        self._wait_for_buffers(0)

    def _wait_for_buffers(self, most: int) -> None:
        """Wait until at most `most` reductions are in flight, and free the inputs of the finished reductions."""
        while len(self.buffers) > most:
            number, nbytes = self.buffers.popleft()
            self._wait(number)
            self._free(nbytes)

    # Work in both passes

    def _gather(self, k: int) -> None:
        """Issue the gather of a group, unless the gather is pending or not needed."""
        group, state = self.groups[k], self.state[k]
        if state.pending is not None or state.unsharded:
            return
        if state.in_host:
            self._gather_later(state.resharded)
        line = "host" if state.in_host else "wire"
        state.pending = self.last_gather = self._begin("gather", line, k, group.gathered, self.last_gather)
        # the shard, in the precision in which it is gathered
        cast = group.gathered // self.costs.ranks if self.casts else 0
        self._allocate(cast)
        self._allocate(group.gathered)
        self._free(cast)

    def _copy_out(self, k: int, *, forward: bool) -> None:
        group, state = self.groups[k], self.state[k]
        if state.pending is None:
            return
        self._wait(state.pending)
        place = len(self.actions)
        self._copy(group.gathered)
        self.issued.append(_Issued("copy_out", k, group.gathered, place, len(self.actions)))
        self._allocate(group.gathered)
        if state.in_host:
            self._free(group.gathered // int(group.reshard))
        state.pending, state.unsharded, state.in_host = None, True, False
        if forward:
            self._release_copied()
            self.last_copied = k, len(self.actions)
        else:
            self._gather_later(len(self.actions))
            self._free(group.gathered)

    def _release_copied(self) -> None:
        """Free the output of the last copied gather, when the next gather is copied or the forward pass ends."""
        if self.last_copied is not None:
            held, place = self.last_copied
            self._gather_later(place)
            self._free(self.groups[held].gathered)
            self.last_copied = None

    def _compute(self, kind: str, u: int, seconds: float, *, gradients: int = 0) -> None:
        if self.hook_s:
            self._wait(self._collective(_Issued(kind, u, 0, 0, line="issue")))
        self.actions.append(Compute(seconds, self.units[u].path))
        self.issued.append(_Issued(kind, u, 0, len(self.actions) - 1, len(self.actions)))
        self._allocate(gradients)

    def _copy(self, nbytes: int) -> None:
        if seconds := self.costs.copy_s_per_byte * nbytes:
            self.actions.append(Compute(seconds, "copy"))

    def _wait(self, number: int | None) -> None:
        """Let the compute stream wait for a collective, if there is one."""
        if number is not None:
            self.actions.append(Wait(number))

    def _gather_later(self, place: int) -> None:
        """Let all gathers that are issued from now on begin no earlier than this place of the compute stream."""
        self.gather_from = max(self.gather_from, place)

    def _begin(self, kind: str, line: str, k: int, nbytes: int, after: int | None = None) -> int:
        """Issue a collective of a group, and return its number."""
        place = len(self.actions)
        if kind == "gather":
            place = self.gather_from = max(self.gather_from, self.wire_from if line == "wire" else 0)
        elif line == "wire":
            self.wire_from = place
        number = self._collective(_Issued(kind, k, nbytes, place, line=line, after=after))
        self.issued.append(self.collectives[number])
        return number

    def _collective(self, one: _Issued) -> int:
        self.collectives.append(one._replace(number=len(self.collectives)))
        self.host += [Start(self.collectives[-1].number)] if self.hook_s else []
        return self.collectives[-1].number

    def _hook(self) -> None:
        self.host += [Compute(self.hook_s)] if self.hook_s else []

    def _allocate(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)

    def _free(self, nbytes: int) -> None:
        self.nbytes -= nbytes
