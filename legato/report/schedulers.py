"""The schedulers of a report side by side: the table of one workload, its headline, and the table of all workloads.

[Note: one kind of time] Predicted times are compared with predicted ones and
measured times with measured ones, and every head and sentence says which they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.report.idle import drawn_worker
from legato.report.model import ModelReport
from legato.report.tables import bar_percent, factor, in_one_unit, percent, table_cell, table_of

__all__ = ["Entry", "Kind", "best_of", "bound_sentence", "entries", "headline", "overview", "scheduler_table"]

#: Iteration times that differ by less than this share count as equal.
_SAME = 0.005
_HELP = {
    "predicted": "The iteration time that the simulator predicts.",
    "measured": "The iteration time of a real run: the median, if several iterations were timed.",
    "prediction error": "How much the prediction is above (+) or below (−) the measurement.",
    "predicted over DDP": "DDP's predicted iteration time over the predicted one of this plan.",
    "measured over DDP": "DDP's measured iteration time over the measured one of this plan.",
    "predicted above bound": "How far the predicted iteration time is above a bound that no plan with such messages "
    "can beat.",
    "rounded": "The share of the gradients' bytes that travel rounded, in two bytes for four.",
    "overlap": "The overlap coefficient (N + C − T) / min(N, C), with N seconds of communication and C seconds of "
    "computation in an iteration of T seconds: 100% when the shorter of the two is hidden behind the other one, below "
    "0% when the device also waits for its host.",
    "utilization": "The share of the iteration in which the worker computes.",
    "planning time": "The time that planning took.",
}


Kind = Literal["predicted", "measured"]


class Entry(msgspec.Struct, frozen=True):
    """One line of the table: seconds, and shares of 1; None is unknown.

    `gap` is that of the predicted time. `overlap` and `utilization` are those of the predicted iteration or, without
    one, of the measured one. `exposed` holds the share of exposed communication, by kind of iteration.
    `rounded` is that of the bytes in a wire format, where any plan of the table has some.
    """

    scheduler: str
    predicted_s: float | None = None
    measured_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    plan_s: float | None = None
    exposed: dict[Kind, float] = {}
    rounded: float | None = None

    def seconds(self, kind: Kind) -> float | None:
        """The iteration time of this kind."""
        return self.measured_s if kind == "measured" else self.predicted_s


def entries(model: ModelReport) -> list[Entry]:
    """The lines of a workload's table: from its rows or, without rows, from its timelines."""
    measured = {t.name: t.iteration_s for t in model.timelines if t.source == "measured"}
    if not model.rows:
        names = dict.fromkeys(t.name for t in model.timelines)
        return [_of_timelines([t for t in model.timelines if t.name == name]) for name in names]
    rounds = any(row.rounded for row in model.rows)
    return [
        Entry(
            row.scheduler,
            row.iteration_s,
            measured.get(row.scheduler) if row.measured_s is None else row.measured_s,
            row.lower_bound_s or None,
            row.gap if row.lower_bound_s else None,
            row.overlap,
            row.utilization,
            row.num_messages,
            row.plan_s,
            _exposed([t for t in model.timelines if t.name == row.scheduler]),
            row.rounded if rounds else None,
        )
        for row in model.rows
    ]


def _exposed(same: Sequence[Timeline]) -> dict[Kind, float]:
    """The share of exposed communication in the first predicted and in the first measured timeline."""
    return {t.source: t.exposed_comm_s / t.iteration_s for t in reversed(same) if t.iteration_s > 0}


def _of_timelines(same: list[Timeline]) -> Entry:
    """One line from the timelines of one name; the metrics are those of a predicted one, if there is one."""
    by_source = {t.source: t for t in reversed(same)}
    predicted, measured = by_source.get("predicted"), by_source.get("measured")
    shown = predicted or same[0]
    bound = next((t.lower_bound_s for t in same if t.lower_bound_s), None)
    return Entry(
        shown.name,
        predicted.iteration_s if predicted else None,
        measured.iteration_s if measured else None,
        bound,
        predicted.iteration_s / bound - 1 if bound and predicted else None,
        shown.overlap,
        shown.utilization,
        sum(s.kind == "message" and s.worker == drawn_worker(shown) for s in shown.spans),
        exposed=_exposed(same),
    )


