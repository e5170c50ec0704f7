"""The section of a sweep on the page: headline, table, and plots with one line per fabric and scheduler.

As in the papers' figures, a plot has one panel for each cluster. All points in a panel have the same value on every
axis except the x axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from legato.core.axes import SERVERS, SWEPT, Axis
from legato.core.table import Column, Table, factor
from legato.core.text import count
from legato.core.units import format_bandwidth, format_seconds
from legato.reports.figures import BUTTONS, axis, label, layout
from legato.reports.model import SweepRow
from legato.reports.tables import drawn_table

__all__ = ["draw_sweep", "sweep_headline", "sweep_sections", "sweep_table", "varying"]

#: The axes that a plot can have along x if their values are numbers. The number of servers is part of a line's name.
_AXES = {axis.field: axis for axis in SWEPT if axis is not SERVERS}
_COLOURS, _MOST_PANELS, _ACROSS = 10, 9, 3
_SAME = 1.0005  # iteration times whose ratio is smaller count as equal
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star", "pentagon", "hexagon")
_PANEL, _GAP_X, _GAP_Y, _TOP = 250, 0.055, 72, 26

#: The most rows in a table, because more would make the page slow; the file of rows has all.
_MOST_ROWS = 2000

Key = tuple[Any, ...]


def sweep_sections(rows: Sequence[SweepRow], figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the template's values for each workload of a sweep, and add its figures to `figures` by id."""
    parts, by_workload = [], dict[str, list[SweepRow]]()
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    for number, (name, mine) in enumerate(by_workload.items()):
        drawn = []
        several = len({(row.fabric, row.scheduler) for row in mine}) > 1
        for x in [name for name in varying(mine) if not isinstance(_AXES[name].usual, str)] or [""]:
            for y, caption in (("iteration_s", "Iteration time"), ("speedup", f"Speedup {over(mine)}")):
                if y == "speedup" and not several:
                    continue
                figure = draw_sweep(mine, x, y)
                if any(trace["x"] for trace in figure["data"]):
                    figures[f"sweep-{number}-{x}-{y}"] = figure
                    by = f" by {_AXES[x].title}" if x else ""
                    drawn.append({"id": f"sweep-{number}-{x}-{y}", "caption": caption + by})
        parts.append(
            {
                "id": f"sweep-{number}",
                "name": name,
                "headline": sweep_headline(mine),
                "facts": _facts(mine),
                "figures": drawn,
                "table": drawn_table(sweep_table(mine[:_MOST_ROWS], errors=True)),
                "left_out": count(len(mine) - _MOST_ROWS, "more row") if len(mine) > _MOST_ROWS else "",
            }
        )
    return parts


def over(rows: Sequence[SweepRow]) -> str:
    """Return words such as "over ring, ddp", which name the fabric and scheduler that speedups are relative to."""
    first = rows[0]
    parts = [first.fabric] if len({row.fabric for row in rows}) > 1 else []
    parts += [first.scheduler] if len({row.scheduler for row in rows}) > 1 else []
    return f"over {', '.join(parts) or 'the first'}"


def _facts(rows: Sequence[SweepRow]) -> str:
    failed = sum(row.error is not None for row in rows)
    facts = [count(len(rows), "cell"), f"by {rows[0].fidelity}"]
    return " · ".join([*facts, *([f"{failed:,} failed"] if failed else [])])


def _text(axis: Axis, value: Any) -> str:
    return f"{value:,}" if axis.type is int and value >= 1000 else axis.write(value)


