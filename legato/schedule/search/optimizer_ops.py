"""When to run the optimizer ops: in the time in which the forward pass would wait.

An optimizer op can run as soon as its gradients have arrived, and must run before the first
forward op that reads what it updates. If each runs just before that forward op
(`Workload.iteration_order`), the stream waits although it has work to do. Here the stream
runs the next forward op if it can, and otherwise the update that is needed first among
those that can run: it is never idle while an op is ready (a work-conserving schedule).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from legato.core.workload import Workload

__all__ = ["work_conserving_order"]


def work_conserving_order(workload: Workload, arrival_s: Sequence[float]) -> tuple[tuple[int, ...], float]:
    """An `op_order` for gradients that arrive at these seconds of the period, by tensor, in O(n log n).

    Also the seconds until its last op ends.
    """
    ops = workload.ops
    arrives = [0.0] * len(ops)  # when everything that an op reads has arrived
    updates_of: dict[int, set[int]] = {op: set() for op in workload.phase_ops("forward")}
    for tensor, arrival in zip(workload.tensors, arrival_s, strict=True):
        mine = {r for r in tensor.readers if ops[r].phase == "optimizer"}
        for reader in tensor.readers:
            arrives[reader] = max(arrives[reader], arrival)
            if ops[reader].phase == "forward":
                updates_of[reader] |= mine
    by_use = [op for op in workload.iteration_order() if ops[op].phase == "optimizer"]
    for op in by_use:  # each stands after the updates that it depends on; other ops that it needs have run before
        arrives[op] = max((arrives[op], *(arrives[dep] for dep in ops[op].deps if ops[dep].phase == "optimizer")))
    coming = [(arrives[op], use, op) for use, op in enumerate(by_use)]
    heapq.heapify(coming)
    there: list[tuple[int, int]] = []
    order, done = workload.phase_ops("backward"), set[int]()
    now = sum(ops[op].duration_s for op in order)
    forward = deque(updates_of)
    while forward or coming or there:
        while coming and coming[0][0] <= now:
            _, use, op = heapq.heappop(coming)
            heapq.heappush(there, (use, op))
        next_forward = arrives[forward[0]] if forward and updates_of[forward[0]] <= done else math.inf
        if next_forward <= now:
            op = forward.popleft()
        elif there:
            op = heapq.heappop(there)[1]
            done.add(op)
        else:
            now = min(next_forward, coming[0][0] if coming else math.inf)
            continue
        now += ops[op].duration_s
        order.append(op)
    return tuple(order), now
