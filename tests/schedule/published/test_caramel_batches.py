"""Caramel's batcher: its threshold, its rule by hand, and that nobody waits while the network is idle."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.strategies import clusters, costs, durations, workloads

from legato.core.cluster import LinearCost
from legato.schedule import schedule
from legato.schedule.published.caramel import batches, threshold_bytes
from legato.simulator.collective import iteration_time


@given(st.floats(1e-9, 1), st.floats(1e-12, 1e-6))
def test_the_threshold_is_where_two_messages_cost_hardly_more_than_one_of_both(alpha, beta):
    cost = LinearCost(alpha, beta)
    x = threshold_bytes(cost)

    def ratio(size):
        return cost.cost(2 * size) / (2 * cost.cost(size))

    assert ratio(x * 1.001) > 0.8 >= ratio(x * 0.999)


def test_the_threshold_at_the_ends():
    assert threshold_bytes(LinearCost(2.0, 0.5)) == 6.0
    assert threshold_bytes(LinearCost(0.0, 0.5)) == threshold_bytes(LinearCost(0.0, 0.0)) == 0.0
    assert threshold_bytes(LinearCost(2.0, 0.0)) == math.inf


@pytest.mark.parametrize(
    ("ready", "nbytes", "expected"),
    [
        # Idle network: the first goes at once (1 to 4); meanwhile two more come, which go when it is done.
        ([1, 2, 3, 9], [2, 1, 1, 1], [[0], [1, 2], [3]]),
        # The batch is full when it is larger than 6 bytes, not before.
        ([1, 2, 2, 2, 2], [6, 3, 3, 1, 1], [[0], [1, 2, 3], [4]]),
        # One of exactly the threshold is small.
        ([1, 2, 2], [2, 6, 1], [[0], [1, 2]]),
        # Ready at the same moment: together, though the network is idle.
        ([1, 1, 5], [2, 2, 2], [[0, 1], [2]]),
        # A large one goes alone, past the batch that is waiting: the network is busy until 18 anyway.
        ([1, 2, 3, 4], [2, 1, 20, 1], [[0], [2], [1, 3]]),
        # The network is free again the moment the next one is ready: together.
        ([1, 2, 4], [2, 1, 1], [[0], [1, 2]]),
        ([], [], []),
    ],
)
def test_batches_by_hand(ready, nbytes, expected):
    assert batches(ready, nbytes, LinearCost(2.0, 0.5), 6.0) == expected


def test_as_many_sizes_as_times():
    with pytest.raises(ValueError, match="1 release times and 2 sizes"):
        batches([1.0], [1, 2], LinearCost(1.0, 1.0), 1.0)


gradients = st.lists(st.tuples(durations, st.integers(1, 16)), max_size=12).map(sorted)
thresholds = st.sampled_from([0.0, 3.0, 8.0, math.inf])


@given(gradients, costs, thresholds)
def test_batches_are_small_gradients_that_wait_only_for_the_network(drawn, cost, threshold):
    ready, nbytes = [r for r, _ in drawn], [n for _, n in drawn]
    sent = batches(ready, nbytes, cost, threshold)
    assert sorted(k for group in sent for k in group) == list(range(len(drawn)))
    for group in sent:
        assert group == sorted(group)
        if len(group) > 1:
            assert max(nbytes[k] for k in group) <= threshold
            assert sum(nbytes[k] for k in group[:-1]) <= threshold
    idle = 0.0
    for m, group in enumerate(sent):
        start = max(idle, ready[group[-1]])
        if start > idle:  # nothing that goes out from here on was there before
            assert min(ready[k] for later in sent[m:] for k in later) == start
        idle = start + cost.cost(sum(nbytes[k] for k in group))


@given(workloads(max_tensors=8), clusters(max_collectives=1), thresholds | st.none())
def test_batching_alone_never_costs_time(workload, cluster, threshold):
    assume(not cluster.collectives["c0"].points)  # between measured sizes, one message may cost more than two
    options = {"serialization": False, "scheduling": False, "threshold": threshold}
    batched = iteration_time(workload, schedule("caramel", workload, cluster, **options), cluster)
    assert batched <= iteration_time(workload, schedule("fifo", workload, cluster), cluster)