def _comparable(table: Sequence[Entry]) -> tuple[Kind, list[Entry]]:
    """What is compared: the measured entries or, if nothing was measured, the predicted ones."""
    measured = [e for e in table if e.measured_s is not None]
    return ("measured", measured) if measured else ("predicted", [e for e in table if e.predicted_s is not None])


def best_of(table: Sequence[Entry]) -> Entry:
    """The entry that is taken: of those within half a per cent of the fastest, DDP, else the fewest messages.

    Of those that round different shares of the bytes, only those count that round least, to within half a per cent.
    """
    kind, seen = _comparable(table)
    fastest = min(e.seconds(kind) or 0.0 for e in seen)
    as_fast = [e for e in seen if (e.seconds(kind) or 0.0) <= fastest * (1 + _SAME)]
    least = min(e.rounded or 0.0 for e in as_fast)
    as_fast = [e for e in as_fast if (e.rounded or 0.0) <= least + _SAME]
    return min(as_fast, key=lambda e: (e.scheduler != "ddp", e.num_messages or 0, e.seconds(kind) or 0.0))


def _ddp(table: Sequence[Entry]) -> Entry | None:
    return next((e for e in table if e.scheduler == "ddp"), None)


def headline(table: Sequence[Entry], job: str = "") -> list[tuple[str, bool]]:
    """What an iteration takes, what of it is exposed, and what the best plan gains, as pieces of (text, bold?).

    Empty without a table. If anything was measured, only measured times are compared. A timeline may have the name of
    the job instead of that of a scheduler.
    """
    if not table:
        return []
    kind, seen = _comparable(table)
    best, ddp = best_of(table), _ddp(seen)
    now = ddp or best
    under = "" if now.scheduler == job else f" under {_shown_name(now)}"
    words = [("An iteration takes ", False), (in_one_unit([now.seconds(kind)])[0], True), (f"{under} ({kind})", False)]
    if kind in now.exposed:
        words += [(", ", False), (percent(now.exposed[kind]), True), (" of it exposed communication", False)]
    if best is not now:
        words += [("; ", False), (best.scheduler, True), (" is ", False), (f"{_times(now, best, kind)} as fast", True)]
    elif ddp is not None and len(seen) > 1:
        words += [("; ", False), (f"none of {len(seen)} schedulers is more than {_SAME:.1%} faster", True)]
    return [*words, (".", False)]


def _shown_name(entry: Entry) -> str:
    return "DDP" if entry.scheduler == "ddp" else entry.scheduler


def bound_sentence(table: Sequence[Entry]) -> str:
    """How close the best plan's prediction is to the bound; "" if that is unknown."""
    best = best_of(table) if table else None
    if best is None or best.gap is None:
        return ""
    if best.gap < 0.0005:
        return (
            f"No plan is predicted to be faster than {_shown_name(best)}: its prediction is at the proven lower bound."
        )
    return f"The prediction for {_shown_name(best)} is {percent(best.gap)} above the proven lower bound."


def _times(slow: Entry, fast: Entry, kind: Kind) -> str:
    seconds = slow.seconds(kind), fast.seconds(kind)
    return f"{seconds[0] / seconds[1]:.2f}×" if seconds[0] and seconds[1] else "infinitely"


