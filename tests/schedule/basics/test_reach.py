"""The time of everything that an op reaches: exact on any graph, and never too large where chains are left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import durations, examples, workloads

from legato.schedule.basics import heads_tails as module
from legato.schedule.basics import reach
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.reach import reached_s


@st.composite
def graphs(draw, most=12):
    """Ops after those that they wait for, and their durations."""
    count = draw(st.integers(1, most))
    waits = [sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else [] for i in range(count)]
    return waits, draw(st.lists(durations, min_size=count, max_size=count))


def reached(ops, waits):
    return set(ops).union(*(reached(waits[op], waits) for op in ops)) if ops else set()


@examples(200)
@given(graphs())
def test_it_is_the_sum_over_all_ops_reached(graph):
    waits, seconds = graph
    starts = [[], *([op] for op in range(len(waits))), list(range(0, len(waits), 2))]
    expected = [sum(seconds[op] for op in reached(ops, waits)) for ops in starts]
    assert reached_s(range(len(waits)), waits, seconds, starts) == expected


@examples(200)
@given(graphs(), st.integers(1, 4))
def test_it_is_never_too_large(graph, most):
    waits, seconds = graph
    starts = [[op] for op in range(len(waits))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "MOST_ENTRIES", 0)
        patch.setattr(reach, "_LEAST_ENTRIES", most)
        found = reached_s(range(len(waits)), waits, seconds, starts)
    exact = [sum(seconds[op] for op in reached(ops, waits)) for ops in starts]
    assert all(own <= some <= whole for own, some, whole in zip(seconds, found, exact, strict=True))


def test_a_deep_network_reaches_few_chains():
    """Layers of three branches that join again, and an end in each that nothing needs."""
    waits = [[]]
    for _ in range(50):
        begin = len(waits) - 1
        waits += [[begin], [begin], [begin], [begin], [begin + 2, begin + 3, begin + 4]]
    cover = reach.Cover(range(len(waits)), waits, [1.0] * len(waits))
    assert max(len(chains) for chains in cover.reached.values()) <= 4


@examples(200)
@given(workloads(max_ops=8, max_tensors=8), st.sampled_from(["captured", "any"]))
def test_release_times_and_tails_are_the_same_with_sets_and_without(workload, order):
    expected = heads_tails(workload, "one", order)
    again = replace(workload)  # which has no times yet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_BITS", 0)
        assert heads_tails(again, "one", order) == expected
