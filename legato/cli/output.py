"""What commands print: tables for people, JSON for programs, progress and notes on standard error."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from legato.core.cluster import LinearCost
from legato.core.units import format_seconds

__all__ = ["describe_cost", "format_gap", "note", "print_json", "print_rows", "print_table", "progress"]


def format_gap(gap: float) -> str:
    """The distance above a bound, such as `+2.6%`; never `-0.0%`."""
    return f"{gap if abs(gap) > 5e-4 else 0.0:+.1%}"


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "scheduler": ("scheduler", str),
    "fabric": ("fabric", str),
    "iteration_s": ("predicted", format_seconds),
    "undisturbed_s": ("undisturbed", format_seconds),
    "lost_s": ("lost", format_seconds),
    "propagated": ("propagated", lambda v: f"{v:.0%}"),
    "measured_s": ("measured", format_seconds),
    "predicted_s": ("predicted", format_seconds),
    "error": ("prediction\nerror", lambda v: f"{v:+.1%}"),
    "speedup_over_ddp": ("measured\nover ddp", lambda v: f"{v:.2f}x"),
    "predicted_over_ddp": ("predicted\nover ddp", lambda v: f"{v:.2f}x"),
    "speedup_over_random": ("measured\nover random", lambda v: f"{v:.2f}x"),
    "iterations_per_s": ("measured\nper second", lambda v: f"{v:.2f}"),
    "gap": ("above bound", format_gap),
    "rounded": ("rounded", lambda v: f"{v:.1%}"),
    "overlap": ("overlap", lambda v: f"{v:.2f}"),
    "utilization": ("utilization", lambda v: f"{v:.1%}"),
    "straggler": ("straggler", lambda v: f"{v:.1%}"),
    "variation": ("variation", lambda v: f"{v:.1%}"),
    "out_of_order": ("out of order", lambda v: f"{v:.2%}"),
    "agent_s": ("agent's pass", format_seconds),
    "num_messages": ("messages", str),
    "plan_s": ("planned in", format_seconds),
    "speedup": ("speedup", lambda v: f"{v:.2f}x"),
    "simulate_s": ("simulated in", format_seconds),
}
#: What is computed from an iteration time: from the predicted one where a row has it as `iteration_s`.
_OF_ITERATION = ("gap", "overlap", "utilization")
#: Wider than any table.
_WIDEST = 10_000


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.flush()


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], by: str = "iteration_s") -> None:
    """Print one row per scheduler, sorted by the seconds in `by`, with the fastest marked.

    If anything was measured, the heads say what is predicted and what is measured.
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
        table.add_row(*cells, style="bold green" if row[by] == fastest else None)
    print_table(table)


def print_table(table: Table, keys: int = 1) -> None:
    """Print a table on standard output, with its title in a line above it.

    A table that is wider than the terminal loses its frame. If that is not enough, it becomes several tables, each with
    the first `keys` columns, which name the rows. No name or number is truncated or wrapped.
    """
    console = _console(stderr=False)
    if table.title is not None:
        console.print(table.title, style="bold", markup=False, soft_wrap=True)
        table.title = None
    if _width(console, table) > console.width:
        table.box, table.padding, table.pad_edge = box.SIMPLE_HEAD, (0, 0), False
    for part in _parts(console, table, keys):
        width = console.width
        console.width = max(width, _width(console, part))
        console.print(part)
        console.width = width


def _parts(console: Console, table: Table, keys: int) -> list[Table]:
    """The table in parts that fit the terminal, each with the first columns and at least one of the others."""
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
    """The width of the table in a terminal that is wide enough."""
    return console.measure(table, options=console.options.update(width=_WIDEST)).maximum


def _console(stderr: bool) -> Console:
    # A pipe has no width: nothing is wrapped or truncated.
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_WIDEST)


def describe_cost(cost: LinearCost) -> str:
    """Alpha, beta and the floor, if any, in words."""
    line = f"{format_seconds(cost.alpha_s)} + {format_seconds(cost.beta_s_per_byte * 2**20)} per MiB"
    return f"{line}, at least {format_seconds(cost.floor_s)}" if cost.floor_s else line


def note(text: str) -> None:
    """Print a line on standard error."""
    _console(stderr=True).print(text, markup=False, soft_wrap=True)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error; yields `advance(done, total)`."""
    with _bars() as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _bars() -> Progress:
    console = _console(stderr=True)
    return Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def stages(labels: Iterable[str]) -> Iterator[Callable[[str, int, int], None]]:
    """Show one progress bar per label, each from its first call on; yields `advance(label, done, total)`."""
    with _bars() as bars:
        tasks = {label: bars.add_task(label, total=None, visible=False) for label in labels}

        def advance(label: str, done: int, total: int) -> None:
            bars.update(tasks[label], completed=done, total=total, visible=True)

        yield advance