def scheduler_table(table: Sequence[Entry]) -> dict[str, Any]:
    """The table of one workload for the template; columns in which nothing is known are left out.

    It is sorted by measured times if all schedulers were measured, else by predicted ones.
    """
    best = best_of(table)
    order: Kind = "measured" if all(e.measured_s is not None for e in table) else "predicted"
    table = sorted(table, key=lambda e: (e.seconds(order) is None, e.seconds(order) or e.measured_s, e is not best))
    any_predicted = any(e.predicted_s is not None for e in table)
    basis: Kind = "predicted" if any_predicted else "measured"
    columns = [
        ("scheduler", [table_cell(e.scheduler, e.scheduler) for e in table]),
        *_time_columns(table),
        ("predicted above bound", [table_cell(percent(e.gap), e.gap) for e in table]),
        ("rounded", [table_cell(percent(e.rounded), e.rounded) for e in table]),
        (f"{basis} overlap", [_of_basis(e, basis, _overlap(e.overlap), e.overlap) for e in table]),
        (f"{basis} utilization", [_of_basis(e, basis, percent(e.utilization), e.utilization) for e in table]),
        (
            "messages",
            [table_cell("" if e.num_messages is None else f"{e.num_messages:,}", e.num_messages) for e in table],
        ),
        ("planning time", [table_cell("" if e.plan_s is None else format_seconds(e.plan_s), e.plan_s) for e in table]),
    ]
    help = _HELP | {f"{basis} {name}": _HELP[name] for name in ("overlap", "utilization")}
    return table_of(columns, help, order, table.index(best))


def _time_columns(table: Sequence[Entry]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The iteration times of both kinds in one unit, each with its speedup over DDP, and the error."""
    kinds: tuple[Kind, ...] = ("measured", "predicted")
    every = [e.seconds(kind) for kind in kinds for e in table]
    texts = in_one_unit(every)
    longest = max((s for s in every if s is not None), default=0.0) or 1.0
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for k, kind in enumerate(kinds):
        times = texts[k * len(table) :]
        speedups = [_speedup(table, e, kind) for e in table]
        found.append(
            (kind, [_time_cell(e.seconds(kind), time, longest) for e, time in zip(table, times, strict=False)])
        )
        found.append((f"{kind} over DDP", [table_cell(factor(speedup), speedup) for speedup in speedups]))
    return [*found, ("prediction error", [_error_cell(e) for e in table])]


def _time_cell(seconds: float | None, text: str, longest: float) -> dict[str, Any]:
    return table_cell(text, seconds, bar=bar_percent(seconds, longest))


def _error_cell(e: Entry) -> dict[str, Any]:
    off = e.predicted_s / e.measured_s - 1 if e.predicted_s is not None and e.measured_s else None
    sign = "+" if off is not None and off > 0 else ""
    return table_cell(sign + percent(off), None if off is None else abs(off))


def _of_basis(e: Entry, basis: Kind, text: str, value: float | None) -> dict[str, Any]:
    return table_cell(text, value) if e.seconds(basis) is not None else table_cell("", None)


def _overlap(share: float | None) -> str:
    """The overlap in percent; far below zero, where the device mostly waits for its host, the number says nothing."""
    return "below −100%" if share is not None and share < -1 else percent(share)


def _speedup(table: Sequence[Entry], e: Entry, kind: Kind) -> float | None:
    """How many times as fast as DDP, by times of one kind; None in a table of one."""
    ddp, own = _ddp(table) if len(table) > 1 else None, e.seconds(kind)
    ddp_s = ddp.seconds(kind) if ddp is not None else None
    return ddp_s / own if ddp_s is not None and own else None


def overview(models: Sequence[ModelReport]) -> dict[str, Any]:
    """The table of all workloads, which begins a page of several, with the plan that is taken for each."""
    tables = [entries(model) for model in models]
    taken = [best_of(table) if table else Entry("") for table in tables]
    columns = [
        ("workload", [table_cell(m.name, m.name, href=f"#workload-{i}") for i, m in enumerate(models)]),
        ("taken", [table_cell(e.scheduler, e.scheduler or None) for e in taken]),
    ]
    kinds: tuple[Kind, ...] = ("measured", "predicted")
    for kind in kinds:
        times = [e.seconds(kind) for e in taken]
        speedups = [_speedup(table, e, kind) for table, e in zip(tables, taken, strict=True)]
        columns.append((kind, [table_cell(in_one_unit([s])[0], s) for s in times]))
        columns.append((f"{kind} over DDP", [table_cell(factor(x), x) for x in speedups]))
    columns.append(("predicted above bound", [table_cell(percent(e.gap), e.gap) for e in taken]))
    return table_of(columns, _HELP)
