"""The numbers of a report: the table of schedulers, the headline, and numbers as people write them."""

from __future__ import annotations

import msgspec

from legato.core.timeline import Timeline
from legato.report.model import ModelReport

__all__ = ["Entry", "best_of", "entries", "headline", "in_one_unit", "own_worker", "percent", "time_unit"]

#: Shorter differences than this are none (share of an iteration).
_SAME = 0.005


class Entry(msgspec.Struct, frozen=True):
    """One line of the table; None is what nobody knows. Seconds, and shares of 1."""

    scheduler: str
    predicted_s: float | None = None
    measured_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    overlap: float | None = None
    utilization: float | None = None
    num_messages: int | None = None
    plan_s: float | None = None

    @property
    def iteration_s(self) -> float:
        """What is known best: measured before predicted."""
        return next(s for s in (self.measured_s, self.predicted_s, 0.0) if s is not None)


def entries(model: ModelReport) -> list[Entry]:
    """The table of a workload: its rows, or, where there are none, what its timelines say."""
    measured = {t.name: t.iteration_s for t in model.timelines if t.source == "measured"}
    if not model.rows:
        names = dict.fromkeys(t.name for t in model.timelines)
        return [_of_timelines([t for t in model.timelines if t.name == name]) for name in names]
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
        )
        for row in model.rows
    ]


def _of_timelines(same: list[Timeline]) -> Entry:
    """One line from the timelines of one name; the metrics are those of the predicted one, if there is one."""
    by_source = {t.source: t for t in reversed(same)}
    predicted, measured = by_source.get("predicted"), by_source.get("measured")
    shown = predicted or same[0]
    bound = next((t.lower_bound_s for t in same if t.lower_bound_s), None)
    return Entry(
        shown.name,
        predicted.iteration_s if predicted else None,
        measured.iteration_s if measured else None,
        bound,
        shown.iteration_s / bound - 1 if bound else None,
        shown.overlap,
        shown.utilization,
        sum(s.kind == "message" and s.worker == own_worker(shown) for s in shown.spans),
    )


def own_worker(timeline: Timeline) -> int:
    """The worker that is drawn: 0, or the first there is."""
    return min((s.worker for s in timeline.spans), default=0)


def best_of(table: list[Entry]) -> Entry:
    """The fastest; where anything was measured, the fastest of what was. A tie goes to legato."""
    seen = [e for e in table if e.measured_s is not None] or table
    return min(seen, key=lambda e: (round(e.iteration_s, 9), e.scheduler != "legato"))


def headline(table: list[Entry]) -> list[tuple[str, bool]]:
    """One sentence on the best scheduler, as pieces of (text, bold?); empty without a table.

    Where anything was measured, what was measured decides.
    """
    if not table:
        return []
    seen = [e for e in table if e.measured_s is not None] or table
    best = best_of(table)
    ddp = next((e for e in seen if e.scheduler == "ddp"), None)
    how = " (measured)" if best.measured_s is not None else ""
    if ddp is not None and ddp.iteration_s > best.iteration_s * (1 + _SAME):
        words = [(best.scheduler, True), (" is ", False), (f"{_times(ddp, best)} faster than DDP", True), (how, False)]
    elif ddp is not None:
        best = ddp
        words = [("DDP", True), (" is as fast as the best of ", False), (f"{len(seen)} schedulers", True), (how, False)]
        if len(seen) == 1:
            words = [("DDP", True), (" takes ", False), (in_one_unit([best.iteration_s])[0], True), (how, False)]
    else:
        words = [(best.scheduler, True), (" takes ", False), (in_one_unit([best.iteration_s])[0], True), (how, False)]
    if best.gap is None:
        return [*words, (".", False)]
    plan = "; its plan" if best.measured_s is not None else ""
    if best.gap < 0.0005:
        return [
            *words,
            (f"{plan or '; no plan'} ", False),
            ("cannot be beaten" if plan else "can be faster", True),
            (".", False),
        ]
    return [
        *words,
        (f"{plan} is " if plan else ", ", False),
        (percent(best.gap), True),
        (" above the proven bound.", False),
    ]


def _times(slow: Entry, fast: Entry) -> str:
    return f"{slow.iteration_s / fast.iteration_s:.2f}×" if fast.iteration_s > 0 else "infinitely"


def percent(share: float | None) -> str:
    """`3.1%`; fewer digits where they say nothing."""
    if share is None:
        return ""
    share = share if abs(share) >= 5e-4 else 0.0
    return (f"{share:.1%}" if abs(share) < 1 else f"{share:,.0%}").replace("-", "−")


def in_one_unit(seconds: list[float | None]) -> list[str]:
    """Times to compare, all in the unit and with the decimals that give the largest one four digits."""
    known = [abs(s) for s in seconds if s is not None]
    largest = max(known, default=0.0)
    unit, scale = time_unit(largest)
    whole = len(str(int(largest / scale)))
    return ["" if s is None else f"{s / scale:,.{max(0, 4 - whole)}f} {unit}" for s in seconds]


def time_unit(largest_s: float) -> tuple[str, float]:
    """(unit, seconds in it) to write times up to `largest_s` in; milliseconds from one of them to ten seconds."""
    return ("s", 1.0) if largest_s >= 10 else ("ms", 1e-3) if largest_s >= 1e-3 else ("us", 1e-6)
