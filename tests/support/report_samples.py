"""Made-up workloads and timelines for the report's tests: small enough to follow, large enough to look real."""

import random

import msgspec

from legato.core.axes import SWEPT
from legato.core.cluster import Cluster
from legato.core.measurement import MeasuredPlan, Measurement
from legato.core.table import Table
from legato.core.timeline import Span, Timeline
from legato.core.units import format_seconds
from legato.core.workload import Op, Tensor, Workload
from legato.reports.model import Breakdown, BreakdownChart, ModelReport, Report, SchedulerRow, SweepRow

CLUSTER = Cluster.derive(8, 10e9, 30e-6)


def cnn(layers=50, name="resnet-50", seed=0):
    """A chain of layers: early ones slow with small tensors, late ones fast with large tensors."""
    rng = random.Random(seed)
    forward, backward, update, tensors = [], [], [], []
    for i in range(layers):
        forward.append(Op(f"conv{i}", "forward", rng.uniform(0.4e-3, 1.4e-3), (i - 1,) if i else ()))
    for k, i in enumerate(reversed(range(layers))):
        at = layers + k
        backward.append(Op(f"conv{i} backward", "backward", forward[i].duration_s * 2, (i, at - 1) if k else (i,)))
        nbytes = 16 * int(2 ** rng.uniform(6 + 11 * i / layers, 12 + 9 * i / layers))
        tensors.append(Tensor(f"conv{i}.weight", nbytes, at, (2 * layers + k, i)))
        update.append(Op(f"sgd conv{i}", "optimizer", 20e-6, (at,)))
    return Workload(name, (*forward, *backward, *update), tuple(tensors), 64, "cuda", untraced_s=0.17)


def run(workload, name, groups, cost, forward_overlap, source="predicted", slowdown=1.0, bound=None, lanes=1):
    """A timeline by hand: ops in order on one stream, messages (lists of tensors) in order on `lanes` links."""
    ready, spans, arrived, at = {}, [], {}, 0.0
    order = workload.iteration_order()
    backward = [i for i in order if workload.ops[i].phase == "backward"]
    for i in backward:
        end = at + workload.ops[i].duration_s * slowdown
        spans.append(Span(0, "compute", workload.ops[i].name, at, end, "backward"))
        ready[i], at = end, end
    free, waiting = [0.0] * lanes, list(groups)
    while waiting:
        link = free.index(min(free))
        # The first in the list that is ready when the link is; where none is, the first that will be.
        since = [max([free[link], *(ready[t.ready_after] for t in group)]) for group in waiting]
        group = waiting.pop(since.index(min(since)))
        start = min(since)
        free[link] = start + cost.cost(sum(t.nbytes for t in group)) * slowdown * lanes
        label = group[0].name if len(group) == 1 else f"{group[0].name} + {len(group) - 1}"
        spans.append(Span(0, "network", label, start, free[link], "message", sum(t.nbytes for t in group)))
        arrived |= {t.name: max(free[link], arrived.get(t.name, 0.0)) for t in group}
    for i in order[len(backward) :]:
        needs = [arrived[t.name] for t in workload.tensors if i in t.readers]
        start = max([at, *(needs if forward_overlap else [max(arrived.values())])])
        at = start + workload.ops[i].duration_s * slowdown
        spans.append(Span(0, "compute", workload.ops[i].name, start, at, workload.ops[i].phase))
    return Timeline(name, source, at, tuple(spans), bound)


def row(timeline, plan_s):
    messages = sum(s.kind == "message" for s in timeline.spans)
    gap = timeline.iteration_s / timeline.lower_bound_s - 1
    return SchedulerRow(
        timeline.name,
        timeline.iteration_s,
        timeline.lower_bound_s,
        gap,
        timeline.overlap,
        timeline.utilization,
        messages,
        plan_s,
    )


def buckets(tensors, nbytes):
    """Neighbours merged to at least `nbytes` bytes."""
    groups, size = [[]], 0
    for tensor in tensors:
        if size >= nbytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


def timelines(workload, cluster=CLUSTER):
    """(ddp, fifo, legato) predicted, by three rules simple enough for a test."""
    cost = cluster.cost()
    bound = max(
        workload.compute_s, cost.cost(workload.nbytes) + workload.ops[workload.tensors[0].ready_after].duration_s
    )
    tensors = list(workload.tensors)
    return (
        run(workload, "ddp", buckets(tensors, 25 * 2**20), cost, False, bound=bound),
        run(workload, "fifo", [[t] for t in tensors], cost, True, bound=bound),
        run(workload, "legato", by_need(tensors), cost, True, bound=bound),
    )


