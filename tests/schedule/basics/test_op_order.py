"""Caramel's order of computation: the paper's two stages against their definitions, and what the result leaves open."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples, workloads

from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.simulator.period import Period

# Backward: after op 2, two branches: 3 (3 s), 5 (1 s) and 4 (2 s), 6 (1 s); 7 joins them; nothing needs 8.
# The branches were captured in turns.
FORK = Workload(
    "fork",
    (
        Op("f0", "forward", 1.0),
        Op("f1", "forward", 1.0, (0,)),
        Op("b2", "backward", 1.0, (1,)),
        Op("b3", "backward", 3.0, (2,)),
        Op("b4", "backward", 2.0, (2,)),
        Op("b5", "backward", 1.0, (3,)),
        Op("b6", "backward", 1.0, (4,)),
        Op("b7", "backward", 1.0, (5, 6)),
        Op("b8", "backward", 1.0, (2,)),
        Op("u", "optimizer", 1.0, (7,)),
    ),
    (Tensor("c", 4, 5), Tensor("d", 4, 6), Tensor("a", 8, 7, (0, 9)), Tensor("b", 2, 7, (1,))),
)


def ancestors(waits, op):
    return {op}.union(*(ancestors(waits, dep) for dep in waits[op]))


def control_dependencies(workload, updates):
    """Stage 2 of the paper: from the end set of each update to the free set of the next, if not in the graph."""
    waits, executed, edges = Period.of(workload).waits, set(), []
    for k, update in enumerate([*updates, None]):
        needs = workload.phase_ops("backward") if update is None else ancestors(waits, update)
        block = sorted(set(needs) - executed)
        free = [op for op in block if executed.issuperset(waits[op])]
        edges += [(updates[k - 1], op) for op in free if k and updates[k - 1] not in waits[op]]
        executed.update(block)
    return edges


def test_the_stages_by_hand():
    # c needs 5 s (b2, b3, b5) and d 4 s (b2, b4, b6): d first. Then c needs 4 s more, and a and b 5 s.
    updates = update_order(FORK)
    assert updates == [6, 5, 7]
    # Free for c, once d is there: b3. For a and b: b7, which waits for b5 as it is. Then b8, which nothing needs.
    assert control_dependencies(FORK, updates) == [(6, 3), (7, 8)]
    assert serialized_order(FORK, updates) == (2, 4, 6, 3, 5, 7, 8, 9, 0, 1)


def test_the_captured_order_of_a_chain_is_kept():
    ops = tuple(Op(f"b{i}", "backward", 1.0, (i - 1,) if i else ()) for i in range(5))
    chain = Workload("chain", ops, (Tensor("x", 1, 1), Tensor("y", 1, 4), Tensor("z", 1, 4)))
    assert update_order(chain) == [1, 4] and control_dependencies(chain, [1, 4]) == []
    assert serialized_order(chain, [1, 4]) == chain.iteration_order()


def test_the_time_left_is_exact():
    """Ten times 0.1 s is more than 1 s, whatever the rounding of a running sum says."""
    ops = [Op(f"b{i}", "backward", 0.1) for i in range(10)]
    ops += [Op("many", "backward", 0.0, tuple(range(10))), Op("one", "backward", 1.0)]
    assert update_order(Workload("sum", tuple(ops), (Tensor("x", 1, 10), Tensor("y", 1, 11)))) == [11, 10]


@examples(150)
@given(workloads(max_ops=8, max_tensors=8))
def test_stage_1_is_what_the_paper_says(workload):
    """In each step, the update that needs the least of what is not completed; its ops are then completed."""
    period = Period.of(workload)
    completed, order = set(), []
    updates = sorted(set(period.ready_op))
    while set(order) != set(updates):
        cost = {
            u: sum(period.duration_s[i] for i in ancestors(period.waits, u) - completed)
            for u in updates
            if u not in order
        }
        order.append(min(cost, key=lambda u: (cost[u], u)))
        completed |= ancestors(period.waits, order[-1])
    assert update_order(workload) == order


def feasible(ops, waits):
    """All orders of the ops in which each stands after those it waits for."""
    if not ops:
        yield ()
    for op in ops:
        if not waits[op] & ops:
            yield from ((op, *rest) for rest in feasible(ops - {op}, waits))


@examples(100)
@given(workloads(max_ops=6, max_tensors=5), st.booleans())
def test_stage_2_leaves_one_order_of_updates_and_adds_nothing_in_vain(workload, greedy):
    period = Period.of(workload)
    updates = update_order(workload) if greedy else sorted(set(period.ready_op))
    added = control_dependencies(workload, updates)
    assert all(before not in period.waits[after] for before, after in added) and len(set(added)) == len(added)
    backward = frozenset(workload.phase_ops("backward"))
    turn, taken = {}, set()  # of each op: the first update that needs it
    for k, update in enumerate(updates):
        turn |= dict.fromkeys(ancestors(period.waits, update) - taken, k)
        taken |= ancestors(period.waits, update)

    def left_by(edges):
        waits = {op: set(period.waits[op]) | {before for before, after in edges if after == op} for op in backward}
        return feasible(backward, waits)

    turns = sorted(turn.get(op, len(updates)) for op in backward)
    orders = list(left_by(added))
    assert orders  # the added dependencies close no circle
    for order in orders:
        assert [op for op in order if op in updates] == updates
        assert [turn.get(op, len(updates)) for op in order] == turns  # only what the next update needs ever runs
    own = serialized_order(workload, updates)
    assert own[: len(backward)] in orders
    assert own[len(backward) :] == workload.iteration_order()[len(backward) :]
    for edge in added:
        without = left_by([other for other in added if other != edge])
        assert any([turn.get(op, len(updates)) for op in order] != turns for order in without)


@given(workloads(max_ops=8, max_tensors=8))
def test_the_order_is_one_that_a_plan_may_have(workload):
    whole = tuple(Message((Slice(t.name, 0, t.nbytes),)) for t in workload.tensors)
    check_plan(Plan("p", whole, op_order=serialized_order(workload, update_order(workload))), workload)


@given(workloads(max_ops=6, max_tensors=6))
def test_the_first_update_is_as_early_as_any_order_makes_it(workload):
    period = Period.of(workload)

    def first(order):
        when = itertools.accumulate(period.duration_s[op] for op in order)
        return next(end for op, end in zip(order, when, strict=True) if op in period.ready_op)

    earliest = min(
        sum(period.duration_s[i] for i in ancestors(period.waits, update)) for update in set(period.ready_op)
    )
    assert first(serialized_order(workload, update_order(workload))) == earliest <= first(workload.iteration_order())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3.7e5])
def test_the_unit_of_time_does_not_matter(scale):
    ops = tuple(msgspec.structs.replace(op, duration_s=op.duration_s * scale) for op in FORK.ops)
    assert update_order(msgspec.structs.replace(FORK, ops=ops)) == [6, 5, 7]
