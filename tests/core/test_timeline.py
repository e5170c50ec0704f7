"""Timeline metrics, on examples small enough to work out by hand."""

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from legato.core.errors import InputError
from legato.core.intervals import Intervals
from legato.core.timeline import Span, Timeline


def timeline(iteration_s, compute, messages, worker=0):
    spans = [Span(worker, "compute", f"op{i}", a, b, "backward") for i, (a, b) in enumerate(compute)]
    spans += [Span(worker, "network", f"m{i}", a, b, "message") for i, (a, b) in enumerate(messages)]
    return Timeline("t", "predicted", iteration_s, tuple(spans))


def metrics(t):
    return t.communication_s, t.computation_s, t.exposed_comm_s, t.overlap, t.utilization


@pytest.mark.parametrize(
    ("what", "iteration_s", "compute", "messages", "expected"),
    [
        # (N, C, exposed, overlap = both / min(N, C), U = C / T)
        ("one after the other", 5.0, [(0, 3)], [(3, 5)], (2, 3, 2, 0.0, 0.6)),
        ("side by side", 3.0, [(0, 3)], [(0, 2)], (2, 3, 0, 1.0, 1.0)),
        ("the network is longer", 4.0, [(0, 1)], [(0, 4)], (4, 1, 3, 1.0, 0.25)),
        ("half of it hidden", 4.0, [(0, 3)], [(2, 4)], (2, 3, 1, 0.5, 0.75)),
        ("a gap filled by a message", 6.0, [(0, 2), (5, 6)], [(1, 5)], (4, 3, 3, 1 / 3, 0.5)),
        ("two messages in flight count once", 5.0, [(0, 3)], [(2, 4), (3, 5)], (3, 3, 2, 1 / 3, 0.6)),
        ("one message inside another", 5.0, [(0, 3)], [(2, 5), (3, 4)], (3, 3, 2, 1 / 3, 0.6)),
        ("nothing to send", 2.0, [(0, 1), (1, 2)], [], (0, 2, 0, 0.0, 1.0)),
        ("nothing to compute", 2.0, [], [(0, 2)], (2, 0, 2, 0.0, 0.0)),
        ("an idle start", 5.0, [(1, 3)], [(3, 5)], (2, 2, 2, 0.0, 0.4)),
        ("half hidden, and idle", 9.0, [(1, 3), (6, 7)], [(2, 4)], (2, 3, 1, 0.5, 1 / 3)),
        ("in flight for longer than an iteration", 3.0, [(0, 3)], [(-2, 3)], (5, 3, 2, 1.0, 1.0)),
        ("spans of no length", 1.0, [(0, 1), (1, 1)], [(0.5, 0.5)], (0, 1, 0, 0.0, 1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_metrics_by_hand(what, iteration_s, compute, messages, expected):
    assert metrics(timeline(iteration_s, compute, messages)) == pytest.approx(expected)


def test_metrics_are_those_of_worker_0():
    own = timeline(4.0, [(0, 3)], [(2, 4)])
    other = timeline(4.0, [(0, 1)], [(0, 4)], worker=1)
    both = Timeline("t", "measured", 4.0, own.spans + other.spans)
    assert metrics(both) == metrics(own)


def test_an_empty_timeline():
    assert metrics(Timeline("t", "predicted", 0.0, ())) == (0, 0, 0, 0, 1)


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), min_size=1, max_size=8
)


@given(intervals, intervals)
def test_metrics_agree_with_counting_moments(compute, messages):
    t = timeline(80.0, compute, messages)

    def moments(spans):
        return {m for a, b in spans for m in range(a, b)}

    c, n = moments(compute), moments(messages)
    assert t.computation_s == len(c) and t.communication_s == len(n) and t.exposed_comm_s == len(n - c)
    assert t.overlap == pytest.approx(len(c & n) / min(len(c), len(n)) if c and n else 0.0)
    # Where the worker either computes or waits for the network, T = C + exposed, and U is the papers' formula.
    if c and n:
        busy = Timeline("t", "predicted", float(len(c | n)), t.spans)
        rho = len(n) / len(c)
        assert busy.utilization == pytest.approx(1 / (1 + rho - busy.overlap * min(rho, 1)))
        assert busy.overlap == pytest.approx((len(n) + len(c) - busy.iteration_s) / min(len(n), len(c)))


@given(intervals)
def test_merged_intervals_are_sorted_disjoint_and_cover_the_same(spans):
    merged = Intervals(spans).parts
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(merged))
    assert {m for a, b in merged for m in range(a, b)} == {m for a, b in spans for m in range(a, b)}


@pytest.mark.parametrize(("start", "end"), [(2, 1), (float("nan"), 1), (0, float("inf")), (0, 1e300)])
def test_a_span_needs_finite_times_in_order(start, end):
    with pytest.raises(InputError, match="expected start <= end"):
        Span(0, "compute", "op", start, end, "forward")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_iteration_needs_finite_seconds(seconds):
    with pytest.raises(InputError, match="iteration_s"):
        Timeline("t", "predicted", seconds, ())


def test_a_timeline_as_text():
    t = Timeline("ddp", "measured", 0.005, (Span(0, "compute", "op", 0, 0.003, "backward"),), 0.004)
    assert str(t) == (
        "ddp (one measured iteration): 5 ms, lower bound 4 ms, computation 3 ms, "
        "communication 0 s (0 s exposed), overlap 0.00, utilization 0.60"
    )


def picture(t):
    """The rectangles of spans, by their titles, and all other text."""
    svg = ElementTree.fromstring(t._repr_html_())
    name = "{http://www.w3.org/2000/svg}"
    bars = {rect[0].text: rect for rect in svg.iter(f"{name}rect") if len(rect)}
    return bars, [text.text for text in svg.iter(f"{name}text")]


def test_a_notebook_shows_a_timeline_to_scale():
    bars, texts = picture(timeline(4.0, [(0, 1)], [(1, 3)]))
    assert list(bars) == ["op0, 1 s", "m0, 2 s"]
    one, two = (float(bar.get("width")) for bar in bars.values())
    assert two == pytest.approx(2 * one, abs=1) and one == pytest.approx(200, abs=1)
    assert bars["op0, 1 s"].get("fill") != bars["m0, 2 s"].get("fill")
    assert {"t (predicted)", "4 s", "worker 0 compute", "worker 0 network"} <= set(texts)
    assert "t (one measured iteration)" in picture(replace(timeline(4.0, [(0, 1)], []), source="measured"))[1]


def test_a_notebook_shows_a_baseline_on_the_same_axis_and_what_was_trained_where():
    base = replace(timeline(4.0, [(0, 2)], []), name="ddp")
    best = replace(timeline(2.0, [(0, 1)], [(1, 2)]), job="net", network="2 workers", baseline=base)
    bars, texts = picture(best)
    assert {"ddp (predicted)", "t (predicted): net on 2 workers", "4 s", "2 s"} <= set(texts)
    assert [float(bar.get("width")) for bar in bars.values()] == pytest.approx([400, 200, 200], abs=1)


def test_messages_in_flight_at_once_are_below_each_other():
    bars, _ = picture(timeline(4.0, [], [(0, 3), (1, 4)]))
    one, two = (float(bar.get("y")) for bar in bars.values())
    assert two == pytest.approx(one + float(bars["m0, 3 s"].get("height")))


@pytest.mark.parametrize(
    "t",
    [
        Timeline("<script>&\n\x00", "predicted", 1.0, (Span(0, "</svg>", "<b>\x07", 0.0, 1.0, "message", 7),), 0.5),
        Timeline("job", "predicted", 1.0, (), job="<script>\x00", network="</svg>"),
        Timeline("empty", "predicted", 0.0, ()),
        Timeline("earlier", "measured", 1.0, (Span(3, "compute", "x", -2.0, -1.0, "forward"),)),
        Timeline("no length", "measured", 0.0, (Span(0, "compute", "x", 0.0, 0.0, "forward"),)),
    ],
    ids=lambda t: t.name[:8].strip("<"),
)
def test_any_timeline_has_a_picture(t):
    bars, _ = picture(t)
    assert len(bars) == len(t.spans) and "script" not in t._repr_html_().replace("&lt;script", "")
    assert all(0 <= float(bar.get("x")) <= 950 for bar in bars.values())


def test_a_picture_of_many_spans_and_workers_stays_small():
    spans = [Span(w, "compute", "x", i / 1000, (i + 1) / 1000, "forward") for w in range(2) for i in range(10_000)]
    assert len(Timeline("many", "predicted", 10.0, tuple(spans))._repr_html_()) < 1_000_000
    workers = [Span(w, "compute", "x", 0, 1, "forward") for w in range(1000)]
    _, texts = picture(Timeline("workers", "predicted", 1.0, tuple(workers)))
    assert "and 984 more lanes" in texts
    at_once = [Span(w, "network", "x", i / 1000, 9 + i / 1000, "message") for w in range(20) for i in range(2000)]
    assert len(Timeline("at once", "predicted", 11.0, tuple(at_once))._repr_html_()) < 4_000_000
