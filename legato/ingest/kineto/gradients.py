"""The gradients of a traced step: their sizes, when they are ready, and which ops read the parameters.

[Note: a parameter has no name in a trace] For each parameter, PyTorch records one `AccumulateGrad` operator in the
backward pass. If shapes were recorded, the shape of this operator is the shape of the parameter. The autograd node just
before this operator has a sequence number, and the forward operator with the same number read the parameter. DDP's hook
runs inside `AccumulateGrad`, so the gradient depends on everything that was launched before this operator ended and
before the collective was launched. Without shapes, the copies from the buckets back to the gradients
(`copy_bucket_to_grad`) give the bytes: the parameters of a bucket are copied in the order in which their gradients
became ready. For each bucket, the sizes must add up to the bytes that were sent; otherwise the bucket becomes one
tensor.
"""

from __future__ import annotations

import bisect
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato.core.text import count
from legato.ingest.kineto.phases import BackwardPass
from legato.ingest.kineto.step import TracedStep
from legato.ingest.kineto.trace.columns import whole_number
from legato.ingest.kineto.trace.events import ACCUMULATE
from legato.ingest.names import tensor_bytes
from legato.ingest.traced import Gradient, Notes, TracedTransfer

__all__ = ["gradients", "why_none"]

_COPY_BACK = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
_HOOK = f"autograd::engine::evaluate_function: {ACCUMULATE}"
_BACKWARD_NODE = re.compile(r"\w+Backward\d*$")


@dataclass(frozen=True)
class _Parameter:
    start_s: float
    nbytes: int | None
    shape: tuple[int, ...] | None
    ready_after: int
    readers: tuple[int, ...] | None


def gradients(step: TracedStep, notes: Notes) -> list[Gradient]:
    """Return the gradients of a trimmed step, or none if it has neither transfers of gradients nor parameters."""
    sent = [(t, moment) for t, moment in zip(step.transfers, step.issued_s, strict=True) if t.carries_gradients]
    unsized = [t for t, _ in sent if t.nbytes is None]
    if unsized:
        notes.lacks(f"the size of {count(len(unsized), 'gradient transfer')} (record_shapes=True records it): left out")
        sent = [(t, moment) for t, moment in sent if t.nbytes is not None]
    parameters = _parameters(step)
    if not sent:
        return _without_transfers(parameters, notes)
    if not parameters:
        notes.lacks("AccumulateGrad operators, which tell the parameters", "each gradient transfer is one tensor")
        return [_bucket(k, transfer, ()) for k, (transfer, _) in enumerate(sent)]
    if all(p.nbytes is None for p in parameters):
        parameters = _sized_by_copies(step, parameters, sent)
    return _assigned(parameters, sent, notes)


def why_none(step: TracedStep) -> str:
    """Return why no plan can be made for a step in which `gradients` finds no gradients."""
    sent = sum(t.carries_gradients for t in step.transfers)
    parameters = len(_accumulations(step))
    if not sent and not parameters:
        return (
            f"no gradient transfers and no parameters found in {step.interval.name} (expected all-reduces or "
            "AccumulateGrad operators in its backward pass)"
        )
    what = count(sent, "gradient transfer") if sent else count(parameters, "parameter")
    alone = "" if sent else ", and no gradient transfers"
    return (
        f"{step.interval.name} has {what} without sizes{alone} (record with record_shapes=True, or add the execution "
        "trace of the same step)"
    )


def _parameters(step: TracedStep) -> list[_Parameter]:
    """Return the parameters whose gradients are sent, with their readers in the first forward pass."""
    found = _of_pass(step, step.sending)
    if step.sending is None or step.sending is step.phases.passes[0]:
        return found
    first = _of_pass(step, step.phases.passes[0])
    same = [p.shape for p in first] == [p.shape for p in found]
    return [replace(p, readers=first[k].readers if same else None) for k, p in enumerate(found)]


