"""Convert a model to a workload: forward and backward ops with their times, and one tensor per trained variable.

The backward pass mirrors the forward pass. If several layers read a value, an op adds up their gradients. If several
layers read a variable (tied weights), an op adds up the variable's gradients. The samples have no gradient, so the
first layer computes no gradient for its input. Every backward op depends on the ops that compute the gradients that it
reads. Dependencies on saved activations are left out, since all activations exist before the backward pass starts.
There are no optimizer ops, because the papers neglect the optimizer.

Three techniques for large models change an iteration. With *recomputed activations*, the backward pass of a block
starts with an op that is as long as the block's forward pass. With *accumulated* micro-batches, a worker sends
gradients only during the last micro-batch. One op, `accumulation`, stands for all passes between the first forward pass
and the last backward pass. It is at the end of the forward pass. A *replica* of several devices divides the work and
the matrices evenly among its devices, as tensor parallelism does. The iteration describes one device, which exchanges
messages with the same device of every other replica. Messages between the devices of a replica are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from legato.core.errors import InputError, unknown_name
from legato.core.workload import Op, Phase, Tensor, Workload
from legato.zoo.builder import Layer, Model, Variable
from legato.zoo.device import PRECISIONS, Device

__all__ = ["lower"]

#: The most samples, micro-batches, and devices of a replica.
_MOST = 2**30
#: In language models, the first component of the names of ops before the layers.
_BEFORE = ("embeddings", "positions")
_ACCUMULATION = "accumulation"


def lower(  # noqa: PLR0913
    model: Model,
    device: Device,
    *,
    batch_size: int | None = None,
    forward_s: float | None = None,
    backward_s: float | None = None,
    precision: str | None = None,
    gradients: str | None = None,
    recompute: bool = False,
    accumulate: int = 1,
    replica_devices: int = 1,
    parts: Callable[[int], Mapping[tuple[str, Phase], float]] | None = None,
) -> Workload:
    """Return one training iteration of a model on a device.

    `batch_size` counts the samples of all `accumulate` micro-batches of a replica; the default is the model's batch
    size. If `forward_s` or `backward_s` is given, the ops of a micro-batch's forward or backward pass are scaled so
    that they add up to these seconds. `precision`, one of `PRECISIONS`, is the precision of the computation; the
    default is the model's precision. `gradients` is the precision in which gradients are sent; the default is
    `precision`. `recompute` computes the activations of each block of layers again in the backward pass.
    `replica_devices` is the number of devices that share the model and its batch. `parts` is for language models. For a
    micro-batch of n samples, `parts(n)` returns the seconds of each part of the model in each phase
    (`language.one_gpu.part_times`). The ops of each part are scaled to these seconds, divided by `replica_devices`.
    Raises `InputError` on numbers that are not above zero, on a batch that `accumulate` does not divide, on a precision
    that is unknown or that the device lacks, and on `recompute` for a model without blocks.
    """
    batch = model.batch_size if batch_size is None else batch_size
    _check_numbers(batch_size=batch, accumulate=accumulate, replica_devices=replica_devices)
    if batch % accumulate:
        raise InputError(f"batch_size: {batch} (expected a multiple of the {accumulate} micro-batches accumulated)")
    _check_seconds(forward_s=forward_s, backward_s=backward_s)
    precision = model.precision if precision is None else precision
    device.peak(precision)
    if gradients is not None and gradients not in PRECISIONS:
        raise unknown_name("precision", gradients, PRECISIONS)
    lowering = _Lowering(model, device, batch // accumulate, precision, gradients or precision, replica_devices)
    lowering.forward(accumulation=accumulate > 1)
    lowering.backward(recompute=recompute)
    ops = lowering.ops
    if parts is not None:
        each = {key: seconds / replica_devices for key, seconds in parts(batch // accumulate).items()}
        ops = _scaled(ops, each, lambda op: (_part_of(op.name), op.phase))
    ops = _scaled(ops, {"forward": forward_s, "backward": backward_s}, lambda op: op.phase)
    if accumulate > 1:
        passes_s = math.fsum(op.duration_s for op in ops)
        ops = [_lasting(op, (accumulate - 1) * passes_s) if op.name == _ACCUMULATION else op for op in ops]
    where = device.name if precision == "fp32" else f"{device.name} {precision}"
    where = where if replica_devices == 1 else f"{where} (1 of {replica_devices})"
    itemsize = lowering.gradient_bytes
    return Workload(model.name, tuple(ops), tuple(lowering.tensors), batch_size=batch, device=where, itemsize=itemsize)


def _check_numbers(**numbers: int) -> None:
    for field, number in numbers.items():
        if not 1 <= number <= _MOST:
            raise InputError(f"{field}: {number} (expected 1 to {_MOST:,})")


def _check_seconds(**times: float | None) -> None:
    for field, total in times.items():
        if total is not None and not (math.isfinite(total) and total > 0):
            raise InputError(f"{field}: {total} (expected finite seconds above 0)")


def _lasting(op: Op, duration_s: float) -> Op:
    return Op(op.name, op.phase, duration_s, op.deps)


def _part_of(op: str) -> str:
    """Return the part of a language model to which the op with this name belongs."""
    first = op.partition("/")[0]
    if first.startswith("layer"):
        return op if op == f"{first}/recompute" else first
    return _BEFORE[0] if first in _BEFORE else "output"


def _scaled(ops: list[Op], totals: Mapping[Any, float | None], part_of: Callable[[Op], object]) -> list[Op]:
    """Return the ops; if `totals` has seconds for a part, the part's ops are scaled to take these seconds."""
    now: dict[Any, float] = {}
    for op in ops:
        now[part_of(op)] = now.get(part_of(op), 0.0) + op.duration_s
    scale = {part: total / now[part] for part, total in totals.items() if total is not None and now.get(part)}
    return [_lasting(op, op.duration_s * scale.get(part_of(op), 1.0)) for op in ops]


