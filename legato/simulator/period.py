"""The dependencies within one period (iteration) of steady-state training.

    backward of this iteration ──► gradients on the network ──► optimizer ──► forward of the next

The period starts with the backward pass. When the period starts, the results of the previous forward pass exist and the
network is idle, so dependencies on that forward pass are left out. The remaining dependencies form a directed graph
without cycles, which is the same for every plan. In a sharded plan, the all-gathers come between the optimizer and the
forward ops; `updates_by_arrival` gives the order of the optimizer ops in sharded plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from legato.core.errors import unknown_name
from legato.core.plan import Message
from legato.core.workload import Workload

__all__ = ["COMPUTE", "Compute", "Period", "check_compute"]

#: How a worker computes: on `one` stream, one op at a time, or (PACE's assumption) on `unlimited` streams.
Compute = Literal["one", "unlimited"]
COMPUTE: tuple[Compute, ...] = ("one", "unlimited")


def check_compute(compute: str) -> None:
    """Raise `InputError` unless `compute` is one of `COMPUTE`."""
    if compute not in COMPUTE:
        raise unknown_name("compute setting", compute, COMPUTE)


class Period:
    """The ops and tensors of a workload as lists of indices, for many simulations.

    `duration_s[op]` is the duration of an op in seconds. `waits[op]` are the ops of this period that must end before
    the op starts, and `reads[op]` are the tensors that must have arrived before it starts. `ready_op[tensor]` is the op
    that produces the gradient, and `updates[tensor]` are the optimizer ops that apply it. `tensor_id[name]` is the
    index of a tensor. `topological` is an order (backward, optimizer, forward) in which every op comes after the ops
    for which it waits. `captured` is `Workload.iteration_order()`.
    """

    __slots__ = (
        "captured",
        "duration_s",
        "reads",
        "ready_op",
        "tensor_id",
        "topological",
        "updates",
        "waits",
        "workload",
    )

    @classmethod
    def of(cls, workload: Workload) -> Period:
        """Return the period of a workload, which is computed once and cached in the (immutable) workload."""
        kept: dict[str, Any] = workload.__dict__
        if "period" not in kept:
            kept["period"] = cls(workload)
        period: Period = kept["period"]
        return period

    def __init__(self, workload: Workload) -> None:
        ops = workload.ops
        self.workload = workload
        self.duration_s = [op.duration_s for op in ops]
        self.waits: list[list[int]] = [
            list(op.deps)
            if op.phase == "forward"  # forward ops depend only on forward ops
            else [dep for dep in op.deps if ops[dep].phase != "forward"]
            for op in ops
        ]
        self.reads: list[list[int]] = [[] for _ in ops]
        self.ready_op = [tensor.ready_after for tensor in workload.tensors]
        self.tensor_id = {tensor.name: t for t, tensor in enumerate(workload.tensors)}
        self.updates: list[list[int]] = []
        for t, tensor in enumerate(workload.tensors):
            readers = set(tensor.readers)
            updates = [r for r in readers if ops[r].phase == "optimizer"]
            self.updates.append(updates)
            for reader in readers:
                self.reads[reader].append(t)
                if ops[reader].phase == "forward":
                    self.waits[reader] += updates
        backward, optimizer, forward = map(workload.phase_ops, ("backward", "optimizer", "forward"))
        self.topological = [*backward, *optimizer, *forward]
        self.captured = workload.iteration_order()

    def updates_by_arrival(self, messages: Iterable[Message]) -> list[int]:
        """Return the optimizer ops in the order in which the last reduce_scatter that they need arrives.

        An op comes after the ops on which it depends. If several ops wait for the same message, the op that the forward
        pass needs first comes first.
        """
        ops = self.workload.ops
        last = {
            self.tensor_id[name]: i
            for i, message in enumerate(messages)
            if message.kind == "reduce_scatter"
            for name in message.tensors
        }
        arrives: dict[int, int] = {}
        for op in self.workload.phase_ops("optimizer"):
            before = (arrives[dep] for dep in ops[op].deps if dep in arrives)
            arrives[op] = max((*(last[t] for t in self.reads[op]), *before), default=-1)
        return sorted((op for op in self.captured if op in arrives), key=arrives.__getitem__)
