"""Lists of results that show themselves in notebooks and become tables of numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from legato.core.axes import SWEPT
from legato.core.pictures import draw_bars
from legato.core.table import Column, Table
from legato.core.text import count

__all__ = ["Results"]


class _Row(Protocol):
    @property
    def columns(self) -> dict[str, Any]: ...
    @property
    def parts(self) -> dict[str, float]: ...


Row = TypeVar("Row", bound=_Row)
_MOST_ROWS = 40
_AXES = {axis.field for axis in SWEPT}


class Results(list[Row]):
    """A list of results, one per row; `pandas.DataFrame(results.rows)` makes a data frame."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the results as flat dictionaries, as `--json` prints them."""
        return [one.columns for one in self]

    def table(self, title: str = "") -> Table:
        """Return a table of the columns in which results differ."""
        rows = self.rows
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = Table(title, rows, [Column(name, name) for name in names])
        return table.shown(lambda head, _: head == names[0] or len({str(row.get(head)) for row in rows}) > 1)

    def __str__(self) -> str:
        """Return a line for each result."""
        return str(self.table()) if self else "no results"

    def _repr_html_(self) -> str:
        """Return a picture for notebooks: each result's time, and a table of the columns in which results differ."""
        if not self:
            return "<p>no results</p>"
        first = f"the first {_MOST_ROWS} of " if len(self) > _MOST_ROWS else ""
        table = self.table(f"{first}{count(len(self), 'result')}:")
        named = [c for c in table.columns if c.head in _AXES or isinstance(c.of(table.rows[0]), str)]
        names = [", ".join(column.text(row) for column in named) for row in table.rows]
        bars = [(name, one.parts, "") for name, one in zip(names, self, strict=True) if one.parts]
        shown = replace(table, rows=table.rows[:_MOST_ROWS])
        return f"{draw_bars(bars, 'predicted') if bars else ''}{shown._repr_html_()}"
