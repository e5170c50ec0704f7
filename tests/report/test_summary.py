"""The numbers that a person sees first: the table, the headline, numbers in words."""

import pytest
from support.report_samples import CLUSTER, EVIL, cnn, model, row, run, timelines

from legato.core.errors import InputError
from legato.core.timeline import Span, Timeline
from legato.report.drawing import coalesce, draw_timelines, label
from legato.report.model import ModelReport, Report, SchedulerRow
from legato.report.shapes import drained, draw_readiness, draw_tensor_sizes, readiness
from legato.report.summary import Entry, entries, headline, in_one_unit, percent


def sentence(*table):
    return "".join(text for text, _ in headline(list(table)))


def entry(name, predicted, gap=None, measured=None):
    return Entry(name, predicted_s=predicted, measured_s=measured, gap=gap)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            [entry("ddp", 1.24, 0.28), entry("legato", 1.0, 0.031)],
            "legato is 1.24× faster than DDP, 3.1% above the proven bound.",
        ),
        (
            [entry("ddp", 1.24, 0.28, 1.5), entry("legato", 1.0, 0.031, 1.2), entry("pace", 0.9, 0.0)],
            "legato is 1.25× faster than DDP (measured); its plan is 3.1% above the proven bound.",
        ),
        ([entry("ddp", 2.0), entry("fifo", 1.0)], "fifo is 2.00× faster than DDP."),
        ([entry("fifo", 1.0, 0.0), entry("ddp", 2.0)], "fifo is 2.00× faster than DDP; no plan can be faster."),
        (
            [entry("ddp", 1.0, 0.5), entry("legato", 0.999, 0.499)],
            "DDP is as fast as the best of 2 schedulers, 50.0% above the proven bound.",
        ),
        (
            [entry("ddp", 1.0, 0.1, 1.0), entry("legato", 0.9, 0.0, 1.1)],
            "DDP is as fast as the best of 2 schedulers (measured); its plan is 10.0% above the proven bound.",
        ),
        ([entry("fifo", 0.1323)], "fifo takes 132.3 ms."),
        ([entry("ddp", 0.1323)], "DDP takes 132.3 ms."),
        ([entry("pace", 1.0), entry("legato", 1.0), entry("ddp", 2.0)], "legato is 2.00× faster than DDP."),
        ([], ""),
    ],
)
def test_the_headline(table, words):
    assert sentence(*table) == words


def test_rows_become_the_table_and_measured_timelines_fill_it():
    shown = model()
    table = {e.scheduler: e for e in entries(shown)}
    measured = {t.name: t.iteration_s for t in shown.timelines if t.source == "measured"}
    assert {n: e.measured_s for n, e in table.items()} == {
        "ddp": measured["ddp"],
        "legato": measured["legato"],
        "fifo": None,
    }
    bare = ModelReport(
        "x",
        rows=tuple(SchedulerRow(r.scheduler, 1.0, 0.0, 0.0, 0, 1, 1, None) for r in shown.rows),
        timelines=shown.timelines,
    )
    assert entries(bare)[0].measured_s == measured["ddp"]
    assert entries(bare)[0].gap is None  # a bound of zero is no bound


def test_timelines_alone_make_a_table():
    ddp, _, legato = timelines(cnn(10))
    real = run(cnn(10), "ddp", [list(cnn(10).tensors)], CLUSTER.cost(), False, "measured")
    table = entries(ModelReport("x", timelines=(ddp, legato, real)))
    assert [e.scheduler for e in table] == ["ddp", "legato"]
    assert table[0].predicted_s == ddp.iteration_s and table[0].measured_s == real.iteration_s
    assert table[1].gap == pytest.approx(legato.iteration_s / legato.lower_bound_s - 1)
    assert table[1].num_messages == row(legato, 0).num_messages
    only = entries(ModelReport("x", timelines=(real,)))[0]
    assert only.predicted_s is None and only.measured_s == real.iteration_s and only.lower_bound_s is None


def test_numbers_to_compare_stand_in_one_unit():
    assert in_one_unit([1.371, 1.2346, None]) == ["1,371 ms", "1,235 ms", ""]
    assert in_one_unit([0.0123456, 0.001]) == ["12.35 ms", "1.00 ms"]
    assert in_one_unit([123.4, 2.0]) == ["123.4 s", "2.0 s"]
    assert in_one_unit([0.0, None]) == ["0.000 us", ""]
    assert [percent(x) for x in (0.031, -0.25, 2.5, 12345.0, None)] == ["3.1%", "−25.0%", "250%", "1,234,500%", ""]


@pytest.mark.parametrize(
    "change",
    [{"iteration_s": -1.0}, {"lower_bound_s": float("nan")}, {"gap": float("inf")}, {"measured_s": float("inf")}],
)
def test_a_row_needs_real_numbers(change):
    good = {"scheduler": "x", "iteration_s": 1.0, "lower_bound_s": 1.0, "gap": 0.0, "overlap": 0.5, "utilization": 1.0}
    good |= {"num_messages": 1, "plan_s": 0.1}
    assert SchedulerRow(**good).measured_s is None
    with pytest.raises(InputError, match=next(iter(change))):
        SchedulerRow(**good | change)


def test_a_report_shows_something():
    with pytest.raises(InputError, match="nothing to show"):
        ModelReport("x")
    with pytest.raises(InputError, match="at least one"):
        Report(())


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
