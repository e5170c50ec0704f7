"""The results of `rehearsal.py` as an interactive picture: predicted over measured times, and speedups over DDP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

__all__ = ["draw"]

TARGET = 0.05


def draw(runs: Sequence[dict[str, Any]]) -> go.Figure:
    """Above, a point a row: how far off its prediction was. Below, legato over DDP by ratio, a line a place."""
    figure = make_subplots(
        rows=2,
        vertical_spacing=0.24,
        subplot_titles=("predicted over measured", "legato: times faster than ddp, by communication over computation"),
    )
    names = dict.fromkeys(row["scheduler"] for run in runs for row in run["rows"])
    for k, name in enumerate(names):
        found = [(_place(run), run["ratio"], row) for run in runs for row in run["rows"] if row["scheduler"] == name]
        figure.add_scatter(
            x=[f"{place}, ratio {ratio}" for place, ratio, _ in found],
            y=[1 + row["error"] for *_, row in found],
            mode="markers",
            name=name,
            marker_color=qualitative.Dark24[k],
            row=1,
            col=1,
        )
    figure.add_hrect(y0=1 - TARGET, y1=1 + TARGET, fillcolor="green", opacity=0.1, line_width=0, row=1, col=1)
    places: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for row in run["rows"]:
            if row["scheduler"] == "legato" and run["ratio"] != "own":
                places.setdefault(_place(run), []).append((float(run["ratio"]), row["speedup_over_ddp"]))
    for k, (place, points) in enumerate(places.items()):
        ratios, speedups = zip(*sorted(points), strict=True)
        colour = qualitative.Light24[k % len(qualitative.Light24)]
        figure.add_scatter(x=ratios, y=speedups, name=place, legend="legend2", line_color=colour, row=2, col=1)
    figure.add_hline(y=1, line_dash="dot", row=2, col=1)
    figure.update_xaxes(type="log", tickvals=[0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10], row=2, col=1)
    figure.update_layout(height=1000, legend2={"y": 0.38, "yanchor": "top"}, template="plotly_white")
    return figure


def _place(run: dict[str, Any]) -> str:
    return f"{run['model']}, {run['hosts']} x {run['bandwidth']}"
