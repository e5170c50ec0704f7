"""Orders of computation to plan for."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.coarse_to_fine import coarse_to_fine
from legato.schedule.basics.op_order import serialized_order, update_order
from legato.schedule.bound.lower_bound import cheapest_line
from legato.schedule.search.budget import Budget
from legato.schedule.search.op_orders import OrderValue, promising_orders
from legato.simulator.collective import iteration_time


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 20))
def test_the_highest_is_found_where_values_rise_and_then_fall(count, top, first):
    assert coarse_to_fine(count, lambda k: -abs(k - top), first=first) == min(top, count - 1)


@examples(40)
@given(workloads(), clusters())
def test_promising_orders_are_orders_and_none_is_the_captured_one(workload, cluster):
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    orders = promising_orders(workload, value, rounds=5, enough_s=0.0, budget=Budget(), seed=0)
    assert len(set(orders)) == len(orders) and workload.iteration_order() not in orders
    for order in orders:
        plan = replace(schedule("fifo", workload, cluster), op_order=order)
        check_plan(plan, workload)


@examples(40)
@given(workloads(optimizer=False), clusters(), st.randoms(use_true_random=False))
def test_no_plan_takes_less_than_the_value_of_its_order(workload, cluster, rng):
    updates = update_order(workload)
    order = serialized_order(workload, rng.choice([updates, sorted(updates)]))
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))(order)
    for name in ("fifo", "single", "p3", "dear", "merge-optimal"):
        plan = replace(schedule(name, workload, cluster), op_order=order)
        assert iteration_time(workload, plan, cluster) >= value * (1 - 1e-12)


def layers(count, bytes_each, last_bytes):
    """A chain of layers, the weights' gradients hanging on it, each op 1 s; the last layer has other bytes."""
    ops = [Op(f"f{i}", "forward", 1.0, (i - 1,) if i else ()) for i in range(count)]
    tensors, above = [], count - 1
    for i in reversed(range(count)):
        ops.append(Op(f"w{i}", "backward", 1.0, (above,)))
        tensors.append(Tensor(f"t{i}", last_bytes if i == count - 1 else bytes_each, len(ops) - 1, (i,)))
        ops.append(Op(f"b{i}", "backward", 1.0, (above,)))
        above = len(ops) - 1
    return Workload("layers", tuple(ops), tuple(tensors))


def test_what_is_needed_late_is_computed_behind_what_would_wait_for_it():
    """The last layer's weights are large and read last: made first, they delay all; made last, they fit beside it."""
    workload, cluster = layers(6, 16, 16), Cluster(2, {"c": LinearCost(0.0, 1.5 / 16)})
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    best = promising_orders(workload, value, rounds=0, enough_s=0.0, budget=Budget(), seed=0)[0]
    updates = update_order(workload)
    others = [workload.iteration_order(), serialized_order(workload, updates)]
    assert value(best) < min(map(value, others))
    plan = schedule("legato", workload, cluster, any_order=True)
    assert iteration_time(workload, plan, cluster) < iteration_time(
        workload, schedule("legato", workload, cluster), cluster
    )
