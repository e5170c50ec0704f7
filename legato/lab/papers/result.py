"""The result of a reproduction: figures, and cells that have a published value and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cell", "Figure", "Paper", "Part", "claim", "select"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A published number and ours, in the same unit.

    `table` says where the number is printed ("Table 4", "Fig. 9", "8.2.1"). For a claim in words, `published` is 1, and
    `ours` is the share of the checked cases in which the claim holds. `published` is None if the paper prints no value.
    """

    table: str
    row: str
    column: str
    published: float | None
    ours: float

    @property
    def ratio(self) -> float | None:
        """Return our value divided by the published value, or None if the published value is zero or missing."""
        return self.ours / self.published if self.published else None

    def as_row(self, paper: str) -> dict[str, Any]:
        """Return this cell as `legato reproduce --json` prints it."""
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
    """A plot; `curves` maps the name of each curve to its (x values, y values). The x values of bars are text.

    The name of a curve with values from the paper ends in `published`; such a curve is drawn as points.
    """

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
    """The result of reproducing one table, figure or section."""

    cells: tuple[Cell, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper with its parts. The label of a table or figure maps to a function that computes the part.

    `constants` has every number that the paper does not print, and says what it is
    fitted to or why it is assumed. `left_out` has every part that is
    not reproduced, and the reason.
    """

    name: str
    title: str
    parts: Mapping[str, Callable[[], Part]]
    constants: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def claim(table: str, row: str, column: str, holds: Sequence[bool]) -> Cell:
    """Return the cell of a claim in words; `holds` says of each checked case whether the claim holds in it."""
    return Cell(table, row, column, 1.0, sum(holds) / len(holds))


def select(paper: Paper, table: int | None = None, figure: int | None = None) -> list[str]:
    """Return the labels of the table and the figure with these numbers, or without numbers, of all parts."""
    if table is None and figure is None:
        return list(paper.parts)
    wanted = {f"Table {table}", f"Fig. {figure}"}
    return [label for label in paper.parts if label in wanted]
