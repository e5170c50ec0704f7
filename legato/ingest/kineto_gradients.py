"""The parameters of a traced step: sizes, when their gradients are ready, who reads them.

[Note: a parameter has no name in a trace]
What PyTorch leaves behind for each parameter is one `AccumulateGrad` operator
in the backward pass. Its shape, if shapes were recorded, is the parameter's.
The autograd node that ran just before it carries a sequence number, and the
forward operator with that number is the one that read the parameter. DDP's own
hook runs inside it, so that what was launched until its end, but before the
collective, makes the gradient ready for sending. Without shapes the copies from
the buckets back to the gradients (`copy_bucket_to_grad`) give the bytes: a
bucket's parameters are copied in the order in which their gradients came. What
is found must add up, bucket for bucket, to the bytes that were sent; where it
does not, the bucket is one tensor.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from legato.ingest.collectives import tensor_bytes
from legato.ingest.kineto_events import ACCUMULATE, Trace, whole_number
from legato.ingest.kineto_step import Step, carries_gradients
from legato.ingest.step import Gradient, Notes, Transfer

__all__ = ["gradients"]

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


def gradients(step: Step, notes: Notes) -> list[Gradient]:
    """The tensors of a step (trimmed); empty if it has neither gradient transfers nor parameters."""
    sent = [(t, moment) for t, moment in zip(step.transfers, step.issued_s, strict=True) if carries_gradients(t)]
    unsized = [t for t, _ in sent if t.nbytes is None]
    if unsized:
        notes.lacks(f"the size of {len(unsized)} gradient transfers (record_shapes=True writes it): left out")
        sent = [(t, moment) for t, moment in sent if t.nbytes is not None]
    parameters = _parameters(step)
    if not sent:
        return _without_transfers(parameters, notes)
    if not parameters:
        notes.lacks("operators of autograd that name parameters", "each gradient transfer is one tensor")
        return [_bucket(k, transfer, ()) for k, (transfer, _) in enumerate(sent)]
    if all(p.nbytes is None for p in parameters):
        parameters = _sized_by_copies(step, parameters, sent)
    return _assigned(parameters, sent, notes)


def _parameters(step: Step) -> list[_Parameter]:
    trace, spans = step.trace, step.trace.operator
    rows = _rows(trace, ACCUMULATE, step)
    hooks = _rows(trace, _HOOK, step)
    nodes = [
        (float(spans.start[i]), int(spans.link[i]), int(spans.thread[i]))
        for i in _window_rows(step)
        if spans.link[i] >= 0 and _BACKWARD_NODE.match(trace.named(spans, i))
    ]
    forward = _first_by_sequence(step, nodes[0][0]) if nodes else {}
    forward_ops = [i for i, op in enumerate(step.ops) if op.phase == "forward"]
    launched = np.array([step.host_s[i] for i in forward_ops])
    backward_ops = [i for i, op in enumerate(step.ops) if op.phase == "backward"]
    made = np.array([step.host_s[i] for i in backward_ops])
    found, before = [], 0
    for row in rows:
        start, thread = float(spans.start[row]), int(spans.thread[row])
        end = min((float(spans.end[h]) for h in hooks if spans.start[h] <= start <= spans.end[h]), default=start)
        end = min([end, *(moment for moment in step.issued_s if moment >= start)])
        ready = np.flatnonzero(made < end)
        while before < len(nodes) and nodes[before][0] <= start:
            before += 1
        sequence = next((link for _, link, on in reversed(nodes[:before]) if on == thread), None)
        readers: tuple[int, ...] | None = None
        if sequence in forward and len(forward_ops):
            at = int(np.searchsorted(launched, forward[sequence]))
            if not step.on_device and at and step.ops[forward_ops[at - 1]].end_s > forward[sequence]:
                at -= 1  # an operator inside the one that is the op
            readers = (forward_ops[min(at, len(forward_ops) - 1)],)
        args = spans.detail(row)
        dims = args.dimensions() if args is not None else None
        nbytes = tensor_bytes(dims, args.type_names()) if args is not None else None
        ready_after = max((backward_ops[i] for i in ready), default=-1)
        found.append(_Parameter(start, nbytes, _shape(dims), ready_after, readers))
    return found


def _shape(dims: Any) -> tuple[int, ...] | None:
    return tuple(dims[0]) if isinstance(dims, list) and dims and isinstance(dims[0], list) else None


def _window_rows(step: Step) -> range:
    start = step.trace.operator.start
    return range(int(np.searchsorted(start, step.window.start_s)), int(np.searchsorted(start, step.window.end_s)))


def _rows(trace: Trace, name: str, step: Step) -> list[int]:
    if name not in trace.names:
        return []
    number = trace.names.index(name)
    window = _window_rows(step)
    return [window.start + int(i) for i in np.flatnonzero(trace.operator.name[window.start : window.stop] == number)]


def _first_by_sequence(step: Step, backward_s: float) -> dict[int, float]:
    """When the forward operator of each sequence number began."""
    spans, first = step.trace.operator, dict[int, float]()
    for i in _window_rows(step):
        if spans.start[i] >= backward_s:
            break
        if spans.link[i] >= 0:
            first.setdefault(int(spans.link[i]), float(spans.start[i]))
    return first


def _sized_by_copies(step: Step, parameters: list[_Parameter], sent: list[tuple[Transfer, float]]) -> list[_Parameter]:
    """The parameters with the bytes that were copied back to their gradients, if each was."""
    trace = step.trace
    copies = _rows(trace, _COPY_BACK, step)
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


def _assigned(parameters: list[_Parameter], sent: list[tuple[Transfer, float]], notes: Notes) -> list[Gradient]:
    """The parameters of each transfer, if their bytes add up to its; else the transfer as one tensor."""
    found: list[Gradient] = []
    pool: list[_Parameter] = []
    left = list(parameters)
    for number, (transfer, issued) in enumerate(sent):
        while left and left[0].start_s < issued:
            pool.append(left.pop(0))
        chosen = _adding_up(pool, transfer.nbytes)
        if chosen is None:
            notes.lacks(
                "parameters whose bytes add up to those of each gradient transfer",
                "a transfer for which they do not is one tensor",
            )
            chosen, whole = pool, True
        else:
            whole = False
        pool = [p for p in pool if not any(p is c for c in chosen)]
        found += (
            [_bucket(number, transfer, tuple(chosen))]
            if whole
            else [_gradient(len(found) + k, p) for k, p in enumerate(chosen)]
        )
    return found


def _adding_up(pool: list[_Parameter], nbytes: int | None) -> list[_Parameter] | None:
    """All of the pool, the latest of it, or all but one: whichever has exactly so many bytes."""
    pool = [p for p in pool if p.nbytes is not None]
    choices = itertools.chain(
        (pool[k:] for k in range(len(pool))), (pool[:k] + pool[k + 1 :] for k in range(len(pool)))
    )
    return next((c for c in choices if c and sum(p.nbytes or 0 for p in c) == nbytes), None)


def _gradient(number: int, parameter: _Parameter) -> Gradient:
    assert parameter.nbytes is not None
    shape = "x".join(map(str, parameter.shape)) if parameter.shape else ""
    name = f"gradient {number:03} {shape}".strip()
    return Gradient(name, parameter.nbytes, parameter.ready_after, parameter.readers)


def _bucket(number: int, transfer: Transfer, parameters: tuple[_Parameter, ...]) -> Gradient:
    assert transfer.nbytes is not None
    readers = None
    if parameters and all(p.readers is not None for p in parameters):
        readers = tuple(sorted({r for p in parameters for r in p.readers or ()}))
    return Gradient(f"bucket {number:02}", transfer.nbytes, transfer.after, readers)


def _without_transfers(parameters: list[_Parameter], notes: Notes) -> list[Gradient]:
    known = [p for p in parameters if p.nbytes is not None]
    if known:
        notes.lacks("gradient transfers", "the gradient of every parameter with a shape is to be sent")
    if len(known) < len(parameters):
        notes.lacks(f"the shapes of {len(parameters) - len(known)} parameters (record_shapes=True): left out")
    return [_gradient(k, p) for k, p in enumerate(known)]
