"""The page in a real browser: it draws, it sorts, and it has nothing to complain about."""

import json
import re
import shutil
import subprocess
from urllib.parse import unquote

import pytest
from support import PATIENCE_S
from support.report_samples import EVIL, breakdown_report, evil_report, model, sweep_rows

from legato.reports.html import write_report
from legato.reports.model import ModelReport, Report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: the page is not opened in a browser")

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--v=0",
    "--virtual-time-budget=5000",
    "--dump-dom",
]


def browse(path, profile, width=1280, height=1000, *flags):
    """(the document after its scripts, what they wrote to the console)"""
    command = [
        CHROMIUM,
        *FLAGS,
        *flags,
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        f"file://{path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def ask(path, script, profile, width=1280, *flags):
    """What the JavaScript expression gives on a copy of the page, whose policy would not let it run; all is drawn."""
    page = path.read_text()
    copy = path.with_name(f"asked-{path.name}")
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page, count=1)
    end = page.rindex("</body>")
    script = (
        f'dispatchEvent(new Event("beforeprint")); answer.textContent = encodeURIComponent(JSON.stringify({script}))'
    )
    extra = f'<pre id="answer"></pre><script>{script}</script>'
    copy.write_text(page[:end] + extra + page[end:])
    document, console = browse(copy, profile, width, 1000, *flags)
    assert console == []
    return json.loads(unquote(re.search(r'<pre id="answer">([^<]+)</pre>', document).group(1)))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, Report((model(), model(12, "vgg-16", measured=False))))
    return path


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The browser's own folder; with a new one for each page it would set itself up each time."""
    return tmp_path_factory.mktemp("profile")


@pytest.mark.slow
def test_the_console_would_tell(tmp_path, profile):
    (tmp_path / "bad.html").write_text("<script>console.error('seen')</script>")
    assert "seen" in browse(tmp_path / "bad.html", profile)[1][0]


def test_it_draws_under_its_own_policy_and_the_console_stays_empty(report, profile):
    """In a window as high as the page, all figures come into view.

    A headless browser opens a small window first, and may write the document before it has made it larger.
    """
    for _ in range(20):
        document, console = browse(report, profile, 1280, 20_000)
        assert console == []
        if document.count("js-plotly-plot") >= 8:
            break
    assert document.count("js-plotly-plot") >= 8
    assert document.count("barlayer") >= 4
    assert document.count('class="point"') > 300


@pytest.mark.slow
def test_text_comes_first_and_a_figure_when_it_comes_into_view(report, profile):
    """Plotly is text until a figure is near the window; figures further down keep their room."""
    document, console = browse(report, profile, 1280, 1000)
    drawn, all_figures = document.count("js-plotly-plot"), document.count("data-figure=")
    assert console == [] and 1 <= drawn < all_figures == 8
    begin = """(() => {
      const text = document.getElementById("plotly");
      return {type: text.type, begins: document.body.innerText.slice(0, 40), scripts: document.scripts.length,
              heights: [...document.querySelectorAll(".plot")].map((div) => [
                parseFloat(div.style.minHeight), div.getBoundingClientRect().height])};
    })()"""
    seen = ask(report, begin, profile)
    assert seen["type"] == "text/plain" and "resnet-50" in seen["begins"] and seen["scripts"] == 5
    assert all(height == pytest.approx(kept, abs=8) for kept, height in seen["heights"])


SORT = """(() => {
  const table = document.querySelector("table.schedulers");
  const button = (name) => [...table.querySelectorAll("th button")].find((b) => b.textContent === name);
  const first = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent.trim());
  const seen = [first()];
  for (const name of ["messages", "messages", "scheduler", "measured", "measured"]) {
    button(name).click();
    seen.push(first());
  }
  return {seen, sorted: button("measured").closest("th").getAttribute("aria-sort"),
          others: table.querySelectorAll("th[aria-sort]").length};
})()"""

LAYOUT = """({
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  plots: [...document.querySelectorAll(".plot")].map((div) => [
    div.querySelectorAll(".main-svg").length > 0, div.getBoundingClientRect().width,
    div.querySelector(".main-svg").getBoundingClientRect().width]),
  paper: getComputedStyle(document.querySelector(".plot .main-svg")).backgroundColor,
  tables: [...document.querySelectorAll("table")].map((table) => {
    const box = table.closest(".scroll");
    return table.scrollWidth <= box.clientWidth || getComputedStyle(box).overflowX === "auto";
  }),
  covered: [...document.querySelectorAll(".plot")].flatMap((div) => {
    const rect = (e) => e.getBoundingClientRect(), bar = div.querySelector(".modebar");
    const texts = [...div.querySelectorAll(".legendtext, .annotation-text, .xtitle, .xtick text")];
    return bar === null ? [] : texts.filter((text) => {
      const a = rect(bar), b = rect(text);
      return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    }).map((text) => text.textContent);
  }),
  fills: new Set([...document.querySelectorAll(".barlayer path")].map((p) => p.style.fill)).size,
})"""

