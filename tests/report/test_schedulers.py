"""The table of schedulers, its headline, and how numbers are written."""

import msgspec
import pytest
from support.report_samples import CLUSTER, cnn, model, row, run, timelines

from legato.core.errors import InputError
from legato.core.units import format_seconds
from legato.report.model import ModelReport, Report, SchedulerRow
from legato.report.schedulers import Entry, best_of, bound_sentence, entries, headline, overview, scheduler_table
from legato.report.sections import section
from legato.report.tables import in_one_unit, percent


def sentence(*table):
    return "".join(text for text, _ in headline(list(table), "job"))


def entry(name, predicted, gap=None, measured=None, **more):
    return Entry(name, predicted_s=predicted, measured_s=measured, gap=gap, **more)


@pytest.mark.parametrize(
    ("table", "words", "bound"),
    [
        (
            [entry("ddp", 1.24, 0.28, exposed={"predicted": 0.25}), entry("legato", 1.0, 0.031)],
            "An iteration takes 1,240 ms under DDP (predicted), 25.0% of it exposed communication; "
            "legato is 1.24× as fast.",
            "The prediction for legato is 3.1% above the proven lower bound.",
        ),
        (
            [
                entry("ddp", 1.24, 0.28, 1.5, exposed={"predicted": 0.25, "measured": 0.4}),
                entry("legato", 1.0, 0.031, 1.2),
                entry("pace", 0.9, 0.0),
            ],
            "An iteration takes 1,500 ms under DDP (measured), 40.0% of it exposed communication; "
            "legato is 1.25× as fast.",
            "The prediction for legato is 3.1% above the proven lower bound.",
        ),
        (
            [entry("fifo", 1.0, 0.0), entry("ddp", 2.0)],
            "An iteration takes 2,000 ms under DDP (predicted); fifo is 2.00× as fast.",
            "No plan is predicted to be faster than fifo: its prediction is at the proven lower bound.",
        ),
        (
            [entry("ddp", 1.0, 0.5), entry("legato", 0.999, 0.499)],
            "An iteration takes 1,000 ms under DDP (predicted); none of 2 schedulers is more than 0.5% faster.",
            "The prediction for DDP is 50.0% above the proven lower bound.",
        ),
        (
            [entry("ddp", 1.0, 0.1, 1.0), entry("legato", 0.9, 0.0, 1.1)],
            "An iteration takes 1,000 ms under DDP (measured); none of 2 schedulers is more than 0.5% faster.",
            "The prediction for DDP is 10.0% above the proven lower bound.",
        ),
        (
            [entry("ddp", 2.0), entry("legato", 1.0, measured=1.1)],  # DDP was not measured
            "An iteration takes 1,100 ms under legato (measured).",
            "",
        ),
        ([entry("fifo", 0.1323)], "An iteration takes 132.3 ms under fifo (predicted).", ""),
        ([entry("job", None, measured=0.1323)], "An iteration takes 132.3 ms (measured).", ""),
        (
            [entry("fifo", 1.0, num_messages=9), entry("pace", 1.001, num_messages=3), entry("ddp", 2.0)],
            "An iteration takes 2,000 ms under DDP (predicted); pace is 2.00× as fast.",
            "",
        ),
        ([], "", ""),
    ],
)
def test_the_headline_compares_one_kind_of_time_and_says_which(table, words, bound):
    assert sentence(*table) == words
    assert bound_sentence(table) == bound


def columns(table):
    return {head["text"]: [row["cells"][i]["text"] for row in table["rows"]] for i, head in enumerate(table["heads"])}


def test_speedups_are_of_measured_times_or_of_predicted_ones_and_never_of_both():
    """DDP is measured to take 4 s and predicted to take 2 s; pace was not measured, fifo not predicted."""
    table = [
        entry("ddp", 2.0, 1.0, 4.0, overlap=0.5),
        entry("legato", 1.0, 0.0, 3.2, overlap=0.9),
        entry("pace", 1.6, 0.6),
        Entry("fifo", measured_s=5.0, overlap=0.1),
    ]
    assert columns(scheduler_table(table)) == {
        "scheduler": ["legato", "pace", "ddp", "fifo"],
        "measured": ["3,200 ms", "", "4,000 ms", "5,000 ms"],
        "measured over DDP": ["1.25×", "", "1.00×", "0.80×"],
        "predicted": ["1,000 ms", "1,600 ms", "2,000 ms", ""],
        "predicted over DDP": ["2.00×", "1.25×", "1.00×", ""],
        "prediction error": ["−68.8%", "", "−50.0%", ""],
        "predicted above bound": ["0.0%", "60.0%", "100%", ""],
        "predicted overlap": ["90.0%", "", "50.0%", ""],
    }
    assert "measured overlap" in columns(scheduler_table(table[3:]))


