"""Lists of results that show themselves in notebooks and become tables of numbers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from legato.core.axes import SWEPT
from legato.core.pictures import draw_bars
from legato.core.text import count, html_table, percent, table
from legato.core.units import format_bytes, format_seconds

__all__ = ["Results"]


class _Row(Protocol):
    @property
    def columns(self) -> dict[str, Any]: ...
    @property
    def parts(self) -> dict[str, float]: ...


Row = TypeVar("Row", bound=_Row)
_MOST_ROWS = 40
_WRITE = {axis.field: axis.write for axis in SWEPT}
_SHARES = ("gap", "overlap", "utilization")


class Results(list[Row]):
    """A list of results, one per row; `pandas.DataFrame(results.rows)` makes a data frame."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the results as flat dictionaries, as `--json` prints them."""
        return [one.columns for one in self]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the headings and the cells of the columns in which results differ."""
        rows = self.rows
        every = list(dict.fromkeys(name for row in rows for name in row))
        heads = [name for name in every if len({str(row.get(name)) for row in rows}) > 1 or name in every[:1]]
        return heads, [[_text(name, row.get(name)) for name in heads] for row in rows]

    def __str__(self) -> str:
        """Return a line for each result."""
        heads, texts = self._table()
        return "\n".join(table(heads, texts, right=0)) if texts else "no results"

    def _repr_html_(self) -> str:
        """Return a picture for notebooks: each result's time, and a table of the columns in which results differ."""
        rows, (heads, texts) = self.rows, self._table()
        if not rows:
            return "<p>no results</p>"
        named = [name for name in heads if name in _WRITE or isinstance(rows[0][name], str)]
        names = [", ".join(_text(name, row[name]) for name in named) for row in rows]
        bars = [(name, one.parts, "") for name, one in zip(names, self, strict=True) if one.parts]
        shown = f"the first {_MOST_ROWS} of " if len(rows) > _MOST_ROWS else ""
        picture = draw_bars(bars, "predicted") if bars else ""
        return f"{picture}<p>{shown}{count(len(rows), 'result')}:</p>{html_table(heads, texts[:_MOST_ROWS], right=0)}"


def _text(name: str, value: Any) -> str:
    """Return a value as text, in the unit that the name of its column implies."""
    if value is None:
        return ""
    if name in _WRITE:
        return _WRITE[name](value)
    if name in _SHARES:
        return percent(value)
    for unit, write in (("_s", format_seconds), ("nbytes", format_bytes)):
        if name.endswith(unit) and isinstance(value, (int, float)) and not name.endswith("per_s"):
            return write(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
