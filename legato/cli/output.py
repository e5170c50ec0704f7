"""The output of commands: tables for people, JSON for programs, progress and notes on standard error."""

from __future__ import annotations

import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from legato.core.errors import InputError
from legato.core.text import count, one_line, percent
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.reports.model import TextTable
    from legato.simulator.flow import Disturbance

__all__ = [
    "describe_size",
    "fidelity_of",
    "note",
    "note_unseen",
    "print_json",
    "print_parts",
    "print_rows",
    "print_table",
    "print_text",
    "progress",
    "say",
    "stages",
]


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "scheduler": ("scheduler", str),
    "fabric": ("fabric", str),
    "iteration_s": ("predicted", format_seconds),
    "undisturbed_s": ("undisturbed", format_seconds),
    "longest_s": ("longest", format_seconds),
    "measured_s": ("measured", format_seconds),
    "quartiles_s": ("quartiles", lambda v: " to ".join(map(format_seconds, v))),
    "predicted_s": ("predicted", format_seconds),
    "error": ("prediction\nerror", partial(percent, signed=True)),
    "speedup_over_ddp": ("measured\nover ddp", lambda v: f"{v:.2f}x"),
    "predicted_over_ddp": ("predicted\nover ddp", lambda v: f"{v:.2f}x"),
    "speedup_over_random": ("measured\nover random", lambda v: f"{v:.2f}x"),
    "iterations_per_s": ("measured\nper second", lambda v: f"{v:.2f}"),
    "gap": ("above bound", partial(percent, signed=True)),
    "overlap": ("overlap", lambda v: f"{v:.2f}"),
    "utilization": ("utilization", percent),
    "straggler": ("straggler", percent),
    "variation": ("variation", percent),
    "out_of_order": ("out of order", lambda v: percent(v, 2)),
    "agent_s": ("agent's pass", format_seconds),
    "num_messages": ("messages", str),
    "plan_s": ("planned in", format_seconds),
    "speedup": ("speedup over 1 server", lambda v: f"{v:.2f}x"),
    "simulate_s": ("simulated in", format_seconds),
}
#: Columns that are computed from an iteration time: the predicted `iteration_s` if rows have it, else a measured one.
_OF_ITERATION = ("gap", "overlap", "utilization")
#: A width that no table exceeds.
_WIDEST = 10_000
#: Seconds between two lines of progress.
_EVERY_S = 5.0


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.flush()


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], by: str = "iteration_s", best: str | None = None) -> None:
    """Print one row per scheduler or fabric, sorted by the seconds in the column `by`.

    The row of the scheduler `best` is marked, by default the fastest row. If any row has measurements, the column heads
    say which columns are predicted and which are measured.
    """
    table = Table(title=title, header_style="dim")
    shown = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    basis = "predicted" if "iteration_s" in shown else "measured"
    for key in shown:
        name = _COLUMNS[key][0]
        head = f"{basis}\n{name}" if key in _OF_ITERATION and "measured_s" in shown else name
        table.add_column(head, justify="left" if key in ("scheduler", "fabric") else "right")
    fastest = min((row[by] for row in rows), default=None)
    for row in sorted(rows, key=lambda r: r[by]):
        cells = ["" if row.get(key) is None else _COLUMNS[key][1](row[key]) for key in shown]
        marked = row[by] == fastest if best is None else row["scheduler"] == best
        table.add_row(*cells, style="bold green" if marked else None)
    print_table(table)


def print_parts(title: str, parts: Mapping[str, float], beside: tuple[str, Mapping[str, float]] | None) -> None:
    """Print the seconds that each part of a predicted step takes.

    `beside` has the column head and the parts of another step, which is printed next to it. Parts that take no time in
    either step are left out.
    """
    table = Table("of the step", title=title, header_style="dim")
    steps = [parts] if beside is None else [beside[1], parts]
    for head in [*([] if beside is None else [beside[0]]), "predicted", "share"]:
        table.add_column(head, justify="right")
    seconds = math.fsum(parts.values())
    for part in parts:
        if any(step[part] for step in steps):
            share = percent(parts[part] / seconds if seconds else 0)
            table.add_row(part, *(format_seconds(step[part]) for step in steps), share)
    every = (format_seconds(math.fsum(step.values())) for step in steps)
    table.add_row("step", *every, percent(1.0), style="bold green")
    print_table(table)


def print_table(table: Table, keys: int = 1) -> None:
    """Print a table on standard output, with its title in a line above it.

    A table that is wider than the terminal loses its frame. If it is still too wide, it is split into several tables,
    each with the first `keys` columns, which name the rows. No name or number is truncated or wrapped.
    """
    console = _console(stderr=False)
    if table.title is not None:
        console.print(table.title, style="bold", soft_wrap=True)
        table.title = None
    if _width(console, table) > console.width:
        table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 0), False
    for part in _parts(console, table, keys):
        width = console.width
        console.width = max(width, _width(console, part))
        console.print(part)
        console.width = width


