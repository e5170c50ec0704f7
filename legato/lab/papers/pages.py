"""Draw the figures of a paper on one self-contained page or as files, with the numbers that the paper prints."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legato.core.errors import missing_extra
from legato.core.files import write_text
from legato.lab.papers.result import Figure, Paper
from legato.reports.pictures import FORMATS, write_figures

__all__ = ["write_page"]

_PUBLISHED = {"symbol": "diamond-open", "size": 12, "color": "black", "line": {"width": 2}}
_STYLE = "body{font:15px system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em}"


def write_page(path: str | os.PathLike[str], paper: Paper, figures: Sequence[Figure]) -> None:
    """Write the figures as one HTML file that needs no network, or each figure as an SVG or PDF file.

    Raises `FileError` if a file cannot be written, and `InputError` if plotly (the extra `legato[report]`) is missing.
    """
    try:
        import plotly.offline  # slow to import, and only figures need it
    except ModuleNotFoundError:
        raise missing_extra("plotly", "report", "a page of figures") from None

    if Path(path).suffix in FORMATS:
        write_figures(path, [_draw(figure).to_dict() for figure in figures])
        return
    drawn = "\n".join(str(_draw(figure).to_html(full_html=False, include_plotlyjs=False)) for figure in figures)
    title = html.escape(paper.title)
    write_text(
        path,
        f"<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style><script>{plotly.offline.get_plotlyjs()}</script></head>\n"
        f"<body><h1>{title}</h1><p>The figures, as legato computes them.</p>\n{drawn}\n</body></html>\n",
    )


def _draw(figure: Figure) -> Any:
    import plotly.graph_objects as go

    drawing = go.Figure()
    for name, (x, y) in figure.curves.items():
        if name.endswith("published"):
            drawing.add_scatter(x=list(x), y=list(y), name=name, mode="markers", marker=_PUBLISHED)
        elif any(isinstance(value, str) for value in x):
            drawing.add_bar(x=list(x), y=list(y), name=name)
        else:
            drawing.add_scatter(x=list(x), y=list(y), name=name, mode=figure.mode)
    drawing.update_layout(
        title=f"{figure.label}: {figure.title}",
        template="plotly_white",
        height=420,
        showlegend=True,
        xaxis={"title": {"text": figure.x}, "type": "log" if figure.log_x else None},
        yaxis={"title": {"text": figure.y}, "type": "log" if figure.log_y else None, "rangemode": "tozero"},
    )
    return drawing
