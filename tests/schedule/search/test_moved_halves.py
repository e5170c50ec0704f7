"""Halves, ops and updates that move together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, examples, op_orders, plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.budget import Budget
from legato.schedule.search.moved_halves import _Search, move_halves
from legato.schedule.search.problem import Problem
from legato.simulator.collective import iteration_time


def problem_of(workload, cluster, rounds=1):
    return Problem(workload, cluster, None, 0.005, 1.0, 20.0, rounds, 0, True, None, "none", "none")


@examples(40)
@given(st.data())
def test_moved_halves_make_plans_no_slower_than_they_say(data):
    workload, cluster = data.draw(workloads()), data.draw(clusters())
    drawn = sorted(data.draw(op_orders(workload)), key=lambda op: workload.ops[op].phase != "backward")
    start = data.draw(plans(workload, cluster, op_order=st.just(()) | st.just(tuple(drawn))))
    bound = lower_bound(workload, cluster, order="any", thorough=False).seconds
    search = _Search(problem_of(workload, cluster), start, 0.0, Budget())
    state = search.run(50)
    plan = search.plan(state)
    check_plan(plan, workload)
    seconds = iteration_time(workload, plan, cluster)
    assert bound * (1 - 1e-9) <= seconds <= state.seconds * (1 + 1e-9)
    assert state.seconds <= search.start.seconds
    if cluster.unpack_s_per_byte == 0:
        assert seconds == pytest.approx(state.seconds)


def test_updates_run_while_the_stream_would_wait():
    """The gradient of a large layer arrives early: its update fits beside the message of the first layer."""
    workload = Workload(
        "updates",
        (
            Op("f0", "forward", 1.0),
            Op("f1", "forward", 1.0, (0,)),
            Op("b1", "backward", 1.0),
            Op("b0", "backward", 5.0, (2,)),
            Op("u1", "optimizer", 3.0),
        ),
        (Tensor("t1", 16, 2, (1, 4)), Tensor("t0", 64, 3, (0,))),
    )
    cluster = Cluster(2, {"c": LinearCost(0.0, 1 / 16)})
    start = schedule("dear", workload, cluster)
    plan = move_halves(problem_of(workload, cluster, rounds=10), start, 0.0, Budget())
    assert iteration_time(workload, plan, cluster) == pytest.approx(6 + 4 + 2)
    assert plan.op_order == (2, 3, 4, 0, 1)
