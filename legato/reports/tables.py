"""Heads and cells of the page's tables, and the format of their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from legato.core.text import percent
from legato.core.units import format_seconds

__all__ = ["bar_percent", "factor", "heads", "seconds_cell", "share_cell", "table_cell", "table_of", "time_unit"]


def heads(
    names: Sequence[str], ordered: int | None = None, help: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return the heads of columns with the tooltips of `help`; column number `ordered` determines the order of rows."""
    return [{"text": n, "sorted": i == ordered, "help": (help or {}).get(n, "")} for i, n in enumerate(names)]


def table_of(
    columns: Sequence[tuple[str, Sequence[dict[str, Any]]]],
    help: Mapping[str, str],
    ordered: str = "",
    best: int | None = None,
) -> dict[str, Any]:
    """Return the table for the template, without empty columns; `columns` has (name, cells); row `best` is marked."""
    shown = [(name, cells) for name, cells in columns if any(cell["sort"] != "" for cell in cells)]
    names = [name for name, _ in shown]
    rows = [
        {"cells": list(cells), "best": i == best}
        for i, cells in enumerate(zip(*(cells for _, cells in shown), strict=True))
    ]
    return {"heads": heads(names, names.index(ordered) if ordered in names else None, help), "rows": rows}


def table_cell(text: str, sort: float | str | None, href: str = "", bar: float | None = None) -> dict[str, Any]:
    """Return a cell, with a bar that fills `bar` percent of it; rows are sorted by `sort` (None comes last)."""
    return {"text": text, "sort": "" if sort is None else sort, "href": href, "bar": bar}


def bar_percent(value: float | None, largest: float) -> float | None:
    """Return the length of a value's bar in percent of the bar of the `largest` value; None without a value."""
    return None if value is None else round(100 * min(1.0, value / largest), 2)


def factor(ratio: float | None) -> str:
    """Return a ratio in the form `1.24x`, or "" if there is no ratio."""
    return "" if ratio is None else f"{ratio:.2f}x"


def share_cell(share: float | None, *, signed: bool = False) -> dict[str, Any]:
    """Return a cell with a percentage, or an empty cell without a value."""
    return table_cell("" if share is None else percent(share, signed=signed), share)


def seconds_cell(seconds: float | None, longest: float | None = None) -> dict[str, Any]:
    """Return a cell with a time, and with a bar if `longest` is given; return an empty cell without a value."""
    bar = bar_percent(seconds, longest) if longest else None
    return table_cell("" if seconds is None else format_seconds(seconds), seconds, bar=bar)


def time_unit(largest_s: float) -> tuple[str, float]:
    """Return (name, seconds) of the unit for times up to `largest_s`; from 1 ms to 10 s, it is milliseconds."""
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e-3) if largest_s >= 1e-3 else ("us", 1e-6)
