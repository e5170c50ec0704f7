"""An emulated accelerator: a workload's ops take their time, and leave the CPU to the network.

`EmulatedModel` is a module with the workload's parameters. Its forward pass
reads them where the workload's ops do, its backward pass gives gradients of the
real sizes, in the workload's order, through autograd: hooks, buckets and
reducers see what they see in any training. Between these events nothing is
computed; the host sleeps until the emulated device is done. `EmulatedOptimizer`
updates in the same way. Nothing is learnt: gradients are constants.

[Note: the device's clock] A host hands work to an accelerator and runs ahead of
it; only what the device waits for (a gradient, a parameter) makes it idle. So
an op's end is *planned*: the end of the op before it plus its duration. The
host sleeps until then. Where it wakes too late, or was busy packing a message,
the next end does not move. Waiting for the network is the exception, and so
stands between `ask` and `meet`: if it took time, the device cannot have begun
before now.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from legato.core.errors import InputError
from legato.core.workload import Workload

__all__ = ["Clock", "EmulatedModel", "EmulatedOptimizer"]

_PR_SET_TIMERSLACK = 29
#: What takes less than this was there already.
_AT_ONCE_S = 200e-6
_DTYPES = {4: torch.float32, 2: torch.float16}


class Clock:
    """Until when the device is busy, in the host's seconds. Of one thread: Linux wakes it up precisely."""

    def __init__(self) -> None:
        self.begin()
        libc: Any = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def begin(self) -> None:
        """The device is free now."""
        self.busy_until = self._asked = time.perf_counter()

    def run(self, seconds: float) -> None:
        """The device works for so long; returns when it is done."""
        self.busy_until += seconds
        left = self.busy_until - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def ask(self) -> None:
        """From now on the host may have to wait for the network."""
        self._asked = time.perf_counter()

    def meet(self) -> None:
        """What it asked for is there, and the device was waiting for it too."""
        now = time.perf_counter()
        if now - self._asked > _AT_ONCE_S:
            self.busy_until = max(self.busy_until, now)
        self._asked = now


class _Stretch(NamedTuple):
    """Ops that run one after another, and the tensors that are read before them or ready after them."""

    seconds: float
    tensors: tuple[int, ...]


