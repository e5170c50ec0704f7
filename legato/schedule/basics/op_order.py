"""Caramel's dataflow DAG optimizer: compute first what the next gradient needs.

Idea: the backward pass is a graph, and any order of ops that respects the graph
computes the same gradients. The order that makes gradients ready early leaves the
network the most time.
Paper: Caramel (Hashemi, Abdu Jyothi, Godfrey, Campbell, 2020), section 4.1.

Stage 1 chooses the order of the parameter updates: it repeatedly takes the update
that needs the least computation beyond what the updates before it have computed.
Stage 2 makes every worker keep to this order. It adds control dependencies from the
end set of an update (the op that it depends on directly: `Tensor.ready_after`) to
the free set of the next one (the ops it needs that wait for nothing else).

With these dependencies, the ops of one update all come before any op of the next,
so only one order of the updates is feasible. The ops of one update keep the freedom
that the graph gives them. Every added dependency is necessary: without it, an op can
run before its update's turn.

Deviations:
- Tensors that become ready at the same op are one update.
- Backward ops that no update needs (the gradient of the input) do not occur in the
  paper. They come last, as if one more update needed them.
- Of updates that need equally little, the one captured first is taken. So an update
  never comes before one that it depends on.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["parts", "serialized_order", "update_order"]


def update_order(workload: Workload) -> list[int]:
    """Stage 1: the backward ops that produce gradients, in the order in which to run them.

    What is left to compute for an op is at least what is left for those that it waits
    for. So the search goes through the graph from what has been computed, always on
    from the op for which least is left, until this is an update, as Dijkstra's does.
    Only ops near to what has been computed are looked at. Times are exact (whole
    multiples of a small enough unit), so no rounding errors add up.
    """
    part_of = parts(workload)
    search = _Nearest(workload, part_of)
    return [search.next() for _ in range(len(set(Period.of(workload).ready_op)))]


def parts(workload: Workload) -> dict[int, int]:
    """For each backward op that an update needs, the op of which it is a part.

    This is itself for an update. An op that only one part of the backward pass needs is
    a part of it.
    """
    period = Period.of(workload)
    part_of = {update: update for update in sorted(set(period.ready_op))}
    needed_by: defaultdict[int, set[int]] = defaultdict(set)
    for op in reversed(workload.phase_ops("backward")):
        if op not in part_of and needed_by[op]:
            part_of[op] = op if len(needed_by[op]) > 1 else min(needed_by[op])
        if op in part_of:
            for dep in period.waits[op]:
                needed_by[dep].add(part_of[op])
    return part_of


class _Nearest:
    """Finds the update for which least is left to compute, again and again. An op stands for all of its parts."""

    def __init__(self, workload: Workload, part_of: dict[int, int]) -> None:
        period = Period.of(workload)
        self.updates = set(period.ready_op)
        self.duration: dict[int, int] = dict.fromkeys(part_of.values(), 0)
        self.waits: dict[int, set[int]] = {op: set() for op in self.duration}
        durations = _whole_durations(workload)
        for op, joined in part_of.items():
            self.duration[joined] += durations[op]
            self.waits[joined].update(part_of[dep] for dep in period.waits[op])
        self.followers: dict[int, list[int]] = {op: [] for op in self.duration}
        for op, waits in self.waits.items():
            waits.discard(op)
            for dep in waits:
                self.followers[dep].append(op)
        self.undone, self.passed = set(self.duration), set[int]()
        self.ahead = {op: len(waits) for op, waits in self.waits.items()}  # neither done nor passed
        self.needs: dict[int, set[int]] = {}  # by op seen: what is left to compute for it, of what takes time
        self.left: dict[int, int] = {}  # and for how long
        self.needed_by: defaultdict[int, list[int]] = defaultdict(list)
        self.nearest: list[tuple[int, bool, int]] = []  # of equally near ops, updates stand last, by their ids
        for op in sorted(op for op, count in self.ahead.items() if not count):
            self._see(op)

    def next(self) -> int:
        """The next update; it is done then, with everything that it needs."""
        while True:
            left, is_update, op = heapq.heappop(self.nearest)
            if op in self.undone and op not in self.passed and left == self.left[op]:
                if is_update:
                    self._do(op)
                else:
                    self.passed.add(op)
                for follower in self.followers[op]:
                    self.ahead[follower] -= 1
                    if not self.ahead[follower]:
                        self._see(follower)
                if is_update:
                    return op

    def _see(self, op: int) -> None:
        """Find what is left to compute for an op that waits only for what is done or passed."""
        needs = {op} if self.duration[op] else set()
        needs.update(*(self.needs[dep] for dep in self.waits[op] if dep in self.undone))
        for other in needs:
            self.needed_by[other].append(op)
        self.needs[op], self.left[op] = needs, sum(self.duration[other] for other in needs)
        heapq.heappush(self.nearest, (self.left[op], op in self.updates, op))

    def _do(self, update: int) -> None:
        """Compute an update and what it needs, which leaves less for others."""
        done, nearer = [update], set[int]()
        self.undone.remove(update)
        for op in done:  # grows
            for dep in self.waits[op]:
                if dep in self.undone:
                    self.undone.remove(dep)
                    done.append(dep)
        for op in done:
            self.needs.pop(op)
            for other in self.needed_by.pop(op, ()):
                if other in self.undone:
                    self.needs[other].remove(op)
                    self.left[other] -= self.duration[op]
                    nearer.add(other)
        for op in nearer - self.passed:
            heapq.heappush(self.nearest, (self.left[op], op in self.updates, op))


def _whole_durations(workload: Workload) -> list[int]:
    """Durations as whole multiples of a unit that they all share."""
    exact = [op.duration_s.as_integer_ratio() for op in workload.ops]
    unit = max(denominator for _, denominator in exact)  # a power of two, like all of them
    return [numerator * (unit // denominator) for numerator, denominator in exact]


def serialized_order(workload: Workload, updates: Sequence[int]) -> tuple[int, ...]:
    """An order of all ops of a period in which the backward pass makes the updates in this order.

    Of the orders that the control dependencies of stage 2 allow, this is the one closest to
    the captured order. Optimizer and forward ops stand as in `Workload.iteration_order`.
    """
    rest = workload.iteration_order()[len(workload.phase_ops("backward")) :]
    return (*(op for block in _blocks(workload, updates) for op in block), *rest)


def _blocks(workload: Workload, updates: Iterable[int]) -> list[list[int]]:
    """For each update, the ops that no earlier one needs, in captured order; last, the ops that no update needs."""
    waits = Period.of(workload).waits
    unexecuted = set(workload.phase_ops("backward"))
    blocks = []
    for update in updates:
        block, reached = [], [update]
        while reached:
            op = reached.pop()
            if op in unexecuted:
                unexecuted.remove(op)
                block.append(op)
                reached += waits[op]
        blocks.append(sorted(block))
    return [*blocks, sorted(unexecuted)]
