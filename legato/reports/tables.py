"""Tables as the page's template needs them, and units of time."""

from __future__ import annotations

from typing import Any

from legato.core.table import Table

__all__ = ["bar_percent", "drawn_table", "time_unit"]


def drawn_table(table: Table, ordered: str = "") -> dict[str, Any]:
    """Return a table for the template; `ordered` is the head of the column by which its rows are sorted.

    A reader can sort rows by a number, by the first of several numbers, or by text; empty cells come last.
    """
    values = [[column.of(row) for column in table.columns] for row in table.rows]
    longest = max((v for row in values for v, c in zip(row, table.columns, strict=True) if _is_bar(c, v)), default=0.0)
    heads = [
        {"text": " ".join(c.head.split()), "sorted": c.head == ordered, "help": c.help, "number": number}
        for c, number in zip(table.columns, table.numeric, strict=True)
    ]
    rows = [
        {
            "best": k in table.best or k in table.sums,
            "cells": [
                {
                    "text": text,
                    "sort": (value[0] if isinstance(value, tuple) else value) if text else "",
                    "href": column.href(row) if column.href else "",
                    "bar": bar_percent(value, longest) if _is_bar(column, value) else None,
                }
                for column, value, text in zip(table.columns, values[k], texts, strict=True)
            ],
        }
        for k, (row, texts) in enumerate(zip(table.rows, table.texts, strict=True))
    ]
    return {"title": table.title, "heads": heads, "rows": rows}


def _is_bar(column: Any, value: Any) -> bool:
    return column.bar and isinstance(value, (int, float))


def bar_percent(value: float, largest: float) -> float:
    """Return the length of a value's bar in percent of the bar of the `largest` value."""
    return round(100 * min(1.0, value / (largest or 1.0)), 2)


def time_unit(largest_s: float) -> tuple[str, float]:
    """Return (name, seconds) of the unit for times up to `largest_s`; from 1 ms to 10 s, it is milliseconds."""
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e-3) if largest_s >= 1e-3 else ("us", 1e-6)
