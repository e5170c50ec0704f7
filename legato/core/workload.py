"""A workload: the ops and the tensors of one training iteration on one worker."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from typing import Any, Literal

import msgspec

from legato.core.errors import InputError
from legato.core.table import Table
from legato.core.text import count, percent, shorten
from legato.core.timeline import Span, Timeline, draw
from legato.core.units import Int64, format_bytes, format_seconds

__all__ = ["Module", "Op", "Parameter", "Phase", "Tensor", "Workload"]

Phase = Literal["forward", "backward", "optimizer"]
_ORDER: dict[str, int] = {"forward": 0, "backward": 1, "optimizer": 2}
#: The largest time in seconds. Larger values could overflow in later arithmetic.
_LONGEST_S = 1e15
_MOST_ROWS = 10  # in a notebook


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One computation of an iteration. The id of an op is its index in `Workload.ops`.

    `duration_s` is in seconds; `deps` are the ids of the earlier ops whose results the op needs.
    """

    name: str
    phase: Phase
    duration_s: float
    deps: tuple[Int64, ...] = ()

    @property
    def graph(self) -> str:
        """Return the name of the compiled graph that contains the op (`graph 0/backward`), or "" if no graph does."""
        return self.name.rpartition("/")[0] if self.name.startswith("graph ") else ""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A trained parameter and its gradient of `nbytes` bytes.

    `ready_after` is the id of the backward op that produces the gradient. `readers` has the ids of the ops that need
    the gradient's average over all workers: the optimizer ops that apply the average, and the forward ops of the *next*
    iteration that read the updated parameter. A forward op that reads the parameter therefore waits for all optimizer
    ops that update it.
    """

    name: str
    nbytes: Int64
    ready_after: Int64
    readers: tuple[Int64, ...] = ()


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A parameter of a module: its bytes, the bytes of an element, and the number of its rows (its first dimension).

    Fully sharded training divides a parameter by rows. `trained` says whether the parameter gets a gradient.
    """

    name: str
    nbytes: Int64
    rows: Int64
    itemsize: Int64 = 4
    trained: bool = True


