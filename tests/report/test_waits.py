"""Where the time went: gaps, and the messages that they are laid to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_samples import cnn, timelines

from legato.core.timeline import Span, Timeline
from legato.report.waits import Wait, blame, idle_gaps, waits


def timeline(iteration_s, compute, messages, source="predicted"):
    spans = [Span(0, "compute", f"op{i}", a, b, "forward") for i, (a, b) in enumerate(compute)]
    spans += [Span(0, "network", name, a, b, "message") for name, a, b in messages]
    return Timeline("t", source, iteration_s, tuple(spans))


def test_gaps_are_what_compute_leaves_of_the_iteration():
    t = timeline(10.0, [(1, 3), (2, 4), (4, 5), (6, 8)], [("m", 0, 10)])
    assert idle_gaps(t) == [(0, 1), (5, 6), (8, 10)]
    assert idle_gaps(timeline(3.0, [(0, 1), (1, 3)], [])) == []
    assert idle_gaps(timeline(3.0, [], [])) == [(0, 3)]
    assert idle_gaps(timeline(3.0, [(0, 5)], [])) == []  # computes beyond the end: nothing is idle before it


def test_a_gap_is_laid_to_the_message_that_ends_with_it():
    t = timeline(10.0, [(0, 2), (5, 6), (9, 10)], [("a", 1, 4), ("b", 4, 5), ("c", 5, 9)])
    assert waits(t) == [Wait("b", 3.0, 1), Wait("c", 3.0, 1)]


def test_of_several_that_end_together_the_last_to_start():
    t = timeline(6.0, [(0, 2), (5, 6)], [("late", 3, 5), ("early", 0, 5)])
    assert waits(t) == [Wait("late", 3.0, 1)]


def test_a_gap_that_no_message_ends_is_shared_by_those_in_flight():
    t = timeline(10.0, [(0, 2), (8, 10)], [("a", 1, 4), ("b", 3, 7)])
    # 2..3 a alone, 3..4 both, 4..7 b alone, 7..8 nobody.
    assert waits(t) == [Wait("b", 3.5, 1), Wait("a", 1.5, 1), Wait(None, 1.0, 1)]


def test_measured_ends_need_not_coincide_exactly():
    spans = ([(0, 2), (5.004, 10)], [("a", 1, 4), ("b", 4, 5)])
    assert [w.message for w in waits(timeline(10.0, *spans, source="measured"))] == ["b"]
    assert [w.message for w in waits(timeline(10.0, *spans))] == ["a", "b", None]


def test_costs_of_a_message_add_up_over_gaps():
    t = timeline(9.0, [(0, 1), (2, 3), (5, 9)], [("m", 0, 2), ("m", 2, 5)])
    assert waits(t) == [Wait("m", 3.0, 2)]
    assert waits(timeline(2.0, [(0, 2)], [("m", 0, 2)])) == []


def test_other_workers_do_not_count():
    other = Span(1, "network", "other", 0.0, 3.0, "message")
    t = Timeline("t", "predicted", 3.0, (Span(0, "compute", "op", 2.0, 3.0, "forward"), other))
    assert waits(t) == [Wait(None, 2.0, 1)]
    assert waits(t, worker=1) == [Wait("other", 3.0, 1)]


def test_all_idle_time_is_laid_to_somebody():
    for t in timelines(cnn(20)):
        idle = t.iteration_s - t.computation_s
        assert sum(w.seconds for w in waits(t)) == pytest.approx(idle)
        assert waits(t)[0].message is not None
        assert [w.seconds for w in waits(t)] == sorted((w.seconds for w in waits(t)), reverse=True)


pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


@given(pieces, pieces, st.sampled_from(["predicted", "measured"]))
def test_shares_of_a_gap_are_the_gap(compute, flights, source):
    t = timeline(40.0, compute, [(f"m{i}", a, b) for i, (a, b) in enumerate(flights)], source)
    for start, end, shares in blame(t):
        assert sum(shares.values()) == pytest.approx(end - start) and min(shares.values()) >= 0
    assert sum(w.seconds for w in waits(t)) == pytest.approx(40.0 - t.computation_s)
