"""The schedulers of a report side by side: the table of one workload, its headline, and the table of all workloads.

[Note: one kind of time] Predicted times are only compared with predicted times, and measured times only with measured
times. Every sentence and every head of a column says which kind of time it shows. A measured time is the median of many
iterations. A measured timeline shows only one iteration, so it does not tell which plan is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from legato.core.measurement import MeasuredPlan
from legato.core.table import Column, Table, factor
from legato.core.text import percent
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.reports.idle import drawn_worker
from legato.reports.model import ModelReport, SchedulerRow
from legato.reports.tables import drawn_table

__all__ = ["Entry", "Kind", "best_of", "bound_sentence", "entries", "headline", "overview", "scheduler_table"]

#: Iteration times that differ by less than this share count as equal.
_SAME = 0.005
#: The baselines of comparisons in words, by scheduler: DDP, or the random order if plans are orders of pulls.
BASELINES = {"ddp": "DDP", "random": "the random order"}
_HELP = {
    "predicted": "The iteration time that the simulator predicts.",
    "measured": "The iteration time of a real run: the median of its timed iterations.",
    "quartiles": "A quarter of the timed iterations took less than the first time, a quarter more than the second.",
    "one iteration": "The time of the one measured iteration that is drawn. Others took more or less time.",
    "prediction error": "How much the prediction is above (+) or below (-) the measured time.",
    "predicted over DDP": "DDP's predicted iteration time divided by this plan's predicted iteration time.",
    "measured over DDP": "DDP's measured iteration time divided by this plan's measured iteration time.",
    "predicted above bound": "How far the predicted iteration time is above a bound that no plan with the same kind of "
    "messages can beat.",
    "overlap": "The time during which communication and computation both run, divided by the shorter of the two: 100% "
    "if the shorter one is completely hidden.",
    "utilization": "The share of the iteration during which the worker computes.",
    "planning time": "The time that planning took.",
}


Kind = Literal["measured", "one iteration", "predicted"]


class Entry(msgspec.Struct, frozen=True):
    """One row of the table: times in seconds, and shares from 0 to 1; None means unknown.

    `measured_s` is a median, and `one_s` is the time of the single measured iteration that the report draws. `gap` is
    how far `predicted_s` is above `lower_bound_s`. `overlap` and `utilization` describe the predicted iteration, or the
    measured iteration if there is no prediction. `exposed` has the share of exposed communication for each source of
    timelines (predicted or measured).
    """

    scheduler: str
    predicted_s: float | None = None
    measured_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    one_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    plan_s: float | None = None
    exposed: dict[str, float] = {}

    def seconds(self, kind: Kind) -> float | None:
        """Return the iteration time of this kind."""
        return {"measured": self.measured_s, "one iteration": self.one_s, "predicted": self.predicted_s}[kind]


def entries(model: ModelReport) -> list[Entry]:
    """Return the rows of a workload's table: one for each plan with measurements, a `SchedulerRow` or a timeline."""
    measured = {plan.scheduler: plan for plan in model.measured.plans} if model.measured else {}
    rows = {row.scheduler: row for row in model.rows}
    drawn: dict[str, dict[str, Timeline]] = {}
    for timeline in model.timelines:
        drawn.setdefault(timeline.name, {}).setdefault(timeline.source, timeline)
    return [
        _entry(name, measured.get(name), rows.get(name), drawn.get(name, {}))
        for name in dict.fromkeys([*measured, *rows, *drawn])
    ]


def _entry(name: str, plan: MeasuredPlan | None, row: SchedulerRow | None, drawn: dict[str, Timeline]) -> Entry:
    """Return the table row of a plan from its measurement, its `SchedulerRow` and its timelines by source."""
    known, told = _told_by(drawn), row or plan
    if plan:
        known |= {"measured_s": plan.measured_s, "quartiles_s": plan.quartiles_s, "num_messages": plan.num_messages}
        if plan.predicted_s is not None:
            known["predicted_s"] = plan.predicted_s
    if row:
        known |= {"predicted_s": row.iteration_s, "overlap": row.overlap, "utilization": row.utilization}
        known |= {"num_messages": row.num_messages, "plan_s": row.plan_s}
    bounds = (told.lower_bound_s if told else None), *(timeline.lower_bound_s for timeline in drawn.values())
    bound, seconds = next(filter(None, bounds), None), known.get("predicted_s")
    return Entry(
        name,
        lower_bound_s=bound,
        gap=seconds / bound - 1 if bound and seconds is not None else None,
        **known,
    )


