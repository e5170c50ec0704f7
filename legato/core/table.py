"""Tables: rows, and columns that say how to write their values; consoles, pages and notebooks show the same tables."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

from legato.core.axes import NETWORK
from legato.core.text import one_line, percent
from legato.core.units import format_bytes, format_seconds

__all__ = ["Column", "Table", "factor", "written"]


def factor(ratio: float, decimals: int = 2) -> str:
    """Return a ratio in the form `1.24x`."""
    return f"{ratio:.{decimals}f}x"


#: How values are written whose keys do not end in a unit.
_WRITE: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("gap", "error"), partial(percent, signed=True)),
    **dict.fromkeys(("utilization", "straggler", "variation"), percent),
    "out_of_order": partial(percent, decimals=2),
    "overlap": "{:.2f}".format,
    **dict.fromkeys(("speedup", "speedup_over_ddp", "predicted_over_ddp", "speedup_over_random"), factor),
    "slowdown": partial(factor, decimals=3),
    "quartiles_s": lambda quartiles: " to ".join(map(format_seconds, quartiles)),
    "iterations_per_s": "{:.2f}".format,
    **{axis.field: axis.write for axis in NETWORK if axis.write is not str},
}


def written(key: str, value: Any) -> str:
    """Return a value as text, in the unit that its key implies."""
    if key in _WRITE and not isinstance(value, str):
        return _WRITE[key](value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key.endswith("_s") and not key.endswith("per_s"):
            return format_seconds(value)
        if key.endswith(("nbytes", "_bytes")):
            return format_bytes(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return str(value)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `value` is the key of the column's values in rows, or a function that returns a row's value. Without `write`, a
    value is written in the unit that its key implies. A cell is empty if the row lacks the key, and has the text
    `missing` if the value is None. Pages show `help` as a tooltip of the head, draw a bar for each value if `bar` is
    true, and make cells with an address `href(row)` links.
    """

    head: str
    value: str | Callable[[Any], Any]
    write: Callable[[Any], str] | None = None
    help: str = ""
    missing: str = ""
    bar: bool = False
    href: Callable[[Any], str] | None = None

    def of(self, row: Any) -> Any:
        """Return the value of a row, which has its values as items or as attributes."""
        if not isinstance(self.value, str):
            return self.value(row)
        return row.get(self.value, "") if isinstance(row, Mapping) else getattr(row, self.value)

    def text(self, row: Any) -> str:
        """Return the value of a row as text."""
        value = self.of(row)
        if value is None or value == "":
            return self.missing if value is None else ""
        return self.write(value) if self.write else written(self.value if isinstance(self.value, str) else "", value)


@dataclass(frozen=True)
class Table:
    """Rows and their columns.

    Rows with an index in `best` are marked, and so are rows in `sums`, which add up the rows above them. If a terminal
    is too narrow, the first `keys` columns, which name the rows, are repeated in each part of the table.
    """

    title: str
    rows: Sequence[Any]
    columns: Sequence[Column]
    best: Collection[int] = ()
    sums: Collection[int] = ()
    keys: int = 1

    @classmethod
    def of(
        cls, title: str, write: Mapping[str, Callable[[Any], str] | None], rows: Iterable[Sequence[Any]], **marks: Any
    ) -> Table:
        """Return a table whose rows have their values in the order of the heads in `write`; `marks` are fields."""
        columns = [Column(head, itemgetter(k), how) for k, (head, how) in enumerate(write.items())]
        return cls(title, list(rows), columns, **marks)

    def shown(self, wanted: Callable[[str, set[str]], object] = lambda _, texts: texts) -> Table:
        """Return the table without columns that `wanted(head, texts)` refuses: by default, the empty columns."""
        columns = [column for column in self.columns if wanted(column.head, {*map(column.text, self.rows)} - {""})]
        return replace(self, columns=columns, keys=max(1, sum(c in columns for c in self.columns[: self.keys])))

    @property
    def heads(self) -> list[str]:
        """Return the heads of the columns."""
        return [column.head for column in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        """Return the cells of all rows as text."""
        return [[column.text(row) for column in self.columns] for row in self.rows]

    @property
    def numeric(self) -> list[bool]:
        """Return whether each column holds anything else than names, so that its cells are aligned to the right."""
        values = ([column.of(row) for row in self.rows] for column in self.columns)
        return [not all(value is None or isinstance(value, str) for value in column) for column in values]

    def __str__(self) -> str:
        """Return the title, if there is one, and a line for each row."""
        rows = [[" ".join(head.split("\n")) for head in self.heads], *self.texts]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = [str.rjust if number else str.ljust for number in self.numeric]
        lines = ("  ".join(map(_padded, sides, row, widths)).rstrip() for row in rows)
        return "\n".join([*([self.title] if self.title else []), *lines])

    def _repr_html_(self) -> str:
        """Return the table for notebooks. It has no colours of its own, but the notebook's."""

        def line(cells: Sequence[str], tag: str) -> str:
            sides = ("right" if number else "left" for number in self.numeric)
            inside = (
                f'<{tag} style="padding: 2px 8px; text-align: {side}">{html.escape(one_line(cell))}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(inside)}</tr>"

        title = f"<p>{html.escape(self.title)}</p>" if self.title else ""
        rows = "".join(line(row, "td") for row in self.texts)
        return f"{title}<table><thead>{line(self.heads, 'th')}</thead><tbody>{rows}</tbody></table>"


def _padded(pad: Callable[[str, int], str], cell: str, width: int) -> str:
    return pad(cell, width)
