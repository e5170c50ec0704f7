"""Predicted steps as stacked bars: what a GPU computes, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from legato.core.text import percent
from legato.core.units import format_seconds
from legato.reports.figures import axis, label, layout
from legato.reports.model import Breakdown, BreakdownChart
from legato.reports.tables import time_unit

__all__ = ["PARTS", "breakdown_charts", "breakdown_headline", "draw_breakdowns"]

#: The parts of a step, in the order in which they are drawn, with their colours and the patterns that tell them apart
#: without colour.
PARTS = {
    "computing": ("@forward", ""),
    "bubble": ("@idle", "/"),
    "tensor": ("@series-5", "\\"),
    "context": ("@series-7", "|"),
    "expert": ("@series-8", "x"),
    "pipeline": ("@series-6", "-"),
    "data": ("@message", "."),
    "optimizer": ("@optimizer", ""),
}
#: The colour of the lines of patterns.
_LIGHT = "rgba(255, 255, 255, .3)"
_MOST_BARS = 20
_ROW = 46  # pixels of a bar with its name above
_BAR, _TOP = 0.44, 0.76  # the height of a bar, and from its centre to the upper edge of its name, in rows


def breakdown_headline(charts: Sequence[BreakdownChart]) -> list[tuple[str, bool]]:
    """Return a sentence on the first step's time and exposed communication, as a list of (text, whether it is bold)."""
    step = charts[0].bars[0]
    exposed_s = sum(seconds for part, seconds in step.parts.items() if part not in ("computing", "bubble", "optimizer"))
    words = [("A step takes ", False), (format_seconds(step.seconds), True), (f" with {step.name}", False)]
    words += [(" (predicted): ", False), (percent(exposed_s / step.seconds), True)]
    words += [(" of it exposed communication", False)]
    if bubble_s := step.parts.get("bubble"):
        words += [(", ", False), (percent(bubble_s / step.seconds), True), (" bubble", False)]
    return [*words, (".", False)]


def breakdown_charts(charts: Sequence[BreakdownChart], number: int, figures: dict[str, Any]) -> list[dict[str, str]]:
    """Return the values that the template needs for each chart; store the chart's figure in `figures` under its id.

    All charts share one scale.
    """
    drawn = [chart.bars[:_MOST_BARS] for chart in charts]
    longest_s = max(bar.seconds for bars in drawn for bar in bars)
    found = []
    for k, (chart, bars) in enumerate(zip(charts, drawn, strict=True)):
        name, more = f"breakdowns-{number}-{k}", len(chart.bars) - len(bars)
        figures[name] = draw_breakdowns(bars, longest_s)
        hint = f"{chart.hint} The table has {more:,} more." if more else chart.hint
        found.append({"id": name, "title": chart.title, "hint": hint})
    return found


def draw_breakdowns(bars: Sequence[Breakdown], longest_s: float) -> dict[str, Any]:
    """Return the figure, with one bar for each step, from top to bottom; the time axis ends at `longest_s`."""
    unit, scale = time_unit(longest_s) if longest_s < 1 else ("s", 1.0)
    traces = []
    for part, (colour, pattern) in PARTS.items():
        if rows := [i for i, bar in enumerate(bars) if part in bar.parts]:
            traces.append(_trace(part, colour, pattern, [bars[i] for i in rows], rows, scale))
    notes = []
    for i, bar in enumerate(bars):
        notes.append(_note(f"<b>{label(bar.name)}</b>  {label(bar.facts)}", 0.0, -i + _BAR / 2, "bottom"))
        end = f"<b>{format_seconds(bar.seconds)}</b>  {label(bar.note)}"
        notes.append(_note(end, bar.seconds / scale, -i, "middle") | {"xshift": 5})
    shape = layout(
        barmode="stack",
        height=_ROW * len(bars) + 100,
        margin={"l": 12, "r": 110, "t": 34, "b": 46},  # at the right, times stand next to the bars
        dragmode=False,
        annotations=notes,
        legend={"orientation": "h", "traceorder": "normal", "x": 0, "y": 1, "yanchor": "bottom"},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis=axis(f"predicted step [{unit}]", range=[0, 1.002 * longest_s / scale], fixedrange=True),
        yaxis=axis(range=[_TOP - len(bars) - 0.06, _TOP], visible=False, fixedrange=True),
    )
    return {"data": traces, "layout": shape}


def _trace(
    part: str, colour: str, pattern: str, bars: Sequence[Breakdown], rows: Sequence[int], scale: float
) -> dict[str, Any]:
    """Return the plotly trace with the bars of one part, for all steps that have this part."""
    shares = [percent(bar.parts[part] / bar.seconds) for bar in bars]
    times = [format_seconds(bar.parts[part]) for bar in bars]
    dim = part == "bubble"
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": [bar.parts[part] / scale for bar in bars],
        "y": [-i for i in rows],
        "width": _BAR,
        "text": [f"{part} {share}" for share in shares],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": "@soft" if dim else "@paper", "size": 11},
        "marker": {
            "color": colour,
            "line": {"width": 1, "color": "@paper"},
            "pattern": {"shape": pattern, "bgcolor": colour, "fgcolor": "@hatch" if dim else _LIGHT, "size": 7},
        },
        "customdata": [
            [label(bar.name), f"{time} · {share} of {format_seconds(bar.seconds)}"]
            for bar, time, share in zip(bars, times, shares, strict=True)
        ],
        "hovertemplate": f"<b>{part}</b> %{{customdata[1]}}<br>%{{customdata[0]}}<extra></extra>",
    }


def _note(text: str, x: float, y: float, yanchor: str) -> dict[str, Any]:
    font = {"color": "@ink", "size": 12}
    return {"text": text, "x": x, "y": y, "xanchor": "left", "yanchor": yanchor, "showarrow": False, "font": font}