def _of_pass(step: TracedStep, which: BackwardPass | None) -> list[_Parameter]:
    """Return the parameters of one backward pass, or of the whole step."""
    columns = step.trace.operator
    forward = _first_by_sequence(step)
    forward_ops = [i for i, op in enumerate(step.ops) if op.phase == "forward"]
    launched = np.array([step.host_s[i] for i in forward_ops])
    made, latest = _backward_ops(step)
    found = []
    for row, end, sequence in _accumulations(step):
        start = float(columns.start[row])
        if which is not None and not which.start_s <= start <= which.end_s:
            continue
        issued = bisect.bisect_left(step.issued_s, start)
        ready = int(np.searchsorted(made, min([end, *step.issued_s[issued : issued + 1]])))
        readers: tuple[int, ...] | None = None
        if sequence in forward and len(forward_ops):
            at = int(np.searchsorted(launched, forward[sequence]))
            if not step.on_device and at and step.ops[forward_ops[at - 1]].end_s > forward[sequence]:
                at -= 1  # `AccumulateGrad` runs inside the op
            readers = (forward_ops[min(at, len(forward_ops) - 1)],)
        args = columns.detail(row)
        dims = args.dimensions() if args is not None else None
        nbytes = tensor_bytes(dims, args.type_names()) if args is not None else None
        found.append(_Parameter(start, nbytes, _shape(dims), int(latest[ready - 1]) if ready else -1, readers))
    return found


def _shape(dims: Any) -> tuple[int, ...] | None:
    return tuple(dims[0]) if isinstance(dims, list) and dims and isinstance(dims[0], list) else None


def _backward_ops(step: TracedStep) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the launch times of the backward ops, sorted, and the highest index of an op launched by each time."""
    ops = np.array([i for i, op in enumerate(step.ops) if op.phase == "backward"], dtype=np.int64)
    order = np.argsort(step.host_s[ops], kind="stable") if len(ops) else ops
    return step.host_s[ops][order], np.maximum.accumulate(ops[order])


def _accumulations(step: TracedStep) -> list[tuple[int, float, int | None]]:
    """Return (row, end of the hook, sequence number of the previous node) of each `AccumulateGrad` in the step."""
    columns, names = step.trace.operator, step.trace.names
    nodes = _backward_nodes(step)
    hook_end: dict[int, float] = {}
    sequence: dict[int, int] = {}
    found = []
    for row in _step_rows(step):
        number, thread = int(columns.name[row]), int(columns.thread[row])
        if number in nodes:
            if columns.link[row] >= 0:
                sequence[thread] = int(columns.link[row])
        elif names[number] == _HOOK:
            hook_end[thread] = float(columns.end[row])
        elif names[number] == ACCUMULATE:
            start = float(columns.start[row])
            found.append((row, max(start, hook_end.get(thread, start)), sequence.get(thread)))
    return found


def _backward_nodes(step: TracedStep) -> set[int]:
    """Return the indices of the names that are nodes of autograd."""
    return {number for number, name in enumerate(step.trace.names) if _BACKWARD_NODE.match(name)}


def _step_rows(step: TracedStep) -> range:
    start = step.trace.operator.start
    return range(int(np.searchsorted(start, step.interval.start_s)), int(np.searchsorted(start, step.interval.end_s)))


def _rows(step: TracedStep, name: str) -> list[int]:
    columns, names, rows = step.trace.operator, step.trace.names, _step_rows(step)
    number = names.index(name) if name in names else -1
    return [rows.start + int(i) for i in np.flatnonzero(columns.name[rows.start : rows.stop] == number)]


def _first_by_sequence(step: TracedStep) -> dict[int, float]:
    """Return the start of the forward operator with each sequence number."""
    columns, nodes, first = step.trace.operator, _backward_nodes(step), dict[int, float]()
    for row in _step_rows(step):
        if columns.link[row] >= 0:
            if int(columns.name[row]) in nodes:
                break
            first.setdefault(int(columns.link[row]), float(columns.start[row]))
    return first


def _sized_by_copies(
    step: TracedStep, parameters: list[_Parameter], sent: list[tuple[TracedTransfer, float]]
) -> list[_Parameter]:
    """Return the parameters; if each gradient was copied back from a bucket, its copy gives the parameter's bytes."""
    trace = step.trace
    copies = _rows(step, _COPY_BACK)
    if len(copies) != len(parameters) or not step.on_device:
        return parameters
    launched = {int(link): float(s) for link, s in zip(trace.launch.link, trace.launch.start, strict=True)}
    moved = sorted(
        (launched.get(int(trace.device.link[i]), -1.0), whole_number(args.nbytes))
        for i in trace.device.detailed()
        if (args := trace.device.detail(i)) is not None and args.nbytes is not None
    )
    at = np.array([moment for moment, _ in moved])
    sizes = []
    for row in copies:
        k = int(np.searchsorted(at, trace.operator.start[row]))
        inside = k < len(at) and at[k] <= trace.operator.end[row]
        sizes.append(moved[k][1] if inside and moved[k][1] > 0 else None)
    return [replace(p, nbytes=size) for p, size in zip(parameters, sizes, strict=True)]


