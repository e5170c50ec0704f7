"""A workload that computes in another order, as if this had been captured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from legato.core.files import identity
from legato.core.plan import Plan
from legato.core.workload import Workload

__all__ = ["Reordered"]


class Reordered:
    """The workload with another captured order of backward and forward ops, and what its plans are in the original.

    `order` has these ops of the original by id, each after those that it depends on. Optimizer ops are left out.
    """

    def __init__(self, original: Workload, order: Sequence[int]) -> None:
        self.original = original
        forward, backward = (
            [op for op in order if original.ops[op].phase == phase] for phase in ("forward", "backward")
        )
        self.ids = (*forward, *backward, *original.phase_ops("optimizer"))  # of the original, by new id
        new = {op: place for place, op in enumerate(self.ids)}
        ops = [
            msgspec.structs.replace(original.ops[op], deps=tuple(sorted(new[dep] for dep in original.ops[op].deps)))
            for op in self.ids
        ]
        tensors = [
            msgspec.structs.replace(
                tensor, ready_after=new[tensor.ready_after], readers=tuple(sorted(new[op] for op in tensor.readers))
            )
            for tensor in original.tensors
        ]
        self.workload = msgspec.structs.replace(original, ops=tuple(ops), tensors=tuple(tensors))

    def restored(self, plan: Plan) -> Plan:
        """The same plan for the original workload."""
        order = tuple(self.ids[op] for op in plan.op_order or self.workload.iteration_order())
        if order == self.original.iteration_order():
            order = ()
        return msgspec.structs.replace(plan, op_order=order, workload_id=identity(self.original))
