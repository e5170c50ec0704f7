"""The output of commands: tables for people, JSON for programs, progress and notes on standard error."""

from __future__ import annotations

import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import rich.table
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from legato.core.errors import InputError
from legato.core.table import Column, Table
from legato.core.text import count, one_line, percent
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Workload

if TYPE_CHECKING:
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
    "progress",
    "say",
    "stages",
]


#: The heads of columns of schedulers and fabrics, by the keys of their rows.
_HEADS = {
    "scheduler": "scheduler",
    "fabric": "fabric",
    "iteration_s": "predicted",
    "undisturbed_s": "undisturbed",
    "longest_s": "longest",
    "measured_s": "measured",
    "quartiles_s": "quartiles",
    "predicted_s": "predicted",
    "error": "prediction\nerror",
    "speedup_over_ddp": "measured\nover ddp",
    "predicted_over_ddp": "predicted\nover ddp",
    "speedup_over_random": "measured\nover random",
    "iterations_per_s": "measured\nper second",
    "gap": "above bound",
    "overlap": "overlap",
    "utilization": "utilization",
    "straggler": "straggler",
    "variation": "variation",
    "out_of_order": "out of order",
    "agent_s": "agent's pass",
    "num_messages": "messages",
    "plan_s": "planned in",
    "speedup": "speedup over 1 server",
    "simulate_s": "simulated in",
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
    rows = sorted(rows, key=lambda row: row[by])
    measured = any(row.get("measured_s") is not None for row in rows)
    basis = "predicted" if any(row.get("iteration_s") is not None for row in rows) else "measured"
    columns = [
        Column(f"{basis}\n{head}" if measured and key in _OF_ITERATION else head, key) for key, head in _HEADS.items()
    ]
    marked = [k for k, row in enumerate(rows) if (row[by] == rows[0][by] if best is None else row["scheduler"] == best)]
    print_table(Table(title, rows, columns, best=marked).shown())


def print_parts(title: str, parts: Mapping[str, float], beside: tuple[str, Mapping[str, float]] | None) -> None:
    """Print the seconds that each part of a predicted step takes.

    `beside` has the column head and the parts of another step, which is printed next to it. Parts that take no time in
    either step are left out.
    """
    steps = {"predicted": parts} if beside is None else {beside[0]: beside[1], "predicted": parts}
    shown = [part for part in parts if any(step[part] for step in steps.values())]
    seconds = {part: [step[part] for step in steps.values()] for part in shown}
    seconds["step"] = [math.fsum(step.values()) for step in steps.values()]
    whole = seconds["step"][-1] or 1.0
    write = {"of the step": None, **dict.fromkeys(steps, format_seconds), "share": percent}
    rows = ((part, *each, each[-1] / whole) for part, each in seconds.items())
    print_table(Table.of(title, write, rows, sums=[len(shown)]))


def print_table(table: Table) -> None:
    """Print a table on standard output, with its title in a line above it.

    A table that is wider than the terminal loses its frame. If it is still too wide, it is split into several tables,
    each with the columns that name the rows. No name or number is truncated or wrapped.
    """
    console = _console(stderr=False)
    console.print(table.title, style="bold", soft_wrap=True)
    shown = rich.table.Table(header_style="dim")
    for head, number in zip(table.heads, table.numeric, strict=True):
        shown.add_column(head, justify="right" if number else "left")
    for k, texts in enumerate(table.texts):
        style = "bold" if k in table.sums else "bold green" if k in table.best else None
        shown.add_row(*texts, style=style, end_section=k in table.sums)
    if _width(console, shown) > console.width:
        shown.box, shown.padding, shown.pad_edge = box.SIMPLE_HEAD, (0, 0), False
    for part in _parts(console, shown, table.keys):
        width = console.width
        console.width = max(width, _width(console, part))
        console.print(part)
        console.width = width


def _parts(console: Console, table: rich.table.Table, keys: int) -> list[rich.table.Table]:
    """Split the table into parts that fit the terminal; each has the first `keys` columns and at least one more."""
    names, rest = table.columns[:keys], table.columns[keys:]
    parts = [[*names, *rest[:1]]]
    for column in rest[1:]:
        if _width(console, _part(table, [*parts[-1], column])) <= console.width:
            parts[-1].append(column)
        else:
            parts.append([*names, column])
    return [_part(table, columns) for columns in parts]


def _part(table: rich.table.Table, columns: list[rich.table.Column]) -> rich.table.Table:
    part = copy.copy(table)
    part.columns = columns
    return part


def _width(console: Console, table: rich.table.Table) -> int:
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