def _assigned(parameters: list[_Parameter], sent: list[tuple[TracedTransfer, float]], notes: Notes) -> list[Gradient]:
    """Return each transfer's parameters if they have as many bytes as the transfer, and else the transfer itself."""
    found: list[Gradient] = []
    pool: list[_Parameter] = []
    taken = 0
    for number, (transfer, issued) in enumerate(sent):
        while taken < len(parameters) and parameters[taken].start_s < issued:
            pool.append(parameters[taken])
            taken += 1
        chosen = _adding_up(pool, transfer.nbytes)
        if chosen is None:
            notes.lacks(
                "parameters whose bytes add up to the size of each gradient transfer",
                "a transfer without such parameters is one tensor",
            )
            chosen, whole = pool, True
        else:
            whole = False
        carried = set(map(id, chosen))
        pool = [p for p in pool if id(p) not in carried]
        found += (
            [_bucket(number, transfer, tuple(chosen))]
            if whole
            else [replace(_gradient(len(found) + k, p), transfer=number) for k, p in enumerate(chosen)]
        )
    return found


def _adding_up(pool: list[_Parameter], nbytes: int | None) -> list[_Parameter] | None:
    """Return parameters with a total of `nbytes`: try the last ones, all except one, and any neighbouring ones."""
    pool = [p for p in pool if p.nbytes is not None]
    sizes = [p.nbytes or 0 for p in pool]
    sums = [0, *itertools.accumulate(sizes)]
    begins = {total: k for k, total in enumerate(sums)}
    wanted = nbytes or 0
    if (k := begins.get(sums[-1] - wanted, len(pool))) < len(pool):
        return pool[k:]
    for k, size in enumerate(sizes):
        if len(pool) > 1 and sums[-1] - size == wanted:
            return pool[:k] + pool[k + 1 :]
    runs = ((begins[total - wanted], k) for k, total in enumerate(sums) if total - wanted in begins)
    return next((pool[first:last] for first, last in runs if first < last), None)


def _gradient(number: int, parameter: _Parameter) -> Gradient:
    assert parameter.nbytes is not None
    shape = "x".join(map(str, parameter.shape)) if parameter.shape else ""
    name = f"gradient {number:03} {shape}".strip()
    return Gradient(name, parameter.nbytes, parameter.ready_after, parameter.readers)


def _bucket(number: int, transfer: TracedTransfer, parameters: tuple[_Parameter, ...]) -> Gradient:
    assert transfer.nbytes is not None
    readers = None
    if parameters and all(p.readers is not None for p in parameters):
        readers = tuple(sorted({r for p in parameters for r in p.readers or ()}))
    return Gradient(f"bucket {number:02}", transfer.nbytes, transfer.after, readers, number)


def _without_transfers(parameters: list[_Parameter], notes: Notes) -> list[Gradient]:
    known = [p for p in parameters if p.nbytes is not None]
    if known:
        notes.lacks("gradient transfers", "the gradient of every parameter with a shape is to be sent")
    if len(known) < len(parameters):
        lost = count(len(parameters) - len(known), "parameter")
        notes.lacks(f"the shapes of {lost} (record_shapes=True records them): left out")
    return [_gradient(k, p) for k, p in enumerate(known)]
