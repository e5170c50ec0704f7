"""A plot of time over memory, with a point for each way to train, and a line for the lower bound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from legato.core.units import format_bytes, format_seconds
from legato.reports.figures import axis, label, layout
from legato.reports.model import MemoryPoint

__all__ = ["draw_memory"]

_GIB, _S = 2**30, 1e-3


def draw_memory(points: Sequence[MemoryPoint]) -> dict[str, Any]:
    """Return the figure, with memory in GiB along x (logarithmic) and milliseconds along y."""
    ordered = sorted(points, key=lambda point: point.nbytes)
    bounds = [(point.nbytes / _GIB, point.bound_s) for point in ordered if point.bound_s is not None]
    # The bound never rises with memory.
    least = list(itertools.accumulate((seconds for _, seconds in bounds), min))
    traces: list[dict[str, Any]] = []
    if bounds:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "no groups are faster",
                "x": [x for x, _ in bounds],
                "y": [seconds / _S for seconds in least],
                "line": {"color": "@soft", "dash": "dot", "shape": "hv"},
                "hoverinfo": "skip",
            }
        )
    for chosen, name, colour, size in ((False, "ways to train", "@message", 9), (True, "the answer", "@backward", 13)):
        shown = [point for point in ordered if point.chosen is chosen]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [point.nbytes / _GIB for point in shown],
                "y": [point.seconds / _S for point in shown],
                "text": [
                    f"{label(point.name)}<br>{format_seconds(point.seconds)}, {format_bytes(point.nbytes)}"
                    for point in shown
                ],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": colour, "size": size},
            }
        )
    x = axis("memory on a GPU without activations (GiB)", type="log")
    return {"data": traces, "layout": layout(xaxis=x, yaxis=axis("step (ms)", rangemode="tozero"), height=380)}
