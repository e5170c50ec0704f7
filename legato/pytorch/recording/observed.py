"""Observes training steps through hooks, and makes a workload from the steps with the most frequent order of events.

The user's program is not changed: no operator is recorded, and no step is slower. Plans only need certain moments, and
hooks see these moments: when modules begin to run (and first read their parameters), when the backward pass begins,
when each gradient is complete, and when the optimizers work. Each op of the workload spans the time between two
consecutive moments that hooks see.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from legato.core.errors import CaptureError
from legato.core.workload import Op, Phase, Tensor, Workload
from legato.pytorch.device import clock_for
from legato.pytorch.private.dynamo import on_compilation
from legato.pytorch.recording.capture import to_workload
from legato.pytorch.recording.recorder import RecordedStep

__all__ = ["StepObserver"]

#: In a compiled model, gradients that are complete within this fraction of the backward pass come from one graph.
_AT_ONCE = 0.02


@dataclass
class _Step:
    """The times in one step when its phases begin, and when each parameter (by name) is read and has its gradient."""

    begin: Any
    reads: dict[str, Any] = field(default_factory=dict)
    backward: Any = None
    ready: dict[str, Any] = field(default_factory=dict)
    updates: list[tuple[Any, Any]] = field(default_factory=list)  # the beginning and the end of each optimizer's work
    updating: Any = None


@dataclass(frozen=True)
class _Seconds:
    """The measurement of one step, in seconds since the step began.

    The times in `ready` are in seconds since the backward pass began.
    """

    reads: dict[str, float]
    forward: float
    ready: dict[str, float]
    optimizer: float

    @property
    def order(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.reads), tuple(self.ready)


class StepObserver:
    """Notes the moments of each step; its methods are called at these moments.

    `parameters` has the parameters whose gradients are averaged, by name. With `compiled`, hooks do not see the calls
    of modules.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], compiled: bool) -> None:
        self._parameters = dict(parameters)
        self._clock = clock_for(next(iter(self._parameters.values())).device)
        self._compiled = compiled
        names = {id(p): name for name, p in self._parameters.items()}
        #: The names of a module's own parameters, by the `id()` of the module.
        self._read_by = {
            id(m): found
            for m in module.modules()
            if (found := [names[id(p)] for p in m.parameters(recurse=False) if id(p) in names])
        }
        self._watch = ExitStack()
        self._step: _Step | None = None
        self._steps: list[_Step] = []

    def forward_begins(self) -> None:
        """Record that a forward pass begins; a step begins with the last forward pass before the optimizer's step."""
        self.step_ended()
        self._step = _Step(self._clock.now())
        if not self._compiled:
            self._watch.callback(register_module_forward_pre_hook(self._module_begins).remove)
            self._watch.enter_context(on_compilation(self._watch.close))  # dynamo would compile the hook

    def forward_ended(self) -> None:
        """Record that the forward pass has ended, with or without an error."""
        self._watch.close()

    def backward_begins(self) -> None:
        """Record that the first gradient is about to be computed."""
        if self._step is not None and self._step.backward is None:
            self._step.backward = self._clock.now()

    def ready(self, name: str) -> None:
        """Record that a gradient is complete."""
        if self._step is not None and self._step.backward is not None:
            self._step.ready.setdefault(name, self._clock.now())

    def updates_begin(self) -> None:
        """Record that an optimizer begins its updates."""
        if self._step is not None:
            self._step.updating = self._clock.now()

    def updates_end(self) -> None:
        """Record that an optimizer has finished its updates."""
        if self._step is not None and self._step.updating is not None:
            self._step.updates.append((self._step.updating, self._clock.now()))
            self._step.updating = None

    def step_ended(self) -> None:
        """Record that the step is over, if it had a backward pass."""
        step, self._step = self._step, None
        if step is not None and step.ready:
            self._steps.append(step)

    def _module_begins(self, module: nn.Module, _: Any) -> None:
        if self._step is not None and (names := self._read_by.get(id(module))):
            now = self._clock.now()
            for name in names:
                self._step.reads.setdefault(name, now)

    def workload(self, name: str, optimizers: Iterable[torch.optim.Optimizer], warmup: int) -> Workload:
        """Return an iteration with the most frequent order of events, ignoring the first `warmup` steps.

        Raises `CaptureError` if there is no such iteration, because gradients are complete in a different order in each
        step.
        """
        steps = [self._seconds(step) for step in self._steps[warmup:]]
        if not steps:
            raise CaptureError("no step was observed: no gradient was complete in any")
        order = statistics.mode(step.order for step in steps)
        steps = [step for step in steps if step.order == order] if len(steps) > 1 else steps
        if 2 * len(steps) <= len(self._steps) - warmup:
            raise CaptureError("the step is not the same every time: gradients are complete in another order each time")
        middle = _Seconds(
            _medians([step.reads for step in steps]),
            statistics.median(step.forward for step in steps),
            _medians([step.ready for step in steps]),
            statistics.median(step.optimizer for step in steps),
        )
        device = next(iter(self._parameters.values())).device.type
        return to_workload([self._recorded(middle, optimizers)], name=name, batch_size=1, device=device)

    def _seconds(self, step: _Step) -> _Seconds:
        seconds = self._clock.seconds
        return _Seconds(
            {name: seconds(step.begin, mark) for name, mark in step.reads.items()},
            seconds(step.begin, step.backward),
            {name: seconds(step.backward, mark) for name, mark in step.ready.items()},
            sum(seconds(begin, end) for begin, end in step.updates),
        )

    def _recorded(self, step: _Seconds, optimizers: Iterable[torch.optim.Optimizer]) -> RecordedStep:
        """Return the step as ops that run one after another."""
        nbytes = {name: p.nbytes for name, p in self._parameters.items()}
        ready = _spread(step.ready, nbytes) if self._compiled else step.ready
        reads = sorted({min(at, step.forward) for at in step.reads.values()} | {0.0})
        ops = _stretches("forward", [*reads, step.forward], 0)
        reader = {at: i for i, at in enumerate(reads)}
        ends = sorted(set(ready.values()))
        ops += _stretches("backward", [0.0, *ends], len(ops))
        after = {end: len(reads) + i for i, end in enumerate(ends)}
        unused = tuple(name for name in self._parameters if name not in ready)
        tensors = [
            Tensor(name, nbytes[name], after[ready[name]] if name in ready else len(ops) - 1,
                   (reader[min(step.reads.get(name, 0.0), step.forward)],))
            for name in (*ready, *unused)
        ]  # fmt: skip
        updated = [name for name in self._in_order_of(optimizers) if name in ready]
        every = sum(nbytes[name] for name in updated)
        updates = tuple((name, step.optimizer * nbytes[name] / every) for name in updated)
        return RecordedStep(tuple(ops), tuple(tensors), unused, updates)

    def _in_order_of(self, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, None]:
        """Return the names of the parameters in the order in which optimizers update them."""
        names = {id(p): name for name, p in self._parameters.items()}
        every = (p for o in optimizers for group in o.param_groups for p in group["params"])
        return dict.fromkeys(names.get(id(p), "") for p in every)


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def _stretches(phase: Phase, moments: Sequence[float], first: int) -> list[Op]:
    """Return one op for the time from each of these moments to the next.

    Each op depends on the previous op; the first op has index `first`.
    """
    return [
        Op(f"{phase} {i}", phase, end - begin, (i - 1,) if i else ())
        for i, (begin, end) in enumerate(pairwise(moments), first)
    ]


def _spread(ready: Mapping[str, float], nbytes: Mapping[str, int]) -> dict[str, float]:
    """Return when each gradient is complete; if a graph returns gradients together, spread them over its time.

    Each gradient takes time in proportion to its bytes, because gradients are complete one after another when legato
    cuts the graph.
    """
    last_s = max(ready.values())
    groups: list[list[str]] = []
    for name, at in ready.items():
        if groups and at - ready[groups[-1][-1]] <= _AT_ONCE * last_s:
            groups[-1].append(name)
        else:
            groups.append([name])
    found: dict[str, float] = {}
    begin = 0.0
    for group in groups:
        end, every, done = ready[group[-1]], sum(nbytes[name] for name in group), 0
        for name in group:
            done += nbytes[name]
            found[name] = begin + (end - begin) * done / every
        begin = end
    return found
