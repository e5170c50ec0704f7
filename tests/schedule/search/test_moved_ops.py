"""Orders of computation and messages searched together."""

import importlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, examples, op_orders, plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.reordered import Reordered
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.search.budget import Budget
from legato.schedule.search.moved_ops import BoundInOrder, move_ops
from legato.schedule.search.optimizer_ops import WorkConserving
from legato.schedule.search.problem import Problem
from legato.simulator.collective import iteration_time

legato = importlib.import_module("legato.schedule.search.legato")  # the package has a function of this name


DEAR = Cluster(2, {"c": LinearCost(1.5, 1 / 16)})


def nets(seed):
    """A layer with some branches above it, of random times and bytes, with updates."""
    rng, count = random.Random(seed), 4
    ops = [Op("f", "forward", 1.0)]
    ops += [Op(f"f{i}", "forward", rng.uniform(0, 3), (0,)) for i in range(count)]
    ops += [Op(f"b{i}", "backward", rng.uniform(0, 3)) for i in range(count)]
    ops += [Op("b", "backward", 1.0, tuple(range(count + 1, 2 * count + 1)))]
    ops += [Op(f"u{i}", "optimizer", rng.uniform(0, 1)) for i in range(count + 1)]
    first = 2 * count + 2
    tensors = [Tensor(f"t{i}", 16 * rng.randint(1, 4), count + 1 + i, (1 + i, first + i)) for i in range(count)]
    tensors.append(Tensor("t", 16 * rng.randint(1, 4), 2 * count + 1, (0, first + count)))
    return Workload(f"net{seed}", tuple(ops), tuple(tensors))


def problem_of(workload, cluster, rounds=4):
    return Problem(workload, cluster, None, 0.005, 1.0, 20.0, rounds, 0, True, None, "none", "none")


@examples(40)
@given(st.data())
def test_moved_ops_make_plans(data):
    workload, cluster = data.draw(workloads()), data.draw(clusters())
    starts = [data.draw(plans(workload, cluster, op_order=st.just(()) | op_orders(workload)))]
    bound = lower_bound(workload, cluster, order="any", sends="all_reduces").seconds
    for plan in move_ops(problem_of(workload, cluster), starts, bound, Budget()):
        check_plan(plan, workload)
        assert kind_of(plan, workload).sends == "all_reduces"
        assert iteration_time(workload, plan, cluster) >= bound * (1 - 1e-9)


@examples(60)
@given(st.data())
def test_updates_run_in_idle_time_in_any_order(data):
    workload = data.draw(workloads())
    order = [op for op in data.draw(op_orders(workload)) if workload.ops[op].phase != "optimizer"]
    arrival_s = [data.draw(st.floats(0, 10)) for _ in workload.tensors]
    other = Reordered(workload, order)
    expected, seconds = WorkConserving(other.workload)(arrival_s)
    found, found_s = WorkConserving(workload).in_order(order)(arrival_s)
    assert found_s == pytest.approx(seconds)
    assert found == tuple(other.ids[op] for op in expected)


@examples(40)
@given(st.data())
def test_no_plan_of_all_reduces_is_faster_than_the_bound_in_its_order(data):
    workload, cluster = data.draw(workloads()), data.draw(clusters())
    drawn = sorted(data.draw(op_orders(workload)), key=lambda op: workload.ops[op].phase != "backward")
    plan = data.draw(plans(workload, cluster, halves=False, op_order=st.just(tuple(drawn))))
    order = tuple(op for op in plan.op_order if workload.ops[op].phase != "optimizer")
    value = BoundInOrder(workload, cluster, Budget())
    assert iteration_time(workload, plan, cluster) >= value(order) * (1 - 1e-9)
    captured = tuple(op for op in workload.iteration_order() if workload.ops[op].phase != "optimizer")
    assert value(captured) == lower_bound(workload, cluster, sends="all_reduces", thorough=False).seconds


def test_an_order_is_bounded_once():
    budget, workload = Budget(1.0), nets(0)
    value = BoundInOrder(workload, DEAR, budget)
    order = tuple(op for op in workload.iteration_order() if workload.ops[op].phase != "optimizer")
    first, left = value(order), budget.work
    assert left < 1.0 and value(order) == first and budget.work == left


@pytest.mark.parametrize("seed", [3, 5, 8, 9])
def test_orders_found_with_their_messages_save_what_others_do_not(seed, monkeypatch):
    workload = nets(seed)

    def seconds():
        return iteration_time(workload, schedule("legato", workload, DEAR, any_order=True, rounds=100), DEAR)

    ours = seconds()
    monkeypatch.setattr(legato, "search_any_order", lambda *_: None)
    assert ours < 0.97 * seconds()
