"""The least time of the updates that still have to run when some bytes have arrived: whole tensors are updated.

An optimizer op runs when every tensor that it reads is complete. Its time is divided among these by
their bytes, so a tensor that is not complete keeps at least its share waiting. If the complete
tensors have x bytes at most, the updates that wait take at least

    all updates - max over sets of tensors with at most x bytes of (their shares).

This is a knapsack. The tensors with the largest shares are in it or not; of the others, parts count
(those with the largest share per byte first), which can only lower the result. Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order, heads_tails

__all__ = ["WHOLE", "Updates", "WaitingUpdates", "update_times"]

Floats = npt.NDArray[np.float64]
#: How many tensors, those with the largest shares, are complete or not; of the others, parts count.
WHOLE = 10


class Updates:
    """By tensor, on one stream: its share of the updates that read it, and the forward ops of its tail, in seconds."""

    def __init__(self, workload: Workload, order: Order) -> None:
        self._workload, self._order = workload, order
        self.share_s = update_times(workload)[1]

    @cached_property
    def forward_s(self) -> Floats:
        """The tails of the workload with updates that take no time."""
        ops = self._workload.ops
        at_once = (msgspec.structs.replace(op, duration_s=0.0) if op.phase == "optimizer" else op for op in ops)
        workload = msgspec.structs.replace(self._workload, ops=tuple(at_once))
        return np.array(heads_tails(workload, "one", self._order).tail_s)


class WaitingUpdates:
    """The updates of all tensors, or of some of them, by what is complete."""

    def __init__(self, share_s: Floats, nbytes: Sequence[int]) -> None:
        """`share_s` and `nbytes` are by tensor."""
        self.share_s, self.nbytes = share_s, np.array(nbytes, dtype=np.float64)

    def least_s(self, complete_bytes: Floats, *, never: Sequence[int] = ()) -> Floats:
        """For each amount, the least seconds of updates that wait if complete tensors have so many bytes at most.

        The tensors `never` are not complete in any case.
        """
        may = np.setdiff1d(np.arange(len(self.nbytes)), never)
        by_share = may[np.argsort(-self.share_s[may], kind="stable")]
        whole, parts = by_share[:WHOLE], by_share[WHOLE:]
        parts = parts[np.argsort(-self.share_s[parts] / self.nbytes[parts], kind="stable")]
        edges, until = (np.cumsum(np.append(0.0, of[parts])) for of in (self.nbytes, self.share_s))
        taken, seconds = np.zeros(1), np.zeros(1)
        for t in whole:
            taken = np.append(taken, taken + self.nbytes[t])
            seconds = np.append(seconds, seconds + self.share_s[t])
        done = np.zeros(len(complete_bytes))
        for begun, own in zip(taken, seconds, strict=True):
            left = complete_bytes - begun
            done = np.maximum(done, np.where(left >= 0, own + np.interp(left, edges, until), 0.0))
        waiting: Floats = np.maximum(self.share_s.sum() - done, 0.0)
        return waiting


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
