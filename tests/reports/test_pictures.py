"""Figures as files: those of the page, numbered, in the light theme's colours, and what they need."""

import json
import re
import shutil
import sys
import types

import pytest
from support.command import run
from support.report_samples import model, sweep_rows

from legato.core.errors import InputError
from legato.core.table import Table
from legato.lab.papers import PAPERS, Figure
from legato.lab.papers.pages import write_page
from legato.reports.html import write_report
from legato.reports.model import ModelReport, Report
from legato.reports.pictures import _colours


@pytest.fixture
def drawn(monkeypatch):
    """What plotly is asked to draw, instead of drawing it in a browser."""
    import plotly.io

    asked = []
    # first, as plotly keeps the kaleido that it finds when `to_image` is first looked up
    monkeypatch.setattr(plotly.io, "to_image", lambda figure, **how: asked.append((figure, how)) or b"drawn")
    monkeypatch.setitem(sys.modules, "kaleido", types.ModuleType("kaleido"))
    return asked


def test_the_figures_are_those_of_the_page_and_the_timelines_come_first(tmp_path, drawn):
    write_report(tmp_path / "r.html", Report((model(),)))
    page = (tmp_path / "r.html").read_text()
    every = json.loads(re.search(r'id="figures"[^>]*>([^<]+)<', page).group(1))
    write_report(tmp_path / "r.svg", Report((model(),)))
    names = ["r.svg", *(f"r-{k}.svg" for k in range(2, len(every) + 1))]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == sorted(names) and len(names) > 2
    assert len(drawn[0][0]["data"]) == len(every["timelines-0"]["data"])
    assert {how["format"] for _, how in drawn} == {"svg"}
    text = json.dumps([figure for figure, _ in drawn])
    assert not re.search(r'"@[\w-]+"', text) and _colours()["@forward"] in text


def test_sweeps_and_papers_are_drawn_too(tmp_path, drawn):
    write_report(tmp_path / "s.pdf", Report(sweep=tuple(sweep_rows())))
    assert (tmp_path / "s.pdf").read_bytes() == b"drawn" and drawn[-1][1]["format"] == "pdf"
    curves = {"ours": ((1.0, 2.0), (3.0, 4.0)), "published": ((2.0,), (4.5,))}
    write_page(tmp_path / "p.svg", PAPERS["caramel"], [Figure("Fig. 1", "t", "x", "y", curves)])
    ours, published = drawn[-1][0]["data"]
    assert ours["mode"] == "lines+markers" and published["mode"] == "markers" and list(published["y"]) == [4.5]


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys, monkeypatch, drawn):
    told = ModelReport("m", told=(Table.of("t", {"a": None}, ["b"]),))
    with pytest.raises(InputError, match="nothing to draw"):
        write_report(tmp_path / "r.svg", Report((told,)))
    status, _, err = run(capsys, "reproduce", "all", "-o", tmp_path / "all.svg")
    assert status == 2 and "expected a folder, or one paper" in err
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(InputError, match="a figure needs kaleido: pip install plotly kaleido"):
        write_report(tmp_path / "r.svg", Report((model(),)))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="no browser to draw in")
@pytest.mark.parametrize(("name", "begins"), [("r.svg", b"<svg"), ("r.pdf", b"%PDF")])
def test_a_browser_draws_them(tmp_path, name, begins):
    pytest.importorskip("kaleido")
    write_report(tmp_path / name, Report((model(),)))
    assert (tmp_path / name).read_bytes().startswith(begins)
