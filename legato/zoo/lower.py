"""Convert a model to a workload: forward and backward ops with their times, and one tensor per trained variable.

The backward pass mirrors the forward pass. If several layers read a value, an op
adds up their gradients; if several layers read a variable (tied weights), an op
adds up the variable's gradients. The samples have no gradient, so the first layer
computes none for its input. Every backward op depends on the ops that compute its
input gradients; dependencies on saved activations are left out, since these exist
before the loss. There are no optimizer ops: the papers neglect the optimizer.
"""

from __future__ import annotations

import math

from legato.core.errors import InputError
from legato.core.workload import Op, Phase, Tensor, Workload
from legato.zoo.builder import FLOAT_BYTES, Layer, Model
from legato.zoo.device import Device

__all__ = ["lower"]


def lower(
    model: Model,
    device: Device,
    *,
    batch_size: int | None = None,
    forward_s: float | None = None,
    backward_s: float | None = None,
) -> Workload:
    """One training iteration of a model on a device.

    `batch_size` is the model's own by default. `forward_s` and `backward_s`
    (seconds), where given, scale the ops of that pass to this total. Raises
    `InputError` on a batch or a total that is not above zero.
    """
    batch = model.batch_size if batch_size is None else batch_size
    if batch < 1:
        raise InputError(f"batch_size: {batch} (expected at least 1)")
    for field, total in (("forward_s", forward_s), ("backward_s", backward_s)):
        if total is not None and not (math.isfinite(total) and total > 0):
            raise InputError(f"{field}: {total} (expected finite seconds above 0)")
    lowering = _Lowering(model, device, batch)
    lowering.forward()
    lowering.backward()
    ops = _scaled(lowering.ops, {"forward": forward_s, "backward": backward_s})
    return Workload(model.name, tuple(ops), tuple(lowering.tensors), batch_size=batch, device=device.name)


def _scaled(ops: list[Op], totals: dict[Phase, float | None]) -> list[Op]:
    """Return the ops, with those of each phase scaled to its total (seconds) if it has one."""
    scale = {
        phase: total / math.fsum(op.duration_s for op in ops if op.phase == phase)
        for phase, total in totals.items()
        if total is not None
    }
    if not scale:
        return ops
    return [Op(op.name, op.phase, op.duration_s * scale.get(op.phase, 1.0), op.deps) for op in ops]


class _Lowering:
    """Op i of the forward pass is layer i."""

    def __init__(self, model: Model, device: Device, batch: int) -> None:
        self.model, self.device, self.batch = model, device, batch
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
        self.gradients: list[list[int]] = [[] for _ in layers]  # ops that yield (a part of) the output's gradient
        self.partial: dict[int, list[int]] = {}  # ops that yield (a part of) a variable's gradient

    def forward(self) -> None:
        for layer in self.model.layers:
            rows_only = layer.gradient == "weights"
            values = self.batch * layer.moved + (0 if rows_only else self._weights(layer))
            self._op(layer.name, "forward", self.batch * layer.flops, values, layer.inputs)

    def backward(self) -> None:
        for i in range(len(self.model.layers) - 1, -1, -1):
            if self.trained[i]:
                self._differentiate(i)

    def _differentiate(self, i: int) -> None:
        layer, after = self.model.layers[i], self._output_gradient(i)
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
        """The op after which the gradient of layer i's output is complete; for a loss, the layer itself."""
        parts = list(dict.fromkeys(self.gradients[i]))
        if not parts:
            return i
        if len(parts) == 1:
            return parts[0]
        layer = self.model.layers[i]
        values = self.batch * layer.outputs * (len(parts) + 1)
        return self._op(f"{layer.name}/grad-sum", "backward", 0, values, parts)

    def _variable_gradient(self, v: int, op: int) -> None:
        """Add a part of a variable's gradient; with the last part, add the tensor."""
        parts, variable = self.partial.setdefault(v, []), self.model.variables[v]
        parts.append(op)
        if len(parts) < len(self.readers[v]):
            return
        if len(parts) > 1:
            op = self._op(f"{variable.name}/grad-sum", "backward", 0, variable.size * (len(parts) + 1), parts)
        self.tensors.append(Tensor(variable.name, variable.nbytes, op, tuple(self.readers[v])))

    def _weights(self, layer: Layer) -> int:
        return sum(self.model.variables[v].size for v in layer.variables)

    def _op(self, name: str, phase: Phase, flops: int, values: int, deps: tuple[int, ...] | list[int]) -> int:
        duration_s = self.device.time_s(flops, FLOAT_BYTES * values)
        self.ops.append(Op(name, phase, duration_s, tuple(sorted(deps))))
        return len(self.ops) - 1
