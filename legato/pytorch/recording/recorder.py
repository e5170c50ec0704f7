"""Records one training step, op by op, while it runs, for `capture`.

A dispatch mode sees every operator below autograd: in the forward pass, in the backward pass (the engine carries the
mode into its device threads) and in the optimizer. No operator runs twice, and no tensor is kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from legato.core.errors import CaptureError
from legato.core.workload import Op, Phase, Tensor
from legato.pytorch.compiled.functions import one_by_one
from legato.pytorch.device import clock_for
from legato.pytorch.parameters import sparse_parameters, trained_parameters
from legato.pytorch.private.dynamo import is_compiled
from legato.pytorch.private.tensors import DispatchMode
from legato.pytorch.recording.module_paths import ModulePaths
from legato.pytorch.recording.operators import Operator, operator_of, tensors
from legato.pytorch.recording.optimizer_times import OptimizerTimes
from legato.pytorch.recording.storages import Owners, Storages

__all__ = ["RecordedStep", "Recorder"]

_RANDOM_STATE = "random"


@dataclass(frozen=True)
class RecordedStep:
    """One recorded training step.

    `ops` has the ops of the forward and the backward pass in execution order, with measured seconds. `tensors` are in
    the order in which their gradients were complete; tensors without a gradient come last, and `unused` has their
    names. The readers of a tensor are forward ops. `updates` has (parameter, seconds in the optimizer), in the
    optimizer's order.
    """

    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    unused: tuple[str, ...]
    updates: tuple[tuple[str, float], ...]


class _Mode(DispatchMode):
    """A dispatch mode that passes every operator to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, clock = kwargs or {}, self._recorder._clock
        start = clock.now()
        out = func(*args, **kwargs)
        self._recorder._has_run(func, args, kwargs, out, (start, clock.now()))
        return out


