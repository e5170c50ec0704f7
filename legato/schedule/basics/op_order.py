"""Caramel's dataflow DAG optimizer: compute first what the next gradient needs.

Idea: the backward pass is a graph, and any order of it that respects the graph
computes the same. The one that makes gradients ready early leaves the network
the most time.
Paper: Caramel (Hashemi, Jyothi, Campbell, MLSys 2020), section 4.1.

Stage 1 chooses the order of the parameter updates: again and again the one that
needs the least computation beyond what was computed for those before. Stage 2
makes every worker keep to it: control dependencies from the end set of an
update (the op that it depends on directly: `Tensor.ready_after`) to the free set
of the next one (the ops it needs that wait for nothing else).

What they leave feasible: the ops of one update all come before any op of the
next, so the order of the updates is the only one left; in between, the ops of
one update keep the freedom that the graph gives them. Every added dependency is
needed for that: without it, an op can run before its update's turn.

Deviations:
- Tensors that become ready at the same op are one update.
- Backward ops that no update needs (the gradient of the input) do not occur in
  the paper; they come last, as if one more update needed them.
- Where two updates need equally little, the one captured first. So an update
  never comes before one that it depends on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["control_dependencies", "serialized_order", "update_order"]


def update_order(workload: Workload) -> list[int]:
    """Stage 1: the backward ops that produce gradients, in the order in which to run them.

    An update never comes before one that it depends on, which needs less. So it
    is weighed only when all of those have been made, by what is left to compute
    for it; until then it is kept with one that it waits for. Times are exact
    (whole numbers of a small enough unit), so nothing drifts.
    """
    waits, duration = Period.of(workload).waits, _whole_durations(workload)
    updates = sorted({tensor.ready_after for tensor in workload.tensors})
    undone = set(workload.phase_ops("backward"))
    pending = set(updates)
    behind: dict[int, list[int]] = {}  # by update: those that wait for it
    left: dict[int, int] = {}  # of the updates that wait for none
    needed_by: dict[int, list[int]] = {}  # by op: those of them that need it
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
        chosen = min(left, key=lambda update: (left[update], update))  # of equals, the one captured first
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
    """The undone ops that an update needs, itself among them, or another update that it waits for."""
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
    """Stage 2: the dependencies (op, op that has to wait for it) to add to the graph; none that is there already.

    `updates` are the ops that produce gradients, each once, none before one
    that it depends on: what `update_order` returns.
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
    """The order of all ops of a period in which the backward pass makes these updates in this order.

    Of the orders that `control_dependencies` leaves, the one closest to the
    captured order; optimizer and forward ops stand as in `Workload.iteration_order`.
    """
    rest = workload.iteration_order()[len(workload.phase_ops("backward")) :]
    return (*(op for block in _blocks(workload, updates) for op in block), *rest)


def _blocks(workload: Workload, updates: Iterable[int]) -> list[list[int]]:
    """The ops of each update that no earlier one needs, and last the ops that none does; captured order in each."""
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
