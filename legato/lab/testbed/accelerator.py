"""An emulated accelerator: each op of a workload takes its captured time, and the CPU stays free for the network.

`EmulatedModel` is a module with the workload's parameters. The model's forward pass reads its parameters where the
workload's ops do. The model's backward pass produces gradients of the real sizes, in the workload's order, through
autograd, so hooks, buckets and reducers work as in any training. Between reads and gradients nothing is computed: the
host sleeps until the emulated device is done. `EmulatedOptimizer` sleeps for the time of the workload's optimizer ops.
The models do not learn, because gradients are constants.

[Note: the device's clock] A host launches work on an accelerator, and continues before the accelerator has finished
this work. The device is idle only while it waits for a gradient or a parameter. Therefore the end of an op is
*planned*: it is the end of the previous op plus the op's duration. The host sleeps until the planned end. If the host
wakes up too late, or was busy with packing a message, the planned end of the next op does not move. Only a wait for the
network moves the planned end. `ask` and `meet` enclose a wait for the network: if the wait took time, the device cannot
have started the next op before the wait ended.
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
#: Waits shorter than this many seconds do not delay the device.
_AT_ONCE_S = 200e-6
_DTYPES = {4: torch.float32, 2: torch.float16}


class Clock:
    """The time until which the device is busy (in host seconds).

    One thread uses the clock, and the clock makes Linux wake up this thread precisely.
    """

    def __init__(self) -> None:
        self.begin()
        libc: Any = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def begin(self) -> None:
        """Declare the device idle now."""
        self.busy_until = self._asked = time.perf_counter()

    def run(self, seconds: float) -> None:
        """Let the device work for `seconds`, and return when it is done."""
        self.busy_until += seconds
        left = self.busy_until - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def ask(self) -> None:
        """Mark the start of a possible wait for the network."""
        self._asked = time.perf_counter()

    def meet(self) -> None:
        """Mark the end of a possible wait for the network; if the host waited, the device also waited."""
        now = time.perf_counter()
        if now - self._asked > _AT_ONCE_S:
            self.busy_until = max(self.busy_until, now)
        self._asked = now


class _Stretch(NamedTuple):
    """Consecutive ops, with the tensors of the first op (in the forward pass) or of the last op (in other phases)."""

    seconds: float
    tensors: tuple[int, ...]


class _Backward(Function):
    """The autograd function of a stretch of the backward pass. The forward pass applies these functions in reverse."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, token: Tensor, model: EmulatedModel, stretch: int, *_: Tensor
    ) -> Tensor:
        ctx.model, ctx.stretch = model, stretch
        return token.clone()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        model, stretch = ctx.model, ctx.model.backward_stretches[ctx.stretch]
        model.clock.run(stretch.seconds)
        model.clock.ask()
        # A new tensor object: autograd uses it as `.grad` without copying its memory.
        return (token, None, None, *(model.gradients[t].detach() for t in stretch.tensors))


class EmulatedModel(nn.Module):
    """A module with a workload's parameters, whose passes take the workload's time; `model()` returns a loss.

    Parameters are flat, in float32 (or in float16 if the size in bytes is not divisible
    by four). Every gradient is filled with `1 + seed / 8`. With `shared`, the
    model uses the memory of another model's parameters and gradients. Raises
    `InputError` if a gradient has an odd number of bytes.
    """

    #: Tells the runtime that nothing else reads the memory that gradients share with `gradients`.
    reads_no_gradients = True

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
            self._parameters[tensor.name] = parameter  # names may have dots, which `register_parameter` refuses

    def follow(self, op_order: tuple[int, ...]) -> None:
        """Run the ops in this order from now on; an empty order means the workload's own order, as in `Plan`."""
        order = op_order or tuple(range(len(self.workload.ops)))
        self.forward_stretches = _forward(self.workload, order)
        self.backward_stretches = _backward(self.workload, order)

    def forward(self) -> Tensor:
        """Run the forward pass, which waits for parameters that are not up to date."""
        for seconds, tensors in self.forward_stretches:
            self.clock.ask()
            for t in tensors:
                self.ordered[t].detach()  # reading a gated parameter waits for it
            self.clock.meet()
            self.clock.run(seconds)
        if not torch.is_grad_enabled():
            return torch.zeros(1)
        token = torch.zeros(1, requires_grad=True)
        for k in reversed(range(len(self.backward_stretches))):
            parameters = [self.ordered[t] for t in self.backward_stretches[k].tensors]
            token = _Backward.apply(token, self, k, *parameters)
        return token.sum()


class EmulatedOptimizer(torch.optim.Optimizer):
    """An optimizer that takes the time of a workload's optimizer ops; an op runs when its last parameter is updated.

    If the optimizer has only some elements of the tensors of an op (some `parameters`, or shards), it takes only that
    fraction of the op's time.
    """

    #: Tells the runtime that it may step parameters, and even parts of them, one by one.
    steps_parameters_alone = True
    steps_elements_alone = True

    def __init__(self, model: EmulatedModel, parameters: Any = None) -> None:
        super().__init__(model.parameters() if parameters is None else parameters, {})
        self.clock = model.clock
        self.tensor_of = {id(p): t for t, p in enumerate(model.ordered)}
        self.ops = _updates(model.workload)
        self.ops_of: list[list[int]] = [[] for _ in model.ordered]
        for i, (_, tensors) in enumerate(self.ops):
            for t in tensors:
                self.ops_of[t].append(i)
        self.missing = [len(tensors) for _, tensors in self.ops]
        self.elements = [sum(model.ordered[t].numel() for t in tensors) for _, tensors in self.ops]
        self.partial = parameters is not None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Run each op for which no parameter is missing any more, and return when the time of these ops has passed."""
        self.clock.meet()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.clock.run(self._seconds(parameter))
        self.clock.ask()

    def _seconds(self, parameter: Any) -> float:
        ops = self.ops_of[self.tensor_of[id(getattr(parameter, "shard_of", parameter))]]
        if self.partial or hasattr(parameter, "shard_of"):
            return sum((self.ops[i].seconds * parameter.numel() / self.elements[i] for i in ops), 0.0)
        seconds = 0.0
        for i in ops:
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
    """Split the forward pass before every op that reads a parameter for the first time."""
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
    """Split the backward pass after every op that produces a gradient."""
    ready: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        ready.setdefault(tensor.ready_after, []).append(t)
    return _runs(workload, [i for i in order if workload.ops[i].phase == "backward"], ready)


def _updates(workload: Workload) -> list[_Stretch]:
    """Split the optimizer ops after every op that updates tensors; ops after the last such op belong to its part."""
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
    """Split these ops after every op that has an entry in `tensors`."""
    stretches, seconds = [], 0.0
    for i in ops:
        seconds += workload.ops[i].duration_s
        if i in tensors:
            stretches.append(_Stretch(seconds, tuple(tensors[i])))
            seconds = 0.0
    if seconds:
        stretches.append(_Stretch(seconds, ()))
    return stretches
