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
from legato.schedule.search.op_orders import OrderValue, annealed_order, promising_orders
from legato.simulator.collective import iteration_time


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 20))
def test_the_highest_is_found_where_values_rise_and_then_fall(count, top, first):
    assert coarse_to_fine(count, lambda k: -abs(k - top), first=first) == min(top, count - 1)


@examples(40)
@given(workloads(), clusters())
def test_promising_orders_are_orders_and_none_is_the_captured_one(workload, cluster):
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    orders = promising_orders(workload, value, moves=(5, 30), enough_s=0.0, budget=Budget(), seed=0)
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
    best = promising_orders(workload, value, moves=(0, 0), enough_s=0.0, budget=Budget(), seed=0)[0]
    updates = update_order(workload)
    others = [workload.iteration_order(), serialized_order(workload, updates)]
    assert value(best) < min(map(value, others))


def annealed(workload, cluster, start=None, *, rounds=400):
    value = OrderValue(workload, cheapest_line(cluster, workload.nbytes))
    start = start or workload.iteration_order()
    order = annealed_order(workload, value, start, rounds=rounds, enough_s=0.0, budget=Budget(), seed=0)
    assert value(order) <= value(start)
    return order


@examples(60)
@given(workloads(), clusters())
def test_moved_ops_stay_where_they_may_be(workload, cluster):
    order = annealed(workload, cluster, rounds=60)
    check_plan(replace(schedule("fifo", workload, cluster), op_order=order), workload)
    phases = [workload.ops[op].phase for op in order]
    assert "backward" not in phases[len(workload.phase_ops("backward")) :]
    fixed = [op for op in order if workload.ops[op].phase != "optimizer"]
    assert fixed == workload.phase_ops("backward") + workload.phase_ops("forward")


def test_only_nodes_of_one_graph_change_places():
    """Two branches; the gradient of the second is large, so it should be computed first, and can be in one graph."""
    workload, cluster = branches(graph=True), Cluster(2, {"c": LinearCost(0.0, 1.0 / 16)})
    moved = [op for op in annealed(workload, cluster) if workload.ops[op].phase == "backward"]
    assert moved == [3, 2]
    apart = branches(graph=False)
    assert annealed(apart, cluster) == apart.iteration_order()


def branches(graph):
    name = "graph 0/{}/{}" if graph else "{} {}"
    ops = [Op(name.format("forward", i), "forward", 1.0, (0,) if i else ()) for i in range(2)]
    ops += [Op(name.format("backward", i), "backward", 1.0) for i in range(2)]
    return Workload("branches", tuple(ops), (Tensor("small", 16, 2, (1,)), Tensor("large", 64, 3, (0,))))


def test_an_update_moves_behind_the_forward_ops_that_do_not_need_it():
    """The large tensor's update would keep the stream from the forward pass; and its gradient may arrive later."""
    ops = [Op("f0", "forward", 4.0), Op("f1", "forward", 1.0, (0,)), Op("b0", "backward", 1.0)]
    ops += [Op("u0", "optimizer", 1.0), Op("u1", "optimizer", 4.0)]
    tensors = Tensor("0", 16, 2, (0, 3)), Tensor("1", 64, 2, (1, 4))
    workload, cluster = Workload("updates", tuple(ops), tensors), Cluster(2, {"c": LinearCost(0.0, 1.0 / 16)})
    assert annealed(workload, cluster, start=(2, 3, 4, 0, 1)) == (2, 3, 0, 4, 1)
    assert iteration_time(workload, schedule("legato", workload, cluster), cluster) == 1 + 1 + 1 + 4 + 4 + 1
