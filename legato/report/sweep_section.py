"""A sweep's part of the page, as the plain values that the template shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from legato.core.units import format_bandwidth, format_seconds
from legato.report.cells import factor, heads, table_cell
from legato.report.model import SweepRow
from legato.report.summary import in_one_unit, percent
from legato.report.sweeps import AXES, draw_sweep, sweep_headline, varying

__all__ = ["sweep_sections"]

#: A table of more rows would make the page slow; the file of rows has them all.
_MOST_ROWS = 2000


def sweep_sections(rows: Sequence[SweepRow], figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What the template needs for each workload of a sweep; the figures are added to `figures` by id."""
    parts = []
    for number, name in enumerate(dict.fromkeys(row.workload for row in rows)):
        mine = [row for row in rows if row.workload == name]
        drawn = []
        several = len({(row.fabric, row.scheduler) for row in mine}) > 1
        for x in varying(mine) or [""]:
            for y, caption in (("iteration_s", "Iteration time"), ("speedup", _over(mine))):
                if y == "speedup" and not several:
                    continue
                figure = draw_sweep(mine, x, y)
                if any(trace["x"] for trace in figure["data"]):
                    figures[f"sweep-{number}-{x}-{y}"] = figure
                    over = f" by {AXES[x][0]}" if x else ""
                    drawn.append({"id": f"sweep-{number}-{x}-{y}", "caption": caption + over})
        parts.append(
            {
                "id": f"sweep-{number}",
                "name": name,
                "headline": sweep_headline(mine),
                "facts": _facts(mine),
                "figures": drawn,
                "table": _table(mine),
                "left_out": max(0, len(mine) - _MOST_ROWS),
            }
        )
    return parts


def _over(rows: Sequence[SweepRow]) -> str:
    first = rows[0]
    parts = [first.fabric] if len({row.fabric for row in rows}) > 1 else []
    parts += [first.scheduler] if len({row.scheduler for row in rows}) > 1 else []
    return f"Speedup over {', '.join(parts)}"


def _facts(rows: Sequence[SweepRow]) -> str:
    failed = sum(row.error is not None for row in rows)
    facts = [f"{len(rows):,} cells", f"{rows[0].fidelity} fidelity"]
    return " · ".join([*facts, *([f"{failed:,} failed"] if failed else [])])


def _table(rows: Sequence[SweepRow]) -> dict[str, Any]:
    times = in_one_unit([row.iteration_s for row in rows])
    longest = max((row.iteration_s or 0.0 for row in rows), default=0.0) or 1.0
    bars = [None if row.iteration_s is None else round(100 * row.iteration_s / longest, 2) for row in rows]
    columns: list[tuple[str, Callable[[SweepRow], Any], Callable[[SweepRow], str]]] = [
        ("fabric", lambda r: r.fabric, lambda r: r.fabric),
        ("scheduler", lambda r: r.scheduler, lambda r: r.scheduler),
        ("workers", lambda r: r.workers, lambda r: f"{r.workers:,}"),
        ("servers", lambda r: r.servers or None, lambda r: str(r.servers or "")),
        ("link", lambda r: r.bandwidth_bps, lambda r: format_bandwidth(r.bandwidth_bps)),
        ("latency", lambda r: r.latency_s, lambda r: format_seconds(r.latency_s)),
        ("racks", lambda r: r.racks, lambda r: str(r.racks)),
        ("oversubscription", lambda r: r.oversubscription, lambda r: f"{r.oversubscription:g}:1"),
        ("slow worker", lambda r: r.slow, lambda r: factor(r.slow)),
        ("slow link", lambda r: r.slow_link, lambda r: factor(r.slow_link)),
        ("jitter", lambda r: r.jitter, lambda r: f"{r.jitter:g}"),
        ("speedup", lambda r: r.speedup, lambda r: factor(r.speedup)),
        ("above bound", lambda r: r.gap, lambda r: percent(r.gap)),
        ("computing", lambda r: r.utilization, lambda r: percent(r.utilization)),
    ]
    shown = [column for column in columns if len({column[1](row) for row in rows} - {None}) > 1] or columns[:1]
    table_rows = []
    for row, time, bar in list(zip(rows, times, bars, strict=True))[:_MOST_ROWS]:
        cells = [table_cell(text(row), sort(row)) for _, sort, text in shown]
        cells.insert(1, table_cell(row.error or time, row.iteration_s, bar=bar))
        table_rows.append({"cells": cells, "best": False})
    names = [name for name, _, _ in shown]
    return {"heads": heads([names[0], "iteration", *names[1:]]), "rows": table_rows}
