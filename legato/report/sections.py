"""One workload's part of the page, as the plain values that the template shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.units import format_bandwidth, format_bytes, format_seconds
from legato.core.workload import Workload
from legato.report.cells import factor, heads, table_cell
from legato.report.costs import cost_sentence, costs
from legato.report.drawing import draw_timelines
from legato.report.model import ModelReport
from legato.report.shapes import draw_op_times, draw_readiness, draw_tensor_sizes
from legato.report.summary import Entry, best_of, entries, headline, in_one_unit, percent

__all__ = ["overview", "section"]

_MOST_WAITS = 6


def section(model: ModelReport, number: int, figures: dict[str, Any]) -> dict[str, Any]:
    """What the template needs for one workload; its figures are added to `figures` by id."""
    table = entries(model)
    part: dict[str, Any] = {
        "id": f"workload-{number}",
        "name": model.name,
        "headline": headline(table),
        "facts": _facts(model),
        "advice": model.advice,
        "table": _scheduler_table(table) if table else None,
        "timelines": "",
        "worker_note": "",
        "waits": _waits(model.timelines, model.plans),
        "workload": _workload(model.workload, model.cluster, number, figures) if model.workload else None,
        "cluster": _cluster(model.cluster, model.workload) if model.cluster else None,
    }
    if model.timelines:
        part["timelines"] = f"timelines-{number}"
        figures[part["timelines"]] = draw_timelines(model.timelines)
        workers = max(len({s.worker for s in t.spans}) for t in model.timelines)
        if workers > 1:
            part["worker_note"] = f"Drawn is the first of {workers} workers; the Chrome trace has them all."
    return part


def overview(models: Sequence[ModelReport]) -> dict[str, Any]:
    """The table of all workloads, in front of a page of several."""
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
    return {"heads": heads(["workload", "fastest", "iteration", "speedup over DDP", "above bound"]), "rows": rows}


_HELP = {
    "predicted": "iteration time that the simulator predicts",
    "measured": "iteration time that really ran",
    "off by": "how far the prediction is from the measurement",
    "over DDP": "speedup over DistributedDataParallel; measured where both were",
    "above bound": "the gap to a lower bound that no plan can beat",
    "overlap": "overlap coefficient (N + C - T) / min(N, C): 100% where communication hides as well as it can, "
    "below 0% where the device waits for its host as well",
    "computing": "utilization: computation time by iteration time",
    "planning": "time that planning took",
}


def _overlap(share: float | None) -> str:
    """A device that mostly waits for its host has one of minus some thousand per cent, which tells nobody anything."""
    return "below −100%" if share is not None and share < -1 else percent(share)


def _scheduler_table(table: list[Entry]) -> dict[str, Any]:
    best = best_of(table)
    all_measured = all(e.measured_s is not None for e in table)
    any_measured = any(e.measured_s is not None for e in table)
    # Without a prediction for all, what is known of each; a measured and a predicted time are not put in one order.
    column = "measured" if all_measured else "predicted"
    table = sorted(
        table, key=lambda e: (e.measured_s if all_measured else e.predicted_s or e.iteration_s, e is not best)
    )
    ddp = next((e for e in table if e.scheduler == "ddp" and len(table) > 1), None)
    times = in_one_unit([e.predicted_s for e in table] + [e.measured_s for e in table])
    longest = max((e.predicted_s or e.iteration_s for e in table), default=0.0) or 1.0
    names = ["scheduler", "predicted", *(["measured", "off by"] if any_measured else [])]
    names += ["over DDP", "above bound", "overlap", "computing", "messages", "planning"]
    rows: list[dict[str, Any]] = []
    for i, e in enumerate(table):
        cells = [
            table_cell(e.scheduler, e.scheduler),
            table_cell(times[i], e.predicted_s, bar=_share(e.predicted_s, longest)),
        ]
        if any_measured:
            off = e.predicted_s / e.measured_s - 1 if e.predicted_s is not None and e.measured_s else None
            cells.append(table_cell(times[len(table) + i], e.measured_s, bar=_share(e.measured_s, longest)))
            cells.append(
                table_cell(
                    ("+" if off > 0 else "") + percent(off) if off is not None else "",
                    abs(off) if off is not None else None,
                )
            )
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


def _speedup(ddp: Entry | None, e: Entry) -> float | None:
    if ddp is None:
        return None
    if ddp.measured_s is not None and e.measured_s:
        return ddp.measured_s / e.measured_s
    return ddp.predicted_s / e.predicted_s if ddp.predicted_s is not None and e.predicted_s else None


def _share(value: float | None, whole: float) -> float | None:
    return None if value is None else round(100 * min(1.0, value / whole), 2)


def _facts(model: ModelReport) -> str:
    facts = []
    if model.workload:
        facts.append(f"{format_bytes(model.workload.nbytes)} of gradients")
        facts.append(f"{format_seconds(model.workload.compute_s)} of computation")
    if model.cluster:
        facts.append(_count(model.cluster.workers, "worker"))
        if model.cluster.bandwidth_bps:
            facts.append(format_bandwidth(model.cluster.bandwidth_bps))
        facts.append(model.cluster.default_collective)
    return " · ".join(facts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _waits(timelines: Sequence[Timeline], plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """A list of the dearest tensors or messages for every timeline, with bars of one scale."""
    found = [(t, *costs(t, plans)) for t in timelines]
    dearest = max((w.seconds for _, ws, _ in found for w in ws), default=0.0)
    parts = []
    for timeline, dear, tensors in found:
        idle = sum(w.seconds for w in dear)
        rest = dear[_MOST_WAITS:]
        lines = [
            {
                "name": "no message in flight" if w.message is None else w.message,
                "cost": format_seconds(w.seconds),
                "bar": _share(w.seconds, dearest),
            }
            for w in dear[:_MOST_WAITS]
        ]
        share = idle / timeline.iteration_s if timeline.iteration_s else 0.0
        summary = f"idle {format_seconds(idle)} of {format_seconds(timeline.iteration_s)} ({percent(share)})"
        parts.append(
            {
                "name": timeline.name,
                "source": timeline.source,
                "summary": summary if dear else "never idle",
                "sentence": cost_sentence(dear, tensors),
                "lines": lines,
                "rest": f"and {format_seconds(sum(w.seconds for w in rest))} for {_count(len(rest), 'other')}"
                if rest
                else "",
            }
        )
    return parts


def _tile(name: str, value: str, note: str = "") -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _workload(workload: Workload, cluster: Cluster | None, number: int, figures: dict[str, Any]) -> dict[str, Any]:
    phases = []
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
    tiles = [
        _tile(
            "computation", format_seconds(workload.compute_s), f"batch of {workload.batch_size:,} on {workload.device}"
        ),
        _tile("gradients", format_bytes(workload.nbytes), _count(len(workload.tensors), "tensor")),
        _tile("largest tensor", format_bytes(largest.nbytes), f"{largest.nbytes / workload.nbytes:.0%} of all bytes"),
        _tile("ops", f"{len(workload.ops):,}", ", ".join(f"{p['count']:,} {p['name']}" for p in phases)),
    ]
    if workload.untraced_s is not None:
        note = "without tracing" + (f", times scaled by {workload.time_scale:.3g}" if workload.time_scale != 1 else "")
        tiles.insert(1, _tile("one worker alone", format_seconds(workload.untraced_s), note))
    if cluster and workload.compute_s > 0:
        seconds = cluster.cost().cost(workload.nbytes)
        note = f"{seconds / workload.compute_s:.2f} × computation, as one message"
        tiles.append(_tile("communication", format_seconds(seconds), note))
    drawn = [
        (
            "readiness",
            "When gradients are ready, and what the network can have sent by then",
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


def _cluster(cluster: Cluster, workload: Workload | None) -> dict[str, Any]:
    tiles = [_tile("workers", f"{cluster.workers:,}")]
    if cluster.servers:
        tiles.append(_tile("parameter servers", f"{cluster.servers:,}"))
    if cluster.bandwidth_bps is not None:
        tiles.append(_tile("link", format_bandwidth(cluster.bandwidth_bps), "each way"))
    if cluster.latency_s is not None:
        tiles.append(_tile("latency", format_seconds(cluster.latency_s), "a hop"))
    if cluster.reduce_s_per_byte:
        tiles.append(_tile("adding gradients", f"{format_bytes(1 / cluster.reduce_s_per_byte)}/s"))
    derived = cluster.bandwidth_bps is not None
    tiles.append(
        _tile("costs", "derived" if derived else "measured", "from link and latency" if derived else "on this cluster")
    )
    names = ["collective", "a message (alpha)", "a MiB (beta)", "goodput", "worth merging below"]
    rows = []
    for name, cost in cluster.collectives.items():
        beta = cost.beta_s_per_byte
        even = cost.alpha_s / beta if beta else None
        cells = [
            table_cell(name, name),
            table_cell(format_seconds(cost.alpha_s), cost.alpha_s),
            table_cell(format_seconds(beta * 2**20), beta),
            table_cell(format_bandwidth(8 / beta) if beta else "", 8 / beta if beta else None),
            table_cell(format_bytes(even) if even is not None else "", even),
        ]
        if workload:
            cells.append(table_cell(format_seconds(cost.cost(workload.nbytes)), cost.cost(workload.nbytes)))
        rows.append({"cells": cells, "best": False})
    if workload:
        names.append("all gradients at once")
    help = {"worth merging below": "a message of this size spends half of its time in alpha"}
    return {"tiles": tiles, "table": {"heads": heads(names, help=help), "rows": rows}}