class Recorder:
    """Records the steps of a model and its optimizer, one at a time.

    Use `with recorder.phase(name)` around each phase; after the last phase, `finish()` returns the `RecordedStep`. If
    the step fails, `abandon()` removes all hooks; `finish()` removes them too.

    If something cannot be recorded, the step goes on undisturbed, and `finish()` raises the error.

    Raises `CaptureError` if the model has no trainable parameter, or has a parameter with sparse gradients.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        if sparse := sparse_parameters(model):
            raise CaptureError(f"{next(iter(sparse))}: an embedding with sparse=True (expected dense gradients only)")
        self._parameters = trained_parameters(model)
        if not self._parameters:
            raise CaptureError("the model has no trainable parameter (expected at least one that requires grad)")
        self._clock = clock_for(next(iter(self._parameters.values())).device)
        self._compiled = any(map(is_compiled, model.modules()))
        self._lock = threading.Lock()
        self._hooks = ExitStack()
        self._phase: Phase | None = None
        self._updates: OptimizerTimes | None = None

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Record a phase: forward, backward or optimizer."""
        if self._phase is None:
            self._start()
        self._phase = phase
        if phase == "optimizer":
            self._updates = OptimizerTimes(list(self._parameters.values()), self._optimizer, self._storages)
        one_by_one.wanted = True
        try:
            with _Mode(self):
                yield
        finally:
            one_by_one.wanted = False

    def abandon(self) -> None:
        """Stop, remove all hooks, and forget the step."""
        self._hooks.close()
        self._phase = None

    def finish(self) -> RecordedStep:
        """Stop, remove all hooks, wait for the device, and return the step.

        Raises `CaptureError` if no parameter got a gradient, or if something could not be recorded.
        """
        self.abandon()
        if self._problem is not None:
            kind = "" if isinstance(self._problem, CaptureError) else f"{type(self._problem).__name__}: "
            raise CaptureError(f"{kind}{self._problem}") from self._problem
        seconds = self._clock.seconds
        ops = tuple(Op(name, phase, seconds(*marks), deps) for name, phase, marks, deps in self._ops)
        names = list(self._parameters)
        unused = [i for i in range(len(names)) if i not in self._ready]
        found = tuple(self._tensors(unused))
        ready = [i for i in range(len(names)) if i in self._ready]
        updates = [] if self._updates is None else self._updates.seconds(ready, seconds)
        return RecordedStep(
            ops=ops,
            tensors=found,
            unused=tuple(names[i] for i in unused),
            updates=tuple((names[i], s) for i, s in updates),
        )

    def _tensors(self, unused: list[int]) -> Iterator[Tensor]:
        names, parameters = list(self._parameters), list(self._parameters.values())
        backward = [i for i, (_, phase, _, _) in enumerate(self._ops) if phase == "backward"]
        if not backward or not self._ready:
            raise CaptureError("no parameter got a gradient (expected a loss that depends on the model's parameters)")
        after = backward[0]
        complete = self._ready
        if self._compiled:  # autograd adds to the gradients of a graph only after the whole graph has run
            complete = dict(sorted(complete.items(), key=lambda item: item[1][0]))
        ready = complete | {i: (backward[-1], parameters[i].nbytes) for i in unused}
        for i, (producer, nbytes) in ready.items():
            after = max(after, producer)  # must not come before a gradient that was complete earlier
            yield Tensor(names[i], nbytes, after, tuple(self._readers.get(i, ())))

    def _start(self) -> None:
        self._problem: Exception | None = None
        self._updates = None
        self._storages = Storages()
        self._owners = Owners(self._storages)
        self._paths = ModulePaths(self._model)
        self._ops: list[tuple[str, Phase, tuple[Any, Any], tuple[int, ...]]] = []
        self._ready: dict[int, tuple[int, int]] = {}
        self._readers: dict[int, list[int]] = {}
        if not self._compiled:  # dynamo would trace the hooks
            self._paths.follow(self._hooks)
        for i, parameter in enumerate(self._parameters.values()):
            self._owners.add(parameter, i)
            complete = functools.partial(self._complete, i)
            handle = parameter.register_post_accumulate_grad_hook(complete)
            self._hooks.callback(handle.remove)

    @contextmanager
    def _keeping_problems(self) -> Iterator[None]:
        """Keep the first exception for `finish()`, because the step must go on."""
        with self._lock:
            try:
                yield
            except Exception as error:
                self._problem = self._problem or error

    def _complete(self, i: int, parameter: torch.Tensor) -> None:
        """Record that the gradient of parameter i is complete, and which op wrote it last."""
        gradient = parameter.grad
        with self._keeping_problems():
            writer = None if gradient is None else self._storages.writer(gradient)
            nbytes = parameter.nbytes if gradient is None else gradient.nbytes
            self._ready.pop(i, None)  # of several additions, the last one counts
            self._ready[i] = (len(self._ops) - 1 if writer is None else writer, nbytes)

    def _has_run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, marks: Any) -> None:
        if self._problem is not None:
            return
        with self._keeping_problems():
            if self._phase == "optimizer" and self._updates is not None:
                self._updates.note((*args, *kwargs.values()), out, marks)
            else:
                self._note(operator_of(func), args, kwargs, out, marks)

    def _note(self, what: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, marks: Any) -> None:
        key = self._storages.key
        inputs = [*tensors(args), *tensors(kwargs)]
        reads = {key(tensor) for tensor in inputs}
        made = {key(tensor) for tensor in tensors(out)} - reads
        writes = made | {key(tensor) for tensor in what.written(args, kwargs)}
        if not writes and not (what.host and inputs):
            return  # nothing is computed: the op is a view, a query of a shape, or a mark of the profiler
        assert self._phase is not None
        op = len(self._ops)
        deps = self._storages.access(
            op, reads, writes | {_RANDOM_STATE} if what.random else writes, fence=what.host and bool(inputs)
        )
        self._ops.append((self._paths.name(what.name, self._phase), self._phase, marks, deps))
        if self._phase == "forward":
            for owner in {owner for tensor in inputs for owner in self._owners.of(tensor)}:
                self._readers.setdefault(owner, []).append(op)