class _Lowering:
    """A conversion of a model that is in progress; op number i is the forward pass of layer i."""

    def __init__(
        self, model: Model, device: Device, batch: int, precision: str, gradients: str, replica_devices: int
    ) -> None:
        self.model, self.device, self.batch, self.precision = model, device, batch, precision
        self.gradient_bytes, self.replica_devices = PRECISIONS[gradients], replica_devices
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        layers = model.layers
        self.readers: dict[int, list[int]] = {}
        for i, layer in enumerate(layers):
            for v in layer.variables:
                self.readers.setdefault(v, []).append(i)
        self.trained: list[bool] = []  # whether the layer's output has a gradient
        for layer in layers:
            self.trained.append(bool(layer.variables) or any(self.trained[j] for j in layer.inputs))
        self.gradients: list[list[int]] = [
            [] for _ in layers
        ]  # by layer: ops that yield parts of its output's gradient
        self.partial: dict[int, list[int]] = {}  # by variable: ops that yield parts of its gradient
        self.accumulation: int | None = None  # the op after which the last micro-batch's backward pass starts
        self.to_recompute: dict[str, float] = {}  # by block that the backward pass has not reached: its seconds

    def forward(self, *, accumulation: bool) -> None:
        for layer in self.model.layers:
            rows_only = layer.gradient == "weights"
            values = self.batch * layer.moved + (0 if rows_only else self._weights(layer))
            self._op(layer.name, "forward", self.batch * layer.flops, values, layer.inputs)
        if accumulation:
            read = {j for layer in self.model.layers for j in layer.inputs}
            self.accumulation = len(self.ops)
            last = tuple(i for i in range(self.accumulation) if i not in read)
            self.ops.append(Op(_ACCUMULATION, "forward", 0.0, last))

    def backward(self, *, recompute: bool) -> None:
        if recompute:
            for layer, op in zip(self.model.layers, self.ops, strict=False):
                if layer.block:
                    self.to_recompute[layer.block] = self.to_recompute.get(layer.block, 0.0) + op.duration_s
            if not self.to_recompute:
                raise InputError(f"recompute: {self.model.name} is not made of blocks (expected a transformer)")
        for i in range(len(self.model.layers) - 1, -1, -1):
            if self.trained[i]:
                self._differentiate(i)

    def _differentiate(self, i: int) -> None:
        layer, after = self.model.layers[i], self._output_gradient(i)
        if layer.block in self.to_recompute:
            self.ops.append(Op(f"{layer.block}/recompute", "backward", self.to_recompute.pop(layer.block), (after,)))
            after = len(self.ops) - 1
        inputs = [j for j in layer.inputs if self.trained[j]]
        if layer.gradient == "identity":
            for j in inputs:
                self.gradients[j].append(after)
            return
        flops, values = self.batch * layer.flops, self.batch * layer.moved + self._weights(layer)
        if layer.gradient == "fused":
            values += self.batch * layer.outputs
            done = self._op(f"{layer.name}/grad", "backward", 2 * flops, values, (after,))
            for j in inputs:
                self.gradients[j].append(done)
        else:
            if inputs:
                passed = self._op(f"{layer.name}/grad-input", "backward", flops, values, (after,))
                for j in inputs:
                    self.gradients[j].append(passed)
            done = self._op(f"{layer.name}/grad-weights", "backward", flops, values, (after,))
        for v in layer.variables:
            self._variable_gradient(v, done)

    def _output_gradient(self, i: int) -> int:
        """Return the op that completes the gradient of layer i's output; for the loss, return the last forward op."""
        parts = list(dict.fromkeys(self.gradients[i]))
        if not parts:
            return i if self.accumulation is None else self.accumulation
        if len(parts) == 1:
            return parts[0]
        layer = self.model.layers[i]
        values = self.batch * layer.outputs * (len(parts) + 1)
        return self._op(f"{layer.name}/grad-sum", "backward", 0, values, parts)

    def _variable_gradient(self, v: int, op: int) -> None:
        """Add `op`, which computes a part of variable v's gradient; after the last part, add the tensor."""
        parts, variable = self.partial.setdefault(v, []), self.model.variables[v]
        parts.append(op)
        if len(parts) < len(self.readers[v]):
            return
        if len(parts) > 1:
            op = self._op(f"{variable.name}/grad-sum", "backward", 0, variable.size * (len(parts) + 1), parts)
        self.tensors.append(Tensor(variable.name, self._nbytes(variable), op, tuple(self.readers[v])))

    def _nbytes(self, variable: Variable) -> int:
        """Return the bytes of a gradient on one device, which has a part of each matrix, and all of each vector."""
        parts = self.replica_devices if len(variable.shape) > 1 else 1
        return self.gradient_bytes * -(-variable.size // parts)

    def _weights(self, layer: Layer) -> int:
        return sum(self.model.variables[v].size for v in layer.variables)

    def _op(self, name: str, phase: Phase, flops: int, values: int, deps: tuple[int, ...] | list[int]) -> int:
        flops_here, values_here = flops / self.replica_devices, values / self.replica_devices
        duration_s = self.device.time_s(flops_here, PRECISIONS[self.precision] * values_here, self.precision)
        self.ops.append(Op(name, phase, duration_s, tuple(sorted(deps))))
        return len(self.ops) - 1
