"""Schedules that run optimizer ops when the forward pass would otherwise wait for gradients.

An optimizer op can run as soon as its gradients have arrived, and must run before the first forward op that reads the
updated parameters. If each update runs just before the first forward op that reads its result
(`Workload.iteration_order`), the stream sometimes waits although it has work to do. In a schedule of this module, the
stream runs the next forward op if possible, and otherwise the update that can run and is needed first. So the stream is
never idle while an op is ready (a work-conserving schedule).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence

from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["WorkConserving"]


class WorkConserving:
    """A function that returns a work-conserving `op_order` for given arrivals of a workload's gradients."""

    def __init__(self, workload: Workload) -> None:
        ops, period = workload.ops, Period.of(workload)
        self.duration_s, self.backward = period.duration_s, workload.phase_ops("backward")
        self.backward_s = sum(self.duration_s[op] for op in self.backward)
        # Each update comes after the updates on which it depends; other ops that it needs have run before.
        self.updates = [op for op in workload.iteration_order() if ops[op].phase == "optimizer"]
        place = {op: k for k, op in enumerate(self.updates)}
        self.reads = [period.reads[op] for op in self.updates]
        self.deps = [[place[dep] for dep in ops[op].deps if dep in place] for op in self.updates]
        # Forward ops, each with the tensors that it reads and the places of the updates that it needs. The last entry
        # is no op, and needs all updates.
        self.forward: list[tuple[int | None, list[int], Collection[int]]] = []
        for op in workload.phase_ops("forward"):
            tensors = period.reads[op]
            self.forward.append((op, tensors, {place[update] for t in tensors for update in period.updates[t]}))
        self.forward.append((None, [], range(len(self.updates))))

    def __call__(self, arrival_s: Sequence[float]) -> tuple[tuple[int, ...], float]:
        """Return the order of ops if gradients arrive at these times (by tensor), and the time when the last op ends.

        Takes O(n log n).
        """
        duration_s, updates = self.duration_s, self.updates
        can_run_s: list[float] = []
        for tensors, deps in zip(self.reads, self.deps, strict=True):
            at = _latest(arrival_s, tensors)
            can_run_s.append(max(at, _latest(can_run_s, deps)) if deps else at)
        coming = sorted(range(len(updates)), key=can_run_s.__getitem__, reverse=True)
        there: list[int] = []
        done, order, now = set[int](), list(self.backward), self.backward_s
        for op, tensors, needed in self.forward:
            arrived_s = _latest(arrival_s, tensors)
            missing = len(needed) - sum(map(done.__contains__, needed))
            while True:
                while coming and can_run_s[coming[-1]] <= now:
                    heapq.heappush(there, coming.pop())
                if not missing and arrived_s <= now:
                    break
                if there:
                    k = heapq.heappop(there)
                    done.add(k)
                    missing -= k in needed
                    order.append(updates[k])
                    now += duration_s[updates[k]]
                else:
                    now = min(math.inf if missing else arrived_s, can_run_s[coming[-1]] if coming else math.inf)
            if op is not None:
                order.append(op)
                now += duration_s[op]
        return tuple(order), now


def _latest(moments: Sequence[float], which: Iterable[int]) -> float:
    latest = 0.0
    for k in which:  # faster than max, which matters: a search does this for every op of every plan
        if moments[k] > latest:
            latest = moments[k]
    return latest
