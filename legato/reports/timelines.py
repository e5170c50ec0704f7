"""The figure of timelines, one below the other on one time axis.

[Note: few traces, few bars] A plotly figure becomes slow with many traces and many bars. All timelines therefore share
one figure, with one trace per kind of span. Spans narrower than a pixel are drawn together (`coalesce`), so the number
of bars depends on the width of the figure in pixels, and not on the number of ops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from legato.core.text import count, percent
from legato.core.timeline import Bar, Span, Timeline, coalesce, stack
from legato.core.units import format_bytes, format_seconds
from legato.reports.figures import BUTTONS, axis, label, layout
from legato.reports.idle import drawn_worker, idle_causes, idle_gaps
from legato.reports.model import are_jobs
from legato.reports.tables import time_unit

__all__ = ["draw_timelines"]

#: The shortest bar as a share of the time axis: a third of a pixel, or with many timelines a whole pixel.
_FINEST, _COARSEST, _MANY = 1 / 3000, 1 / 1000, 12
_MOST_FOUND = 5000  # the search covers at most this number of spans in a row
_KINDS = {"backward": "backward", "forward": "forward", "optimizer": "optimizer", "message": "messages"}
_HEIGHT = 118  # pixels per timeline
_ROWS = {"compute": 1.62, "network": 2.62}  # from the upper edge of a timeline to the centre of a lane
_PITCH = 3.4  # height of a timeline, in units of a lane
_LANE = 0.88


def _begins_with(timelines: Sequence[Timeline]) -> str:
    """Return the pass that begins an iteration: "backward", or "forward" if it gathers parameters."""
    spans = [span for timeline in timelines for span in timeline.spans if span.kind in ("forward", "backward")]
    return min(spans, key=lambda span: span.start_s).kind if spans else "backward"


def draw_timelines(timelines: Sequence[Timeline], single: Collection[int] = ()) -> dict[str, Any]:
    """Return the figure of a workload's timelines: {"data", "layout"} for plotly, and "spans" for the page's search.

    Each timeline has a lane for computation, where idle gaps are hatched, and a lane for the network. A solid line
    marks the end of the iteration. Predicted timelines also have a dashed line at the lower bound. A measured timeline
    shows a single iteration. If the timeline's number is in `single`, the iteration's time is left out, because the
    page has the median time.
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
        if timeline.lower_bound_s and timeline.source == "predicted":
            _add_line(lines[1], timeline.lower_bound_s, i, scale)
    data += [line for line in lines if line["x"]]
    shape = _layout(timelines, single, unit, first / scale, longest / scale)
    return {"data": data, "layout": shape, "spans": _index(timelines, scale)}


def _own(timeline: Timeline) -> list[Span]:
    worker = drawn_worker(timeline)
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
                # Alternating shades separate neighbouring bars; a border would hide narrow bars.
                trace["marker"]["color"].append(f"@{bar.kind}{'-2' if k % 2 else ''}")


def _index(timelines: Sequence[Timeline], scale: float) -> dict[str, Any]:
    """Return all spans for the search, even short ones: index of the name, start, end, centre and height."""
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
    """Yield (centre, height, spans) of each row in a lane of timeline `i`; overlapping spans are in different rows."""
    placed = stack([s for s in _own(timeline) if (s.kind == "message") == (lane == "network")])
    lines: dict[int, list[Span]] = {}
    for row, span in placed:
        lines.setdefault(row, []).append(span)
    rows = len(lines)
    for row, spans in lines.items():
        y = -i * _PITCH - _ROWS[lane] + _LANE * ((rows - 1) / 2 - row) / rows
        yield y, _LANE / rows * (0.94 if rows > 1 else 1), spans


def _hover(bar: Bar) -> list[str]:
    name = label(bar.name) if bar.count == 1 else f"{count(bar.count, 'short span')}, the first is {label(bar.name)}"
    size = f" · {format_bytes(bar.nbytes)}" if bar.nbytes else ""
    return [name, f"starts at {format_seconds(bar.start_s)} · takes {format_seconds(bar.end_s - bar.start_s)}{size}"]


def _add_idle(trace: dict[str, Any], timeline: Timeline, i: int, scale: float, finest_s: float) -> None:
    for start, end, shares in idle_causes(timeline, drawn_worker(timeline)):
        if end - start < finest_s:
            continue
        cause = max(shares, key=lambda name: shares[name])
        why = f"waits for {label(cause)}" if cause is not None else "no message in flight"
        hover = [f"idle for {format_seconds(end - start)}", f"starts at {format_seconds(start)} · {why}"]
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


def _facts(timeline: Timeline, end: str) -> list[str]:
    """Return the facts to write after a timeline's name; `end` is the iteration's time as text, or "" to omit it."""
    facts = [f"{timeline.source_in_words} <b>{end}</b>" if end else timeline.source_in_words]
    if timeline.lower_bound_s and timeline.source == "predicted":
        gap = percent(timeline.iteration_s / timeline.lower_bound_s - 1)
        facts.append("at the bound" if gap == percent(0.0) else f"{gap} above the bound")
    idle_s = sum(end - start for start, end in idle_gaps(timeline, drawn_worker(timeline)))
    if timeline.iteration_s:
        facts.append(f"computing {percent(1 - idle_s / timeline.iteration_s)}")
    return facts


def _layout(
    timelines: Sequence[Timeline], single: Collection[int], unit: str, first: float, longest: float
) -> dict[str, Any]:
    ticks = {-i * _PITCH - top: lane for i in range(len(timelines)) for lane, top in _ROWS.items()}
    notes = []
    for i, timeline in enumerate(timelines):
        facts = "  ·  ".join(_facts(timeline, "" if i in single else format_seconds(timeline.iteration_s)))
        # All text starts at the left edge, because texts from both edges would overlap in a narrow window.
        text = f"<b>{label(timeline.name, 24)}</b>  <span style='font-size:12px'>{facts}</span>"
        notes.append(_note(text, 0, "left", -i * _PITCH - 0.62, 15, "@ink"))
    margin = (longest - first) * 0.012 or 1
    since = "" if are_jobs(timelines) else f" since the start of the {_begins_with(timelines)} pass"
    return layout(
        barmode="overlay",
        bargap=0,
        height=_HEIGHT * len(timelines) + 100 + BUTTONS,
        margin={"l": 72, "r": 24, "t": 44, "b": 56 + BUTTONS},
        dragmode="zoom",
        annotations=notes,
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis=axis(
            f"time{since} [{unit}]",
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
