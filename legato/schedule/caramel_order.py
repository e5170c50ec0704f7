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
from fractions import Fraction
from math import lcm

from legato.core.workload import Workload
from legato.simulate.period import Period

__all__ = ["control_dependencies", "serialized_order", "update_order"]


def update_order(workload: Workload) -> list[int]:
    """Stage 1: the backward ops that produce gradients, in the order in which to run them.

    Ops that the same updates need are taken together, as one part: a choice
    completes whole parts, and the time left is kept up to date part by part.
    Times are exact (whole numbers of a small enough unit), so nothing drifts.
    """
    updates = sorted({tensor.ready_after for tensor in workload.tensors})
    parts = _parts(workload, updates)
    needs: list[list[int]] = [[] for _ in updates]
    left = [0] * len(updates)
    for p, (members, duration) in enumerate(parts):
        for k in members:
            needs[k].append(p)
            left[k] += duration
    order, waiting, done = [], dict.fromkeys(range(len(updates))), [False] * len(parts)
    while waiting:
        chosen = min(waiting, key=left.__getitem__)  # the first of equals: captured first
        del waiting[chosen]
        order.append(updates[chosen])
        for p in needs[chosen]:
            if not done[p]:
                done[p] = True
                members, duration = parts[p]
                for k in members:
                    left[k] -= duration
    return order


def control_dependencies(workload: Workload, updates: Sequence[int]) -> list[tuple[int, int]]:
    """Stage 2: the dependencies (op, op that has to wait for it) to add to the graph; none that is there already.

    `updates` are the ops that produce gradients, each once, none before one
    that it depends on: what `update_order` returns.
    """
    waits = Period(workload).waits
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
    waits = Period(workload).waits
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


def _parts(workload: Workload, updates: Sequence[int]) -> list[tuple[list[int], int]]:
    """(indices of the updates, duration) for every set of updates that some ops are needed by, and by no others.

    Sets are bits while they are found. Durations are whole multiples of a unit that they all share.
    """
    waits = Period(workload).waits
    needed_by = [0] * len(workload.ops)
    for k, op in enumerate(updates):
        needed_by[op] = 1 << k
    ops = workload.phase_ops("backward")
    for op in reversed(ops):
        for dep in waits[op]:
            needed_by[dep] |= needed_by[op]
    exact = [Fraction(workload.ops[op].duration_s) for op in ops]
    unit = lcm(*{duration.denominator for duration in exact})
    durations: dict[int, int] = {}
    for op, duration in zip(ops, exact, strict=True):
        whole = duration.numerator * (unit // duration.denominator)
        durations[needed_by[op]] = durations.get(needed_by[op], 0) + whole
    return [
        ([k for k, bit in enumerate(f"{bits:b}"[::-1]) if bit == "1"], duration) for bits, duration in durations.items()
    ]
