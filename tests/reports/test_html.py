"""The page as text: self-contained, complete, and safe whatever the names are."""

import html.parser
import json
import re
import sys

import pytest
from support.report_samples import CLUSTER, EVIL, cnn, evil_report, model, timelines

from legato.core.errors import FileError, InputError
from legato.core.workload import Op, Tensor, Workload
from legato.reports.html import render, write_report
from legato.reports.model import ModelReport, Report


class Page(html.parser.HTMLParser):
    """Elements with their attributes, the text outside scripts, and the scripts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.scripts, self._script = [], "", [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._script = tag in ("script", "style")
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        else:
            self.text += data

    def of(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    def figures(self):
        return json.loads(next(s for s in self.scripts if s.startswith("{")))


@pytest.fixture(scope="module")
def page():
    return Page(render(Report((model(), model(12, "vgg-16", measured=False, advice="")))))


@pytest.fixture(scope="module")
def evil():
    return Page(render(evil_report()))


def test_it_loads_nothing(page):
    assert len(page.of("script")) == 3 and not any("src" in attrs for attrs in page.of("script"))
    links = [attrs["href"] for tag in ("link", "a") for attrs in page.of(tag)]
    assert all(link.startswith(("#", "data:image/svg+xml,")) for link in links)
    assert not {"img", "iframe", "object", "embed", "form"} & {tag for tag, _ in page.elements}
    (policy,) = [a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-inline' 'sha" not in policy


def test_it_says_what_matters_first(page):
    text = re.sub(r"\s+", " ", page.text)
    assert re.search(
        r"An iteration takes \d+ ms under DDP \(measured\); legato is 1\.\d\dx as fast\. ?"
        r"The prediction for legato is \d+\.\d% above the proven lower bound\.",
        text,
    )
    assert text.lstrip().startswith("legato: resnet-50, vgg-16 resnet-50, vgg-16")  # the title, and the heading
    assert "Buy no faster network: computation is what limits you." in text
    for words in ("resnet-50", "vgg-16", "10 Gbit/s", "30 us", "Where the time goes", "halving-doubling", "50 forward"):
        assert words in text
    assert re.search(r"Made by legato \d+\.\d+\.\d+ with plotly", text)


def test_every_plot_has_its_figure(page):
    wanted = [attrs["data-figure"] for attrs in page.of("div") if "data-figure" in attrs]
    assert sorted(wanted) == sorted(page.figures()) and len(wanted) == 8


def test_names_are_text_and_never_markup(evil):
    assert len(evil.of("script")) == 3 and len(evil.of("b")) == 2 * 3  # the names of the three phases
    assert evil.text.count(EVIL) >= 8
    assert not any(key.startswith("on") for _, attrs in evil.elements for key in attrs)
    raw = next(s for s in evil.scripts if s.startswith("{"))
    assert not set("<>&") & set(raw) and "alert(1)" in raw
    shown = json.dumps([t.get("customdata") for f in evil.figures().values() for t in f["data"]])
    assert "&lt;/script&gt;" in shown and "<script" not in shown and "<b>" not in shown


def test_a_page_of_one_has_no_overview_and_one_of_many_links_to_each(page):
    assert [a["href"] for a in page.of("a")][:2] == ["#workload-0", "#workload-1"]
    assert {a.get("id") for a in page.of("article")} == {"workload-0", "workload-1"}
    single = Page(render(Report((model(5),))))
    assert not single.of("a") and "All workloads" not in single.text


@pytest.mark.parametrize(
    "shown",
    [
        ModelReport("timelines only", timelines=timelines(cnn(4))[:1]),
        ModelReport("workload only", cnn(4)),
        ModelReport("no timelines", cnn(4), CLUSTER, model(4).rows),
        ModelReport("rows only", rows=model(4).rows[:1]),
        ModelReport("no time", Workload("w", (Op("b", "backward", 0.0),), (Tensor("t", 1, 0),)), CLUSTER),
    ],
    ids=lambda shown: shown.name,
)
def test_what_is_missing_is_left_out(shown):
    page = Page(render(Report((shown,))))
    assert shown.name in page.text
    assert ("The workload" in page.text) == (shown.workload is not None)
    assert ("The cluster" in page.text) == (shown.cluster is not None)
    assert ("Schedulers" in page.text) == bool(shown.rows or shown.timelines)
    assert ("One iteration" in page.text) == bool(shown.timelines)


def test_the_size_is_that_of_plotly_and_little_more(tmp_path):
    import plotly.offline

    write_report(tmp_path / "r.html", Report((model(),)))
    assert (tmp_path / "r.html").stat().st_size < len(plotly.offline.get_plotlyjs().encode()) + 400_000


def test_it_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(FileError, match="cannot write"):
        write_report(tmp_path / "missing" / "r.html", Report((model(3),)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("library", ["plotly", "jinja2"])
def test_a_missing_library_names_what_to_install(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError) as found:
        render(Report((model(3),)))
    assert str(found.value) == f"a report needs {library}: pip install jinja2 plotly"
