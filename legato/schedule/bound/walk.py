"""Release times and tails by definition, in whole numbers: checkers of bounds use these, not `heads_tails`."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate

from legato.core.workload import Workload
from legato.schedule.basics.heads_tails import Order
from legato.simulator.period import Compute

__all__ = ["SCALE", "Walk", "whole"]

#: Every finite float is a multiple of 2**-1074, and half of one of 2**-1075.
SCALE = 2**1075


def whole(seconds: float) -> int:
    """Seconds in units of 1 / SCALE."""
    exact = Fraction(seconds) * SCALE
    assert exact.denominator == 1
    return exact.numerator


class Walk:
    """Release times and tails by definition, in units of 1 / _SCALE seconds."""

    scale = SCALE

    def __init__(self, workload: Workload, compute: Compute, order: Order) -> None:
        self.workload, self.compute_setting, self.order = workload, compute, order
        self.duration = [whole(op.duration_s) for op in workload.ops]
        self.phase = [op.phase for op in workload.ops]
        self.before = [
            [d for d in op.deps if op.phase == "forward" or self.phase[d] != "forward"] for op in workload.ops
        ]
        for tensor in workload.tensors:
            for reader in tensor.readers:
                if self.phase[reader] == "forward":
                    self.before[reader] += [u for u in tensor.readers if self.phase[u] == "optimizer"]
        self.after: list[list[int]] = [[] for _ in workload.ops]
        for i, ops in enumerate(self.before):
            for op in ops:
                self.after[op].append(i)
        forward, backward = (
            [d if p == phase else 0 for d, p in zip(self.duration, self.phase, strict=True)]
            for phase in ("forward", "backward")
        )
        self.backward_until = list(accumulate(backward))
        self.forward_from = list(accumulate(reversed(forward)))[::-1]
        self.paths: dict[tuple[int, bool], int] = {}
        self.releases: dict[int, int] = {}
        self.tails: dict[int, int] = {}

    def compute(self) -> int:
        if self.compute_setting == "one":
            return sum(self.duration)
        through = [self.release(t) + self.tail(t) for t in range(len(self.workload.tensors))]
        return max([*through, *(self.path(i, self.before.__getitem__, False) for i in range(len(self.duration)))])

    def release(self, t: int) -> int:
        if t not in self.releases:
            self.releases[t] = self._release(t)
        return self.releases[t]

    def tail(self, t: int) -> int:
        if t not in self.tails:
            self.tails[t] = self._tail(t)
        return self.tails[t]

    def _release(self, t: int) -> int:
        producer = self.workload.tensors[t].ready_after
        if self.compute_setting == "unlimited":
            return self.path(producer, self.before.__getitem__, False)
        if self.order == "any":
            return sum(self.duration[i] for i in self.needs(t))
        return self.backward_until[producer]

    def _tail(self, t: int) -> int:
        readers = list(self.workload.tensors[t].readers)
        if self.compute_setting == "unlimited":
            return max((self.path(r, self.after.__getitem__, True) for r in readers), default=0)
        later = self.reached(readers, self.after)
        if self.order == "any":
            return sum(self.duration[i] for i in later)
        updates = sum(self.duration[i] for i in later if self.phase[i] == "optimizer")
        forward = [i for i in later if self.phase[i] == "forward"]
        return updates + (self.forward_from[min(forward)] if forward else 0)

    def forward(self, t: int) -> int:
        """The forward ops of the tail of a tensor."""
        if self.compute_setting == "unlimited":
            return 0
        later = self.reached(list(self.workload.tensors[t].readers), self.after)
        return self.tail(t) - sum(self.duration[i] for i in later if self.phase[i] == "optimizer")

    def needs(self, t: int) -> set[int]:
        """The ops that the gradient of a tensor depends on, and the one that produces it."""
        return self.reached([self.workload.tensors[t].ready_after], self.before)

    def reached(self, start: list[int], neighbours: list[list[int]]) -> set[int]:
        found, todo = set(start), list(start)
        while todo:
            for op in neighbours[todo.pop()]:
                if op not in found:
                    found.add(op)
                    todo.append(op)
        return found

    def path(self, op: int, neighbours: Callable[[int], list[int]], later: bool) -> int:
        """The longest path from an op along `neighbours`, without recursion."""
        todo = [op]
        while todo:
            i = todo[-1]
            missing = [n for n in neighbours(i) if (n, later) not in self.paths]
            if missing:
                todo += missing
            else:
                todo.pop()
                self.paths[i, later] = self.duration[i] + max((self.paths[n, later] for n in neighbours(i)), default=0)
        return self.paths[op, later]