def sweep_table(rows: Sequence[SweepRow], title: str = "", *, errors: bool = False) -> Table:
    """Return a table of cells with the columns in which they differ, and with their times.

    With `errors`, a column says why cells have failed.
    """

    def of(axis: Axis) -> Column:
        return Column(axis.column, lambda row: row.axes[axis.field], partial(_text, axis))

    columns = [
        Column("workload", "workload"),
        *(of(axis) for axis in SWEPT if axis is not SERVERS),
        Column("fabric", "fabric"),
        of(SERVERS),
        Column("scheduler", "scheduler"),
        Column("iteration", "iteration_s", missing="failed", bar=True),
        Column(f"speedup {over(rows)}", "speedup", factor),
        Column("above bound", "gap"),
        Column("utilization", "utilization"),
        *([Column("error", "error")] if errors else []),
    ]
    keys = [column.head for column in columns].index("iteration")
    few = ("utilization", "error")
    return Table(title, rows, columns, keys=keys).shown(
        lambda head, texts: len(texts) > 1 or head == "iteration" or (head in few and texts)
    )


def varying(rows: Sequence[SweepRow]) -> list[str]:
    """Return the axes on which the rows differ; the number of servers is not such an axis."""
    return [name for name in _AXES if len({row.axes[name] for row in rows}) > 1]


def sweep_headline(rows: Sequence[SweepRow]) -> list[tuple[str, bool]]:
    """Return a sentence on what is fastest on how many clusters, in pieces: a text, and whether it is bold."""
    wins = _wins(rows)
    if not wins:
        return [("No cell has a result.", False)]
    speedups = {key: [row.speedup or 0.0 for row in won.values()] for key, won in wins.items()}
    names, clusters = _names(rows), len(set[Key]().union(*wins.values()))
    first = max(wins, key=lambda key: (len(wins[key]), sum(speedups[key])))
    won, gain = len(wins[first]), max(speedups[first])
    alike = {key for key in wins if wins[key].keys() >= wins[first].keys()} - {first}
    where = "everywhere" if won == clusters else f"on {won} of {clusters} clusters"
    if len(alike) + 1 == len(names) > 1 and won == clusters:
        return [("All are as fast as each other", True), (f" {where}.", False)]
    if alike:
        others = names[alike.pop()] if len(alike) == 1 else f"{len(alike)} others"
        words = [(f"{names[first]} and {others}", True), (f" are the fastest {where}, as fast as each other", False)]
    else:
        words = [
            (names[first], True),
            (f" is the fastest {where}" if len(names) > 1 else " was simulated alone", False),
        ]
    if gain > 1.005 and first != _series(rows[0]):
        words += [(", up to ", False), (f"{gain:.3g}x as fast as {names[_series(rows[0])]}", True)]
    return [*words, (".", False)]


def _wins(rows: Sequence[SweepRow]) -> dict[Key, dict[Key, SweepRow]]:
    """Return, for each line of the plots, its rows by cluster; clusters where another line is faster are left out."""
    every: dict[Key, dict[Key, tuple[float, SweepRow]]] = {}  # cluster -> line -> seconds and row
    for row in rows:
        if row.iteration_s is not None:
            every.setdefault(_at(row, list(_AXES)), {})[_series(row)] = row.iteration_s, row
    wins: dict[Key, dict[Key, SweepRow]] = {}
    for at, found in every.items():
        fastest_s = min(seconds for seconds, _ in found.values())
        for key, (seconds, row) in found.items():
            if seconds <= fastest_s * _SAME:
                wins.setdefault(key, {})[at] = row
    return wins


def draw_sweep(rows: Sequence[SweepRow], x: str, y: str) -> dict[str, Any]:
    """Return the figure of `y` ("iteration_s" or "speedup"): lines over the axis `x`, or bars if `x` is ""."""
    rows = [row for row in rows if getattr(row, y) is not None]
    others = [name for name in varying(rows) if name != x]
    panels = _spread(sorted({_at(row, others) for row in rows}), _MOST_PANELS)
    data: list[dict[str, Any]] = []
    for number, panel in enumerate(panels):
        inside = [row for row in rows if _at(row, others) == panel]
        data += _bars(inside, y) if not x else _lines(inside, rows, x, y, number)
    return {"data": data, "layout": _layout(rows, panels, others, x, y)}


def _at(row: SweepRow, axes: Sequence[str]) -> Key:
    return tuple(row.axes[name] for name in axes)