def _told_by(drawn: dict[str, Timeline]) -> dict[str, Any]:
    """Return the fields of a table row that timelines determine; `drawn` has the row's timelines by source."""
    exposed = {source: t.exposed_comm_s / t.iteration_s for source, t in drawn.items() if t.iteration_s > 0}
    known: dict[str, Any] = {"exposed": exposed}
    for source, field in (("measured", "one_s"), ("predicted", "predicted_s")):  # predictions replace measurements
        if timeline := drawn.get(source):
            known |= {field: timeline.iteration_s, "overlap": timeline.overlap, "utilization": timeline.utilization}
            known["num_messages"] = _messages(timeline)
    return known


def _messages(timeline: Timeline) -> int:
    worker = drawn_worker(timeline)
    return sum(s.kind == "message" and s.worker == worker for s in timeline.spans)


def _comparable(table: Sequence[Entry]) -> tuple[Kind, list[Entry]]:
    """Return the kind of time to compare, and the entries with such a time.

    Measured medians are preferred, then times of single measured iterations, then predictions.
    """
    kinds: tuple[Kind, ...] = ("measured", "one iteration", "predicted")
    for kind in kinds:
        if found := [e for e in table if e.seconds(kind) is not None]:
            return kind, found
    return "predicted", []


def best_of(table: Sequence[Entry]) -> Entry | None:
    """Return the entry to recommend.

    Among the entries that are at most 0.5% slower than the fastest one, the function prefers DDP, and then the plan
    with the fewest messages. The result is None if there are no times, or only times of single measured iterations.
    """
    kind, seen = _comparable(table)
    if kind == "one iteration" or not seen:
        return None
    fastest = min(_seconds(e, kind) for e in seen)
    as_fast = (e for e in seen if _seconds(e, kind) <= fastest * (1 + _SAME))
    return min(as_fast, key=lambda e: (e.scheduler not in BASELINES, e.num_messages or 0, _seconds(e, kind)))


def _seconds(entry: Entry, kind: Kind) -> float:
    return entry.seconds(kind) or 0.0


def _baseline(table: Sequence[Entry]) -> Entry | None:
    """Return the baseline: DDP, or the random order in a table of orders of pulls; None if the table has neither."""
    return next((e for name in BASELINES for e in table if e.scheduler == name), None)


def headline(table: Sequence[Entry], job: str = "") -> list[tuple[str, bool]]:
    """Return a sentence about the iteration time and the gain of the best plan, as pieces of (text, bold?).

    The sentence is empty for an empty table. If any time was measured, only measured times are compared; times of
    single iterations are never compared. A timeline may be named after the job instead of a scheduler.
    """
    kind, seen = _comparable(table)
    if not seen:
        return []
    best, base = best_of(table), _baseline(seen)
    now = base or best or seen[0]
    under = "" if now.scheduler == job else f" under {_shown_name(now)}"
    time = format_seconds(_seconds(now, kind))
    exposed = now.exposed.get("predicted" if kind == "predicted" else "measured")
    share = [] if exposed is None else [(percent(exposed), True), (" of it exposed communication", False)]
    if kind == "one iteration":
        words = [("One measured iteration took ", False), (time, True), (under, False)]
        return [*words, *([(", ", False), *share] if share else []), (".", False)]
    words = [("An iteration takes ", False), (time, True), (f"{under} ({kind})", False)]
    if kind == "predicted" and share:
        words += [(", ", False), *share]
    if best is not None and _seconds(now, kind) > _seconds(best, kind) * (1 + _SAME):
        words += [("; ", False), (best.scheduler, True), (" is ", False), (f"{_times(now, best, kind)} as fast", True)]
    elif base is not None and len(seen) > 1:
        words += [("; ", False), (f"no other plan is more than {percent(_SAME)} faster", True)]
    return [*words, (".", False)]


def _shown_name(entry: Entry) -> str:
    return BASELINES.get(entry.scheduler, entry.scheduler)


