"""The options that say what a sweep simulates, how its cells run, and where its rows are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legato.cli.options import (
    FABRIC_HELP,
    PAGES,
    SCHEDULER_HELP,
    Fidelity,
    Interrupted,
    Iterations,
    check_file,
    keep_apart,
    setting,
)
from legato.cli.output import note, print_json, progress
from legato.core.errors import InputError
from legato.core.text import count

if TYPE_CHECKING:
    from legato.sweeps.table import Row

__all__ = ["MOST_SHOWN", "Cells", "Running", "Simulated", "Written"]

#: A printed table shows at most this number of rows.
MOST_SHOWN = 40


@dataclass(frozen=True)
class Cells:
    """The options that say what to simulate on several networks."""

    fabric: str = setting("ring", FABRIC_HELP)
    fidelity: Fidelity = None
    iterations: Iterations = None
    scheduler: str | None = setting(None, f"{SCHEDULER_HELP} plain sends one message per tensor.", show_default="plain")


@dataclass(frozen=True)
class Simulated(Cells):
    """The options that say what to simulate on one network."""

    fabric: str = setting("all", FABRIC_HELP)
    scheduler: str | None = setting(
        None,
        "Name of the scheduler, or FILE.py:FUNCTION for your own; plain sends one message per tensor.",
        show_default="plain",
    )
    plan: Path | None = setting(None, "Simulate the plan in this file instead of a scheduler's plan.", metavar="P.json")

    def check(self) -> None:
        if self.plan is not None and self.scheduler is not None:
            raise InputError("--plan and --scheduler: give one or the other")


@dataclass(frozen=True)
class Running:
    """The options that say how cells are run."""

    jobs: int | None = setting(None, "Number of cores to use.", show_default="all", min=1)
    dask: str | None = setting(
        None,
        "Run on the Dask cluster whose scheduler has this address.",
        metavar="HOST:PORT",
        show_default="this machine",
    )
    fresh: bool = setting(False, "Discard finished cells and start again.", "--fresh")

    @contextmanager
    def cells(self, kept: Path | None) -> Iterator[dict[str, Any]]:
        """Yield keyword arguments for functions of `legato.sweeps`; the journal is stored next to the output `kept`."""
        from legato.sweeps.journal import Journal, journal_of
        from legato.sweeps.parallel import check_dask

        check_dask(self.dask)
        journal = None
        try:
            with nullcontext() if kept is None else Journal(journal_of(kept)) as journal:
                if self.fresh and journal is not None:
                    journal.forget()
                if journal is not None and journal.done:
                    note(f"{journal.path} has {len(journal.done):,} finished cells")
                with progress("sweeping") as advance:
                    yield {"journal": journal, "jobs": self.jobs, "dask": self.dask, "progress": advance}
        except KeyboardInterrupt:
            if kept is None:
                raise Interrupted("interrupted; without --output, no finished cell is kept") from None
            number = "" if journal is None else f"{len(journal.done):,} "
            kept_cells = f"{number}finished cells are kept in {journal_of(kept)}"
            raise Interrupted(f"interrupted; {kept_cells}: run the same command again to continue") from None


@dataclass(frozen=True)
class Written:
    """The options that say where rows are written."""

    output: Path | None = setting(
        None,
        "Write the rows to this .csv or .parquet file, or plots to this .html, .svg or .pdf file.",
        "--output",
        "-o",
    )
    report: Path | None = setting(None, "Write plots to this file, in addition to the rows.", metavar="R.html")

    def check(self, reads: Sequence[Path], *suffixes: str) -> None:
        """Raise `InputError` if an output file is also an input, cannot be written, or has an unknown suffix."""
        keep_apart(reads, output=self.output, report=self.report)
        check_file("report", self.report, ".html")
        check_file("output", self.output, *suffixes)

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.output, self.report) if path is not None]

    def rows(self, rows: Sequence[Row], show: Callable[[], None], json: bool) -> None:
        """Write the rows, or a report that draws them, to the output files; print JSON, or call `show()`."""
        from legato.pages import report
        from legato.sweeps import write_rows

        for path in self.paths:
            if path.suffix in PAGES:
                report(rows, path=path)
            else:
                write_rows(path, rows)
        if json:
            print_json([row.columns for row in rows])
            return
        show()
        if self.first is not None:
            note(f"{count(len(rows), 'row')} -> {self.first}")

    @property
    def first(self) -> Path | None:
        """Return the first output file (the journal of cells is stored next to it), or None if nothing is written."""
        return next(iter(self.paths), None)