def _spread(values: list[Key], most: int) -> list[Key]:
    """Return at most `most` evenly spaced values, including the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _series(row: SweepRow) -> Key:
    return row.fabric, row.scheduler, row.axes[SERVERS.field]


def _names(rows: Sequence[SweepRow]) -> dict[Key, str]:
    """Return the names of the lines, which consist of the fields in which lines differ."""
    keys = list(dict.fromkeys(map(_series, rows)))
    differs = [len({key[i] for key in keys if key[i]}) > 1 for i in range(3)]
    if not any(differs):
        return {key: key[0] for key in keys}
    names = {}
    for key in keys:
        parts = [key[0]] * differs[0] + [key[1]] * differs[1] + [count(key[2], "server")] * (differs[2] and key[2] > 0)
        names[key] = ", ".join(parts)
    return names


def _look(key: Key, rows: Sequence[SweepRow]) -> dict[str, Any]:
    """Return the style of a line. If fabrics and schedulers vary, colours show fabrics, and dashes show schedulers."""
    every = [list(dict.fromkeys(v for row in rows if (v := _series(row)[i]))) for i in range(3)]
    at = [every[i].index(key[i]) if key[i] else 0 for i in range(3)]
    main, second = (at[0], at[1] + at[2]) if len(every[0]) > 1 else (at[1] if len(every[1]) > 1 else at[2], 0)
    colour = f"@series-{main % _COLOURS}"
    return {
        "line": {"color": colour, "width": 2, "dash": _DASHES[second % len(_DASHES)]},
        "marker": {"color": colour, "size": 7, "symbol": _SYMBOLS[(main + main // _COLOURS) % len(_SYMBOLS)]},
    }


def _scale(y: str) -> float:
    return 1e-3 if y == "iteration_s" else 1.0


def _hover(row: SweepRow, name: str) -> list[str]:
    machines = f"{count(row.axes['workers'], 'worker')} · {format_bandwidth(row.axes['bandwidth_bps'])}"
    speedup = f" · {row.speedup:.2f}x" if row.speedup is not None else ""
    return [label(name), f"{format_seconds(row.iteration_s or 0.0)}{speedup}", machines]


_HOVER = "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>"


def _lines(inside: Sequence[SweepRow], rows: Sequence[SweepRow], x: str, y: str, number: int) -> list[dict[str, Any]]:
    names, traces = _names(rows), []
    for key in dict.fromkeys(map(_series, rows)):
        points = sorted((row for row in inside if _series(row) == key), key=lambda row: row.axes[x])
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(names[key], 40),
                "legendgroup": names[key],
                "showlegend": number == 0,
                "xaxis": _axis_name("x", number),
                "yaxis": _axis_name("y", number),
                "x": [row.axes[x] for row in points],
                "y": [getattr(row, y) / _scale(y) for row in points],
                "customdata": [_hover(row, names[key]) for row in points],
                "hovertemplate": _HOVER,
                **_look(key, rows),
            }
        )
    return traces


def _bars(inside: Sequence[SweepRow], y: str) -> list[dict[str, Any]]:
    names = _names(inside)
    return [
        {
            "type": "bar",
            "x": [label(names[_series(row)], 40) for row in inside],
            "y": [getattr(row, y) / _scale(y) for row in inside],
            "customdata": [_hover(row, names[_series(row)]) for row in inside],
            "hovertemplate": _HOVER,
            "marker": {"color": "@series-0", "line": {"width": 0}},
        }
    ]


def _axis_name(letter: str, number: int) -> str:
    return letter + (str(number + 1) if number else "")


def _layout(rows: Sequence[SweepRow], panels: Sequence[Key], others: Sequence[str], x: str, y: str) -> dict[str, Any]:
    across = 2 if len(panels) == 4 else min(_ACROSS, len(panels)) or 1
    down = math.ceil(len(panels) / across) or 1
    named = len(_names(rows)) > 1 and bool(x)
    height = _PANEL * down + _GAP_Y * (down - 1)
    gap_y = _GAP_Y / height
    width, tall = (1 - _GAP_X * (across - 1)) / across, (1 - gap_y * (down - 1)) / down
    axes: dict[str, Any] = {}
    notes = []
    for number, panel in enumerate(panels):
        column, row = number % across, number // across
        left, top = column * (width + _GAP_X), 1 - row * (tall + gap_y)
        axes[_axis_name("xaxis", number)] = _x_axis(rows, x) | {
            "domain": [round(left, 5), round(left + width, 5)],
            "anchor": _axis_name("y", number),
        }
        axes[_axis_name("yaxis", number)] = _y_axis(rows, y, titled=column == 0) | {
            "domain": [round(top - tall, 5), round(top, 5)],
            "anchor": _axis_name("x", number),
            **({"matches": "y", "showticklabels": column == 0} if number else {}),
        }
        text = " · ".join(_AXES[name].say(_label(name, value)) for name, value in zip(others, panel, strict=True))
        notes.append(_note(label(text), left + width / 2, top))
    legend = {"orientation": "h", "x": 0, "y": 1 + _TOP / height, "yanchor": "bottom", "font": {"color": "@soft"}}
    margin = {"l": 74, "r": 18, "t": _TOP + 34 if named else _TOP, "b": 52 + BUTTONS}
    return layout(
        height=height + margin["t"] + margin["b"] + 18 * named * (len(_names(rows)) // 6),
        margin=margin,
        legend=legend,
        annotations=[note for note in notes if note["text"]],
        dragmode="zoom",
        **axes,
    )


def _label(name: str, value: Any) -> str:
    return _text(_AXES[name], value).removesuffix("/s")


def _x_axis(rows: Sequence[SweepRow], x: str) -> dict[str, Any]:
    if not x:
        return axis(showgrid=False)
    values = sorted({row.axes[x] for row in rows})
    ticks = values if len(values) <= 6 else [value for (value,) in _spread([(v,) for v in values], 6)]
    texts, unit = _without_unit([_label(x, value) for value in ticks])
    return axis(
        f"{_AXES[x].title} [{unit}]" if unit else _AXES[x].title,
        type="log" if values[0] > 0 else "linear",
        tickvals=ticks,
        ticktext=texts,
        tickangle=0,
        minor={"ticks": ""},
    )


def _without_unit(texts: list[str]) -> tuple[list[str], str]:
    """Return the texts without their common unit, and this unit, if any: long labels overlap in narrow panels."""
    units = {text.partition(" ")[2] for text in texts}
    return ([text.partition(" ")[0] for text in texts], units.pop()) if len(units) == 1 else (texts, "")


def _y_axis(rows: Sequence[SweepRow], y: str, *, titled: bool) -> dict[str, Any]:
    values = [getattr(row, y) for row in rows if getattr(row, y) > 0]
    wide = bool(values) and max(values) > 12 * min(values)
    write = format_seconds if y == "iteration_s" else lambda value: f"{value:.3g}x"
    title = "iteration time" if y == "iteration_s" else "speedup"
    ticks = _ticks(min(values), max(values)) if wide else []
    return axis(
        title if titled else "",
        type="log" if wide else "linear",
        rangemode="normal" if wide or y == "speedup" else "tozero",
        **({"tickvals": [v / _scale(y) for v in ticks], "ticktext": list(map(write, ticks))} if wide else {}),
        **({} if wide else {"ticksuffix": " ms" if y == "iteration_s" else "x"}),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return ticks 1, 2, 5, 10 and so on from below `low` to above `high`, or only powers of ten for a wide range."""
    digits = (1, 2, 5) if high < 300 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [float(f"{digit}e{power}") for power in powers for digit in digits]


def _note(text: str, x: float, y: float) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "xref": "paper",
        "xanchor": "center",
        "y": y,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12.5, "color": "@soft"},
    }