class Module(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A module that the forward pass calls, as `fully_shard` sees it; `path` is its name in `named_modules()`.

    `parameters` has the module's own parameters, and also the parameters of inner modules that are never called. A
    parameter that several modules share is listed by the first module that is called; `tied` has the paths of the other
    modules that share it. `calls` is the number of calls of the module in a step, and `named` is its position in
    `named_modules()`. An embedding needs no gradient of its input, and the backward pass does not read its parameters.
    A module *does not reach the loss* if the backward pass computes no gradient of its output, although the module or
    an earlier module has trained parameters.
    """

    path: str
    parameters: tuple[Parameter, ...] = ()
    tied: tuple[str, ...] = ()
    calls: Int64 = 1
    named: Int64 = 0
    input_needs_gradient: bool = True
    read_in_backward: bool = True
    reaches_loss: bool = True


class Workload(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="legato.workload/1",
    dict=True,  # values computed from a workload are cached in it (`iteration_order`, `identity`, `Period`)
):
    """One training iteration on one worker: its ops and its tensors.

    Ops are in the order in which a training step executes them: forward,
    backward, optimizer. Tensors are in the order in which their gradients become
    ready, if the source knows it.

    `modules` has the modules that have parameters (of their own or in inner modules), in the order of their first
    calls. If the source does not know the modules, `modules` is empty. `itemsize` is the number of bytes of an element
    of the gradients.

    `untraced_s` is the time of an iteration without tracing, in seconds (None if it was not measured). `time_scale` is
    the factor by which the measured op times were multiplied so that their sum is `untraced_s` (1 if the times were not
    multiplied).

    Raises `InputError` if an op or tensor refers to a wrong op, or if a number is out of range.
    """

    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    batch_size: Int64 = 1
    device: str = "cpu"
    untraced_s: float | None = None
    time_scale: float = 1.0
    modules: tuple[Module, ...] = ()
    itemsize: Int64 = 4

    def __post_init__(self) -> None:
        if not self.ops:
            raise InputError("ops: none given (expected at least one)")
        if not self.tensors:
            raise InputError("tensors: none given (expected at least one: a model with no parameters?)")
        if self.batch_size < 1:
            raise InputError(f"batch_size: {self.batch_size} (expected at least 1)")
        if not (math.isfinite(self.time_scale) and self.time_scale > 0):
            raise InputError(f"time_scale: {self.time_scale} (expected a finite number above 0)")
        if self.untraced_s is not None and not (math.isfinite(self.untraced_s) and self.untraced_s > 0):
            raise InputError(f"untraced_s: {self.untraced_s} (expected finite seconds above 0)")
        self._check_ops()
        self._check_tensors()
        self._check_modules()

    def _check_ops(self) -> None:
        phase = 0
        for i, op in enumerate(self.ops):
            if not 0 <= op.duration_s <= _LONGEST_S:
                raise InputError(f"ops[{i}].duration_s: {op.duration_s} (expected 0 to {_LONGEST_S:.0e} seconds)")
            if _ORDER[op.phase] < phase:
                raise InputError(
                    f"ops[{i}].phase: {op.phase!r} after a later phase (expected forward, backward, optimizer in order)"
                )
            phase = _ORDER[op.phase]
            for dep in op.deps:
                if not 0 <= dep < i:
                    raise InputError(f"ops[{i}].deps: {dep} (expected the id of an earlier op, 0 to {i - 1})")

    def _check_tensors(self) -> None:
        ops, end = self.ops, len(self.ops)
        names = set()
        for i, tensor in enumerate(self.tensors):
            if tensor.name in names:
                raise InputError(f"tensors[{i}].name: {tensor.name!r} twice (expected a unique name)")
            names.add(tensor.name)
            if tensor.nbytes < 1:
                raise InputError(f"tensors[{i}].nbytes: {tensor.nbytes} (expected at least 1)")
            if not 0 <= tensor.ready_after < end or ops[tensor.ready_after].phase != "backward":
                raise InputError(f"tensors[{i}].ready_after: {tensor.ready_after} (expected the id of a backward op)")
            for reader in tensor.readers:
                if not 0 <= reader < end or ops[reader].phase == "backward":
                    raise InputError(f"tensors[{i}].readers: {reader} (expected ids of forward or optimizer ops)")

    def _check_modules(self) -> None:
        if self.itemsize < 1:
            raise InputError(f"itemsize: {self.itemsize} (expected at least 1)")
        paths = {module.path for module in self.modules}
        if len(paths) < len(self.modules):
            raise InputError("modules: a path twice (expected each module once)")
        for i, module in enumerate(self.modules):
            if module.calls < 1 or module.named < 0:
                raise InputError(
                    f"modules[{i}]: {module.calls} calls, place {module.named} (expected at least 1 and 0)"
                )
            for parameter in module.parameters:
                least = min(parameter.nbytes, parameter.rows, parameter.itemsize)
                if least < 1 or parameter.nbytes % (parameter.rows * parameter.itemsize):
                    raise InputError(
                        f"modules[{i}]: {parameter.name!r} has {parameter.nbytes} bytes in {parameter.rows} rows of "
                        f"elements of {parameter.itemsize} bytes (expected whole elements in every row)"
                    )

    def __str__(self) -> str:
        """Return one line: the model, its ops and tensors, and the time of each phase."""
        phases: tuple[Phase, ...] = ("forward", "backward", "optimizer")
        times = [
            f"{phase} {format_seconds(math.fsum(self.ops[i].duration_s for i in ops))}"
            for phase in phases
            if (ops := self.phase_ops(phase))
        ]
        return (
            f"{shorten(self.name)}: {count(self.batch_size, 'sample')} on {shorten(self.device)}, "
            f"{count(len(self.ops), 'op')}, {count(len(self.tensors), 'tensor')} of {format_bytes(self.nbytes)}, "
            f"{', '.join(times)}"
        )

    def _repr_html_(self) -> str:
        """Return a picture for notebooks: an iteration whose ops wait for no message, and the largest tensors."""
        order = self.iteration_order()
        ends = list(itertools.accumulate(self.ops[i].duration_s for i in order))
        ops = [
            Span(0, "compute", self.ops[i].name, max(end - self.ops[i].duration_s, 0.0), end, self.ops[i].phase)
            for i, end in zip(order, ends, strict=True)
        ]
        title = f"{shorten(self.name)}: an iteration that waits for nothing"
        lane = draw([Timeline(self.name, "predicted", ends[-1], tuple(ops))], title)
        largest = sorted(self.tensors, key=lambda tensor: -tensor.nbytes)[:_MOST_ROWS]
        forward = len(self.phase_ops("forward"))
        rows = [
            [
                tensor.nbytes,
                tensor.nbytes / self.nbytes,
                shorten(tensor.name),
                shorten(self.ops[tensor.ready_after].name),
                shorten(self.ops[first].name) if (first := min(tensor.readers, default=forward)) < forward else "",
            ]
            for tensor in largest
        ]
        shown = f"the {len(rows)} largest of " if len(rows) < len(self.tensors) else ""
        write = {"size": format_bytes, "share": percent, "tensor": None, "gradient from": None, "read by": None}
        summary = f"{self}; {shown}{count(len(self.tensors), 'tensor')}:"
        return f"{lane}{Table.of(summary, write, rows)._repr_html_()}"

    @property
    def compute_s(self) -> float:
        """Return C: the seconds of computation in one iteration, on one stream."""
        return math.fsum(op.duration_s for op in self.ops)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all gradients."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def phase_ops(self, phase: Phase) -> list[int]:
        """Return the ids of the ops of a phase, in execution order."""
        place = _ORDER[phase]
        begin = bisect_left(self.ops, place, key=lambda op: _ORDER[op.phase])
        return list(range(begin, bisect_right(self.ops, place, lo=begin, key=lambda op: _ORDER[op.phase])))

    def iteration_order(self) -> tuple[int, ...]:
        """Return the ids of all ops in the order in which one steady-state iteration runs them.

        An iteration starts with the backward pass and ends with the next forward pass. Each optimizer op comes just
        before the first forward op that reads one of the parameters that it updates. If no forward op does, the
        optimizer op comes at the end. The order is computed once and cached.
        """
        kept: dict[str, Any] = self.__dict__
        if "captured_order" not in kept:
            kept["captured_order"] = self._iteration_order()
        order: tuple[int, ...] = kept["captured_order"]
        return order

    def _iteration_order(self) -> tuple[int, ...]:
        first_use: dict[int, int] = {}
        forward, updates = self.phase_ops("forward"), self.phase_ops("optimizer")
        for tensor in self.tensors:
            applied = [r for r in tensor.readers if r >= len(self.ops) - len(updates)]
            use = min((r for r in tensor.readers if r < len(forward)), default=len(self.ops)) if applied else 0
            for r in applied:
                first_use[r] = min(first_use.get(r, use), use)
        # An optimizer op is needed as early as the earliest optimizer op that depends on it.
        for i in reversed(updates):
            for dep in self.ops[i].deps:
                if self.ops[dep].phase == "optimizer":
                    first_use[dep] = min(first_use.get(dep, len(self.ops)), first_use.get(i, len(self.ops)))
        keyed = [((i, 1), i) for i in forward]
        keyed += [((first_use.get(i, len(self.ops)), 0), i) for i in updates]
        keyed.sort()
        return (*self.phase_ops("backward"), *(i for _, i in keyed))
