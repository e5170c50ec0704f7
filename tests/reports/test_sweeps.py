"""The plots and the table of a sweep, and the sentences of a report."""

import msgspec
import pytest
from support.report_samples import EVIL, sweep_rows

from legato.reports.html import render
from legato.reports.model import Report
from legato.reports.sweeps import draw_sweep, sweep_headline, sweep_sections, varying


def points(figure):
    return {(t["name"], t["xaxis"]): list(zip(t["x"], t["y"], strict=True)) for t in figure["data"]}


def test_a_line_a_fabric_and_a_panel_a_bandwidth():
    found = sweep_rows()
    assert varying(found) == ["workers", "bandwidth_bps"]
    figure = draw_sweep(found, "workers", "speedup")
    assert points(figure) == {
        ("parameter-server", "x"): [(4, 1), (8, 1)],
        ("ring", "x"): [(4, 4), (8, 8)],
        ("parameter-server", "x2"): [(4, 1), (8, 1)],
        ("ring", "x2"): [(4, 4), (8, 8)],
    }
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["1 Gbit", "10 Gbit"]
    assert [trace["showlegend"] for trace in figure["data"]] == [True, True, False, False]
    assert points(draw_sweep(found, "bandwidth_bps", "iteration_s"))["ring", "x2"] == [(1e9, 1000), (1e10, 100)]


def test_labels_of_one_unit_leave_it_to_the_title():
    shape = draw_sweep(sweep_rows(), "bandwidth_bps", "iteration_s")["layout"]
    assert shape["xaxis"]["ticktext"] == ["1", "10"] and shape["xaxis"]["title"]["text"] == "link bandwidth [Gbit]"
    shape = draw_sweep(sweep_rows(links=(1e8, 1e9)), "bandwidth_bps", "iteration_s")["layout"]
    assert shape["xaxis"]["ticktext"] == ["100 Mbit", "1 Gbit"] and shape["xaxis"]["title"]["text"] == "link bandwidth"


def test_without_an_axis_there_are_bars():
    (trace,) = draw_sweep(sweep_rows(workers=(4,), links=(1e9,)), "", "iteration_s")["data"]
    assert trace["type"] == "bar" and trace["x"] == ["parameter-server", "ring"] and trace["y"] == [4000, 1000]


def test_many_panels_become_nine():
    figure = draw_sweep(sweep_rows(links=tuple(1e9 * k for k in range(1, 30))), "workers", "iteration_s")
    texts = [note["text"] for note in figure["layout"]["annotations"]]
    assert len(texts) == 9 and (texts[0], texts[-1]) == ("1 Gbit", "29 Gbit")


def test_the_headline_says_what_is_fastest_and_where():
    assert "".join(text for text, _ in sweep_headline(sweep_rows())) == (
        "ring is the fastest everywhere, up to 8x as fast as parameter-server."
    )
    failed = [msgspec.structs.replace(row, iteration_s=None, speedup=None, error="no") for row in sweep_rows()]
    assert sweep_headline(failed) == [("No cell has a result.", False)]


@pytest.mark.parametrize("one_is_wrong", [False, True])
def test_a_section_has_four_plots_and_all_sweep_rows(one_is_wrong):
    found = sweep_rows()
    if one_is_wrong:
        found[1] = msgspec.structs.replace(found[1], iteration_s=None, speedup=None, error="does not fit")
    figures = {}
    (part,) = sweep_sections(found, figures)
    assert len(figures) == 4 == len(part["figures"])
    assert len(part["table"]["rows"]) == 8
    assert (part["table"]["rows"][1]["cells"][-1]["text"] == "does not fit") == one_is_wrong
    assert ("1 failed" in part["facts"]) == one_is_wrong


def test_a_tie_has_no_winner():
    def said(rows):
        return "".join(text for text, _ in sweep_headline(rows))

    def all_like(names):
        return [msgspec.structs.replace(row, fabric=n) for n in names for row in sweep_rows(fabrics=("x", "ring"))[4:]]

    slow, fast = sweep_rows()[:4], all_like(("tree", "ring"))
    assert said([*slow, *fast]).startswith("tree and ring are the fastest everywhere, as fast as each other, up to 8x")
    assert said([*slow, *all_like("abc")]).startswith("a and 2 others are the fastest everywhere")
    assert said(fast) == "All are as fast as each other everywhere."


def test_speedups_say_what_they_are_over():
    table = sweep_sections(sweep_rows(), {})[0]["table"]
    assert "speedup over parameter-server" in [head["text"] for head in table["heads"]]


def test_failed_sweeps_and_strange_names_are_pages_too():
    failed = [msgspec.structs.replace(row, iteration_s=None, speedup=None, error=EVIL) for row in sweep_rows(name=EVIL)]
    page = render(Report(sweep=tuple(failed)))
    assert EVIL not in page and "No cell has a result." in page


def test_what_is_as_fast_as_the_fastest_counts():
    """`ring` takes as long as `tree` on half of the machines, and less on the others."""
    found = sweep_rows(fabrics=("tree", "ring"), workers=(1, 4))
    assert sweep_headline(found)[:2] == [("ring", True), (" is the fastest everywhere", False)]


def test_one_is_singular_on_pages():
    """Panels, hover texts and what a long table leaves out."""
    rows = sweep_rows(workers=(1, 4), links=(1e9, 2e9))
    panels = [note["text"] for note in draw_sweep(rows, "bandwidth_bps", "iteration_s")["layout"]["annotations"]]
    assert any("1 worker" in text for text in panels) and not any("1 workers" in text for text in panels)
    hover = [text for trace in draw_sweep(rows, "workers", "speedup")["data"] for text in trace["customdata"]]
    assert any("1 worker ·" in str(text) for text in hover)
    left_out = [sweep_sections(rows[:1] * n, {})[0]["left_out"] for n in (1, 2000, 2001, 5000)]
    assert left_out == ["", "", "1 more row", "3,000 more rows"]
    assert sweep_sections(rows[:1], {})[0]["facts"].startswith("1 cell ·")
