"""What a reproduction yields: cells of published values beside ours, and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cell", "Figure", "Paper", "Part", "claim", "select"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One published number and ours, in the same unit; `table` is where it is printed ("Table 4", "Fig. 9", "8.2.1").

    A claim in words is published as 1, and ours is the share of the cases
    looked at in which it holds. `published` is None where a figure's values are
    not printed anywhere, and only its shape can be compared.
    """

    table: str
    row: str
    column: str
    published: float | None
    ours: float

    @property
    def ratio(self) -> float | None:
        """Ours over published; None where nothing, or a zero, is published."""
        return self.ours / self.published if self.published else None

    def as_row(self, paper: str) -> dict[str, Any]:
        """The JSON of `legato reproduce` for this cell."""
        return {
            "paper": paper,
            "table": self.table,
            "row": self.row,
            "column": self.column,
            "published": self.published,
            "ours": self.ours,
            "ratio": self.ratio,
        }


@dataclass(frozen=True, slots=True)
class Figure:
    """Curves to draw: name of a curve -> (x values, y values). A category axis has text for x values."""

    label: str
    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float | str], Sequence[float]]]
    log_x: bool = False
    log_y: bool = False
    mode: str = "lines+markers"


@dataclass(frozen=True, slots=True)
class Part:
    """What one table, figure or section comes to."""

    cells: tuple[Cell, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's parts, by the label of the table or figure, each computed when it is called.

    `constants` names every number that the paper does not print, and what it is
    fitted to or why it is assumed; `left_out` says what is not reproduced, and why.
    """

    name: str
    title: str
    parts: Mapping[str, Callable[[], Part]]
    constants: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def claim(table: str, row: str, column: str, holds: Sequence[bool]) -> Cell:
    """A statement of the paper, and the share of these cases in which it is true of ours."""
    return Cell(table, row, column, 1.0, sum(holds) / len(holds))


def select(paper: Paper, table: int | None = None, figure: int | None = None) -> list[str]:
    """The labels of the parts asked for: all of them, or those of one table and of one figure."""
    if table is None and figure is None:
        return list(paper.parts)
    wanted = {f"Table {table}", f"Fig. {figure}"}
    return [label for label in paper.parts if label in wanted]
