"""Heads and cells of the page's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["factor", "heads", "table_cell"]


def heads(
    names: Sequence[str], ordered: int | None = None, help: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """The columns' heads; column `ordered` is the one by which the rows are sorted."""
    return [{"text": n, "sorted": i == ordered, "help": (help or {}).get(n, "")} for i, n in enumerate(names)]


def table_cell(text: str, sort: float | str | None, href: str = "", bar: float | None = None) -> dict[str, Any]:
    """A cell that is sorted by `sort` (None: last) and has a bar of so many per cent."""
    return {"text": text, "sort": "" if sort is None else sort, "href": href, "bar": bar}


def factor(ratio: float | None) -> str:
    """`1.24×`."""
    return "" if ratio is None else f"{ratio:.2f}×"
