"""The table of schedulers, its headline, and how numbers are written."""

import msgspec
import pytest
from support.report_samples import CLUSTER, cnn, medians, model, row, run, timelines

from legato.core.errors import InputError
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.reports.model import ModelReport, Report, SchedulerRow
from legato.reports.schedulers import Entry, best_of, bound_sentence, entries, headline, overview, scheduler_table
from legato.reports.sections import section


def sentence(*table):
    return "".join(text for text, _ in headline(list(table), "job"))


def entry(name, predicted, gap=None, measured=None, **more):
    return Entry(name, predicted_s=predicted, measured_s=measured, gap=gap, **more)


@pytest.mark.parametrize(
    ("table", "words", "bound"),
    [
        (
            [entry("ddp", 1.24, 0.28, exposed={"predicted": 0.25}), entry("legato", 1.0, 0.031)],
            "An iteration takes 1.24 s under DDP (predicted), 25.0% of it exposed communication; "
            "legato is 1.24x as fast.",
            "The prediction for legato is 3.1% above the proven lower bound.",
        ),
        (
            [
                entry("ddp", 1.24, 0.28, 1.5, exposed={"predicted": 0.25, "measured": 0.4}),
                entry("legato", 1.0, 0.031, 1.2),
                entry("pace", 0.9, 0.0),
            ],
            "An iteration takes 1.5 s under DDP (measured); legato is 1.25x as fast.",
            "The prediction for legato is 3.1% above the proven lower bound.",
        ),
        (
            [entry("fifo", 1.0, 0.0), entry("ddp", 2.0)],
            "An iteration takes 2 s under DDP (predicted); fifo is 2.00x as fast.",
            "No plan is predicted to be faster than fifo: its prediction is at the proven lower bound.",
        ),
        (
            [entry("ddp", 1.0, 0.5), entry("legato", 0.999, 0.499)],
            "An iteration takes 1 s under DDP (predicted); no other plan is more than 0.5% faster.",
            "The prediction for DDP is 50.0% above the proven lower bound.",
        ),
        (
            [entry("ddp", 1.0, 0.1, 1.0), entry("legato", 0.9, 0.0, 1.1)],
            "An iteration takes 1 s under DDP (measured); no other plan is more than 0.5% faster.",
            "The prediction for DDP is 10.0% above the proven lower bound.",
        ),
        (
            [entry("ddp", 2.0), entry("legato", 1.0, measured=1.1)],  # DDP was not measured
            "An iteration takes 1.1 s under legato (measured).",
            "",
        ),
        ([entry("fifo", 0.1323)], "An iteration takes 132 ms under fifo (predicted).", ""),
        ([entry("job", None, measured=0.1323)], "An iteration takes 132 ms (measured).", ""),
        (
            [entry("fifo", 1.0, num_messages=9), entry("pace", 1.001, num_messages=3), entry("ddp", 2.0)],
            "An iteration takes 2 s under DDP (predicted); pace is 2.00x as fast.",
            "",
        ),
        (  # of single iterations none is compared with another, nor with a prediction
            [
                entry("ddp", 2.0, 1.0, one_s=1.9, exposed={"measured": 0.4, "predicted": 0.3}),
                entry("legato", 1.0, 0.0, one_s=1.0),
            ],
            "One measured iteration took 1.9 s under DDP, 40.0% of it exposed communication.",
            "",
        ),
        ([entry("job", None, one_s=0.1323)], "One measured iteration took 132 ms.", ""),
        (
            [entry("random", 2.0, measured=2.0), entry("tic", 1.0, measured=1.0)],
            "An iteration takes 2 s under the random order (measured); tic is 2.00x as fast.",
            "",
        ),
        (
            [entry("random", 2.0, measured=2.008), entry("tic", 1.0, measured=2.0)],
            "An iteration takes 2.01 s under the random order (measured); no other plan is more than 0.5% faster.",
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
        Entry("fifo", measured_s=5.0, quartiles_s=(4.5, 5.5), one_s=1.0, overlap=0.1),
    ]
    assert columns(scheduler_table(table)) == {
        "scheduler": ["legato", "pace", "ddp", "fifo"],
        "measured": ["3.2 s", "", "4 s", "5 s"],
        "quartiles": ["", "", "", "4.5 s to 5.5 s"],
        "measured over DDP": ["1.25x", "", "1.00x", "0.80x"],
        "predicted": ["1 s", "1.6 s", "2 s", ""],
        "predicted over DDP": ["2.00x", "1.25x", "1.00x", ""],
        "prediction error": ["-68.8%", "", "-50.0%", ""],
        "predicted above bound": ["0.0%", "+60.0%", "+100%", ""],
        "predicted overlap": ["90.0%", "", "50.0%", ""],
    }
    assert "overlap of one iteration" in columns(scheduler_table(table[3:]))


def test_single_iterations_have_a_column_of_their_own_and_no_winner():
    table = [entry("ddp", 2.0, one_s=1.9), entry("legato", 1.0, one_s=1.95)]
    shown = scheduler_table(table)
    assert columns(shown) == {
        "scheduler": ["legato", "ddp"],
        "one iteration": ["1.95 s", "1.9 s"],
        "predicted": ["1 s", "2 s"],
        "predicted over DDP": ["2.00x", "1.00x"],
    }
    assert not any(row["best"] for row in shown["rows"])


def test_orders_of_pulls_are_compared_with_the_random_one():
    shown = columns(scheduler_table([entry("random", 2.0, measured=3.0), entry("tic", 1.0, measured=1.5)]))
    assert shown["measured over random order"] == ["2.00x", "1.00x"] and "measured over DDP" not in shown


def test_the_table_of_all_workloads_does_not_mix_either():
    """Only the plan was measured: its measured time has no speedup, its predicted one has."""
    rows = model().rows
    shown = ModelReport("x", rows=rows, measured=medians(legato=[1.0]))
    found = columns(overview([shown, shown]))
    assert found["taken"] == ["legato"] * 2 and found["measured"] == ["1 s"] * 2
    assert "measured over DDP" not in found
    ddp, legato = rows[0].iteration_s, rows[2].iteration_s
    assert found["predicted over DDP"] == [f"{ddp / legato:.2f}x"] * 2


def test_a_plan_has_one_measured_time_on_a_page():
    """The measurement has the median of a training, the timeline is one traced iteration of it."""
    shown, figures = model(), {}
    part = section(msgspec.structs.replace(shown, measured=medians(ddp=[0.123456])), 0, figures)
    said = [note["text"] for note in figures["timelines-0"]["layout"]["annotations"]]
    one = {t.name: format_seconds(t.iteration_s) for t in shown.timelines if t.source == "measured"}
    assert not any(one["ddp"] in text for text in said)  # the time of an iteration that is not the median
    assert any(f"one measured iteration <b>{one['legato']}</b>" in text for text in said)  # of which no median is known
    assert [w["source"] for w in part["waits"]].count("one measured iteration") == 2
    assert one["ddp"] not in next(w for w in part["waits"] if w["source"] != "predicted")["summary"]
    assert sorted(columns(part["table"])["measured"]) == ["", "", "123 ms"]


def test_a_measured_timeline_is_not_taken_for_what_was_measured():
    """Of one iteration each, the other plan is faster than the medians say."""
    ddp, _, legato = timelines(cnn(10))
    one = [msgspec.structs.replace(t, source="measured") for t in (ddp, legato)]
    told = ModelReport("x", timelines=tuple(one), measured=medians(ddp=[0.10], legato=[0.11], doubts=("busy",)))
    assert legato.iteration_s < ddp.iteration_s
    assert sentence(*entries(told)) == (
        "An iteration takes 100 ms under DDP (measured); no other plan is more than 0.5% faster."
    )
    assert best_of(entries(told)).scheduler == "ddp" and section(told, 0, {})["doubts"] == ("busy",)
    alone = entries(msgspec.structs.replace(told, measured=None))
    assert best_of(alone) is None and "as fast" not in sentence(*alone) and all(e.measured_s is None for e in alone)


def test_rows_medians_and_timelines_become_one_table():
    shown = model()
    table = {e.scheduler: e for e in entries(shown)}
    medians_s = {plan.scheduler: plan.measured_s for plan in shown.measured.plans}
    assert {n: e.measured_s for n, e in table.items()} == medians_s | {"fifo": None}
    assert {n: e.plan_s for n, e in table.items()} == {r.scheduler: r.plan_s for r in shown.rows}
    bare = ModelReport("x", rows=tuple(SchedulerRow(r.scheduler, 1.0, 0.0, 0.0, 0, 1, 1, None) for r in shown.rows))
    assert entries(bare)[0].gap is None  # a bound of zero is no bound


def test_several_networks_are_all_named():
    lines = [Timeline(name, "predicted", 1.0, (), network=network) for name, network in (("a", "x"), ("b", "y"))]
    assert "x; y" in section(ModelReport("job", timelines=(*lines, lines[0])), 0, {})["facts"]


def test_the_bound_is_that_of_any_timeline_of_the_plan():
    bare, bounded = Timeline("a", "predicted", 1.2, ()), Timeline("a", "measured", 1.1, (), 1.0)
    assert entries(ModelReport("job", timelines=(bare, bounded)))[0].gap == pytest.approx(0.2)


def test_timelines_alone_make_a_table():
    ddp, _, legato = timelines(cnn(10))
    real = run(cnn(10), "ddp", [list(cnn(10).tensors)], CLUSTER.cost(), False, "measured")
    table = entries(ModelReport("x", timelines=(ddp, legato, real)))
    assert [e.scheduler for e in table] == ["ddp", "legato"]
    assert table[0].predicted_s == ddp.iteration_s and table[0].one_s == real.iteration_s
    assert table[1].gap == pytest.approx(legato.iteration_s / legato.lower_bound_s - 1)
    assert table[1].num_messages == row(legato, 0).num_messages
    only = entries(ModelReport("x", timelines=(real,)))[0]
    assert only.predicted_s is None and only.one_s == real.iteration_s and only.lower_bound_s is None


@pytest.mark.parametrize(
    "change",
    [
        {"iteration_s": -1.0},
        {"lower_bound_s": float("nan")},
        {"gap": float("inf")},
        {"plan_s": float("inf")},
    ],
)
def test_a_row_needs_real_numbers(change):
    good = {"scheduler": "x", "iteration_s": 1.0, "lower_bound_s": 1.0, "gap": 0.0, "overlap": 0.5, "utilization": 1.0}
    good |= {"num_messages": 1, "plan_s": 0.1}
    assert SchedulerRow(**good).runnable
    with pytest.raises(InputError, match=next(iter(change))):
        SchedulerRow(**good | change)


def test_a_report_shows_something():
    with pytest.raises(InputError, match="nothing to show"):
        ModelReport("x")
    with pytest.raises(InputError, match="at least one"):
        Report(())
