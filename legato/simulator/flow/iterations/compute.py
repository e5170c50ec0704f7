"""The compute stream of a worker: its ops in order, split where it waits for the network or launches a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.simulator.flow.fragments import Fragments

__all__ = ["Stream", "first_reads"]

Times = NDArray[np.float64]


class Stream:
    """The backward ops of an iteration, or all other ops: a worker runs them one after another, in segments.

    Within a segment, the worker does not interact with the network. `duration_s[worker, segment]` is the duration of a
    segment in seconds. The k-th op of `ops` is in segment `segment[k]`. The k-th op starts at `op_start_s[worker, k]`
    and ends at `op_end_s[worker, k]`, in seconds after the start of its segment. `at[op]` is the number k of an op.
    """

    def __init__(self, ops: Sequence[int], cuts: set[int], op_duration_s: Times) -> None:
        self.ops = list(ops)
        self.at = {op: k for k, op in enumerate(self.ops)}
        starts = sorted({0, *cuts} - {len(self.ops)}) if self.ops else []
        self.segments = len(starts)
        self.segment = np.searchsorted(starts, np.arange(len(self.ops)), side="right") - 1
        stops = [*starts[1:], len(self.ops)] if starts else []
        durations = op_duration_s[:, np.array(self.ops, dtype=int)]
        self.op_end_s = np.empty_like(durations)
        for start, stop in zip(starts, stops, strict=True):
            np.cumsum(durations[:, start:stop], axis=1, out=self.op_end_s[:, start:stop])
        self.op_start_s = self.op_end_s - durations
        self.duration_s = self.op_end_s[:, np.array(stops, dtype=int) - 1]

    @classmethod
    def backward(cls, workload: Workload, plan: Plan, fragments: Fragments, op_duration_s: Times) -> Stream:
        """Return the backward ops in the plan's order, split after each op that makes a message ready."""
        ops = _order(workload, plan, backward=True)
        at = {op: k for k, op in enumerate(ops)}
        ready = {tensor.name: at[tensor.ready_after] for tensor in workload.tensors}
        cuts = {max(ready[piece.tensor] for piece in plan.messages[i].slices) + 1 for i in set(fragments.message)}
        return cls(ops, cuts, op_duration_s)

    @classmethod
    def forward(cls, workload: Workload, plan: Plan, op_duration_s: Times) -> Stream:
        """Return all other ops in the plan's order, split before each op that is the first to read some tensor."""
        ops = _order(workload, plan, backward=False)
        return cls(ops, set(first_reads(workload, plan, ops)), op_duration_s)


def first_reads(workload: Workload, plan: Plan, ops: Sequence[int]) -> dict[int, list[int]]:
    """Return the tensors for which each op in `ops` waits. Without forward overlap, the first op waits for all."""
    if not plan.forward_overlap:
        return {0: list(range(len(workload.tensors)))}
    at = {op: k for k, op in enumerate(ops)}
    reads: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        if tensor.readers:
            reads.setdefault(min(at[reader] for reader in tensor.readers), []).append(t)
    return reads


def _order(workload: Workload, plan: Plan, *, backward: bool) -> list[int]:
    order = plan.op_order or workload.iteration_order()
    return [op for op in order if (workload.ops[op].phase == "backward") == backward]