ZOOM = """(() => {
  const div = document.querySelector(".plot");
  Plotly.relayout(div, {"xaxis.range": [10, 20]});
  return {range: div.layout.xaxis.range, axes: div._fullLayout._subplots.xaxis,
          fixed: div._fullLayout.yaxis.fixedrange, names: div.data.map((t) => t.name)};
})()"""


SEARCH = """(() => {
  const box = document.querySelector(".finder"), input = box.querySelector("input"), div = box.querySelector(".plot");
  const said = () => box.querySelector("output").textContent, seen = {};
  const type = (text) => { input.value = text; input.dispatchEvent(new Event("input")); };
  const enter = () => input.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  type("CONV7.weight");
  seen.found = said();
  seen.marked = div.data[div.data.length - 1].x.length;
  enter();
  seen.first = said();
  seen.range = div.layout.xaxis.range;
  seen.span = [div.data[div.data.length - 1].base[0], div.data[div.data.length - 1].x[0]];
  enter();
  seen.second = said();
  type("no such op");
  seen.nothing = said();
  type("");
  seen.traces = div.data.length;
  return seen;
})()"""


@pytest.fixture(scope="module")
def answers(report, profile):
    script = f"({{sort: {SORT}, layout: {LAYOUT}, zoom: {ZOOM}, search: {SEARCH}}})"
    return ask(report, script, profile)


@pytest.mark.slow
def test_a_click_sorts_the_table_by_number(answers):
    assert answers["sort"]["seen"] == [
        ["legato", "ddp", "fifo"],  # predicted
        ["ddp", "fifo", "legato"],  # messages: 3, 50, 77
        ["legato", "fifo", "ddp"],
        ["ddp", "fifo", "legato"],  # names
        ["legato", "ddp", "fifo"],  # measured; what was not measured stands last
        ["ddp", "legato", "fifo"],
    ]
    assert answers["sort"]["sorted"] == "descending" and answers["sort"]["others"] == 1


def check_layout(seen, width, paper):
    assert seen["wide"] <= 0 and all(seen["tables"]) and seen["covered"] == []
    assert len(seen["plots"]) == 8
    assert all(drawn and svg == pytest.approx(div, abs=2) and div <= width for drawn, div, svg in seen["plots"])
    assert seen["paper"] == paper and seen["fills"] >= 5


@pytest.mark.slow
def test_it_fits_a_wide_window_and_is_light(answers):
    check_layout(answers["layout"], 1280, "rgb(255, 255, 255)")


@pytest.mark.slow
def test_it_fits_a_narrow_window_and_is_dark_where_that_is_preferred(report, profile):
    dark = "--blink-settings=preferredColorScheme=0"
    check_layout(ask(report, LAYOUT, profile, 700, dark), 700, "rgb(26, 32, 41)")


def test_a_verdict_is_the_headline_and_a_click_takes_its_code(tmp_path, profile):
    code = "groups = [\n    ['a<b>'],\n]"
    page = tmp_path / "verdict.html"
    said = ModelReport("job", told=("Told.",), verdict="Predicted to save 12%: legato.", code=code)
    write_report(page, Report((said,)))
    found = ask(
        page,
        """(() => { document.querySelector(".code button").click();
        return [document.querySelector(".headline").innerText, document.querySelector(".headline strong").innerText,
                getSelection().toString()]; })()""",
        profile,
    )
    assert found == ["Predicted to save 12%: legato.", "Predicted to save 12%:", code]


def test_zooming_one_timeline_zooms_all(answers):
    zoom = answers["zoom"]
    assert zoom["range"] == [10, 20] and zoom["axes"] == ["x"] and zoom["fixed"] is True
    assert {"backward", "forward", "optimizer", "messages", "idle", "proven lower bound"} <= set(zoom["names"])


