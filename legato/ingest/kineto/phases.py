"""Find the phases of a traced step, and its backward passes.

[Note: telling backward passes apart] A step has several backward passes if gradients are accumulated or two models take
turns. Autograd gives the same sequence number to an operator of the forward pass and to the node that differentiates
the operator. If the operator of a node ran after the current backward pass had begun, the node begins the next backward
pass. Operators that autograd runs inside a node (checkpointing) belong to that node.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.workload import Phase
from legato.ingest.kineto.trace.activities import Activity
from legato.ingest.kineto.trace.columns import EventColumns
from legato.ingest.kineto.trace.events import HostInterval, Trace
from legato.ingest.traced import Notes

__all__ = ["FSDP", "BackwardPass", "Nodes", "Phases", "find_phases"]

_ENGINE = "autograd::engine::evaluate_function"
#: Annotations of FSDP. Communication that FSDP issues inside a node of autograd carries gradients, and does not belong
#: to the node.
FSDP = ("FSDP::", "FullyShardedDataParallel.")
_HOOKS = re.compile(r"AccumulateGrad$")
#: Nodes that run whole graphs, and may send gradients or communicate as a part of their computation.
_GRAPHS = re.compile(r"CompiledFunction")


@dataclass(frozen=True)
class BackwardPass:
    """A backward pass: the time in which autograd ran on the host."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Phases:
    """The phases of a step: forward until the first backward pass, backward, and optimizer after the last one.

    The optimizer steps at `optimizer_s`. Operators of the phase optimizer that run before `optimizer_s`, for example to
    clip gradients, also run after the transfers of DDP.
    """

    backward_s: float
    optimizer_s: float
    passes: tuple[BackwardPass, ...]  # empty if the trace has no operators of autograd
    trains: bool = True  # False for inference: the trace has operators, but no autograd and no updates

    def at(self, moment_s: float) -> Phase:
        """Return the phase of an activity that the host launched at this time."""
        if moment_s < self.backward_s:
            return "forward"
        end_s = min(self.passes[-1].end_s, self.optimizer_s) if self.passes else self.optimizer_s
        return "backward" if moment_s < end_s else "optimizer"

    def within(self, moment_s: float) -> Phase:
        """Return the phase as `at` does, but "forward" for a moment between two backward passes."""
        k = bisect.bisect_right(self.passes, moment_s, key=lambda p: p.start_s)
        between = 0 < k < len(self.passes) and moment_s > self.passes[k - 1].end_s
        return "forward" if between else self.at(moment_s)


class Nodes:
    """The nodes of autograd, which tell whether a collective carries gradients or is part of a node's computation.

    Collectives carry gradients if hooks of parameters (`AccumulateGrad`) or FSDP send them, or if they are sent after
    the backward pass. A collective that any other node sends is part of the node's computation: for example, tensor
    parallelism adds up the gradients of activations, and batch normalization adds up its statistics.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._nodes = _by_thread(trace, trace.operator, lambda name: name.startswith(_ENGINE))
        self._sharding = _by_thread(trace, trace.annotation, lambda name: name.startswith(FSDP))

    def own(self, activity: Activity) -> bool | None:
        """Return whether a collective is part of an autograd node's computation; None if a compiled graph issued it."""
        at = activity.thread, activity.host_s
        node = _innermost(self._nodes, self._trace.operator, *at)
        name = "" if node is None else self._trace.named(self._trace.operator, node)
        if not name or _HOOKS.search(name) or _innermost(self._sharding, self._trace.annotation, *at) is not None:
            return False
        return None if _GRAPHS.search(name) else True


_Rows = dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]]


def _by_thread(trace: Trace, columns: EventColumns, wanted: Callable[[str], bool]) -> _Rows:
    """Return, by thread, the events with wanted names, and for each event the latest end of all events up to it."""
    matches = np.array([wanted(name) for name in trace.names], dtype=bool)
    rows = np.flatnonzero(matches[columns.name])
    threads = columns.thread[rows]
    mine = {int(thread): rows[threads == thread] for thread in np.unique(threads)}
    return {thread: (found, np.maximum.accumulate(columns.end[found])) for thread, found in mine.items()}


def _innermost(rows: _Rows, columns: EventColumns, thread: int, moment_s: float) -> int | None:
    """Return the event that began last among all events that run on this thread at this moment."""
    mine, latest = rows.get(thread, (np.array([], dtype=np.int64), np.array([])))
    k = int(np.searchsorted(columns.start[mine], moment_s, side="right")) - 1
    while k >= 0 and latest[k] >= moment_s:
        if columns.end[mine[k]] >= moment_s:
            return int(mine[k])
        k -= 1
    return None


def find_phases(trace: Trace, step: HostInterval, computation: Sequence[Activity], notes: Notes) -> Phases:
    """Return the phases of a step; `computation` has the step's activities that compute."""
    passes = _backward_passes(trace, step)
    lowest = passes[-1].start_s if passes else step.start_s
    updates = [u.start_s for u in trace.marks.updates if step.start_s <= u.start_s < step.end_s]
    stepped = [moment for moment in updates if moment >= lowest]
    if stepped:
        optimizer_s = stepped[0]
    else:
        notes.lacks("Optimizer.step marks", "everything after the last backward operator belongs to the optimizer")
        optimizer_s = max((p.end_s for p in passes), default=step.end_s)
    if not passes:
        notes.lacks("operators of autograd", "the forward pass takes the first third of the computation")
        first, last = np.searchsorted(trace.operator.start, (step.start_s, step.end_s))
        forward_s = _third([a for a in computation if a.host_s < optimizer_s])
        return Phases(forward_s, optimizer_s, (), trains=bool(updates) or first == last)
    between = sum(passes[0].start_s <= moment < lowest for moment in updates)
    if between:
        notes.lacks(
            f"a single update per step: the optimizer steps {between + 1} times",
            "the earlier updates are computation that waits for no transfer",
        )
    return Phases(passes[0].start_s, optimizer_s, passes)


def _backward_passes(trace: Trace, step: HostInterval) -> tuple[BackwardPass, ...]:
    columns = trace.operator
    engine = {number for number, name in enumerate(trace.names) if name.startswith(_ENGINE)}
    first, last = np.searchsorted(columns.start, (step.start_s, step.end_s))
    ran: dict[int, float] = {}  # when the operator with each sequence number ran
    found: list[BackwardPass] = []
    until = -np.inf
    names, links = columns.name[first:last].tolist(), columns.link[first:last].tolist()
    starts, ends = columns.start[first:last].tolist(), columns.end[first:last].tolist()
    for name, link, start, end in zip(names, links, starts, ends, strict=True):
        inside = start < until  # whether it is inside a node of autograd
        if name in engine:
            until = max(until, end)
            if not found or (not inside and ran.get(link, -np.inf) > found[-1].start_s):
                found.append(BackwardPass(start, end))
            else:
                found[-1] = BackwardPass(found[-1].start_s, until)
        elif link >= 0 and not inside:
            ran[link] = start
    return tuple(found)


def _third(computation: list[Activity]) -> float:
    """Return the moment at which the host has launched the first third of the computation."""
    left = sum(a.end_s - a.start_s for a in computation) / 3
    for activity in computation:
        left -= activity.end_s - activity.start_s
        if left < 0:
            return activity.host_s
    return np.inf