class _Backward(Function):
    """A stretch of the backward pass; all of them are one chain, the first one last in the forward direction."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, model: EmulatedModel, stretch: int, *_: Tensor) -> Tensor:
        ctx.model, ctx.stretch = model, stretch
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        model, stretch = ctx.model, ctx.model.backward_stretches[ctx.stretch]
        model.clock.run(stretch.seconds)
        model.clock.ask()
        # A tensor object of its own, which autograd takes over as `.grad` without copying what it holds.
        return (token, None, None, *(model.gradients[t].detach() for t in stretch.tensors))


class EmulatedModel(nn.Module):
    """A module that has a workload's parameters and takes its time; `model()` gives a loss.

    Parameters are flat, and of float32 (float16 where the bytes do not divide
    by four). Every gradient is full of `1 + seed / 8`. `shared` takes the memory
    of another model's parameters and gradients for those of this one. Raises
    `InputError` where a gradient would have to be cut inside a number.
    """

    def __init__(self, workload: Workload, *, clock: Clock, seed: int = 0, shared: EmulatedModel | None = None) -> None:
        super().__init__()
        self.workload, self.clock = workload, clock
        self.follow(())
        values = shared.ordered if shared else [_zeros(t.name, t.nbytes) for t in workload.tensors]
        self.ordered: list[nn.Parameter] = [nn.Parameter(value.detach()) for value in values]
        self.gradients: list[Tensor] = (
            shared.gradients if shared else [torch.full_like(p, 1 + seed / 8) for p in self.ordered]
        )
        for tensor, parameter in zip(workload.tensors, self.ordered, strict=True):
            self._parameters[tensor.name] = parameter  # a workload's names may have dots, which `register_` refuses

    def follow(self, op_order: tuple[int, ...]) -> None:
        """Run ops in this order from now on (as in `Plan`: empty means the workload's own)."""
        order = op_order or tuple(range(len(self.workload.ops)))
        self.forward_stretches = _forward(self.workload, order)
        self.backward_stretches = _backward(self.workload, order)

    def forward(self) -> Tensor:
        """The forward pass; a parameter that is not up to date makes it wait."""
        for seconds, tensors in self.forward_stretches:
            self.clock.ask()
            for t in tensors:
                self.ordered[t].detach()  # an operation like any other: whoever gates parameters sees it
            self.clock.meet()
            self.clock.run(seconds)
        if not torch.is_grad_enabled():
            return torch.zeros(1)
        token = torch.zeros(1, requires_grad=True)
        for k in reversed(range(len(self.backward_stretches))):
            parameters = [self.ordered[t] for t in self.backward_stretches[k].tensors]
            token = _Backward.apply(token, self, k, *parameters)  # type: ignore[no-untyped-call]
        return token.sum()


class EmulatedOptimizer(torch.optim.Optimizer):
    """Takes the time of a workload's optimizer ops; an op is done when the last of its parameters is stepped."""

    #: Says that parameters may be stepped one by one.
    steps_parameters_alone = True

    def __init__(self, model: EmulatedModel) -> None:
        super().__init__(model.parameters(), {})
        self.clock = model.clock
        self.tensor_of = {id(p): t for t, p in enumerate(model.ordered)}
        self.ops = _updates(model.workload)
        self.ops_of: list[list[int]] = [[] for _ in model.ordered]
        for i, (_, tensors) in enumerate(self.ops):
            for t in tensors:
                self.ops_of[t].append(i)
        self.missing = [len(tensors) for _, tensors in self.ops]

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take the time of the ops that are done with these parameters; returns when it has passed."""
        self.clock.meet()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.clock.run(self._seconds(parameter))
        self.clock.ask()

    def _seconds(self, parameter: Tensor) -> float:
        seconds = 0.0
        for i in self.ops_of[self.tensor_of[id(parameter)]]:
            self.missing[i] -= 1
            if self.missing[i] == 0:
                seconds += self.ops[i].seconds
                self.missing[i] = len(self.ops[i].tensors)
        return seconds


def _zeros(name: str, nbytes: int) -> Tensor:
    size = 4 if nbytes % 4 == 0 else 2
    if nbytes % size:
        raise InputError(f"{name!r}: {nbytes} bytes (expected an even number: gradients have 2 or 4 bytes a number)")
    return torch.zeros(nbytes // size, dtype=_DTYPES[size])


def _forward(workload: Workload, order: Sequence[int]) -> list[_Stretch]:
    """The forward pass, cut before every op that reads a parameter for the first time."""
    ops = [i for i in order if workload.ops[i].phase == "forward"]
    at = {i: k for k, i in enumerate(ops)}
    first: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        readers = [r for r in tensor.readers if r in at]
        if readers:
            first.setdefault(min(readers, key=at.__getitem__), []).append(t)
    stretches: list[_Stretch] = []
    for i in ops:
        seconds = workload.ops[i].duration_s
        if i in first or not stretches:
            stretches.append(_Stretch(seconds, tuple(first.get(i, ()))))
        else:
            stretches[-1] = _Stretch(stretches[-1].seconds + seconds, stretches[-1].tensors)
    return stretches


def _backward(workload: Workload, order: Sequence[int]) -> list[_Stretch]:
    """The backward pass, cut after every op that gives a gradient."""
    ready: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        ready.setdefault(tensor.ready_after, []).append(t)
    return _runs(workload, [i for i in order if workload.ops[i].phase == "backward"], ready)


def _updates(workload: Workload) -> list[_Stretch]:
    """The optimizer ops; one that reads no gradient counts to the next that does."""
    reads: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        for r in tensor.readers:
            if workload.ops[r].phase == "optimizer":
                reads.setdefault(r, []).append(t)
    stretches = _runs(workload, workload.phase_ops("optimizer"), reads)
    if len(stretches) > 1 and not stretches[-1].tensors:
        *stretches, before, rest = stretches
        stretches.append(_Stretch(before.seconds + rest.seconds, before.tensors))
    return stretches


def _runs(workload: Workload, ops: Iterable[int], tensors: Mapping[int, Sequence[int]]) -> list[_Stretch]:
    """These ops, cut after every one that has tensors."""
    stretches, seconds = [], 0.0
    for i in ops:
        seconds += workload.ops[i].duration_s
        if i in tensors:
            stretches.append(_Stretch(seconds, tuple(tensors[i])))
            seconds = 0.0
    if seconds:
        stretches.append(_Stretch(seconds, ()))
    return stretches