def print_text(shown: TextTable, *names: str) -> None:
    """Print a table; columns with a head in `names` are aligned as text, all others as numbers."""
    table = Table(title=shown.title, header_style="dim")
    for head in shown.heads:
        table.add_column(head, justify="left" if head in names else "right")
    for row in shown.rows:
        table.add_row(*row)
    print_table(table)


def _parts(console: Console, table: Table, keys: int) -> list[Table]:
    """Split the table into parts that fit the terminal; each has the first `keys` columns and at least one more."""
    names, rest = table.columns[:keys], table.columns[keys:]
    parts = [_part(table, [*names, *rest[:1]])]
    for column in rest[1:]:
        wider = _part(table, [*parts[-1].columns, column])
        if _width(console, wider) <= console.width:
            parts[-1] = wider
        else:
            parts.append(_part(table, [*names, column]))
    return parts


def _part(table: Table, columns: list[Column]) -> Table:
    part = copy.copy(table)
    part.columns = columns
    return part


def _width(console: Console, table: Table) -> int:
    """Return the width that the table needs."""
    return console.measure(table, options=console.options.update(width=_WIDEST)).maximum


class _Console(Console):
    """A console that prints all text literally, because names may contain control characters or markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(one_line, text.split("\n"))), **options)


def _console(stderr: bool) -> Console:
    # A pipe has no width: nothing is wrapped or truncated.
    console = _Console(stderr=stderr)
    return console if console.is_terminal else _Console(stderr=stderr, width=_WIDEST)


def describe_size(workload: Workload) -> str:
    """Return a phrase with the numbers of ops, tensors and bytes of a workload."""
    ops, tensors = count(len(workload.ops), "op"), count(len(workload.tensors), "tensor")
    return f"{ops}, {tensors} of {format_bytes(workload.nbytes)}"


def say(text: str) -> None:
    """Print a line on standard output."""
    _console(stderr=False).print(text, soft_wrap=True)


def note(text: str) -> None:
    """Print a line on standard error."""
    _console(stderr=True).print(text, soft_wrap=True)


def fidelity_of(given: str | None, detailed: Literal["transfers", "flows"]) -> Any:
    """Return the requested fidelity, `formulas` or `detailed`; `detailed` is the default.

    Raises `InputError` on any other name, such as the detailed fidelity of another kind of input.
    """
    if given not in (None, "formulas", detailed):
        raise InputError(f"--fidelity: {given} (expected formulas or {detailed} here)")
    return given or detailed


def note_unseen(windows_s: Mapping[str, Sequence[float]], disturbances: Sequence[Disturbance]) -> None:
    """Print a note on each disturbance that lies outside the time window in which a case is measured."""
    for case, (begin_s, end_s) in windows_s.items():
        for one in disturbances:
            if one.end_s <= begin_s or one.start_s >= end_s:
                window = f"{format_seconds(begin_s)} to {format_seconds(end_s)}"
                note(f"{case}: {one.kind} {one.number} is disturbed only outside the window, {window}")


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, and yield `advance(done, total)`."""
    with stages([label]) as advance:
        advance(label, 0, 0)
        yield lambda done, total: advance(label, done, total)


@contextmanager
def stages(labels: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Show one progress bar per label and yield `advance(label, done, total)`; a bar appears with its first call.

    If standard error is not a terminal, a line of progress is printed every few seconds instead.
    """
    console = _console(stderr=True)
    if not console.is_terminal:
        with _lines(labels[0]) as advance:
            yield advance
        return
    label = TextColumn("{task.description:<28}", markup=False)
    with Progress(label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bars:
        tasks = {label: bars.add_task(one_line(label), total=None, visible=False) for label in labels}

        def show(label: str, done: int, total: int) -> None:
            bars.update(tasks[label], completed=done, total=total or None, visible=True)

        yield show


@contextmanager
def _lines(first: str) -> Iterator[Callable[[str, int, int], None]]:
    """Print a line of progress every few seconds, and less often if the work takes hours."""
    start, over, last = time.monotonic(), threading.Event(), [first]

    def advance(label: str, done: int, total: int) -> None:
        last[0] = f"{label}: {done} of {total}" if total else label

    def tell() -> None:
        passed_s = 0.0
        while not over.wait(max(_EVERY_S, passed_s / 10)):
            passed_s = time.monotonic() - start
            note(f"{last[0]} ({format_seconds(passed_s)})")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        over.set()
        thread.join()
