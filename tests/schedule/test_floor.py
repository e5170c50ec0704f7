"""Costs that are no line, but have a floor or follow measured sizes: what stays true of bounds and schedulers, and what
is found by brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import durations, examples, measured, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.bound.lower_bound import lower_bound, verify_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.published.caramel import threshold_bytes
from legato.schedule.published.merge_optimal import merge_neighbours
from legato.simulator.collective import iteration_time

bent = st.builds(
    LinearCost,
    st.integers(0, 8).map(lambda n: n / 4),
    st.integers(0, 8).map(lambda n: n / 4),
    st.integers(1, 48).map(lambda n: n / 4),
)


@examples(50)
@given(workloads(), st.lists(bent | measured, min_size=1, max_size=2))
def test_nothing_beats_the_bound_and_legato_is_the_best(workload, costs):
    cluster = Cluster(4, {f"c{k}": cost for k, cost in enumerate(costs)})
    times = {}
    for name in SCHEDULERS:
        plan = schedule(name, workload, cluster)
        kind = kind_of(plan, workload)._asdict()
        bound = lower_bound(workload, cluster, **kind)
        verify_bound(bound, workload, cluster, **kind)
        times[name] = iteration_time(workload, plan, cluster)
        assert times[name] >= bound.seconds * (1 - 1e-12)
    runnable = {name: seconds for name, seconds in times.items() if name != "caramel"}
    assert times["legato"] <= min(runnable.values()) * (1 + 1e-12)


@examples(60)
@given(st.lists(st.tuples(durations, st.integers(1, 16)), min_size=1, max_size=7), bent | measured)
def test_neighbours_are_merged_as_well_as_can_be(rows, cost):
    ready = list(itertools.accumulate(seconds for seconds, _ in rows))
    nbytes = [size for _, size in rows]

    def finish(groups):
        end = 0.0
        for start, stop in groups:
            end = max(end, ready[stop - 1]) + cost.cost(sum(nbytes[start:stop]))
        return end

    def partitions():
        for cuts in itertools.product([False, True], repeat=len(rows) - 1):
            edges = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), len(rows)]
            yield list(itertools.pairwise(edges))

    best, groups = merge_neighbours(ready, nbytes, cost)
    assert best == pytest.approx(min(map(finish, partitions())), rel=1e-12)
    assert finish(groups) == pytest.approx(best, rel=1e-12)


@given(bent)
def test_caramel_s_threshold_is_where_its_rule_says(cost):
    def rule(x):
        return cost.cost(2 * x) / (2 * cost.cost(x))

    threshold = threshold_bytes(cost)
    if cost.beta_s_per_byte == 0:
        assert threshold == float("inf")
    else:
        assert rule(threshold) == pytest.approx(0.8)
        assert rule(threshold * 1.01) > 0.8 > rule(threshold * 0.99)
