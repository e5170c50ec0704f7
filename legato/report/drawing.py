"""Timelines drawn one below the other: a plotly figure, as plain JSON values.

[Note: few traces, few bars] A plotly figure slows down with its traces and its
bars. All timelines share one figure, with a trace a kind of span; and spans
that would be narrower than a pixel are drawn together (`coalesce`), which
bounds the bars of a lane by its pixels, whatever the number of ops.

Colours are names with an `@`; the page's script puts in the theme's.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from legato.core.timeline import Span, Timeline
from legato.core.units import format_bytes, format_seconds
from legato.report.lanes import stack
from legato.report.summary import in_one_unit, own_worker, percent, time_unit
from legato.report.waits import blame, idle_gaps

__all__ = ["Bar", "axis", "coalesce", "draw_timelines", "label", "layout"]

#: The finest that is drawn, as a share of the time axis: a third of a pixel; a whole one where timelines are many.
_FINEST, _COARSEST, _MANY = 1 / 3000, 1 / 1000, 12
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_MOST_FOUND = 5000  # spans of a row that the page can search
_KINDS = {"backward": "backward", "forward": "forward", "optimizer": "optimizer", "message": "messages"}
_HEIGHT = 118  # pixels a timeline
_ROWS = {"compute": 1.62, "network": 2.62}  # centre of a lane below its timeline's upper edge; a timeline is 3.4 high
_PITCH = 3.4
_LANE = 0.88


class Bar(msgspec.Struct):
    """What is drawn of one or more spans of a row: seconds, and how many spans."""

    start_s: float
    end_s: float
    name: str
    kind: str
    nbytes: int = 0
    count: int = 1


def coalesce(spans: Iterable[Span], finest_s: float) -> list[Bar]:
    """Spans of one row, in order of start, as bars; neighbours shorter than `finest_s` become one.

    Nothing is moved: spans are joined only where less than `finest_s` lies
    between them. Spans of different kinds are joined until the bar is
    `finest_s` long, and the kind that takes most of it gives it its colour.
    """
    bars: list[Bar] = []
    busy: dict[str, float] = {}  # seconds by kind in the last bar, if it is still open
    for span in spans:
        seconds = span.end_s - span.start_s
        last = bars[-1] if busy and seconds < finest_s else None
        if (
            last
            and span.start_s - last.end_s < finest_s
            and (last.end_s - last.start_s < finest_s or busy.keys() == {span.kind})
        ):
            busy[span.kind] = busy.get(span.kind, 0.0) + seconds
            last.end_s, last.count = max(last.end_s, span.end_s), last.count + 1
            last.nbytes += span.nbytes or 0
            last.kind = max(busy, key=lambda kind: busy[kind])
        else:
            bars.append(Bar(span.start_s, span.end_s, span.name, span.kind, span.nbytes or 0))
            busy = {span.kind: seconds} if seconds < finest_s else {}
    return bars


def label(text: str, most: int = 90) -> str:
    """A name as plotly shows it literally, cut to `most` characters: plotly reads a subset of HTML."""
    return html.escape(
        text if len(text) <= most else f"{text[: most - most // 3]}…{text[1 - most // 3 :]}", quote=False
    )


def axis(**more: Any) -> dict[str, Any]:
    """An axis of this page."""
    return {
        "gridcolor": "@grid",
        "zeroline": False,
        "linecolor": "@grid",
        "tickcolor": "@grid",
        "tickfont": {"color": "@soft"},
        "title": {"font": {"color": "@soft", "size": 12}, "standoff": 8},
        **more,
    }


def layout(**more: Any) -> dict[str, Any]:
    """What all figures of this page share."""
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


def draw_timelines(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines of a workload on one time axis: {"data", "layout"} for plotly, and {"spans"} for the page's search.

    Each has a lane for compute, its idle gaps hatched, and one for the
    network; a dashed line is the lower bound, a solid one the iteration's end.
    """
    longest = max(max([t.iteration_s, t.lower_bound_s or 0.0, *(s.end_s for s in _own(t))]) for t in timelines)
    first = min(0.0, min((s.start_s for t in timelines for s in _own(t)), default=0.0))
    unit, scale = time_unit(longest)
    finest_s = (longest - first) * min(_COARSEST, max(_FINEST, len(timelines) * _COARSEST / _MANY))
    traces = {kind: _bar_trace(name, kind) for kind, name in _KINDS.items()}
    idle = _bar_trace("idle", "idle") | {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    idle["marker"] = {"color": "@idle", "line": {"width": 0}, "pattern": {"shape": "/", "fgcolor": "@hatch", "size": 6}}
    idle |= {"text": [], "textfont": {"color": "@soft", "size": 11}}
    for i, timeline in enumerate(timelines):
        _add_idle(idle, timeline, i, scale, finest_s)
        _add_spans(traces, timeline, i, scale, finest_s)
    data = [trace for trace in [idle, *traces.values()] if trace["x"]]
    lines = [_line_trace("end of iteration", "@ink", "solid"), _line_trace("proven lower bound", "@bound", "dash")]
    for i, timeline in enumerate(timelines):
        _add_line(lines[0], timeline.iteration_s, i, scale)
        if timeline.lower_bound_s:
            _add_line(lines[1], timeline.lower_bound_s, i, scale)
    data += [line for line in lines if line["x"]]
    shape = _layout(timelines, unit, first / scale, longest / scale)
    return {"data": data, "layout": shape, "spans": _index(timelines, scale)}


def _own(timeline: Timeline) -> list[Span]:
    worker = own_worker(timeline)
    return [s for s in timeline.spans if s.worker == worker]


def _bar_trace(name: str, kind: str) -> dict[str, Any]:
    empty: dict[str, Any] = {key: [] for key in ("x", "y", "base", "width", "customdata")}
    return empty | {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendrank": 10 if kind == "idle" else 1,
        "marker": {"color": [], "line": {"width": 0}},
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
    }


def _add_bar(trace: dict[str, Any], y: float, height: float, span: tuple[float, float], hover: list[str]) -> None:
    trace["base"].append(round(span[0], 6))
    trace["x"].append(round(span[1] - span[0], 6))
    trace["y"].append(round(y, 4))
    trace["width"].append(round(height, 4))
    trace["customdata"].append(hover)


def _add_spans(traces: dict[str, dict[str, Any]], timeline: Timeline, i: int, scale: float, finest_s: float) -> None:
    for lane in _ROWS:
        for y, height, spans in _places(timeline, i, lane):
            for k, bar in enumerate(coalesce(spans, finest_s)):
                times = (bar.start_s / scale, bar.end_s / scale)
                trace = traces[bar.kind]
                _add_bar(trace, y, height, times, _hover(bar))
                # Two shades in turn keep neighbours apart without a border, which would hide narrow bars.
                trace["marker"]["color"].append(f"@{bar.kind}{'-2' if k % 2 else ''}")


def _index(timelines: Sequence[Timeline], scale: float) -> dict[str, Any]:
    """Every span that can be searched for, however short: its name's number, start, end, centre and height."""
    numbers: dict[str, int] = {}
    found = []
    for i, timeline in enumerate(timelines):
        for lane in _ROWS:
            for y, height, row in _places(timeline, i, lane):
                for span in row[:_MOST_FOUND]:
                    number = numbers.setdefault(span.name, len(numbers))
                    times = round(span.start_s / scale, 4), round(span.end_s / scale, 4)
                    found.append([number, *times, round(y, 2), round(height, 2)])
    return {"names": list(numbers), "at": found}


def _places(timeline: Timeline, i: int, lane: str) -> Iterator[tuple[float, float, list[Span]]]:
    """(centre, height, spans) of the rows that a lane of timeline `i` needs for spans that lie over one another."""
    placed = stack([s for s in _own(timeline) if (s.kind == "message") == (lane == "network")])
    lines: dict[int, list[Span]] = {}
    for row, span in placed:
        lines.setdefault(row, []).append(span)
    rows = len(lines)
    for row, spans in lines.items():
        y = -i * _PITCH - _ROWS[lane] + _LANE * ((rows - 1) / 2 - row) / rows
        yield y, _LANE / rows * (0.94 if rows > 1 else 1), spans


def _hover(bar: Bar) -> list[str]:
    name = label(bar.name) if bar.count == 1 else f"{bar.count} short ones from {label(bar.name)} on"
    size = f" · {format_bytes(bar.nbytes)}" if bar.nbytes else ""
    return [name, f"at {format_seconds(bar.start_s)} · takes {format_seconds(bar.end_s - bar.start_s)}{size}"]


def _add_idle(trace: dict[str, Any], timeline: Timeline, i: int, scale: float, finest_s: float) -> None:
    for start, end, shares in blame(timeline, own_worker(timeline)):
        if end - start < finest_s:
            continue
        cause = max(shares, key=lambda name: shares[name])
        why = f"waits for {label(cause)}" if cause is not None else "no message in flight"
        hover = [f"idle for {format_seconds(end - start)}", f"at {format_seconds(start)} · {why}"]
        _add_bar(trace, -i * _PITCH - _ROWS["compute"], _LANE, (start / scale, end / scale), hover)
        trace["text"].append(format_seconds(end - start))


def _line_trace(name: str, colour: str, dash: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [],
        "y": [],
        "line": {"color": colour, "width": 1.6, "dash": dash},
        "hovertemplate": f"{name}: %{{x}}<extra></extra>",
    }


def _add_line(trace: dict[str, Any], at_s: float, i: int, scale: float) -> None:
    top = -i * _PITCH - _ROWS["compute"] + 0.62
    trace["x"] += [round(at_s / scale, 6)] * 2 + [None]
    trace["y"] += [top, -i * _PITCH - _ROWS["network"] - 0.6, None]


def _layout(timelines: Sequence[Timeline], unit: str, first: float, longest: float) -> dict[str, Any]:
    ticks = {-i * _PITCH - top: lane for i in range(len(timelines)) for lane, top in _ROWS.items()}
    ends = in_one_unit([t.iteration_s for t in timelines])
    notes = []
    for i, (timeline, end) in enumerate(zip(timelines, ends, strict=True)):
        y = -i * _PITCH - 0.62
        facts = [f"<b>{end}</b>"]
        if timeline.lower_bound_s:
            facts.append(f"{percent(timeline.iteration_s / timeline.lower_bound_s - 1)} above the bound")
        idle_s = sum(end - start for start, end in idle_gaps(timeline, own_worker(timeline)))
        if timeline.iteration_s:
            facts.append(f"computing {percent(1 - idle_s / timeline.iteration_s)}")
        title = f"<b>{label(timeline.name, 24)}</b>  <span style='font-size:12px'>{timeline.source}</span>"
        notes.append(_note(title, 0, "left", y, 15, "@ink"))
        notes.append(_note("  ·  ".join(facts), 1, "right", y, 12, "@soft"))
    margin = (longest - first) * 0.012 or 1
    return layout(
        barmode="overlay",
        bargap=0,
        height=_HEIGHT * len(timelines) + 100,
        margin={"l": 72, "r": 24, "t": 44, "b": 56},
        dragmode="zoom",
        annotations=notes,
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis=axis(
            title={"text": f"time since the backward pass began [{unit}]", "font": {"color": "@soft"}, "standoff": 10},
            range=[first - margin * (first < 0), longest + margin],
            showspikes=True,
            spikemode="across",
            spikesnap="cursor",
            spikethickness=1,
            spikedash="solid",
            spikecolor="@line",
        ),
        yaxis=axis(
            tickvals=list(ticks),
            ticktext=list(ticks.values()),
            range=[-len(timelines) * _PITCH - 0.1, 0],
            fixedrange=True,
            showgrid=False,
        ),
    )


def _note(text: str, x: float, anchor: str, y: float, size: int, colour: str) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "xref": "paper",
        "xanchor": anchor,
        "y": y,
        "yanchor": "middle",
        "showarrow": False,
        "font": {"size": size, "color": colour},
    }
