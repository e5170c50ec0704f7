"""Caramel's dataflow DAG optimizer: compute first what the next gradient needs.

Idea: the backward pass is a graph, and any order of ops that respects the graph computes the same gradients. If
gradients are ready early, the network has more time to send them.
Paper: Caramel (Hashemi, Abdu Jyothi, Godfrey, Campbell, 2020), section 4.1.

Stage 1 chooses the order of the parameter updates: it repeatedly takes the update that needs the least computation
beyond what earlier updates have already computed. Stage 2 makes every worker keep to this order. Stage 2 adds control
dependencies from the *end set* of an update to the *free set* of the next update. The end set is the op
`Tensor.ready_after`, on which the update depends directly. The free set has the ops that the next update needs and that
wait for nothing else.

With these dependencies, all ops of one update run before any op of the next update, so only one order of the updates is
feasible. The ops of one update may still run in any order that the graph allows. Every added dependency is necessary:
without it, an op could run before its update's turn.

Deviations:
- Tensors that become ready at the same op belong to the same update.
- Backward ops that no update needs (the gradient of the input) do not occur in the paper. Unneeded ops come last, as if
  another update needed them.
- If several updates need equally little, the update captured first is taken. Captured order respects dependencies, so
  an update never comes before another update on which it depends.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence

from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["parts", "serialized_order", "update_order"]


def update_order(workload: Workload) -> list[int]:
    """Return the backward ops that produce gradients, in the order in which to run them (stage 1).

    An op needs at least as much computation as any op that it waits for. So the search works like Dijkstra's: it starts
    from the ops that have been computed, and always visits the op that needs the least further computation, until it
    visits an update. The search therefore looks only at ops near those already computed. Times are exact (whole
    multiples of a small enough unit), so there are no rounding errors.
    """
    part_of = parts(workload)
    search = _Nearest(workload, part_of)
    return [search.next() for _ in range(len(set(Period.of(workload).ready_op)))]


def parts(workload: Workload) -> dict[int, int]:
    """Divide the backward ops that updates need into parts, and return the part of each op.

    A part is named after an op: an update, or an op that several parts need. An op that only one part needs belongs to
    that part.
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
    """A search for the update that needs the least further computation. Each op here is the name of a part."""

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
        self.ahead = {op: len(waits) for op, waits in self.waits.items()}  # how many are left
        self.needs: dict[int, set[int]] = {}  # by op seen: the ops left to compute for it that take time
        self.left: dict[int, int] = {}  # by op seen: the time of these ops
        self.needed_by: defaultdict[int, list[int]] = defaultdict(list)
        self.nearest: list[tuple[int, bool, int]] = []  # among equally near ops, updates come last, by id
        for op in sorted(op for op, count in self.ahead.items() if not count):
            self._see(op)

    def next(self) -> int:
        """Return the next update, and mark it and everything that it needs as done."""
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
        """Compute how much more computation an op needs; each op for which it waits is done, or was visited before."""
        needs = {op} if self.duration[op] else set()
        needs.update(*(self.needs[dep] for dep in self.waits[op] if dep in self.undone))
        for other in needs:
            self.needed_by[other].append(op)
        self.needs[op], self.left[op] = needs, sum(self.duration[other] for other in needs)
        heapq.heappush(self.nearest, (self.left[op], op in self.updates, op))

    def _do(self, update: int) -> None:
        """Mark an update and all that it needs as done, so that less is left to compute for other ops."""
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
    """Return durations as whole multiples of a unit that all of them share."""
    exact = [op.duration_s.as_integer_ratio() for op in workload.ops]
    unit = max(denominator for _, denominator in exact)  # every denominator is a power of two
    return [numerator * (unit // denominator) for numerator, denominator in exact]


def serialized_order(workload: Workload, updates: Sequence[int]) -> tuple[int, ...]:
    """Return all ops of an iteration, ordered so that the backward pass finishes the updates in the given order.

    Of all orders that the control dependencies of stage 2 allow, this order is closest to the captured one. Optimizer
    and forward ops keep their order in `Workload.iteration_order`.
    """
    rest = workload.iteration_order()[len(workload.phase_ops("backward")) :]
    return (*(op for block in _blocks(workload, updates) for op in block), *rest)


def _blocks(workload: Workload, updates: Iterable[int]) -> list[list[int]]:
    """Return, for each update, the ops that no earlier update needs, in captured order, and then all unneeded ops."""
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
