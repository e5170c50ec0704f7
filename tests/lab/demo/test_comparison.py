"""What the demo says of its measurements and predictions, from results made by hand."""

import msgspec
import pytest
from support.command import run
from support.report_samples import cnn

from legato.core.cluster import Cluster
from legato.core.units import format_seconds
from legato.lab import demo
from legato.lab.cli.demo import _bandwidth_bps
from legato.lab.cli.demo import _show as show
from legato.lab.demo.result import ModelResult, measured_names
from legato.lab.testbed import hosts
from legato.reports.doubts import doubts
from legato.schedule.compare import compare

JOB = cnn(12)
SLOW, FAST = Cluster.derive(2, 2e9, 30e-6), Cluster.derive(2, 40e12, 1e-9)


def result(cluster=SLOW, scheduler="legato", slowdown=(1.5, 1.2)):
    """The result where DDP and the plan are measured this much above their predictions."""
    found = {c.plan.scheduler: c for c in compare(JOB, cluster, ["ddp", "merge-optimal", "legato"])}
    ddp, chosen = found["ddp"], found[scheduler]
    return ModelResult(
        model="cnn",
        workload=JOB,
        cluster=cluster,
        fit_error=0.0,
        worst_fit_error=0.0,
        rows=[c.columns for c in found.values()],
        predicted=[found[name].timeline for name in dict.fromkeys(("ddp", scheduler))],
        measured=[
            msgspec.structs.replace(c.timeline, name=name, source="measured", lower_bound_s=None)
            for name, c in zip(measured_names(chosen.plan), (ddp, chosen), strict=True)
        ],
        plan=chosen.plan,
        merged=found["merge-optimal"].plan,
        ddp_blocks_s=[ddp.iteration_s * slowdown[0]] * 8,
        legato_blocks_s=[chosen.iteration_s * slowdown[1]] * 8,
        max_relative_difference=0.0,
        steps=8,
    )


def test_measured_times_are_compared_with_measured_ones_and_predictions_with_predictions(capsys):
    one = result()
    predicted = {row["scheduler"]: row["iteration_s"] for row in one.rows}
    over = predicted["ddp"] / predicted["legato"]
    measured, told = demo.advice(one).split(" Predicted: ")
    assert measured.startswith("Measured: ") and measured.endswith(f"with DDP: {over * 1.5 / 1.2:.2f}x.")
    assert f"with DDP: {over:.2f}x." in told
    show(one)
    lines = capsys.readouterr().out.splitlines()
    cells = next(line for line in lines if " legato " in line)
    assert f"{over:.2f}x" in cells and f"{over * 1.5 / 1.2:.2f}x" in cells
    heads = " ".join(lines[2:4])
    assert heads.count("over ddp") == 2 and heads.count("predicted") >= 4 and heads.count("measured") == 2


def test_where_ddp_s_own_plan_is_taken_ddp_has_one_measured_time(tmp_path):
    """The other training is DDP's plan in legato's runtime: it is no second measurement of DDP."""
    one = result(FAST, "ddp", (1.5, 1.4))
    assert demo.rows(one)[0]["measured_s"] == one.ddp_s
    assert [t.name for t in one.measured] == ["ddp", "ddp in legato's runtime"]
    said = demo.advice(one)
    assert "ddp in legato's runtime" in said and "bucket_cap_mb_list" not in said
    assert "with DDP, and no plan is more than 0.5% faster." in said.split("Predicted: ")[1]
    (tmp_path / one.model).mkdir()
    demo.write_pictures([one], tmp_path, "1 Gbit/s")
    assert "ddp in legato&#39;s runtime" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("slowdown", "said"), [((0.4, 0.4), "the calibration cannot be right"), ((1.5, 1.2), "")])
def test_a_measurement_that_cannot_be_is_doubted_beside_it(capsys, slowdown, said):
    one = result(slowdown=slowdown)
    show(one)
    err = capsys.readouterr().err
    assert ("Beware: " in err) == bool(said) and said in err
    assert list(demo.report_of(one, "1 Gbit/s").measured.doubts) == demo.result_doubts(one)
    spread = msgspec.structs.replace(one, legato_blocks_s=[1.0, 2.0] * 4)
    assert any("the machine was busy" in doubt for doubt in demo.result_doubts(spread))
    assert doubts({"ddp": one.ddp_blocks_s}, {"ddp": 0.0}) == []


@pytest.mark.parametrize(
    ("scheduler", "slowdown", "won"),
    [
        ("legato", (1.5, 1.2), "x as fast as DDP: a step took"),
        ("legato", (0.5, 1.2), "legato was slower than DDP (0."),
        ("ddp", (1.2, 1.2), "legato was as fast as DDP: a step took"),
    ],
)
def test_the_last_lines_say_what_was_won_and_what_is_left(scheduler, slowdown, won):
    one = result(FAST if scheduler == "ddp" else SLOW, scheduler, slowdown)
    first, prediction, bound = demo.verdict(one)
    assert first.startswith("cnn: legato ") and won in first
    assert f"({1 / slowdown[1] - 1:+.1%})" in prediction
    assert f"at most {1 - one.best['lower_bound_s'] / one.legato_s:.0%} of the step is left to gain" in bound


def test_without_hosts_the_demo_says_that_it_runs_over_loopback(monkeypatch, capsys):
    monkeypatch.setattr(hosts, "why_unavailable", lambda: "")
    assert (_bandwidth_bps(None), _bandwidth_bps("2Gbit"), _bandwidth_bps("loopback")) == (1e9, 2e9, None)
    monkeypatch.setattr(hosts, "why_unavailable", lambda: "shaped hosts need root")
    assert _bandwidth_bps(None) is None
    said = "".join(capsys.readouterr())
    assert said.startswith("using loopback, where ") and "shaped hosts need root" in said
    assert _bandwidth_bps("2Gbit") == 2e9  # what was asked for is tried, and refused with the reason


@pytest.mark.parametrize(
    ("scheduler", "slowdown"), [("legato", (1.5, 1.2)), ("legato", (0.5, 1.2)), ("ddp", (1.2, 1.2))]
)
def test_the_page_of_the_saved_folder_says_what_was_measured(capsys, tmp_path, scheduler, slowdown):
    one = result(FAST if scheduler == "ddp" else SLOW, scheduler, slowdown)
    (tmp_path / "cnn").mkdir()
    demo.write_pictures([one], tmp_path, "1 Gbit/s")
    (tmp_path / "cnn" / "result.json").write_text("{}")
    assert run(capsys, "report", tmp_path / "cnn", "-o", tmp_path / "again.html")[0] == 0
    for page in ("report.html", "again.html"):
        text = (tmp_path / page).read_text()
        assert f"{format_seconds(one.ddp_s)}</strong> under DDP (measured)" in text and "2 workers, 1 Gbit/s" in text
        assert (f"{one.ddp_s / one.legato_s:.2f}x as fast" in text) == (one.legato_s < 0.99 * one.ddp_s)
