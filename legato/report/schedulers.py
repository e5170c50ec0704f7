"""The schedulers of a report side by side: the table of one workload, its headline, and the table of all workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.report.idle import drawn_worker
from legato.report.model import ModelReport
from legato.report.tables import bar_percent, factor, heads, in_one_unit, percent, table_cell

__all__ = ["Entry", "best_of", "entries", "headline", "overview", "scheduler_table"]

#: Iteration times that differ by less than this share count as equal.
_SAME = 0.005
_HELP = {
    "predicted": "The iteration time that the simulator predicts.",
    "measured": "The iteration time of a real run.",
    "error": "How much the prediction is above (+) or below (−) the measurement.",
    "over DDP": "The speedup over DistributedDataParallel; of measured times where both were measured.",
    "above bound": "How far the predicted iteration time is above a lower bound that no plan can beat.",
    "overlap": "The overlap coefficient (N + C − T) / min(N, C), with N seconds of communication and C seconds of "
    "computation in an iteration of T seconds: 100% when the shorter of the two is hidden behind the other one, below "
    "0% when the device also waits for its host.",
    "utilization": "The share of the iteration in which the worker computes.",
    "planning time": "The time that planning took.",
}


class Entry(msgspec.Struct, frozen=True):
    """One line of the table: seconds, and shares of 1; None is unknown."""

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
        """The measured iteration time, or else the predicted one."""
        return next(s for s in (self.measured_s, self.predicted_s, 0.0) if s is not None)


def entries(model: ModelReport) -> list[Entry]:
    """The lines of a workload's table: from its rows or, without rows, from its timelines."""
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
        shown.iteration_s / bound - 1 if bound else None,
        shown.overlap,
        shown.utilization,
        sum(s.kind == "message" and s.worker == drawn_worker(shown) for s in shown.spans),
    )


def _comparable(table: list[Entry]) -> list[Entry]:
    """The measured entries or, if nothing was measured, all of them."""
    return [e for e in table if e.measured_s is not None] or table


def best_of(table: list[Entry]) -> Entry:
    """The fastest entry, or the fastest measured one if any was measured; legato in a tie."""
    return min(_comparable(table), key=lambda e: (round(e.iteration_s, 9), e.scheduler != "legato"))


def headline(table: list[Entry]) -> list[tuple[str, bool]]:
    """One sentence on the best scheduler as pieces of (text, bold?); empty without a table.

    If anything was measured, only measured schedulers are compared.
    """
    if not table:
        return []
    seen, best = _comparable(table), best_of(table)
    ddp = next((e for e in seen if e.scheduler == "ddp"), None)
    if ddp is not None and ddp.iteration_s > best.iteration_s * (1 + _SAME):
        words = [(best.scheduler, True), (" is ", False), (f"{_times(ddp, best)} faster than DDP", True)]
    elif ddp is not None and len(seen) > 1:
        best = ddp
        words = [("DDP", True), (" is as fast as the best of ", False), (f"{len(seen)} schedulers", True)]
    else:
        name = best.scheduler if ddp is None else "DDP"
        words = [(name, True), (" takes ", False), (in_one_unit([best.iteration_s])[0], True)]
    if best.measured_s is not None:
        words.append((" (measured)", False))
    if best.gap is None:
        return [*words, (".", False)]
    if best.gap < 0.0005:
        return [*words, ("; no plan ", False), ("can be faster", True), (".", False)]
    return [*words, ("; its plan is ", False), (percent(best.gap), True), (" above the proven lower bound.", False)]


def _times(slow: Entry, fast: Entry) -> str:
    return f"{slow.iteration_s / fast.iteration_s:.2f}×" if fast.iteration_s > 0 else "infinitely"


def scheduler_table(table: list[Entry]) -> dict[str, Any]:
    """The table of one workload for the template; columns in which nothing is known are left out.

    It is sorted by measured times if all schedulers were measured, else by predicted ones.
    """
    best = best_of(table)
    all_measured = all(e.measured_s is not None for e in table)
    any_measured = any(e.measured_s is not None for e in table)
    column = "measured" if all_measured else "predicted"
    table = sorted(
        table, key=lambda e: (e.measured_s if all_measured else e.predicted_s or e.iteration_s, e is not best)
    )
    ddp = next((e for e in table if e.scheduler == "ddp" and len(table) > 1), None)
    times = in_one_unit([e.predicted_s for e in table] + [e.measured_s for e in table])
    longest = max((e.predicted_s or e.iteration_s for e in table), default=0.0) or 1.0
    names = ["scheduler", "predicted", *(["measured", "error"] if any_measured else [])]
    names += ["over DDP", "above bound", "overlap", "utilization", "messages", "planning time"]
    rows: list[dict[str, Any]] = []
    for i, e in enumerate(table):
        cells = [
            table_cell(e.scheduler, e.scheduler),
            table_cell(times[i], e.predicted_s, bar=bar_percent(e.predicted_s, longest)),
        ]
        if any_measured:
            off = e.predicted_s / e.measured_s - 1 if e.predicted_s is not None and e.measured_s else None
            sign = "+" if off is not None and off > 0 else ""
            cells.append(table_cell(times[len(table) + i], e.measured_s, bar=bar_percent(e.measured_s, longest)))
            cells.append(table_cell(sign + percent(off), abs(off) if off is not None else None))
        speedup = _speedup(ddp, e)
        cells += [
            table_cell(factor(speedup), speedup),
            table_cell(percent(e.gap), e.gap),
            table_cell(_overlap(e.overlap), e.overlap),
            table_cell(percent(e.utilization), e.utilization),
            table_cell(f"{e.num_messages:,}" if e.num_messages is not None else "", e.num_messages),
            table_cell(format_seconds(e.plan_s) if e.plan_s is not None else "", e.plan_s),
        ]
        rows.append({"cells": cells, "best": e is best})
    drop = {i for i in range(1, len(names)) if all(row["cells"][i]["sort"] == "" for row in rows)}
    for row in rows:
        row["cells"] = [cell for i, cell in enumerate(row["cells"]) if i not in drop]
    names = [name for i, name in enumerate(names) if i not in drop]
    return {"heads": heads(names, names.index(column) if column in names else None, _HELP), "rows": rows}


def _overlap(share: float | None) -> str:
    """The overlap in percent; far below zero, where the device mostly waits for its host, the number says nothing."""
    return "below −100%" if share is not None and share < -1 else percent(share)


def _speedup(ddp: Entry | None, e: Entry) -> float | None:
    if ddp is None:
        return None
    if ddp.measured_s is not None and e.measured_s:
        return ddp.measured_s / e.measured_s
    return ddp.predicted_s / e.predicted_s if ddp.predicted_s is not None and e.predicted_s else None


def overview(models: Sequence[ModelReport]) -> dict[str, Any]:
    """The table of all workloads, which begins a page of several."""
    rows = []
    for number, model in enumerate(models):
        table = entries(model)
        best = best_of(table) if table else None
        ddp = next((e for e in table if e.scheduler == "ddp"), None)
        seconds = best.iteration_s if best else None
        speedup = ddp.iteration_s / seconds if ddp and seconds else None
        cells = [
            table_cell(model.name, model.name, href=f"#workload-{number}"),
            table_cell(best.scheduler if best else "", best.scheduler if best else None),
            table_cell(in_one_unit([seconds])[0], seconds),
            table_cell(factor(speedup), speedup),
            table_cell(percent(best.gap) if best else "", best.gap if best else None),
        ]
        rows.append({"cells": cells, "best": False})
    return {"heads": heads(["workload", "fastest", "iteration", "over DDP", "above bound"], help=_HELP), "rows": rows}
