"""`legato reproduce`"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.options import Json, check_file, check_installed, make_folder
from legato.cli.output import note, print_json, print_table, progress
from legato.core.errors import InputError
from legato.core.table import Column, Table

if TYPE_CHECKING:
    from legato.lab.papers import Cell, Figure, Paper


def reproduce(
    paper: Annotated[str, typer.Argument(metavar="PAPER|all", help="Name of a paper, or all.")],
    table: Annotated[int | None, typer.Option(help="Reproduce only this table.", min=1)] = None,
    figure: Annotated[int | None, typer.Option(help="Reproduce only this figure.", min=1)] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="A folder: write the figures there, one page per paper. A .svg or .pdf file: write one paper's figures"
            " there (the files of further figures are numbered).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Recompute the papers' tables and figures, and show every published value with ours and their ratio.

    Papers: network-operator-edition, mg-wfbp, caramel, tictac, pace.

    Example: [bold]legato reproduce network-operator-edition --table 4[/]
    """
    from legato.lab import papers

    chosen = list(papers.PAPERS.values()) if paper == "all" else [papers.paper(paper)]
    wanted = [(one, label) for one in chosen for label in papers.select(one, table, figure)]
    if not wanted:
        raise InputError(f"{paper}: {_asked(table, figure)} (expected one of {_known(chosen)})")
    as_file = output is not None and output.suffix in (".svg", ".pdf")
    if as_file:
        if len(chosen) > 1:
            raise InputError(f"--output {output}: of {len(chosen)} papers (expected a folder, or one paper)")
        check_file("output", output, ".html")
    elif output is not None:
        check_installed("plotly", "report", "a page of figures")
        make_folder(output)
    cells: dict[str, list[Cell]] = {one.name: [] for one, _ in wanted}
    figures: dict[str, list[Figure]] = {one.name: [] for one, _ in wanted}
    with progress("reproducing") as advance:
        for i, (one, label) in enumerate(wanted):
            part = one.parts[label]()
            cells[one.name] += part.cells
            figures[one.name] += part.figures
            advance(i + 1, len(wanted))
    for one in chosen:
        if output is not None and figures.get(one.name):
            _draw(one, figures[one.name], output if as_file else output / f"{one.name}.html")
    if json:
        print_json([cell.as_row(name) for name, found in cells.items() for cell in found])
    for one in (one for one in chosen if one.name in cells):
        if not json:
            _print_cells(one.title, cells[one.name])
        if table is None and figure is None:
            _explain(f"{one.name}: constants that it does not print", one.constants)
            _explain(f"{one.name}: not reproduced", one.left_out)


def _explain(title: str, reasons: Mapping[str, str]) -> None:
    note(f"\n{title}" + ("" if reasons else ": none"))
    for what, why in reasons.items():
        note(f"- {what}: {why}")


def _asked(table: int | None, figure: int | None) -> str:
    kinds = (("table", table), ("figure", figure))
    return "no " + " and no ".join(f"{kind} {number}" for kind, number in kinds if number is not None)


def _known(chosen: list[Paper]) -> str:
    return ", ".join(dict.fromkeys(label for one in chosen for label in one.parts))


def _print_cells(title: str, cells: list[Cell]) -> None:
    columns = [Column(name, name) for name in ("table", "row", "column", "published", "ours")]
    columns.append(Column("ratio", "ratio", "{:.3f}".format))
    print_table(Table(title, cells, columns, keys=3))


def _draw(one: Paper, figures: list[Figure], path: Path) -> None:
    from legato.lab.papers.pages import write_page

    write_page(path, one, figures)
    note(f"{len(figures)} figures -> {path}")
