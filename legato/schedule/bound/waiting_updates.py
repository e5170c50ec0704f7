"""What the updates of each tensor take: the optimizer ops that wait for it, and its share of those that read it.

Units: seconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from legato.core.workload import Workload

__all__ = ["update_times"]

Floats = npt.NDArray[np.float64]


def update_times(workload: Workload) -> tuple[Floats, Floats]:
    """By tensor: the time of all updates that wait for it, or more, and its share of the updates that read it."""
    ops, count = workload.ops, len(workload.tensors)
    own, share = np.zeros(count), np.zeros(count)
    read: dict[int, list[int]] = {}
    for t, tensor in enumerate(workload.tensors):
        for reader in set(tensor.readers):
            if ops[reader].phase == "optimizer":
                read.setdefault(reader, []).append(t)
    for op, tensors in read.items():
        total = sum(workload.tensors[t].nbytes for t in tensors)
        for t in tensors:
            own[t] += ops[op].duration_s
            share[t] += ops[op].duration_s * workload.tensors[t].nbytes / total
    updates = workload.phase_ops("optimizer")
    if any(ops[dep].phase == "optimizer" for op in updates for dep in ops[op].deps):
        own[:] = sum(ops[op].duration_s for op in updates)
    return own, share
