"""The figures: timelines and workloads."""

import pytest
from support.report_samples import CLUSTER, EVIL, cnn, timelines

from legato.core.timeline import Span, Timeline, coalesce
from legato.reports.figures import label
from legato.reports.timelines import draw_timelines
from legato.reports.workloads import drained, draw_readiness, draw_tensor_sizes, readiness


def spans(*triples):
    return [Span(0, "compute", f"{kind}{i}", a, b, kind) for i, (a, b, kind) in enumerate(triples)]


def test_short_neighbours_are_drawn_as_one():
    tiny = spans(*[(i * 0.001, (i + 1) * 0.001, "forward") for i in range(1000)])
    (bar,) = coalesce(tiny, 0.01)
    assert (bar.start_s, bar.end_s, bar.count, bar.name) == (0.0, 1.0, 1000, "forward0")
    assert len(coalesce(tiny, 0.0005)) == 1000


def test_long_spans_and_gaps_stay():
    found = coalesce(spans((0, 1, "forward"), (1, 1.001, "forward"), (1.5, 1.501, "forward"), (2, 3, "forward")), 0.01)
    assert [(b.start_s, b.end_s, b.count) for b in found] == [(0, 1, 1), (1, 1.001, 1), (1.5, 1.501, 1), (2, 3, 1)]


def test_mixed_short_spans_take_the_colour_of_what_fills_them():
    pairs = [
        (i * 0.01 + a, i * 0.01 + b, k)
        for i in range(500)
        for a, b, k in ((0, 0.001, "optimizer"), (0.001, 0.01, "forward"))
    ]
    found = coalesce(spans(*pairs), 0.02)
    assert len(found) <= 5 / 0.02 + 1
    share = sum(b.end_s - b.start_s for b in found if b.kind == "forward") / 5
    assert share > 0.9


def test_thousands_of_ops_become_few_bars():
    few = timelines(cnn(700))
    figure = draw_timelines(few * 4)
    bars = sum(len(trace["x"]) for trace in figure["data"] if trace["type"] == "bar")
    assert 1000 < bars < sum(len(t.spans) for t in few) * 4 / 2
    assert len(figure["data"]) <= 7


def test_bars_stand_where_the_spans_are():
    workload = cnn(6)
    ddp = timelines(workload)[0]
    data = {trace["name"]: trace for trace in draw_timelines([ddp])["data"]}
    for kind, name in (("forward", "forward"), ("backward", "backward"), ("message", "messages")):
        mine = sorted((s for s in ddp.spans if s.kind == kind), key=lambda s: s.start_s)
        assert data[name]["base"] == pytest.approx([s.start_s * 1e3 for s in mine], abs=1e-5)
        assert data[name]["x"] == pytest.approx([(s.end_s - s.start_s) * 1e3 for s in mine], abs=1e-5)
    idle = (ddp.iteration_s - ddp.computation_s) * 1e3
    assert sum(data["idle"]["x"]) == pytest.approx(idle, abs=1e-3)
    assert data["end of iteration"]["x"][0] == pytest.approx(ddp.iteration_s * 1e3, abs=1e-5)
    assert data["proven lower bound"]["x"][0] == pytest.approx(ddp.lower_bound_s * 1e3, abs=1e-5)
    assert "MiB" in data["messages"]["customdata"][0][1]


def test_labels_are_literal_for_plotly_and_not_endless():
    assert label("<b>&amp;") == "&lt;b&gt;&amp;amp;"
    assert len(label("x" * 500)) == 90 and len(label("x" * 500, 36)) == 36
    assert "<" not in label(EVIL)


def test_readiness_and_what_the_network_sends_of_it():
    workload = cnn(4)
    ready = readiness(workload)
    backward = [op.duration_s for op in workload.ops if op.phase == "backward"]
    assert [t for t, _, _ in ready] == pytest.approx([sum(backward[: k + 1]) for k in range(4)])
    assert [name for _, _, name in ready] == ["conv3.weight", "conv2.weight", "conv1.weight", "conv0.weight"]
    # 10 bytes at 1 s and 10 at 2 s, a byte takes 0.5 s: 1..6 and on to 11; then a pause until 20.
    assert drained([(1.0, 10, "a"), (2.0, 10, "b"), (20.0, 2, "c")], 0.5) == [
        (1.0, 0), (6.0, 10), (11.0, 20), (20.0, 20), (21.0, 22),
    ]  # fmt: skip
    figure = draw_readiness(workload, CLUSTER)
    assert figure["data"][1]["y"][-1] == pytest.approx(workload.nbytes / 2**20, abs=1e-3)
    assert len(draw_readiness(workload, None)["data"]) == 1


def test_tensors_are_drawn_in_forward_order():
    workload = cnn(12)
    (bars,) = draw_tensor_sizes(workload)["data"]
    assert [name for name, _ in bars["customdata"]] == [f"conv{i}.weight" for i in range(12)]
    sizes = {t.name: t.nbytes for t in workload.tensors}
    assert bars["y"] == [sizes[f"conv{i}.weight"] for i in range(12)]


def test_a_timeline_of_nothing_can_be_drawn():
    figure = draw_timelines([Timeline("empty", "predicted", 0.0, ())])
    assert [trace["name"] for trace in figure["data"]] == ["end of iteration"]


@pytest.mark.parametrize(("above", "said"), [(1.0, "at the bound"), (1.0004, "at the bound"), (1.031, "3.1% above")])
def test_a_prediction_at_the_bound_is_not_nothing_above_it(above, said):
    line = Timeline("legato", "predicted", above, (Span(0, "compute", "op", 0.0, 1.0, "backward"),), 1.0)
    (note,) = draw_timelines([line])["layout"]["annotations"]
    assert said in note["text"]
