"""The pairs of halves that the bound "sides" asks for: as fast as it says, and as the simulator says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Plan, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search.best_pairs import best_pairs
from legato.schedule.search.budget import Budget
from legato.schedule.search.paired_period import PairedPeriod
from legato.simulator.collective import iteration_time

MIB = 2**20


def period_of(workload, cluster):
    cost = cluster.cost()
    return PairedPeriod(workload, lambda nbytes: cost.cost(nbytes) / 2, workload.iteration_order(), Budget())


def simulated(period, found, cluster):
    groups, arranged = found
    plan = Plan("p", tuple(period.messages(groups, arranged)), True, arranged.op_order)
    check_plan(plan, period.workload)
    return iteration_time(period.workload, plan, cluster)


@examples(100)
@given(st.data(), workloads(), clusters(max_collectives=1))
def test_they_take_as_long_as_the_simulator_says(data, workload, cluster):
    period = period_of(workload, cluster)
    low_s = lower_bound(workload, cluster, sends="pairs", thorough=False).seconds
    found = best_pairs(
        period, low_s, data.draw(st.sampled_from([1.5, 4.0])) * low_s, partition=data.draw(st.booleans())
    )
    if found:
        assert simulated(period, found, cluster) == pytest.approx(found[1].seconds, rel=1e-12, abs=1e-12)


def chain(seed):
    """A chain of layers without updates, on a network where a message is dear."""
    rng = random.Random(seed)
    layers = rng.randint(2, 24)
    times = [rng.lognormvariate(0, 1) for _ in range(layers)]
    ops = [Op(f"forward {i}", "forward", times[i], (i - 1,) if i else ()) for i in range(layers)]
    for i in reversed(range(layers)):
        ops.append(Op(f"backward {i}", "backward", 2 * times[i], (len(ops) - 1,)))
    sizes = [int(rng.lognormvariate(0, 2) * MIB) // 16 * 16 + 16 for _ in range(layers)]
    tensors = tuple(Tensor(f"{i}", sizes[i], 2 * layers - 1 - i, (i,)) for i in range(layers))
    beta = 3 * sum(times) * rng.uniform(0.4, 1.5) / sum(sizes)
    cost = LinearCost(3 * sum(times) * rng.uniform(0.02, 0.15), beta)
    return Workload(f"chain {seed}", tuple(ops), tensors), Cluster(8, {"ring": cost})


@pytest.mark.parametrize("seed", range(30))
def test_they_are_near_the_optimum_of_chains(seed):
    """Where all tensors may be partitioned and nothing is updated: up to 2.3% off here, where intervals are joined."""
    workload, cluster = chain(seed)
    bound = lower_bound(workload, cluster, sends="pairs")
    low_s = lower_bound(workload, cluster, sends="pairs", thorough=False).seconds
    found = best_pairs(period_of(workload, cluster), low_s, 3 * low_s, partition=True)
    assert found is not None
    assert bound.seconds * (1 - 1e-9) <= found[1].seconds <= bound.seconds * 1.025


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_many_halves(seed):
    """Where messages are cheap, there may be more halves than are counted; then no pairs are found, or right ones."""
    workload, cluster = chain(seed)
    found = []
    for k in range(40):
        cost = LinearCost(workload.compute_s * 1e-3 * 1.1**k, cluster.cost().beta_s_per_byte)
        cheap = Cluster(8, {"ring": cost})
        period, low_s = period_of(workload, cheap), lower_bound(workload, cheap, sends="pairs", thorough=False).seconds
        for high in (1.02, 1.2, 1.5):
            found.append(best_pairs(period, low_s, high * low_s, partition=True))
            if found[-1]:
                assert simulated(period, found[-1], cheap) == pytest.approx(found[-1][1].seconds, rel=1e-12)
    assert any(found) and not all(found)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_plan_of_a_chain_is_known(seed):
    """The bound for pairs is proved for all plans that can be run, and reached."""
    workload, cluster = chain(seed)
    plan = schedule("legato", workload, cluster)
    bound = lower_bound(workload, cluster, sends="pairs")
    assert bound.seconds * (1 - 1e-9) <= iteration_time(workload, plan, cluster) <= bound.seconds * 1.005
