"""Caramel's packing of transfers: by hand, against slots filled one by one, and what it promises is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, durations, workloads

from legato.core.cluster import Cluster
from legato.schedule import schedule
from legato.schedule.published.caramel import pack
from legato.simulator.collective import iteration_time


@pytest.mark.parametrize(
    ("head", "tail", "send", "expected"),
    [
        # Backward pass 10 s, forward pass 10 s. Longest first. One after the other in the backward pass.
        ([1, 2], [10, 5], [4, 3], ([0, 1], 0)),
        # The longer one takes 2 to 8; the other one, although ready first, fits behind it only: 8 to 10 (of 0 to 10).
        ([1, 2], [10, 5], [2, 6], ([1, 0], 0)),
        # ... or before it.
        ([0, 2], [10, 5], [2, 6], ([0, 1], 0)),
        # The second does not fit into the backward pass any more: in the forward pass, just before it is read.
        ([1, 2], [10, 5], [8, 3], ([0, 1], 0)),
        # Forward pass: the longest sits at the end, the next ones before it, in the order of their deadlines.
        ([9, 9, 9], [0, 4, 7], [4, 3, 2], ([2, 1, 0], 0)),
        # No place: read at once, and ready too late. It goes between the passes.
        ([8], [10], [5], ([0], 3)),
        # No place: here it is cheaper to begin before the forward pass than to end after the backward pass.
        ([9], [8], [5], ([0], 3)),
        # Both in one direction: the second adds all of its time.
        ([8, 8], [10, 10], [5, 4], ([0, 1], 7)),
        # One each way: 3 s over the end of backward (8 to 13), 1 s before the start of forward.
        ([8, 10], [10, 6], [5, 5], ([0, 1], 4)),
    ],
)
def test_packings_by_hand(head, tail, send, expected):
    assert pack(head, tail, send, send, 10, 10) == expected


def slots(head, tail, send, nbytes, backward, forward):
    """The same, slot by slot: whole seconds, lanes as sets of occupied ones; forward time counts from the end."""
    lanes, limits, extra, where = (set(), set()), [backward, forward], [0, 0], {}

    def first(lane, release, length):
        return next(s for s in range(release, 10**6) if lanes[lane].isdisjoint(range(s, s + length)))

    def place(m, lane, start):
        where[m] = (lane, start if lane == 0 else -start - send[m])
        lanes[lane].update(range(start, start + send[m]))
        extra[lane] = max(extra[lane], start + send[m] - limits[lane])

    order = sorted(range(len(send)), key=lambda m: (-nbytes[m], m))
    for m in order:
        for lane, release in ((0, head[m]), (1, tail[m])):
            if m not in where and (start := first(lane, release, send[m])) + send[m] <= limits[lane]:
                place(m, lane, start)
    for m in [m for m in order if m not in where]:
        starts = first(0, head[m], send[m]), first(1, tail[m], send[m])
        added = [max(0, starts[lane] + send[m] - limits[lane] - extra[lane]) for lane in (0, 1)]
        lane = 0 if added[0] <= added[1] else 1
        place(m, lane, starts[lane])
    return sorted(where, key=where.__getitem__), sum(extra)


messages = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 6), st.integers(1, 4)), max_size=9)


@given(messages, st.integers(0, 6), st.integers(0, 6))
def test_packing_is_first_fit(drawn, more_backward, more_forward):
    head, tail, send, nbytes = ([row[c] for row in drawn] for c in range(4))
    backward, forward = max(head, default=0) + more_backward, max(tail, default=0) + more_forward
    assert pack(head, tail, send, nbytes, backward, forward) == slots(head, tail, send, nbytes, backward, forward)


many = st.lists(st.tuples(durations, durations, durations, st.integers(1, 4)), min_size=1, max_size=40)


@given(many, st.integers(1, 4))
def test_blocks_of_busy_intervals_change_nothing(drawn, size):
    head, tail, send, nbytes = ([row[c] for row in drawn] for c in range(4))
    expected = pack(head, tail, send, nbytes, max(head), max(tail))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.schedule.published.caramel._BLOCK", size)
        assert pack(head, tail, send, nbytes, max(head), max(tail)) == expected


timed = st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=9)


@given(timed)
def test_nothing_takes_longer_than_planned(drawn):
    """Sent in the order of the packing, as early as possible, everything is read by the time that was planned."""
    head, tail, send = ([row[c] for row in drawn] for c in range(3))
    order, added = pack(head, tail, send, [1] * len(send), max(head), max(tail))
    assert sorted(order) == list(range(len(send)))
    network = 0.0
    for m in order:
        network = max(network, head[m]) + send[m]
        assert network + tail[m] <= max(head) + max(tail) + added


def test_as_many_of_each():
    with pytest.raises(ValueError):
        pack([1.0], [1.0, 2.0], [1.0], [1], 1.0, 1.0)


@given(workloads(max_tensors=6), clusters(max_collectives=1))
def test_messages_for_free_add_nothing(workload, cluster):
    free = Cluster(cluster.workers, {name: type(cost)(0.0, 0.0) for name, cost in cluster.collectives.items()})
    plan = schedule("caramel", workload, free)
    assert iteration_time(workload, plan, free) == workload.compute_s
