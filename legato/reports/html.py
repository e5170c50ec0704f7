"""The report: one HTML file that opens without a network connection.

[Note: names are not trusted] The names of ops, tensors and workloads come from
traces of other programs. In the page, jinja escapes these names. The figures' JSON contains no `<` (`_json`). Plotly
interprets some HTML in labels, so labels are escaped (`figures.label`). In addition, the page's content security policy
forbids loading from the network, and allows only two scripts, which it identifies by their hashes.

[Note: plotly starts late] plotly.js takes longer to start than the rest of the page. So the
page has plotly.js as text, which the page's own script runs when a figure comes into view.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from legato.core import __version__
from legato.core.errors import InputError, missing_extra
from legato.core.files import write_text
from legato.reports.model import Report
from legato.reports.pictures import FORMATS, write_figures
from legato.reports.schedulers import overview
from legato.reports.sections import section
from legato.reports.sweeps import sweep_sections

__all__ = ["render", "write_report"]

_ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">
<path d="M4 14C9 4.5 23 4.5 28 14" fill="none" stroke="#5d7186" stroke-width="3" stroke-linecap="round"/>
<rect x="3" y="18" width="9" height="10" fill="#e08a1e"/><rect x="12" y="18" width="9" height="10" fill="#1b8a77"/>
<rect x="20" y="18" width="9" height="10" fill="#2f6db5"/></svg>"""


def render(report: Report) -> str:
    """Return the HTML of the page: about 5 MB, most of which is plotly.js.

    Raises `InputError` if plotly or jinja2 (the extra `legato[report]`) is not installed.
    """
    # These imports are slow, and only a report needs them.
    try:
        import jinja2
        import plotly.offline
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "plotly", "report", "a report") from None

    sections, sweeps, figures = _parts(report)
    job = ", ".join([model.name for model in report.models] or [part["name"] for part in sweeps])
    plotly_js = plotly.offline.get_plotlyjs()
    script = _asset("page.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("page.html")).render(
        title=f"legato: {report.title or job}",
        job=job,
        subtitle=report.title,
        icon="data:image/svg+xml," + quote(_ICON.replace("\n", "")),
        policy=_policy(plotly_js, script),
        style=Markup(_asset("page.css")),
        sections=sections,
        sweeps=sweeps,
        overview=overview(report.models),
        footer=f"Made by legato {__version__} with plotly.py {plotly.__version__}.",
        figures=Markup(_json(figures)),
        plotly=Markup(plotly_js),
        script=Markup(script),
    )


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write the page to a file (to .svg and .pdf, write only its figures). An error leaves no partial file.

    Raises `FileError`, and `InputError` like `render` and `write_figures`.
    """
    if Path(path).suffix not in FORMATS:
        write_text(path, render(report))
        return
    *_, figures = _parts(report)
    if not figures:
        raise InputError(f"{path}: nothing to draw (expected values with a figure; .html files have the tables)")
    write_figures(path, sorted(figures.values(), key=lambda figure: "spans" not in figure))


def _parts(report: Report) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return the values that the template needs for models, those for sweeps, and the figures by id."""
    figures: dict[str, Any] = {}
    sections = [section(model, number, figures) for number, model in enumerate(report.models)]
    return sections, sweep_sections(report.sweep, figures), figures


def _asset(name: str) -> str:
    return resources.files("legato.reports").joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """Return JSON for a script element: pure ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(*scripts: str) -> str:
    """Return a content security policy that allows only these scripts, inline styles and inline images."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
