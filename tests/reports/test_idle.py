"""Idle time: gaps, the messages that cause them, and the tensors that cost most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_samples import CLUSTER, cnn, timelines

from legato.core.timeline import Span, Timeline
from legato.reports.idle import Wait, idle_causes, idle_costs, idle_gaps, idle_sentence, waits
from legato.schedule import schedule
from legato.simulator.collective import simulate


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


def test_a_gap_of_the_hosts_making_is_not_the_messages():
    """A broadcast of 0.03 s ends with a gap of 6.67 s in which nothing else is sent."""
    line = timeline(20.0, [(0, 2), (8.67, 20)], [("broadcast 00", 8.64, 8.67)], source="measured")
    host, message = waits(line)
    assert (host.message, round(host.seconds, 9)) == (None, 6.64)
    assert (message.message, round(message.seconds, 9)) == ("broadcast 00", 0.03)
    assert idle_sentence([host, message], tensors=False).startswith(
        "No message is in flight during 6.64 s of 6.67 s of idle time: computation waits for its host"
    )


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


def test_all_idle_time_has_a_cause():
    for t in timelines(cnn(20)):
        idle = t.iteration_s - t.computation_s
        assert sum(w.seconds for w in waits(t)) == pytest.approx(idle)
        assert waits(t)[0].message is not None
        assert [w.seconds for w in waits(t)] == sorted((w.seconds for w in waits(t)), reverse=True)


pieces = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


@given(pieces, pieces, st.sampled_from(["predicted", "measured"]))
def test_shares_of_a_gap_are_the_gap(compute, flights, source):
    t = timeline(40.0, compute, [(f"m{i}", a, b) for i, (a, b) in enumerate(flights)], source)
    for start, end, shares in idle_causes(t):
        assert sum(shares.values()) == pytest.approx(end - start) and min(shares.values()) >= 0
    assert sum(w.seconds for w in waits(t)) == pytest.approx(40.0 - t.computation_s)


def test_the_sentence_names_the_tensors_that_cost_most_of_the_idle_time():
    spans = [Span(0, "compute", "b", 0.0, 1.0, "backward")]
    for k, seconds in enumerate((0.55, 0.3, 0.15)):
        start = spans[-1].end_s
        spans.append(Span(0, "network", f"t{k}", start, start + seconds, "message"))
        spans.append(Span(0, "compute", f"f{k}", start + seconds, start + seconds + 0.1, "forward"))
    found = Timeline("x", "predicted", spans[-1].end_s, tuple(spans))
    assert idle_sentence(*idle_costs(found)) == (
        "Waiting for these two tensors takes 850 ms of 1 s of idle time: t0, t1."
    )
    assert idle_sentence(*idle_costs(timelines(cnn(50))[0])).startswith("Waiting for this message takes ")


@pytest.mark.parametrize("name", ["ddp", "mg-wfbp", "legato", "fifo"])
def test_with_the_plan_the_cost_of_messages_is_that_of_their_tensors(name):
    job = cnn(30)
    plan = schedule(name, job, CLUSTER)
    timeline = simulate(job, plan, CLUSTER)
    found, tensors = idle_costs(timeline, [plan])
    assert tensors and {wait.message for wait in found} <= {tensor.name for tensor in job.tensors} | {None}
    assert sum(w.seconds for w in found) == pytest.approx(sum(w.seconds for w in waits(timeline)))
    seconds = [wait.seconds for wait in found]
    assert seconds == sorted(seconds, reverse=True)


def test_the_plan_of_another_timeline_says_nothing():
    job = cnn(30)
    timeline = simulate(job, schedule("ddp", job, CLUSTER), CLUSTER)
    for other in (schedule("fifo", job, CLUSTER), schedule("ddp", job, CLUSTER, bucket_bytes=2**21)):
        assert idle_costs(timeline, [other]) == (waits(timeline), False)
