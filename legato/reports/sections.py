"""The section of one workload on the page: the values that the template shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from legato.core.plan import Plan
from legato.core.table import Column, Table
from legato.core.text import count, percent
from legato.core.timeline import Timeline
from legato.core.units import format_bandwidth, format_bytes, format_seconds
from legato.reports.breakdowns import breakdown_charts, breakdown_headline
from legato.reports.idle import drawn_worker, idle_costs, idle_sentence
from legato.reports.memory import draw_memory
from legato.reports.model import ModelReport, are_jobs
from legato.reports.schedulers import Entry, bound_sentence, entries, headline, scheduler_table
from legato.reports.tables import bar_percent, drawn_table
from legato.reports.timelines import draw_timelines
from legato.reports.workloads import draw_op_times, draw_readiness, draw_tensor_sizes

__all__ = ["section"]

_MOST_WAITS = 6


def section(model: ModelReport, number: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the template needs for one workload, and add its figures to `figures` by id."""
    table = entries(model)
    single, waiting = _single(model.timelines, table), model.timelines
    if model.told:
        said: dict[str, Any] = {"headline": _verdict(model.verdict), "bound": "", "facts": "", "table": None}
        # For a measured iteration, the command's own tables say more about waiting than the timeline.
        waiting = tuple(t for t in waiting if t.source != "measured")
    else:
        said = {"headline": headline(table, model.name), "bound": bound_sentence(table), "facts": _facts(model)}
        said["table"] = scheduler_table(table) if table else None
    whole = any(t.whole for t in model.timelines)
    part: dict[str, Any] = {
        "id": f"workload-{number}",
        "name": model.name,
        **said,
        "code": model.code,
        "advice": model.advice,
        "told": [part if isinstance(part, str) else drawn_table(part) for part in model.told],
        "asides": model.asides,
        "computation": model.computation if waiting else "",
        "jobs": are_jobs(model.timelines),
        "whole": whole,
        "doubts": model.measured.doubts if model.measured else (),
        "timelines": "",
        "points": "",
        "breakdowns": [],
        "worker_note": "",
        "waits": _waits(waiting, model.plans, single, of_tensors=not (model.points or whole)),
        "single": any(timeline.source == "measured" for timeline in model.timelines),
        "workload": _workload(model, number, figures),
        "cluster": _cluster(model),
    }
    if model.points:
        part["points"] = f"points-{number}"
        figures[part["points"]] = draw_memory(model.points)
    if model.breakdowns:
        part["headline"] = breakdown_headline(model.breakdowns)
        part["breakdowns"] = breakdown_charts(model.breakdowns, number, figures)
    if model.timelines:
        part["timelines"] = f"timelines-{number}"
        figures[part["timelines"]] = draw_timelines(model.timelines, single)
        part["worker_note"] = _worker_note(model.timelines)
    return part


def _verdict(sentence: str) -> list[tuple[str, bool]]:
    """Return the verdict of a command as a headline, in which everything before the first colon is bold."""
    first, colon, rest = sentence.partition(":")
    return [(first + colon, True), (rest, False)] if sentence else []


def _worker_note(timelines: Sequence[Timeline]) -> str:
    """Return sentences: how many workers do the same as the worker that is drawn, and which command shows all."""
    workers, alike = max(len({s.worker for s in t.spans}) for t in timelines), 1
    for timeline in timelines:
        alike = max(alike, dict(timeline.members).get(drawn_worker(timeline), 1))
    notes = [f"The worker that is shown is one of {alike:,} that do the same at the same time."] if alike > 1 else []
    if workers > 1:
        notes.append(f"Only the first of {workers} workers is shown; the command legato trace shows all of them.")
    return " ".join(notes)


def _single(timelines: Sequence[Timeline], table: Sequence[Entry]) -> frozenset[int]:
    """Return the indices of the measured timelines whose plan has a measured median in the table."""
    medians = {e.scheduler for e in table if e.measured_s is not None}
    return frozenset(i for i, t in enumerate(timelines) if t.source == "measured" and t.name in medians)


def _facts(model: ModelReport) -> str:
    facts = []
    if model.workload:
        facts.append(f"{format_bytes(model.workload.nbytes)} of gradients")
        facts.append(f"{format_seconds(model.workload.compute_s)} of computation")
    if model.network:
        facts.append(model.network)
    elif model.cluster:
        facts.append(count(model.cluster.workers, "worker"))
        if model.cluster.bandwidth_bps:
            facts.append(format_bandwidth(model.cluster.bandwidth_bps))
        facts.append(model.cluster.default_collective)
    return " · ".join(facts)


