"""The schedulers of a report side by side: the table of one workload, its headline, and the table of all workloads.

[Note: one kind of time] Predicted times are only compared with predicted times, and measured times only with measured
times. Every sentence and every head of a column says which kind of time it shows. A measured time is the median of many
iterations. A measured timeline shows only one iteration, so it does not tell which plan is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from legato.core.measurement import MeasuredPlan
from legato.core.text import percent
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.reports.idle import drawn_worker
from legato.reports.model import ModelReport, SchedulerRow
from legato.reports.tables import factor, seconds_cell, share_cell, table_cell, table_of

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

    def column(name: str, cell: Callable[[Entry], dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        return name, [cell(e) for e in table]

    def based(share: float | None, e: Entry) -> dict[str, Any]:
        return share_cell(None if e.seconds(basis) is None else share)

    columns = [
        column("scheduler", lambda e: table_cell(e.scheduler, e.scheduler)),
        *_time_columns(table),
        column("predicted above bound", lambda e: share_cell(e.gap, signed=True)),
        column(of_basis.format("overlap"), lambda e: based(e.overlap, e)),
        column(of_basis.format("utilization"), lambda e: based(e.utilization, e)),
        column(
            "messages", lambda e: table_cell("" if e.num_messages is None else f"{e.num_messages:,}", e.num_messages)
        ),
        column("planning time", lambda e: seconds_cell(e.plan_s)),
    ]
    help = _HELP | {of_basis.format(name): _HELP[name] for name in ("overlap", "utilization")}
    return table_of(columns, help, order, None if best is None else table.index(best))


def _time_columns(table: Sequence[Entry]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the columns of times: measured medians with quartiles and speedup, predictions with speedup and error."""
    measured = [e.measured_s for e in table]
    one = [e.one_s if e.measured_s is None else None for e in table]
    predicted = [e.predicted_s for e in table]
    longest = max((s for s in [*measured, *one, *predicted] if s is not None), default=0.0) or 1.0
    return [
        ("measured", [seconds_cell(s, longest) for s in measured]),
        ("quartiles", [_quartiles_cell(e) for e in table]),
        _speedups("measured", table),
        ("one iteration", [seconds_cell(s, longest) for s in one]),
        ("predicted", [seconds_cell(s, longest) for s in predicted]),
        _speedups("predicted", table),
        ("prediction error", [_error_cell(e) for e in table]),
    ]


def _quartiles_cell(e: Entry) -> dict[str, Any]:
    if e.quartiles_s is None:
        return table_cell("", None)
    low, high = e.quartiles_s
    return table_cell(f"{format_seconds(low)} to {format_seconds(high)}", high - low)


def _error_cell(e: Entry) -> dict[str, Any]:
    off = e.predicted_s / e.measured_s - 1 if e.predicted_s is not None and e.measured_s else None
    return table_cell("" if off is None else percent(off, signed=True), None if off is None else abs(off))


def _speedups(kind: Kind, table: Sequence[Entry]) -> tuple[str, list[dict[str, Any]]]:
    base = _baseline(table)
    name = "DDP" if base is None else _shown_name(base).removeprefix("the ")
    speedups = (_speedup(table, e, kind) for e in table)
    return f"{kind} over {name}", [table_cell(factor(x), x) for x in speedups]


def _speedup(table: Sequence[Entry], e: Entry, kind: Kind) -> float | None:
    """Return the speedup over the baseline in times of one kind; None if the table has only one row."""
    base, own = _baseline(table) if len(table) > 1 else None, e.seconds(kind)
    base_s = None if base is None else base.seconds(kind)
    return base_s / own if base_s is not None and own else None


def overview(models: Sequence[ModelReport]) -> dict[str, Any]:
    """Return the table at the top of a page of several workloads: the recommended plan for each workload."""
    tables = [entries(model) for model in models]
    taken = [best_of(table) or Entry("") for table in tables]
    columns = [
        ("workload", [table_cell(m.name, m.name, href=f"#workload-{i}") for i, m in enumerate(models)]),
        ("taken", [table_cell(e.scheduler, e.scheduler or None) for e in taken]),
    ]
    kinds: tuple[Kind, ...] = ("measured", "predicted")
    for kind in kinds:
        columns.append((kind, [seconds_cell(e.seconds(kind)) for e in taken]))
        speedups = [_speedup(table, e, kind) for table, e in zip(tables, taken, strict=True)]
        columns.append((f"{kind} over DDP", [table_cell(factor(x), x) for x in speedups]))
    columns.append(("predicted above bound", [share_cell(e.gap, signed=True) for e in taken]))
    return table_of(columns, _HELP)
