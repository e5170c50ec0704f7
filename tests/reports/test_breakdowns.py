"""Steps of whole jobs as stacked bars."""

import msgspec
import pytest
from support.report_samples import EVIL, breakdown, breakdown_report

from legato.core.errors import InputError
from legato.reports.breakdowns import PARTS, breakdown_charts, breakdown_headline, draw_breakdowns
from legato.reports.html import render
from legato.reports.model import Breakdown


def charts(**more):
    return breakdown_report(**more).models[0].breakdowns


def test_bars_are_stacked_to_the_predicted_step():
    bars = [breakdown(computing=6, tensor=1.5, optimizer=0.5), breakdown(note="0.80x", computing=6, bubble=4)]
    figure = draw_breakdowns(bars, 10)
    found = {trace["name"]: dict(zip(trace["y"], trace["x"], strict=True)) for trace in figure["data"]}
    assert found == {"computing": {0: 6, -1: 6}, "bubble": {-1: 4}, "tensor": {0: 1.5}, "optimizer": {0: 0.5}}
    assert figure["layout"]["barmode"] == "stack" and figure["layout"]["xaxis"]["title"]["text"].endswith("[s]")
    ends = {(note["x"], note["y"]): note["text"] for note in figure["layout"]["annotations"] if note["x"]}
    assert ends == {(8, 0): "<b>8 s</b>  ", (10, -1): "<b>10 s</b>  0.80x"}
    names = [note["text"] for note in figure["layout"]["annotations"] if not note["x"]]
    assert names == ["<b>tensor 2, data 4</b>  1f1b"] * 2
    tensor = next(trace for trace in figure["data"] if trace["name"] == "tensor")
    assert tensor["text"] == ["tensor 18.8%"]
    assert tensor["customdata"] == [["tensor 2, data 4", "1.5 s · 18.8% of 8 s"]]


def test_short_steps_are_drawn_in_milliseconds():
    figure = draw_breakdowns([breakdown(computing=0.2)], 0.2)
    assert figure["data"][0]["x"] == [200] and figure["layout"]["xaxis"]["title"]["text"] == "predicted step [ms]"


def test_what_a_step_waits_for_differs_without_colour():
    patterns = [pattern for part, (_, pattern) in PARTS.items() if part not in ("computing", "optimizer")]
    assert all(patterns) and len(set(patterns)) == len(patterns) == 6


def test_the_headline_is_of_the_first_step():
    text = "".join(text for text, _ in breakdown_headline(charts()))
    assert text == (
        "A step takes 8 s with tensor 2, data 4 (predicted): 15.6% of it exposed communication, 6.2% bubble."
    )
    (chart, _) = charts()
    without = breakdown_headline([msgspec.structs.replace(chart, bars=chart.bars[1:])])
    assert "".join(text for text, _ in without).endswith("50.0% of it exposed communication.")


def test_charts_of_a_page_have_one_scale_and_not_all_bars():
    figures = {}
    first, second = breakdown_charts(charts(layouts=23), 0, figures)
    assert (first["hint"], second["hint"]) == ("As long. The table has 3 more.", "")
    ranges = [figures[part["id"]]["layout"]["xaxis"]["range"] for part in (first, second)]
    assert ranges[0] == ranges[1] and 28 <= ranges[0][1] < 29  # of the first 20; the last takes 31 s
    assert len(figures[first["id"]]["data"][0]["x"]) == 20


@pytest.mark.parametrize(
    ("seconds", "parts"),
    [(8, {"computing": 7}), (8, {"computing": 9, "bubble": -1}), (0, {"computing": 0}), (float("inf"), {}), (1, {})],
)
def test_parts_that_are_not_the_step_are_refused(seconds, parts):
    with pytest.raises(InputError, match="parts of 'a layout'"):
        Breakdown("a layout", seconds, parts)


def test_strange_names_are_text():
    page = render(breakdown_report(EVIL))
    assert EVIL not in page and "the efficiency is a default" in page and "What the predictions assume" in page
