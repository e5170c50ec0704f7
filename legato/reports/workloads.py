"""The figures of a workload: when gradients are ready, how large tensors are, and how long ops take."""

from __future__ import annotations

import itertools
from typing import Any

from legato.core.cluster import Cluster
from legato.core.units import format_bytes, format_seconds
from legato.core.workload import Workload
from legato.reports.figures import axis, label, layout
from legato.reports.tables import time_unit

__all__ = ["drained", "draw_op_times", "draw_readiness", "draw_tensor_sizes", "readiness"]

_MOST_OPS = 3000
_MIB = 2.0**20


def readiness(workload: Workload) -> list[tuple[float, int, str]]:
    """Return (seconds, bytes, tensor) of each gradient, in the order in which a worker that never waits computes it."""
    order = workload.iteration_order()
    ends = dict(zip(order, itertools.accumulate(workload.ops[i].duration_s for i in order), strict=True))
    return sorted((ends[t.ready_after], t.nbytes, t.name) for t in workload.tensors)


def drained(ready: list[tuple[float, int, str]], s_per_byte: float) -> list[tuple[float, int]]:
    """Return the corners (seconds, bytes) of the curve of sent bytes if the network sends gradients once ready."""
    corners: list[tuple[float, int]] = []
    at, sent = 0.0, 0
    for ready_s, nbytes, _ in ready:
        if ready_s > at:
            at = ready_s
            corners.append((at, sent))
        at, sent = at + nbytes * s_per_byte, sent + nbytes
        corners.append((at, sent))
    return corners


def draw_readiness(workload: Workload, cluster: Cluster | None) -> dict[str, Any]:
    """Return a figure that shows over time how many bytes are ready, and how many bytes the network can have sent."""
    ready = readiness(workload)
    sent = drained(ready, cluster.cost().beta_s_per_byte) if cluster else []
    compute_s = workload.compute_s
    unit, scale = time_unit(max([compute_s, ready[-1][0], *(t for t, _ in sent)]))
    total = list(itertools.accumulate(n for _, n, _ in ready))
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "gradients ready",
            "x": [0, *(round(t / scale, 6) for t, _, _ in ready), round(compute_s / scale, 6)],
            "y": [0, *(round(n / _MIB, 4) for n in total), round(total[-1] / _MIB, 4)],
            "line": {"color": "@backward", "width": 2.2, "shape": "hv"},
            "customdata": ["", *(f"{label(name)}, {format_bytes(n)}" for _, n, name in ready), "all"],
            "hovertemplate": f"%{{customdata}}<br>ready at %{{x}} {unit}<extra></extra>",
        }
    ]
    if sent:
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "sent at full speed",
                "x": [0, *(round(t / scale, 6) for t, _ in sent)],
                "y": [0, *(round(n / _MIB, 4) for _, n in sent)],
                "line": {"color": "@message", "width": 2.2},
                "fill": "tozeroy",
                "fillcolor": "@message-tint",
                "hovertemplate": f"%{{y:.4~g}} MiB sent at %{{x:.4~g}} {unit}<extra></extra>",
            }
        )
    backward_s = sum(op.duration_s for op in workload.ops if op.phase == "backward")
    marks = [("backward pass ends", backward_s / scale), ("computation ends", compute_s / scale)]
    return {
        "data": data,
        "layout": layout(
            height=340,
            shapes=[_upright(x) for _, x in marks],
            annotations=[_mark(text, x) for text, x in marks],
            xaxis=axis(f"time since the start of the backward pass [{unit}]", rangemode="tozero"),
            yaxis=axis("gradients [MiB]", rangemode="tozero"),
        ),
    }


def draw_tensor_sizes(workload: Workload) -> dict[str, Any]:
    """Return a figure of the tensors' sizes (logarithmic), in the order in which the forward pass reads them."""
    forward = set(workload.phase_ops("forward"))
    last = len(workload.ops)
    tensors = list(enumerate(workload.tensors))
    # A tensor without a known reader is sorted by its gradient, because the backward pass runs in reverse order.
    tensors.sort(
        key=lambda it: (min([r for r in it[1].readers if r in forward], default=last), -it[1].ready_after, -it[0])
    )
    sizes = [t.nbytes for _, t in tensors]
    powers = range(0, 43, 3)
    return {
        "data": [
            {
                "type": "bar",
                "x": list(range(1, len(sizes) + 1)),
                "y": sizes,
                "marker": {"color": "@forward", "line": {"width": 0}},
                "customdata": [[label(t.name), format_bytes(t.nbytes)] for _, t in tensors],
                "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
            }
        ],
        "layout": layout(
            height=300,
            bargap=0.15,
            xaxis=axis("tensors in the order in which the forward pass reads them", showgrid=False),
            yaxis=axis(type="log", tickvals=[2**p for p in powers], ticktext=[format_bytes(2**p) for p in powers]),
        ),
    }


def draw_op_times(workload: Workload) -> dict[str, Any]:
    """Return a figure of the ops' durations (logarithmic) over the iteration, for at most the 3,000 longest ops."""
    order = workload.iteration_order()
    starts = dict(
        zip(order, itertools.accumulate((workload.ops[i].duration_s for i in order), initial=0.0), strict=False)
    )
    shown = sorted((i for i in order if workload.ops[i].duration_s > 0), key=lambda i: -workload.ops[i].duration_s)
    unit, scale = time_unit(workload.compute_s)
    data = []
    for phase in ("backward", "optimizer", "forward"):
        ids = sorted((i for i in shown[:_MOST_OPS] if workload.ops[i].phase == phase), key=lambda i: starts[i])
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": phase,
                "x": [round(starts[i] / scale, 6) for i in ids],
                "y": [workload.ops[i].duration_s for i in ids],
                "marker": {"color": f"@{phase}", "size": 5, "opacity": 0.75},
                "customdata": [[label(workload.ops[i].name), format_seconds(workload.ops[i].duration_s)] for i in ids],
                "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
            }
        )
    powers = range(-9, 5)
    return {
        "data": [trace for trace in data if trace["x"]],
        "layout": layout(
            height=300,
            xaxis=axis(f"computation time [{unit}]", showgrid=False),
            yaxis=axis(
                type="log", tickvals=[10.0**p for p in powers], ticktext=[format_seconds(10.0**p) for p in powers]
            ),
        ),
    }


def _upright(x: float) -> dict[str, Any]:
    line = {"color": "@line", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def _mark(text: str, x: float) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "y": 0.02,
        "yref": "paper",
        "textangle": -90,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"color": "@soft", "size": 11},
    }
