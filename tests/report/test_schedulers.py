"""The table of schedulers, its headline, and how numbers are written."""

import pytest
from support.report_samples import CLUSTER, cnn, model, row, run, timelines

from legato.core.errors import InputError
from legato.report.model import ModelReport, Report, SchedulerRow
from legato.report.schedulers import Entry, entries, headline
from legato.report.tables import in_one_unit, percent


def sentence(*table):
    return "".join(text for text, _ in headline(list(table)))


def entry(name, predicted, gap=None, measured=None):
    return Entry(name, predicted_s=predicted, measured_s=measured, gap=gap)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            [entry("ddp", 1.24, 0.28), entry("legato", 1.0, 0.031)],
            "legato is 1.24× faster than DDP; its plan is 3.1% above the proven lower bound.",
        ),
        (
            [entry("ddp", 1.24, 0.28, 1.5), entry("legato", 1.0, 0.031, 1.2), entry("pace", 0.9, 0.0)],
            "legato is 1.25× faster than DDP (measured); its plan is 3.1% above the proven lower bound.",
        ),
        ([entry("ddp", 2.0), entry("fifo", 1.0)], "fifo is 2.00× faster than DDP."),
        ([entry("fifo", 1.0, 0.0), entry("ddp", 2.0)], "fifo is 2.00× faster than DDP; no plan can be faster."),
        (
            [entry("ddp", 1.0, 0.5), entry("legato", 0.999, 0.499)],
            "DDP is as fast as the best of 2 schedulers; its plan is 50.0% above the proven lower bound.",
        ),
        (
            [entry("ddp", 1.0, 0.1, 1.0), entry("legato", 0.9, 0.0, 1.1)],
            "DDP is as fast as the best of 2 schedulers (measured); its plan is 10.0% above the proven lower bound.",
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