def bound_sentence(table: Sequence[Entry]) -> str:
    """Return a sentence about how close the best plan's prediction is to the bound; "" if the bound is unknown."""
    best = best_of(table)
    if best is None or best.gap is None:
        return ""
    if best.gap < 0.0005:
        return (
            f"No plan is predicted to be faster than {_shown_name(best)}: its prediction is at the proven lower bound."
        )
    return f"The prediction for {_shown_name(best)} is {percent(best.gap)} above the proven lower bound."


def _times(slow: Entry, fast: Entry, kind: Kind) -> str:
    seconds = slow.seconds(kind), fast.seconds(kind)
    return factor(seconds[0] / seconds[1]) if seconds[0] and seconds[1] else "infinitely"


def scheduler_table(table: Sequence[Entry]) -> dict[str, Any]:
    """Return the table of one workload for the template, without empty columns.

    Rows are sorted by measured times if all schedulers were measured, and otherwise by predicted times.
    """
    best = best_of(table)
    order: Kind = "measured" if all(e.measured_s is not None for e in table) else "predicted"
    table = sorted(
        table,
        key=lambda e: (e.seconds(order) is None, e.seconds(order) or e.measured_s or e.one_s or 0.0, e is not best),
    )
    basis: Kind = "predicted" if any(e.predicted_s is not None for e in table) else "one iteration"
    of_basis = "predicted {}" if basis == "predicted" else "{} of one iteration"

    def based(name: str) -> Column:
        def share(e: Entry) -> float | None:
            return None if e.seconds(basis) is None else getattr(e, name)

        return Column(of_basis.format(name), share, percent, _HELP[name])

    columns = [
        Column("scheduler", "scheduler"),
        _column("measured", "measured_s", bar=True),
        _column("quartiles", "quartiles_s"),
        _speedups("measured", table),
        _column("one iteration", lambda e: e.one_s if e.measured_s is None else None, format_seconds, bar=True),
        _column("predicted", "predicted_s", bar=True),
        _speedups("predicted", table),
        _column("prediction error", _error, partial(percent, signed=True)),
        _column("predicted above bound", "gap"),
        based("overlap"),
        based("utilization"),
        _column("messages", "num_messages"),
        _column("planning time", "plan_s"),
    ]
    return drawn_table(Table("", table, columns, best=[] if best is None else [table.index(best)]).shown(), order)


def _column(head: str, *value: Any, **options: Any) -> Column:
    return Column(head, *value, help=_HELP.get(head, ""), **options)


def _error(e: Entry) -> float | None:
    return e.predicted_s / e.measured_s - 1 if e.predicted_s is not None and e.measured_s else None


def _speedups(kind: Kind, table: Sequence[Entry]) -> Column:
    base = _baseline(table)
    name = "DDP" if base is None else _shown_name(base).removeprefix("the ")
    return _column(f"{kind} over {name}", lambda e: _speedup(table, e, kind), factor)


def _speedup(table: Sequence[Entry], e: Entry, kind: Kind) -> float | None:
    """Return the speedup over the baseline in times of one kind; None if the table has only one row."""
    base, own = _baseline(table) if len(table) > 1 else None, e.seconds(kind)
    base_s = None if base is None else base.seconds(kind)
    return base_s / own if base_s is not None and own else None


def overview(models: Sequence[ModelReport]) -> dict[str, Any]:
    """Return the table at the top of a page of several workloads: the recommended plan for each workload."""
    tables = {i: entries(model) for i, model in enumerate(models)}
    best = {i: best_of(table) or Entry("") for i, table in tables.items()}
    columns = [
        Column("workload", lambda i: models[i].name, href=lambda i: f"#workload-{i}"),
        Column("taken", lambda i: best[i].scheduler),
        _column("measured", lambda i: best[i].measured_s, format_seconds),
        _column("measured over DDP", lambda i: _speedup(tables[i], best[i], "measured"), factor),
        _column("predicted", lambda i: best[i].predicted_s, format_seconds),
        _column("predicted over DDP", lambda i: _speedup(tables[i], best[i], "predicted"), factor),
        _column("predicted above bound", lambda i: best[i].gap, partial(percent, signed=True)),
    ]
    return drawn_table(Table("", list(tables), columns).shown())
