"""A workload that computes in another order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, examples, op_orders, plans, workloads

from legato.core.errors import PlanError
from legato.core.plan import check_plan
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.reordered import Reordered
from legato.simulator.collective import iteration_time


@examples(60)
@given(st.data())
def test_a_plan_takes_as_long_in_the_original(data):
    workload = data.draw(workloads())
    cluster = data.draw(clusters())
    other = Reordered(workload, data.draw(op_orders(workload)))
    plan = data.draw(plans(other.workload, cluster, op_order=st.just(()) | op_orders(other.workload)))
    restored = other.restored(plan)
    check_plan(restored, workload)
    try:
        expected = iteration_time(other.workload, plan, cluster)
    except PlanError:  # a forward op stands before the backward pass has ended, and waits for all messages
        with pytest.raises(PlanError):
            iteration_time(workload, restored, cluster)
    else:
        assert iteration_time(workload, restored, cluster) == expected


@examples(60)
@given(st.data())
def test_the_captured_order_is_the_one_given(data):
    workload = data.draw(workloads())
    order = data.draw(op_orders(workload))
    other = Reordered(workload, [op for op in order if workload.ops[op].phase != "optimizer"])
    new = [other.ids[op] for op in other.workload.iteration_order()]
    for phase in ("backward", "forward"):
        assert [op for op in new if workload.ops[op].phase == phase] == [
            op for op in order if workload.ops[op].phase == phase
        ]
    assert [op.name for op in other.workload.ops] == [workload.ops[op].name for op in other.ids]
    in_captured = Reordered(workload, workload.iteration_order()).workload
    assert in_captured.iteration_order() == workload.iteration_order()
    assert heads_tails(in_captured, "one", "captured") == heads_tails(workload, "one", "captured")
