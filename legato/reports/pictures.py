"""The figures of a page as SVG or PDF files for papers, in the colours of the light theme.

plotly draws the figures as on the page, in a browser that kaleido starts. Chrome or Chromium must be installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from legato.core.errors import InputError, missing_extra
from legato.core.files import write_bytes

__all__ = ["FORMATS", "write_figures"]

FORMATS = (".svg", ".pdf")
_WIDTH, _HEIGHT = 1000, 450


def write_figures(path: str | os.PathLike[str], figures: Iterable[dict[str, Any]]) -> None:
    """Write the first figure to this file, and further figures to numbered files next to it (`name-2.svg` and so on).

    Raises `FileError` if a file cannot be written, and `InputError` if a figure cannot be drawn, for example because
    plotly or kaleido (the extra `legato[figures]`) or a browser is missing.
    """
    try:
        import kaleido  # noqa: F401 (plotly finds it)
        import plotly.io
    except ModuleNotFoundError as error:
        raise missing_extra((error.name or "plotly").partition(".")[0], "figures", "a figure") from None
    path = Path(path)
    for number, figure in enumerate(figures, 1):
        drawn = {key: _themed(figure[key]) for key in ("data", "layout")}
        height = figure["layout"].get("height") or _HEIGHT
        options = {"format": path.suffix[1:], "width": _WIDTH, "height": height, "validate": False}
        try:
            data = plotly.io.to_image(drawn, **options)
        except Exception as error:  # errors of kaleido, and of its browser
            why = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: cannot draw: {why} (expected Chrome or Chromium to be installed)") from None
        write_bytes(path if number == 1 else path.with_stem(f"{path.stem}-{number}"), data)


def _themed(value: Any) -> Any:
    """Return the figure with colours in place of colour names (`@name`), as the page's script replaces them."""
    if isinstance(value, dict):
        return {key: _themed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_themed(one) for one in value]
    return _colours().get(value, value) if isinstance(value, str) else value


@cache
def _colours() -> dict[str, str]:
    style = resources.files("legato.reports").joinpath("page.css").read_text(encoding="utf-8")
    light = style[: style.index("@media")]
    return {f"@{name}": colour for name, colour in re.findall(r"--([\w-]+): ([^;]+);", light)}
