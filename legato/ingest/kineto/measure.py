"""Measures a traced step of a rank: computing, exposed communication, waits for late ranks, and waits for the host."""

from __future__ import annotations

import math
from collections.abc import Iterable

from legato.core.intervals import Intervals
from legato.core.timeline import overlap_coefficient
from legato.core.workload import Phase
from legato.ingest.kineto.step import TracedStep
from legato.ingest.traced import KindTimes, RankMeasure, TracedOp

__all__ = ["computing", "measure"]


def measure(rank: int, step: TracedStep, waits_known: bool) -> RankMeasure:
    """Return the measurements of a trimmed step; `waits_known` says whether its transfers know their waits.

    Work of other steps that runs on the device during this step counts as well.
    """

    def inside(spans: Iterable[tuple[float, float]]) -> Intervals:
        return Intervals(spans).within(step.begin_s, step.end_s)

    ops = computing(step)
    computes = inside([*((o.start_s, o.end_s) for o in ops), *step.foreign])
    by_kind: dict[tuple[str, Phase | None], list[tuple[float, float]]] = {}
    for transfer, issued in zip(step.transfers, step.issued_s, strict=True):
        by_kind.setdefault(_kind(transfer.kind, step.phases.within(issued)), []).append(
            (transfer.began_s, transfer.end_s)
        )
    for kind, start, end in step.foreign_transfers:
        by_kind.setdefault(_kind(kind, "forward"), []).append((start, end))
    carries = inside(span for spans in by_kind.values() for span in spans)
    late = inside((t.start_s, t.began_s) for t in step.transfers)
    known = computes | carries | late
    waits = inside(step.waits)
    waited_s = waits.beyond(known)
    c, t, n = computes.seconds, step.length_s, carries.seconds + waited_s
    host = math.fsum(o.duration_s + o.gap_s for o in ops)
    hidden = n - math.fsum(o.stalled_s for o in step.ops)
    order = sorted(by_kind, key=lambda kind: (kind[0], kind[1] != "forward", kind[1] or ""))
    spans = {kind: inside(by_kind[kind]) for kind in order}
    kinds = [KindTimes(kind, own.seconds, own.beyond(computes), phase) for (kind, phase), own in spans.items()]
    if waited_s:
        kinds.append(KindTimes("wait", waited_s, waited_s))
    return RankMeasure(
        rank=rank,
        step=step.interval.name,
        iteration_s=t,
        computation_s=c,
        communication_s=n,
        waiting_s=math.fsum(x.waited_s for x in step.transfers) if waits_known else None,
        exposed_waiting_s=late.beyond(computes | carries),
        idle_s=inside([(step.begin_s, step.end_s)]).beyond(known | waits),
        undelayed_s=t - math.fsum(o.late_s for o in step.ops),
        exposed_comm_s=carries.beyond(computes) + waited_s,
        rho=_ratio(n, c),
        overlap=overlap_coefficient(n, c, t),
        utilization=_ratio(c, t, empty=1.0),
        host_overlap=_ratio(hidden, min(n, host)),
        kinds=tuple(kinds),
    )


def _ratio(part_s: float, whole_s: float, empty: float = 0.0) -> float:
    return part_s / whole_s if whole_s > 0 else empty


def _kind(kind: str, phase: Phase) -> tuple[str, Phase | None]:
    return kind, phase if kind == "all_gather" else None


def computing(step: TracedStep) -> list[TracedOp]:
    """Return the ops that are not transfers."""
    transfers = {(t.name, t.end_s) for t in step.transfers}
    return [op for op in step.ops if (op.name, op.end_s) not in transfers]