def by_need(tensors, piece=2**21):
    """Pieces of at most `piece` bytes, those of the first layers first."""
    return [
        [msgspec.structs.replace(t, nbytes=min(piece, t.nbytes - at))]
        for t in reversed(tensors)
        for at in range(0, t.nbytes, piece)
    ]


def model(layers=50, name="resnet-50", measured=True, advice="Buy no faster network: computation is what limits you."):
    workload = cnn(layers, name)
    ddp, fifo, legato = timelines(workload)
    cost = CLUSTER.cost()
    tensors = list(workload.tensors)
    real = {
        "ddp": run(workload, "ddp", buckets(tensors, 25 * 2**20), cost, False, "measured", 1.03, ddp.lower_bound_s, 2),
        "legato": run(workload, "legato", by_need(tensors), cost, True, "measured", 1.01, ddp.lower_bound_s, 2),
    }
    shown = [ddp, real["ddp"], fifo, legato, real["legato"]] if measured else [ddp, fifo, legato]
    rows = [row(t, 0.001 * 10**k) for k, t in enumerate((ddp, fifo, legato))]
    found = medians(name, **{n: [1.02 * t.iteration_s] * 4 for n, t in real.items()}) if measured else None
    return ModelReport(name, workload, CLUSTER, tuple(rows), tuple(shown), advice, measured=found)


def medians(job="job", doubts=(), **seconds):
    """What was measured: seconds of iterations by scheduler."""
    return Measurement(job, "8 workers, 10 Gbit/s", tuple(MeasuredPlan.of(n, s) for n, s in seconds.items()), doubts)


EVIL = "</script><script>alert(1)</script><b>&amp;\"'@forward %{x} {{ 7*7 }}"


def evil_report():
    """Every name that comes from a file is markup."""
    ops = (
        Op(EVIL, "forward", 1e-3),
        Op(EVIL, "backward", 2e-3, (0,)),
        Op(EVIL + "2", "optimizer", 1e-4, (1,)),
    )
    workload = Workload(EVIL, ops, (Tensor(EVIL, 4096, 1, (0, 2)),), device=EVIL)
    cluster = Cluster(2, {EVIL: CLUSTER.cost()})
    spans = (
        Span(0, EVIL, EVIL, 0.0, 2e-3, "backward"),
        Span(0, EVIL, EVIL, 2e-3, 3e-3, "message"),
        Span(0, EVIL, EVIL, 3e-3, 4e-3, "forward"),
    )
    timeline = Timeline(EVIL, "predicted", 4e-3, spans, 3e-3)
    rows = (SchedulerRow(EVIL, 4e-3, 3e-3, 1 / 3, 0.0, 0.75, 1, None),)
    measured = Measurement(EVIL, EVIL, (MeasuredPlan.of(EVIL, [5e-3]),), (EVIL,))
    one = ModelReport(EVIL, workload, cluster, rows, (timeline,), EVIL, measured=measured)
    return Report((one, one), EVIL)


def breakdown(name="tensor 2, data 4", facts="1f1b", note="", **parts):
    return Breakdown(name, sum(parts.values()), parts, facts, note)


def breakdown_report(name="tensor 2, data 4", layouts=2):
    """Layouts of a job, the first of which takes 8 s, and one better machine."""
    first = breakdown(name, name, computing=6, bubble=0.5, tensor=1, data=0.25, optimizer=0.25)
    others = [breakdown(name, computing=5, context=2, expert=1, pipeline=1 + k) for k in range(1, layouts)]
    faster = breakdown("GPUs twice as fast", "", "1.60x", computing=3, bubble=0.5, tensor=1, data=0.25, optimizer=0.25)
    charts = (BreakdownChart("Layouts", "As long.", (first, *others)), BreakdownChart("Machines", "", (first, faster)))
    told = (Table.of("table", {"layout": None, "step": format_seconds}, [(name, 8.0)]),)
    return Report((ModelReport("job", told=told, asides=("the efficiency is a default",), breakdowns=charts),))


def sweep_rows(workers=(4, 8), links=(1e9, 1e10), fabrics=("parameter-server", "ring"), name="toy"):
    """The parameter server takes as many times as long as there are workers; a ring, as long as for one."""
    found, usual = [], {axis.field: axis.usual for axis in SWEPT} | {"servers": 0, "latency_s": 0.0}
    for fabric in fabrics:
        for bps in links:
            for n in workers:
                seconds = 1e9 / bps * (n if fabric == fabrics[0] else 1)
                more = {"iteration_s": seconds, "speedup": n * 1e9 / bps / seconds, "utilization": 0.5}
                found.append(
                    SweepRow(
                        workload=name,
                        fabric=fabric,
                        scheduler="plain",
                        fidelity="transfers",
                        axes=usual | {"workers": n, "bandwidth_bps": bps},
                        **more,
                    )
                )
    return found
