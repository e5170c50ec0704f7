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

from collections.abc import Iterable, Sequence

from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["control_dependencies", "serialized_order", "update_order"]


def update_order(workload: Workload) -> list[int]:
    """Stage 1: the backward ops that produce gradients, in the order in which to run them.

    An update needs at least as much as the updates that it depends on, so it never
    comes before them. It is compared with others, by what is left to compute for
    it, only when all of those are done; until then it is kept with one that it waits
    for. Times are exact (whole multiples of a small enough unit), so no rounding
    errors add up.
    """
    waits, duration = Period.of(workload).waits, _whole_durations(workload)
    updates = sorted({tensor.ready_after for tensor in workload.tensors})
    undone = set(workload.phase_ops("backward"))
    pending = set(updates)
    behind: dict[int, list[int]] = {}  # by update: the updates that wait for it
    left: dict[int, int] = {}  # what is left to compute, for updates that wait for no other
    needed_by: dict[int, list[int]] = {}  # by op: the updates in `left` that need it
    order: list[int] = []
    fresh = updates
    while len(order) < len(updates):
        for update in fresh:
            block, other = _until_update(update, waits, undone, pending)
            if other is not None:
                behind.setdefault(other, []).append(update)
                continue
            left[update] = sum(duration[op] for op in block)
            for op in block:
                needed_by.setdefault(op, []).append(update)
        chosen = min(left, key=lambda update: (left[update], update))  # of equal ones, the one captured first
        order.append(chosen)
        for op in _until_update(chosen, waits, undone, pending)[0]:
            undone.remove(op)
            for update in needed_by[op]:
                left[update] -= duration[op]
        pending.remove(chosen)
        del left[chosen]
        fresh = behind.pop(chosen, [])
    return order


def _until_update(
    update: int, waits: list[list[int]], undone: set[int], pending: set[int]
) -> tuple[list[int], int | None]:
    """The undone ops that an update needs, including itself, or another update that it waits for."""
    block, found = [update], {update}
    for op in block:  # grows
        for dep in waits[op]:
            if dep in undone and dep not in found:
                if dep in pending:
                    return [], dep
                found.add(dep)
                block.append(dep)
    return block, None


def _whole_durations(workload: Workload) -> list[int]:
    """Durations as whole multiples of a unit that they all share."""
    exact = [op.duration_s.as_integer_ratio() for op in workload.ops]
    unit = max(denominator for _, denominator in exact)  # a power of two, like all of them
    return [numerator * (unit // denominator) for numerator, denominator in exact]


def control_dependencies(workload: Workload, updates: Sequence[int]) -> list[tuple[int, int]]:
    """Stage 2: the dependencies (op, op that must wait for it) to add to the graph, without those it has already.

    `updates` are the ops that produce gradients, each once and none before one
    that it depends on, as `update_order` returns them.
    """
    waits = Period.of(workload).waits
    executed: set[int] = set()
    edges: list[tuple[int, int]] = []
    for k, block in enumerate(_blocks(workload, updates)):
        if k:
            end = updates[k - 1]
            free = [op for op in block if executed.issuperset(waits[op])]
            edges += [(end, op) for op in free if end not in waits[op]]
        executed.update(block)
    return edges


def serialized_order(workload: Workload, updates: Sequence[int]) -> tuple[int, ...]:
    """An order of all ops of a period in which the backward pass makes the updates in this order.

    Of the orders that `control_dependencies` allows, this is the one closest to the
    captured order. Optimizer and forward ops stand as in `Workload.iteration_order`.
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
