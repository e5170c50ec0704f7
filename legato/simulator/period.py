"""Who waits for whom in one period of steady-state training.

    backward of this iteration ──► gradients on the network ──► optimizer ──► forward of the next

The period starts with the backward pass, when everything of the forward pass
before it is there and the network is empty. Dependencies on that earlier
forward pass are therefore met and left out; what remains is one directed
graph without cycles, the same for every plan.
"""

from __future__ import annotations

from typing import Any, Literal

from legato.core.errors import unknown_name
from legato.core.workload import Phase, Workload

__all__ = ["COMPUTE", "Compute", "Period", "check_compute"]

#: How a worker computes: on `one` stream, an op at a time, or (PACE's assumption) on `unlimited` ones.
Compute = Literal["one", "unlimited"]
COMPUTE: tuple[Compute, ...] = ("one", "unlimited")


def check_compute(compute: str) -> None:
    """Raise `InputError` unless `compute` is one of `COMPUTE`."""
    if compute not in COMPUTE:
        raise unknown_name("compute setting", compute, COMPUTE)


class Period:
    """A workload's ops and tensors as lists of indices, ready for many simulations.

    `duration_s[op]`; `waits[op]`: the ops of this period that end before it
    starts; `reads[op]`: the tensors that must have arrived before it starts;
    `ready_op[tensor]`: the op that produces the gradient; `tensor_id[name]`;
    `topological`: backward, optimizer, forward, an order in which everything
    stands after what it waits for; `captured`: `Workload.iteration_order()`.
    """

    __slots__ = ("captured", "duration_s", "reads", "ready_op", "tensor_id", "topological", "waits", "workload")

    @classmethod
    def of(cls, workload: Workload) -> Period:
        """The period of a workload, computed once: it is kept with the workload, which never changes."""
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
            if op.phase == "forward"  # depends on nothing else: it stands first
            else [dep for dep in op.deps if ops[dep].phase != "forward"]
            for op in ops
        ]
        self.reads: list[list[int]] = [[] for _ in ops]
        self.ready_op = [tensor.ready_after for tensor in workload.tensors]
        self.tensor_id = {tensor.name: t for t, tensor in enumerate(workload.tensors)}
        for t, tensor in enumerate(workload.tensors):
            readers = set(tensor.readers)
            updates = [r for r in readers if ops[r].phase == "optimizer"]
            for reader in readers:
                self.reads[reader].append(t)
                if ops[reader].phase == "forward":
                    self.waits[reader] += updates
        phases: tuple[Phase, ...] = ("backward", "optimizer", "forward")
        self.topological = [i for phase in phases for i in workload.phase_ops(phase)]
        self.captured = workload.iteration_order()