@pytest.mark.slow
def test_names_stay_text_in_the_browser(tmp_path, profile):
    write_report(tmp_path / "evil.html", evil_report())
    script = """(() => {
      const div = document.querySelector(".plot");
      Plotly.Fx.hover(div, [{curveNumber: 0, pointNumber: 0}]);
      return {title: document.title, heading: document.querySelector("h2").textContent,
              scripts: document.scripts.length, injected: document.querySelectorAll("td b, h2 b, li b").length,
              drawn: [...div.querySelectorAll("text")].map((t) => t.textContent)};
    })()"""
    answer = ask(tmp_path / "evil.html", script, profile)
    assert answer["title"] == f"legato: {EVIL}" and answer["heading"] == EVIL
    assert answer["scripts"] == 5 and answer["injected"] == 0
    assert any("waits for </script><script>alert(1)</script>" in text for text in answer["drawn"])


def test_a_search_marks_what_it_finds_and_enter_goes_there(answers):
    seen = answers["search"]
    assert seen["found"] == "3 found, 1 different name; press Enter for the next"
    assert seen["marked"] == 3 and seen["traces"] == len(answers["zoom"]["names"])
    start, length = seen["span"]
    assert seen["range"][0] < start and start + length < seen["range"][1]
    assert seen["first"] == "1 of 3: conv7.weight" and seen["second"] == "2 of 3: conv7.weight"
    assert seen["nothing"] == "no match"


SWEEP = """(() => {
  const box = document.querySelector("[data-filter]"), input = box.querySelector("input");
  const rows = () => [...box.querySelectorAll("tbody tr")].filter((row) => row.getClientRects().length);
  const button = (name) => [...box.querySelectorAll("th button")].find((b) => b.textContent === name);
  const seen = {all: rows().length};
  input.value = "RING 10 gbit";
  input.dispatchEvent(new Event("input"));
  seen.some = rows().map((row) => row.cells[2].textContent.trim());
  seen.said = box.querySelector("output").textContent;
  button("workers").click();
  button("workers").click();
  seen.sorted = rows().map((row) => Number(row.cells[0].dataset.sort));
  const div = document.querySelector(".plot.panels");
  Plotly.relayout(div, {"xaxis.range": [0.7, 0.8]});
  seen.zoomed = div.layout.xaxis.range;
  seen.lines = div.querySelectorAll(".scatterlayer .trace").length;
  seen.layout = LAYOUT;
  return seen;
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 600])
def test_a_sweep_is_drawn_searched_sorted_and_zoomed(tmp_path, width, profile):
    write_report(tmp_path / "sweep.html", Report(sweep=tuple(sweep_rows())))
    assert browse(tmp_path / "sweep.html", profile, width)[1] == []
    seen = ask(tmp_path / "sweep.html", SWEEP.replace("LAYOUT", LAYOUT), profile, width)
    assert seen["all"] == 8 and seen["some"] == ["ring", "ring"] and seen["said"] == "2 of 8"
    assert seen["sorted"] == [8, 4] and seen["zoomed"] == [0.7, 0.8] and seen["lines"] == 4
    assert seen["layout"]["wide"] <= 0 and seen["layout"]["covered"] == [] and all(seen["layout"]["tables"])


BREAKDOWNS = """(() => {
  const div = document.querySelector(".plot"), lengths = {};
  for (const trace of div.querySelectorAll(".barlayer .trace")) {
    const name = trace.__data__[0].trace.name;
    lengths[name] = [...trace.querySelectorAll(".point path")].map((path) => path.getBBox().width);
  }
  Plotly.Fx.hover(div, [{curveNumber: 2, pointNumber: 0}]);
  const hover = div.querySelector(".hoverlayer").textContent;
  return {lengths, hover, texts: [...div.querySelectorAll("text")].map((text) => text.textContent), layout: LAYOUT};
})()"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 600])
def test_steps_are_stacked_and_say_their_seconds(tmp_path, width, profile):
    write_report(tmp_path / "layouts.html", breakdown_report())
    assert browse(tmp_path / "layouts.html", profile, width)[1] == []
    seen = ask(tmp_path / "layouts.html", BREAKDOWNS.replace("LAYOUT", LAYOUT), profile, width)
    lengths = seen["lengths"]
    assert lengths["tensor"][0] / lengths["computing"][0] == pytest.approx(1 / 6, abs=0.01)
    assert lengths["context"] == pytest.approx([2 * lengths["tensor"][0]], rel=0.02)
    assert "tensor 1 s · 12.5% of 8 s" in seen["hover"] and "tensor 2, data 4" in seen["hover"]
    assert {"8 s  ", "10 s  "} <= set(seen["texts"]) and "computing 75.0%" in seen["texts"]
    assert seen["layout"]["wide"] <= 0 and seen["layout"]["covered"] == [] and all(seen["layout"]["tables"])