def test_the_table_of_all_workloads_does_not_mix_either():
    """Only the plan was measured: its measured time has no speedup, its predicted one has."""
    rows = [msgspec.structs.replace(r, measured_s=1.0 if r.scheduler == "legato" else None) for r in model().rows]
    shown = ModelReport("x", rows=tuple(rows))
    found = columns(overview([shown, shown]))
    assert found["taken"] == ["legato"] * 2 and found["measured"] == ["1,000 ms"] * 2
    assert "measured over DDP" not in found
    ddp, legato = rows[0].iteration_s, rows[2].iteration_s
    assert found["predicted over DDP"] == [f"{ddp / legato:.2f}×"] * 2


def test_a_plan_has_one_measured_time_on_a_page():
    """The row has the median of a training, the timeline is one traced iteration of it."""
    shown = model()
    rows = [msgspec.structs.replace(r, measured_s=0.123456) if r.scheduler == "ddp" else r for r in shown.rows]
    figures = {}
    part = section(msgspec.structs.replace(shown, rows=tuple(rows)), 0, figures)
    traced = next(t for t in shown.timelines if (t.name, t.source) == ("ddp", "measured"))
    said = [note["text"] for note in figures["timelines-0"]["layout"]["annotations"]]
    times = in_one_unit([t.iteration_s for t in shown.timelines])
    written = times[shown.timelines.index(traced)]
    assert not any(written in text for text in said) and any("one measured iteration" in text for text in said)
    assert [w["source"] for w in part["waits"]].count("one measured iteration") == 1
    assert format_seconds(traced.iteration_s) not in next(w for w in part["waits"] if "one" in w["source"])["summary"]
    whole = section(shown, 0, figures)
    assert not whole["single"] and "one measured iteration" not in str(figures["timelines-0"]["layout"])


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


def test_of_plans_that_are_as_fast_the_one_that_rounds_least_is_taken():
    table = [
        entry("ddp", 1.0, num_messages=2, rounded=0.9),
        entry("legato", 1.001, num_messages=9, rounded=0.2),
        entry("pace", 2.0, num_messages=9, rounded=0.0),
    ]
    assert best_of(table).scheduler == "legato" and columns(scheduler_table(table))["rounded"] == [
        "90.0%",
        "20.0%",
        "0.0%",
    ]
    rows = tuple(SchedulerRow(name, 1.0, 1.0, 0.0, 0.5, 1.0, 3, 0.1, rounded=r) for name, r in (("a", 0.5), ("b", 0.0)))
    assert [e.rounded for e in entries(ModelReport("x", rows=rows))] == [0.5, 0.0]
    assert [e.rounded for e in entries(ModelReport("x", rows=rows[1:]))] == [None]


def test_numbers_to_compare_stand_in_one_unit():
    assert in_one_unit([1.371, 1.2346, None]) == ["1,371 ms", "1,235 ms", ""]
    assert in_one_unit([0.0123456, 0.001]) == ["12.35 ms", "1.00 ms"]
    assert in_one_unit([123.4, 2.0]) == ["123.4 s", "2.0 s"]
    assert in_one_unit([0.0, None]) == ["0.000 us", ""]
    assert [percent(x) for x in (0.031, -0.25, 2.5, 12345.0, None)] == ["3.1%", "−25.0%", "250%", "1,234,500%", ""]


@pytest.mark.parametrize(
    "change",
    [
        {"iteration_s": -1.0},
        {"lower_bound_s": float("nan")},
        {"gap": float("inf")},
        {"measured_s": float("inf")},
        {"rounded": 1.5},
        {"rounded": float("nan")},
    ],
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
