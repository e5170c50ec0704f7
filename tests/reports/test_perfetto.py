"""The Chrome trace: valid events, right times, names that survive."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_samples import EVIL, cnn, timelines

from legato.core.errors import FileError
from legato.core.timeline import Span, Timeline
from legato.reports.perfetto import to_perfetto, write_perfetto

HAND = Timeline(
    "hand",
    "measured",
    5.0,
    (
        Span(1, "compute", "other worker", 0.0, 1.0, "forward"),
        Span(0, "network", "m0", 2.0, 4.0, "message", 1024),
        Span(0, "network", "m1", 3.0, 4.5, "message"),
        Span(0, "network", "m2", 4.0, 5.0, "message"),
        Span(0, "compute", "b0", 0.0, 1.5e-6, "backward"),
    ),
    lower_bound_s=4.0,
)


def test_a_worker_that_stands_for_others_says_so():
    alike = Timeline("alike", "predicted", 5.0, HAND.spans, members=((0, 4096),))
    names = {e["args"]["name"] for e in events(alike) if e["name"] == "thread_name"}
    assert {"worker 0 of 4,096 alike compute", "worker 1 compute"} <= names


def events(*drawn):
    return json.loads(to_perfetto(drawn))["traceEvents"]


def threads(found):
    return {e["args"]["name"]: (e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}


def test_every_event_has_what_the_format_requires():
    drawn = timelines(cnn(5))
    found = events(*drawn)
    assert {e["ph"] for e in found} == {"M", "X", "i", "s", "f"}
    for event in found:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["cat"] and event["cname"]
    assert sum(e["ph"] == "X" for e in found) == sum(len(t.spans) for t in drawn)
    names = {e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {"ddp (predicted)", "fifo (predicted)", "legato (predicted)"}
    assert [e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"] == [1, 2, 3]


def test_times_are_microseconds_and_spans_know_their_kind_and_bytes():
    found = {e["name"]: e for e in events(HAND)}
    assert (found["b0"]["ts"], found["b0"]["dur"], found["b0"]["cat"]) == (0, 1.5, "backward")
    assert (found["m0"]["ts"], found["m0"]["dur"], found["m0"]["cat"]) == (2e6, 2e6, "message")
    assert found["m0"]["args"] == {"nbytes": 1024} and found["m1"]["args"] == {}
    assert found["end of iteration"]["ts"] == 5e6 and found["lower bound"]["ts"] == 4e6


def test_a_thread_for_every_lane_and_another_where_spans_overlap():
    found = events(HAND)
    rows = threads(found)
    assert list(rows) == ["worker 0 compute", "worker 0 network", "worker 0 network (2)", "worker 1 compute"]
    at = {e["name"]: (e["pid"], e["tid"]) for e in found if e["ph"] == "X"}
    assert at["m0"] == at["m2"] == rows["worker 0 network"] and at["m1"] == rows["worker 0 network (2)"]
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    assert [order[tid] for _, tid in rows.values()] == sorted(order.values())


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12))
def test_no_two_events_of_a_thread_overlap(pairs):
    spans = tuple(Span(0, "network", "m", a * 0.1, (a + b) * 0.1, "message") for a, b in pairs)
    rows = {}
    for event in events(Timeline("t", "predicted", 9.0, spans)):
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(nxt[0] >= end - 1e-6 for (_, end), nxt in itertools.pairwise(row))
    # No more threads than spans that are open at one moment.
    deepest = max((sum(a <= t < a + b or (b == 0 and t == a) for a, b in pairs) for t in range(60)), default=0)
    assert len(rows) <= deepest


@pytest.mark.parametrize("name", ['"quoted" \\ name', EVIL, "a\nb\x00\x1f\x7f", "Größe 🎵", "\ud800"])
def test_any_name_survives(name):
    text = to_perfetto([Timeline(name, "predicted", 1.0, (Span(0, name, name, 0.0, 1.0, "message"),))])
    assert text.isascii()
    found = json.loads(text)["traceEvents"]
    assert [e["name"] for e in found if e["ph"] == "X"] == [name]
    assert found[0]["args"]["name"] == f"{name} (predicted)" and f"worker 0 {name}" in threads(found)


def test_nothing_to_show_is_still_a_trace():
    assert events() == []
    assert [e["ph"] for e in events(Timeline("t", "predicted", 0.0, ()))] == ["M", "M", "i"]


def test_it_is_written_whole_or_not_at_all(tmp_path):
    write_perfetto(tmp_path / "t.json", [HAND])
    assert (tmp_path / "t.json").read_text() == to_perfetto([HAND])
    with pytest.raises(FileError, match=r"missing/t\.json: cannot write"):
        write_perfetto(tmp_path / "missing" / "t.json", [HAND])
