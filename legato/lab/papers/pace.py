"""Preemptive All-reduce Scheduling for Expediting Distributed DNN Training (Bao, Peng, Chen, Wu, INFOCOM 2020).

The setting is from section VI: one GTX 1080Ti per worker, ring all-reduce, and
Horovod with its defaults of that time (a cycle of 5 ms, fusion up to 64 MiB). The
paper does not print the start-up of an all-reduce; a latency of 30 us per hop is assumed
for all models and bandwidths. Of TicTac, only the order of transfers is used: tensors are all-reduced whole, without
fusion, in the order in which they are read.

The compute time of VGG-16 is fitted (`VGG_SPEEDUP`). By the zoo's FLOPs, a batch of 64 for VGG-16 takes 1.09 s, which
is longer than the communication at any bandwidth of Fig. 9. But the largest published gain is at 12 Gbps, which
suggests that communication takes as long as computation there. This is true if computation takes about half of 1.09 s.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from legato import zoo
from legato.core.cluster import Cluster
from legato.core.workload import Workload
from legato.lab.hypothetical import scale_compute
from legato.lab.papers.result import Cell, Figure, Paper, Part, claim
from legato.schedule import schedule
from legato.simulator.collective import iteration_time, simulate

__all__ = ["PAPER", "VGG_SPEEDUP"]

#: The only fitted constant: the speed of VGG-16 on a GTX 1080Ti over half the peak (Winograd convolutions are faster).
VGG_SPEEDUP = 2.0
_LATENCY_S = 30e-6
#: Table II: millions of parameters, all-reduce operators.
_TABLE_2 = {
    "vgg-16": (138.4, 32),
    "resnet-v2-50-mxnet": (25.5, 157),
    "seq2seq": (67.2, 32),
    "transformer": (91.8, 164),
}
_LABELS = {"vgg-16": "VGG16", "resnet-v2-50-mxnet": "ResNet50", "seq2seq": "Seq2Seq", "transformer": "Transformer"}
#: Section VI.B: samples, or tokens in sentences of 32 words.
_BATCH = {"vgg-16": 64, "resnet-v2-50-mxnet": 32, "seq2seq": 4096 // 32, "transformer": 2048 // 32}
_SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "WFBP": ("fifo", {}),
    "Horovod": ("horovod", {"fusion_threshold_bytes": 64 * 2**20, "cycle_time_s": 5e-3}),
    "TicTac": ("p3", {"slice_bytes": 2**40}),
    "PACE": ("pace", {}),
}
#: Section VI.C: the range of PACE's gain at 10 Gbps over the four models.
_GAINS_10G = {"WFBP": (0.20, 0.36), "Horovod": (0.03, 0.32), "TicTac": (0.13, 0.21)}
#: Section VI.D: PACE's gain over Horovod on 12 workers: model, Gbps, gain.
_GAINS_12_WORKERS = [
    ("vgg-16", 12, 0.32),
    ("transformer", 14, 0.27),
    ("resnet-v2-50-mxnet", 6, 0.32),
    ("vgg-16", 20, 0.13),
    ("transformer", 20, 0.09),
    ("resnet-v2-50-mxnet", 20, 0.0),
    ("seq2seq", 20, 0.0),
]
_WORKERS = (4, 8, 12, 16)
_GBPS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 25)


@cache
def _job(model: str) -> Workload:
    job = zoo.workload(model, batch_size=_BATCH[model], device="gtx-1080ti")
    return scale_compute(job, VGG_SPEEDUP) if model == "vgg-16" else job


def _cluster(workers: int, gbps: float) -> Cluster:
    return Cluster.derive(workers, gbps * 1e9, _LATENCY_S, collectives=["ring"])


@cache
def _iteration_s(model: str, workers: int, gbps: float, name: str) -> float:
    job, cluster = _job(model), _cluster(workers, gbps)
    scheduler, options = _SCHEDULERS[name]
    return iteration_time(job, schedule(scheduler, job, cluster, **options), cluster)


def _gain(model: str, workers: int, gbps: float, over: str) -> float:
    return _iteration_s(model, workers, gbps, over) / _iteration_s(model, workers, gbps, "PACE")


def _models() -> Part:
    cells = []
    for model, (millions, operators) in _TABLE_2.items():
        network = zoo.model(model)
        cells.append(Cell("Table 2", _LABELS[model], "parameters (million)", millions, network.parameters / 1e6))
        cells.append(Cell("Table 2", _LABELS[model], "all-reduce operators", operators, len(network.trainable)))
    return Part(tuple(cells))


def _workers() -> Part:
    """Compute the total speed by the number of workers at 10 Gbps (Fig. 8)."""
    cells = []
    for name, bounds in _GAINS_10G.items():
        gains = [_gain(model, 16, 10, name) for model in _TABLE_2]
        for column, gain, ours in zip(("least", "greatest"), bounds, (min(gains), max(gains)), strict=True):
            cells.append(Cell("Fig. 8", f"speed over {name}, 16 workers", f"{column} of four models", 1 + gain, ours))
    for model, label in _LABELS.items():
        speeds = [n / _iteration_s(model, n, 10, "PACE") for n in _WORKERS]
        linear = [speed / n > 0.8 * speeds[0] / _WORKERS[0] for n, speed in zip(_WORKERS, speeds, strict=True)]
        cells.append(claim("Fig. 8", label, "PACE scales linearly (within 20% of 4 workers)", linear))
        for name in _GAINS_10G:
            ahead = [_gain(model, n, 10, name) > 0.999 for n in _WORKERS]
            cells.append(claim("Fig. 8", label, f"PACE not behind {name}, 4 to 16 workers", ahead))
    figures = [
        Figure(
            "Fig. 8",
            f"{label} at 10 Gbps",
            "workers",
            "batches/s",
            {name: (_WORKERS, [n / _iteration_s(model, n, 10, name) for n in _WORKERS]) for name in _SCHEDULERS},
        )
        for model, label in _LABELS.items()
    ]
    return Part(tuple(cells), tuple(figures))


def _bandwidths() -> Part:
    """Compute the speed of 12 workers by bandwidth (Fig. 9)."""
    cells = [
        Cell("Fig. 9", f"{_LABELS[model]} at {gbps} Gbps", "speed over Horovod", 1 + gain, ours)
        for model, gbps, gain in _GAINS_12_WORKERS
        for ours in [_gain(model, 12, gbps, "Horovod")]
    ]
    for model, label in _LABELS.items():
        similar = [_gain(model, 12, 0.25, name) < 1.05 for name in _GAINS_10G]
        cells.append(claim("Fig. 9", label, "all alike (5%) at a very low bandwidth (0.25 Gbps)", similar))
    figures = [
        Figure(
            "Fig. 9",
            f"{label} on 12 workers",
            "Gbps",
            "batches/s",
            {name: (_GBPS, [12 / _iteration_s(model, 12, gbps, name) for gbps in _GBPS]) for name in _SCHEDULERS},
        )
        for model, label in _LABELS.items()
    ]
    return Part(tuple(cells), tuple(figures))


def _usage() -> Part:
    """Compute the share of an iteration during which the network is busy, for 12 workers at 10 Gbps (Fig. 10)."""
    shares: dict[str, list[float]] = {"PACE": [], "Horovod": []}
    cluster = _cluster(12, 10)
    for model in _TABLE_2:
        for name, found in shares.items():
            scheduler, options = _SCHEDULERS[name]
            line = simulate(_job(model), schedule(scheduler, _job(model), cluster, **options), cluster)
            found.append(line.communication_s / line.iteration_s)
    more = [ours > theirs for ours, theirs in zip(shares["PACE"], shares["Horovod"], strict=True)]
    labels = list(_LABELS.values())
    cell = claim("Fig. 10", "the four models", "network busier under PACE than under Horovod", more)
    cells = [
        Cell("Fig. 10", label, "share of the iteration in which PACE sends", None, share)
        for label, share in zip(labels, shares["PACE"], strict=True)
    ]
    curves = {name: (labels, found) for name, found in shares.items()}
    figure = Figure("Fig. 10", "Network usage, 12 workers at 10 Gbps", "model", "share of time busy", curves)
    return Part((cell, *cells), (figure,))


PAPER = Paper(
    name="pace",
    title="PACE: Preemptive All-reduce Scheduling for Expediting Distributed DNN Training",
    parts={"Table 2": _models, "Fig. 8": _workers, "Fig. 9": _bandwidths, "Fig. 10": _usage},
    constants={
        f"VGG16, computation: {VGG_SPEEDUP:g} x its FLOPs' speed": "fitted to the bandwidth of its largest gain",
        f"latency per hop: {_LATENCY_S * 1e6:g} us": "assumed",
        "Horovod: a cycle of 5 ms, fusion up to 64 MiB": "its defaults at the time",
    },
    left_out={
        "Table II, computation operators": "nodes of an MXNet graph, in which one node gives both gradients of a layer",
        "Figs. 3 and 4": "a benchmark of their cluster, printed only as a picture; tensor sizes are Table II's",
        "Fig. 10, traffic every 5 ms": "a measurement, printed only as a picture; the share of busy time is compared",
        "absolute speeds of Figs. 8 and 9": "printed only as pictures; the gains in the text are compared",
        "ResNet50 above 10 Gbps": (
            "in the paper's model, partitioning a tensor costs nothing; here every partition has a start-up, as on a "
            "network, so PACE's many partitions make it slower than Horovod if communication is short"
        ),
    },
)
