"""MG-WFBP against its pseudo code, and the optimum against trying everything."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.nets import in_turn
from support.strategies import clusters, costs, durations, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.schedule.published.merge_optimal import merge_neighbours, merge_optimal
from legato.schedule.published.mg_wfbp import mg_wfbp
from legato.simulator.collective import iteration_time

layers = st.lists(st.tuples(durations, st.integers(1, 16)), min_size=1, max_size=10)


def chain(rows):
    return in_turn(*zip(*rows, strict=True), forward_s=1.0)


def groups(plan):
    return [[int(piece.tensor[1:]) for piece in message.slices] for message in plan.messages]


def algorithm_1(a, b, t_b, p):
    """MG-WFBP's Algorithm 1 as printed, layers 1 to L (index 0 stands for the end of the backward pass)."""
    L = len(p) - 1
    t_c, tau_b = [0.0] * (L + 1), [0.0] * (L + 1)
    p = list(p)
    for layer in range(1, L + 1):
        t_c[layer] = a + b * p[layer]
    tau_b[L] = 0.0  # t_f: the period starts with the backward pass
    for layer in range(L - 1, -1, -1):
        tau_b[layer] = tau_b[layer + 1] + t_b[layer + 1]

    def calculate_comm_start():
        tau_c = [0.0] * (L + 1)
        tau_c[L] = tau_b[L] + t_b[L]
        for layer in range(L - 1, 0, -1):
            tau_c[layer] = max(tau_c[layer + 1] + t_c[layer + 1], tau_b[layer] + t_b[layer])
        return tau_c

    tau_c = calculate_comm_start()
    merged = set()
    for layer in range(L, 1, -1):
        if tau_b[layer - 2] - tau_c[layer] < a:
            t_c[layer] = 0.0
            p[layer - 1] += p[layer]
            t_c[layer - 1] = a + b * p[layer - 1]
            tau_c = calculate_comm_start()
            merged.add(layer)
    return merged


@examples(150)
@given(layers, costs)
def test_mg_wfbp_is_its_pseudo_code(rows, cost):
    count = len(rows)
    times, sizes = [0.0] * (count + 1), [0] * (count + 1)
    for k, (seconds, nbytes) in enumerate(rows):
        times[count - k], sizes[count - k] = seconds, nbytes
    merged = algorithm_1(cost.alpha_s, cost.beta_s_per_byte, times, sizes)
    expected = [[0]]
    for k in range(1, count):
        if count - k + 1 in merged:  # the layer before it
            expected[-1].append(k)
        else:
            expected.append([k])
    assert groups(mg_wfbp(chain(rows), Cluster(2, {"c": cost}))) == expected


def test_mg_wfbp_is_not_optimal():
    rows, cost = [(1.0, 2), (2.0, 1), (3.0, 1)], LinearCost(3.0, 1.0)
    workload, cluster = chain(rows), Cluster(2, {"c": cost})
    # Gradients at 1, 3 and 6. Gradient 1 comes 2 s after gradient 0, less than alpha, so the algorithm merges them
    # (from 3 to 9), and then sends gradient 2 alone (from 9 to 13). Waiting for it was the better merge.
    assert groups(mg_wfbp(workload, cluster)) == [[0, 1], [2]]
    assert groups(merge_optimal(workload, cluster)) == [[0], [1, 2]]
    assert iteration_time(workload, mg_wfbp(workload, cluster), cluster) == 13 + 1
    assert iteration_time(workload, merge_optimal(workload, cluster), cluster) == 11 + 1


def finish(ready, nbytes, cost, partition):
    now = 0.0
    for group in partition:
        now = max(now, max(ready[i] for i in group)) + cost.cost(sum(nbytes[i] for i in group))
    return now


def partitions(n):
    """All 2**(n-1) ways to cut n neighbours into groups."""
    for cuts in itertools.product([False, True], repeat=n - 1):
        edges = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), n]
        yield [list(range(a, b)) for a, b in itertools.pairwise(edges)]


@examples(50)
@given(layers, costs)
@example([(1.0, 1)] * 10, LinearCost(0.0, 0.0))
@example([(0.0, 1)] * 10, LinearCost(1.0, 1.0))
def test_merge_optimal_is_the_best_of_all_partitions(rows, cost):
    ready = list(itertools.accumulate(seconds for seconds, _ in rows))
    nbytes = [size for _, size in rows]
    best, found = merge_neighbours(ready, nbytes, cost)
    assert best == min(finish(ready, nbytes, cost, partition) for partition in partitions(len(rows)))
    assert finish(ready, nbytes, cost, [range(*group) for group in found]) == best
    assert [i for group in found for i in range(*group)] == list(range(len(rows)))
    assert groups(merge_optimal(chain(rows), Cluster(2, {"c": cost}))) == [list(range(*group)) for group in found]


def test_a_tie_goes_to_fewer_messages():
    assert merge_neighbours([1, 2, 3], [1, 1, 1], LinearCost(0.0, 0.0)) == (3.0, [(0, 3)])
    assert merge_neighbours([1, 1, 1], [1, 1, 1], LinearCost(0.0, 2.0)) == (7.0, [(0, 3)])
    # Sending the first alone costs nothing more, and saves nothing.
    assert merge_neighbours([1, 3], [1, 1], LinearCost(2.0, 0.0)) == (5.0, [(0, 2)])


@examples(60)
@given(st.lists(st.tuples(durations, st.integers(1, 16)), min_size=1, max_size=4), costs)
def test_no_other_grouping_or_order_is_better(rows, cost):
    ready = list(itertools.accumulate(seconds for seconds, _ in rows))
    nbytes = [size for _, size in rows]
    best, _ = merge_neighbours(ready, nbytes, cost)
    for order in itertools.permutations(range(len(rows))):
        for partition in partitions(len(rows)):
            assert finish(ready, nbytes, cost, [[order[i] for i in group] for group in partition]) >= best


@pytest.mark.parametrize(("ready", "nbytes"), [([], []), ([1.0], [1, 2])])
def test_merging_needs_as_many_sizes_as_times(ready, nbytes):
    with pytest.raises(ValueError, match="expected equal numbers, at least one"):
        merge_neighbours(ready, nbytes, LinearCost(1.0, 1.0))


@given(workloads(max_tensors=8), clusters(linear=True))
def test_tensors_of_one_op_stay_together(workload, cluster):
    """Nothing is gained by sending two gradients that come at the same moment apart."""
    ready = {t.name: t.ready_after for t in workload.tensors}
    if cluster.cost().alpha_s > 0:
        for scheduler in (mg_wfbp, merge_optimal):
            ends = [ready[m.slices[-1].tensor] for m in scheduler(workload, cluster).messages]
            assert len(set(ends)) == len(ends)