def _waits(
    timelines: Sequence[Timeline], plans: Sequence[Plan], single: Collection[int], *, of_tensors: bool
) -> list[dict[str, Any]]:
    """Return, for each timeline, the longest waits of computation, by tensor or message, with bars on one scale."""
    found = [(t, *idle_costs(t, plans)) for t in timelines]
    largest = max((w.seconds for _, ws, _ in found for w in ws), default=0.0)
    parts = []
    for i, (timeline, every, tensors) in enumerate(found):
        idle = sum(w.seconds for w in every)
        rest = every[_MOST_WAITS:]
        lines = [
            {
                "name": "no message in flight" if w.message is None else w.message,
                "cost": format_seconds(w.seconds),
                "bar": bar_percent(w.seconds, largest),
            }
            for w in every[:_MOST_WAITS]
        ]
        share = idle / timeline.iteration_s if timeline.iteration_s else 0.0
        period = "the iteration" if i in single else format_seconds(timeline.iteration_s)
        summary = f"idle for {format_seconds(idle)}, {percent(share)} of {period}"
        parts.append(
            {
                "name": timeline.name,
                "source": timeline.source_in_words,
                "summary": summary if every else "never idle",
                "sentence": idle_sentence(every, tensors and of_tensors),
                "lines": lines,
                "rest": f"and {format_seconds(sum(w.seconds for w in rest))} for {count(len(rest), 'other')}"
                if rest
                else "",
            }
        )
    return parts


def _tile(name: str, value: str, note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _workload(model: ModelReport, number: int, figures: dict[str, Any]) -> dict[str, Any] | None:
    workload, cluster, phases = model.workload, model.cluster, []
    if workload is None:
        return None
    for phase in ("backward", "optimizer", "forward"):
        ids = workload.phase_ops(phase)
        seconds = sum(workload.ops[i].duration_s for i in ids)
        if ids:
            phases.append(
                {
                    "name": phase,
                    "share": round(100 * seconds / (workload.compute_s or 1), 3),
                    "text": format_seconds(seconds),
                    "count": len(ids),
                }
            )
    largest = max(workload.tensors, key=lambda t: t.nbytes)
    batch = f"batch of {workload.batch_size:,} on {workload.device}"
    tiles = [
        _tile(
            "computation",
            format_seconds(workload.compute_s),
            f"with {model.computation}" if model.computation else batch,
        ),
        _tile("gradients", format_bytes(workload.nbytes), count(len(workload.tensors), "tensor")),
        _tile(
            "largest tensor",
            format_bytes(largest.nbytes),
            f"{percent(largest.nbytes / workload.nbytes, 0)} of the gradients",
        ),
        _tile("ops", f"{len(workload.ops):,}", ", ".join(f"{p['count']:,} {p['name']}" for p in phases)),
    ]
    if workload.untraced_s is not None:
        note = "without tracing" + (f"; op times × {workload.time_scale:.3g}" if workload.time_scale != 1 else "")
        tiles.insert(1, _tile("iteration on one worker", format_seconds(workload.untraced_s), note))
    if cluster and workload.compute_s > 0:
        seconds = cluster.cost().cost(workload.nbytes)
        note = f"{seconds / workload.compute_s:.2f} × computation, as one message"
        tiles.append(_tile("communication", format_seconds(seconds), note))
    drawn = [
        (
            "readiness",
            "When gradients are ready" + (", and how much the network can have sent by then" if cluster else ""),
            draw_readiness(workload, cluster),
        ),
        ("sizes", "Tensor sizes", draw_tensor_sizes(workload)),
        ("ops", "Op times", draw_op_times(workload)),
    ]
    shown = []
    for name, caption, figure in drawn:
        if figure["data"]:
            figures[f"{name}-{number}"] = figure
            shown.append({"id": f"{name}-{number}", "caption": caption})
    return {"tiles": tiles, "phases": phases, "figures": shown}


def _cluster(model: ModelReport) -> dict[str, Any] | None:
    cluster, workload = model.cluster, model.workload
    if cluster is None:
        return None
    tiles = [_tile("workers", f"{cluster.workers:,}")]
    costs = "measured", "on this cluster"
    if cluster.servers:
        tiles.append(_tile("parameter servers", f"{cluster.servers:,}"))
    if cluster.bandwidth_bps is not None:
        tiles.append(_tile("link", format_bandwidth(cluster.bandwidth_bps), "each way"))
        costs = "derived", "from link and latency"
    if cluster.latency_s is not None:
        tiles.append(_tile("latency", format_seconds(cluster.latency_s), "per hop"))
    if cluster.reduce_s_per_byte:
        tiles.append(_tile("reduction speed", f"{format_bytes(1 / cluster.reduce_s_per_byte)}/s"))
    tiles.append(_tile("costs", *costs))
    nbytes = workload.nbytes if workload else None
    columns = [
        Column("collective", lambda row: row[0]),
        Column(
            "per message (alpha)",
            lambda row: row[1].line.alpha_s,
            format_seconds,
            "The time that each message takes however small it is.",
        ),
        Column(
            "per MiB (beta)",
            lambda row: row[1].line.beta_s_per_byte,
            lambda beta: format_seconds(beta * 2**20),
            "The time that each further MiB of a message takes.",
        ),
        Column(
            "goodput",
            lambda row: 8 / row[1].line.beta_s_per_byte if row[1].line.beta_s_per_byte else None,
            format_bandwidth,
            "The rate at which long messages carry gradients.",
        ),
        Column(
            "merge below",
            lambda row: row[1].line.alpha_s / row[1].line.beta_s_per_byte if row[1].line.beta_s_per_byte else None,
            format_bytes,
            "A message of this size spends half of its time in alpha; smaller ones gain much by merging.",
        ),
        Column(
            "all gradients, one message", lambda row: None if nbytes is None else row[1].cost(nbytes), format_seconds
        ),
    ]
    return {"tiles": tiles, "table": drawn_table(Table("", list(cluster.collectives.items()), columns).shown())}
