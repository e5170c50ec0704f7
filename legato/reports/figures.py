"""The layout, axes and labels that all figures of the page share.

A figure is a plain JSON value, {"data", "layout"}, that plotly.js draws.
Colours are names that begin with `@`; the page's script replaces them with the
colours of the light or the dark theme.
"""

from __future__ import annotations

import html
from typing import Any

__all__ = ["BUTTONS", "axis", "label", "layout"]

#: The height of plotly's buttons in pixels. The page shows them below the figure, so that they cover nothing.
BUTTONS = 28

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def label(text: str, most: int = 90) -> str:
    """Return a name cut to `most` characters and escaped, because plotly interprets some HTML."""
    shown = text if len(text) <= most else f"{text[: most - most // 3]}…{text[1 - most // 3 :]}"
    return html.escape(shown, quote=False)


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """Return an axis with its title."""
    return {
        "gridcolor": "@grid",
        "zeroline": False,
        "linecolor": "@grid",
        "tickcolor": "@grid",
        "tickfont": {"color": "@soft"},
        "title": {"text": title, "font": {"color": "@soft", "size": 12}, "standoff": 8},
        **more,
    }


def layout(**more: Any) -> dict[str, Any]:
    """Return the common layout of all figures, with `more` settings."""
    return {
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "font": {"family": _FONT, "size": 12, "color": "@ink"},
        "margin": {"l": 72, "r": 24, "t": 34, "b": 46},
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "@card",
            "bordercolor": "@line",
            "font": {"color": "@ink", "size": 12, "family": _FONT},
            "align": "left",
        },
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"color": "@soft"}},
        "uirevision": "keep",
        **more,
    }
