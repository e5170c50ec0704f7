"""The groups that the bound "equal pairs" asks for: as fast as it says, and as the simulator says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nets import chain
from support.strategies import clusters, examples, seeds, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Plan, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.budget import Budget
from legato.schedule.search.in_halves.best_groups import best_groups
from legato.schedule.search.in_halves.period import GroupedPeriod
from legato.simulator.collective import iteration_time

MIB = 2**20


def period_of(workload, cluster):
    cost = cluster.cost()
    return GroupedPeriod(
        workload,
        lambda nbytes: cost.cost(nbytes) / 2,
        workload.iteration_order(),
        Budget(),
        sharded_among=cluster.workers,
    )


@examples(100)
@given(st.data(), workloads(), clusters(max_collectives=1))
def test_they_take_as_long_as_the_simulator_says(data, workload, cluster):
    period, partition = period_of(workload, cluster), data.draw(st.booleans())
    low_s = lower_bound(workload, cluster, shard="optimizer", thorough=False).seconds
    found = best_groups(period, low_s, data.draw(st.sampled_from([1.5, 10.0])) * low_s, partition=partition)
    if found:
        groups, arranged = found
        plan = Plan("p", tuple(period.messages(groups, arranged)), True, arranged.op_order, shard="optimizer")
        check_plan(plan, workload)
        assert iteration_time(workload, plan, cluster) == pytest.approx(arranged.seconds, rel=1e-12, abs=1e-12)
        tensors = [t for group in groups for t, _, _ in group]
        assert partition or len(set(tensors)) == len(tensors)


def random_chain(seed):
    """A chain of layers, where a message is cheap or dear; a backward op takes twice as long as the forward op."""
    rng = random.Random(seed)
    layers = rng.randint(2, 24)
    times = [rng.lognormvariate(0, 1) for _ in range(layers)]
    sizes = [int(rng.lognormvariate(0, 2) * MIB) // 16 * 16 + 16 for _ in range(layers)]
    beta = 3 * sum(times) * rng.uniform(0.4, 1.5) / sum(sizes)
    cost = LinearCost(3 * sum(times) * 10 ** rng.uniform(-4, -0.8), beta)
    return chain([2 * s for s in times], times, sizes, [0.0] * layers), Cluster(8, {"ring": cost})


@pytest.mark.parametrize("seed", seeds(40))
def test_they_are_the_optimum_of_chains(seed):
    """Up to the precision of both, and to bytes."""
    workload, cluster = random_chain(seed)
    bound = lower_bound(workload, cluster, shard="optimizer", step_last=True)
    period = period_of(workload, cluster)
    found = best_groups(period, bound.seconds, 3 * bound.seconds, partition=True)
    assert bound.seconds * (1 - 1e-9) <= found[1].seconds <= bound.seconds * 1.0015
    assert best_groups(period, bound.seconds, bound.seconds * (1 + 1e-5), partition=True) is None
    plan = schedule("legato", workload, cluster, shard="optimizer")
    assert bound.seconds * (1 - 1e-9) <= iteration_time(workload, plan, cluster) <= bound.seconds * 1.005


def test_an_all_gather_waits_for_a_short_update_rather_than_lets_a_long_one_go():
    """Both gradients are scattered by 9 s. The second layer's parameters could be gathered at once, the first one's
    after an update of 1 s, for 2 s each; but the first layer's forward op takes 8 s, and waits for the latter."""
    ops = [Op("f0", "forward", 8.0), Op("f1", "forward", 1.0), Op("b1", "backward", 3.0), Op("b0", "backward", 4.0)]
    ops += [Op("u0", "optimizer", 2.0), Op("u1", "optimizer", 0.0)]
    tensors = Tensor("t1", 16, 2, (1, 5)), Tensor("t0", 16, 3, (0, 4))
    workload, cluster = Workload("two", tuple(ops), tensors), Cluster(2, {"c": LinearCost(2.0, 2 / 16)})
    period = period_of(workload, cluster)
    groups = [[(0, 0, 16)], [(1, 0, 16)]]
    assert min(period.arrange(groups, rank).seconds for rank in period.ranks(groups)) == 9 + 2 + 2 + 8 + 1
    assert period.in_order(groups, [0, 1, 3, 2]).seconds == 9 + 1 + 2 + 8 + 1
