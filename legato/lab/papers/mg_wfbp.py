"""MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms (Shi, Chu, Li, INFOCOM 2019).

Nothing is fitted. The network is the one that the paper measured: 10GbE, on which a ring all-reduce between N nodes has
a start-up of 2 (N - 1) x 45.26 us. (Section V.A has 90.52 us for 2 nodes, 271.56 us for 4 and 633.64 us for 8.) The
paper prints no compute times; ours are for one processor of a K80 at the zoo's efficiency. A message of WFBP has the
gradients of one layer: its weights and biases, and for a convolution also the parameters of its normalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import msgspec

from legato import zoo
from legato.core.cluster import Cluster
from legato.core.workload import Op, Tensor, Workload
from legato.lab.papers.result import Cell, Figure, Paper, Part, claim
from legato.schedule import schedule
from legato.simulator.collective import iteration_time
from legato.simulator.flow import Network, simulate_flow

__all__ = ["PAPER"]

_BANDWIDTH_BPS = 10e9
#: Section V.A: start-up of an all-reduce in seconds, by the number of nodes.
_STARTUP_S = {2: 90.52e-6, 4: 271.56e-6, 8: 633.64e-6}
_LATENCY_S = _STARTUP_S[2] / 2
#: Section I: time of an all-reduce on 8 nodes in seconds, by its bytes.
_ALL_REDUCE_S = {200e3: 1.5e-3, 400e3: 1.8e-3}
#: Section V: batch size per GPU.
_MODELS = {"googlenet": 64, "resnet-v1-50-caffe": 32}
_LABELS = {"googlenet": "GoogleNet", "resnet-v1-50-caffe": "ResNet-50"}
_SCHEDULERS = {"WFBP": "fifo", "SyncEASGD": "single", "MG-WFBP": "mg-wfbp"}
#: Sections V.B and V.C: MG-WFBP's speedup over WFBP and SyncEASGD. For 8 nodes, the text has the same for both models.
_SPEEDUPS = {
    8: {"googlenet": (1.2, 1.36), "resnet-v1-50-caffe": (1.2, 1.36)},
    64: {"googlenet": (1.78, 1.35), "resnet-v1-50-caffe": (1.75, 1.45)},
}
_NODES = (4, 8, 16, 32, 64)


def _cost_table() -> Part:
    """Compute Table II on the paper's 8 nodes by simulating every transfer; adding up takes 0.1 ns per byte."""
    n, alpha, beta, gamma = 8, _LATENCY_S, 8 / _BANDWIDTH_BPS, 1e-10
    log = math.log2(n)
    published: dict[str, tuple[float, float]] = {
        "tree": (2 * alpha * log, (2 * beta + gamma) * log),
        "recursive-doubling": (alpha * log, (beta + gamma) * log),
        "halving-doubling": (2 * alpha * log, 2 * beta - (2 * beta + gamma) / n + gamma),
        "ring": (2 * (n - 1) * alpha, 2 * (n - 1) / n * beta + (n - 1) / n * gamma),
    }
    network = Network(workers=n, bandwidth_bps=_BANDWIDTH_BPS, latency_s=alpha, reduce_s_per_byte=gamma)
    cells = []
    for name, printed in published.items():
        for column, value, ours in zip("ab", printed, _line(name, network), strict=True):
            cells.append(Cell("Table 2", name, f"{column} (s, s per byte)", value, ours))
    return Part(tuple(cells))


def _line(name: str, network: Network) -> tuple[float, float]:
    """Return the start-up and the time per byte of an all-reduce, from simulations of two sizes."""
    ops = (Op("forward", "forward", 0.0), Op("backward", "backward", 0.0, (0,)))
    sizes = (2**20, 2**24)
    small_s, large_s = (
        simulate_flow(Workload("one", ops, (Tensor("w", nbytes, 1, (0,)),)), None, name, network).iteration_s
        for nbytes in sizes
    )
    slope = (large_s - small_s) / (sizes[1] - sizes[0])
    return small_s - slope * sizes[0], slope


@cache
def _job(model: str) -> Workload:
    """Return the model with one tensor per learnable layer, because the paper counts messages by layer."""
    job = zoo.workload(model, batch_size=_MODELS[model], device="k80")
    layers: dict[str, list[Tensor]] = {}
    for tensor in job.tensors:
        layers.setdefault(tensor.name.rsplit("/", 1)[0].removesuffix("/bn"), []).append(tensor)
    merged = [
        Tensor(
            name,
            sum(tensor.nbytes for tensor in parts),
            max(tensor.ready_after for tensor in parts),
            tuple(sorted({reader for tensor in parts for reader in tensor.readers})),
        )
        for name, parts in layers.items()
    ]
    merged.sort(key=lambda tensor: tensor.ready_after)
    return msgspec.structs.replace(job, tensors=tuple(merged))


def _cluster(nodes: int) -> Cluster:
    return Cluster.derive(nodes, _BANDWIDTH_BPS, _LATENCY_S, collectives=["ring"])


@cache
def _iteration_s(model: str, nodes: int, scheduler: str) -> float:
    job, cluster = _job(model), _cluster(nodes)
    return iteration_time(job, schedule(scheduler, job, cluster), cluster)


def _efficiency(model: str, nodes: int, scheduler: str) -> float:
    return _job(model).compute_s / _iteration_s(model, nodes, scheduler)


def _network() -> Part:
    """Compute the sizes of gradients and the times of an all-reduce (Figs. 5a and 5b)."""
    cells = [
        Cell("Fig. 5", f"start-up on {n} nodes", "s", seconds, _cluster(n).cost().alpha_s)
        for n, seconds in _STARTUP_S.items()
    ]
    cells += [
        Cell("Fig. 5", f"all-reduce of {nbytes / 1e3:.0f} KB on 8 nodes (section I)", "s", seconds, ours)
        for nbytes, seconds in _ALL_REDUCE_S.items()
        for ours in [_cluster(8).cost().cost(nbytes)]
    ]
    for model in _MODELS:
        sizes = [tensor.nbytes / 4 for tensor in _job(model).tensors]
        inside = [1e2 <= size <= 5e6 for size in sizes]
        cells.append(claim("Fig. 5", _LABELS[model], "parameters of a layer between 1e2 and 5e6", inside))
    sizes = [4 * 10.0 ** (e / 4) for e in range(8, 29)]
    times = {f"{n} nodes": (sizes, [_cluster(n).cost().cost(size) for size in sizes]) for n in _STARTUP_S}
    counts = {}
    for model in _MODELS:
        ordered = sorted(tensor.nbytes / 4 for tensor in _job(model).tensors)
        counts[_LABELS[model]] = (ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
    return Part(
        tuple(cells),
        (
            Figure("Fig. 5a", "Layer-wise gradients", "parameters", "share of layers", counts, log_x=True),
            Figure("Fig. 5b", "All-reduce on 10GbE", "bytes", "seconds", times, log_x=True, log_y=True),
        ),
    )


def _scaling(figure: str, model: str, nodes: tuple[int, ...]) -> Figure:
    curves = {
        name: (nodes, [n * _efficiency(model, n, scheduler) for n in nodes]) for name, scheduler in _SCHEDULERS.items()
    }
    curves["linear"] = (nodes, [float(n) for n in nodes])
    return Figure(figure, f"{_LABELS[model]} on a K80 cluster with 10GbE", "nodes", "speedup", curves)


def _speedups(figure: str, model: str, nodes: int) -> list[Cell]:
    ours = _iteration_s(model, nodes, "mg-wfbp")
    row = f"{_LABELS[model]} on {nodes} nodes"
    return [
        Cell(figure, row, f"MG-WFBP over {name}", published, _iteration_s(model, nodes, _SCHEDULERS[name]) / ours)
        for name, published in zip(("WFBP", "SyncEASGD"), _SPEEDUPS[nodes][model], strict=True)
    ]


def _measured(figure: str, model: str) -> Callable[[], Part]:
    """Compute the speedups on 2, 4 and 8 nodes, which the paper measured (Figs. 6 and 7)."""

    def part() -> Part:
        nodes = (2, 4, 8)
        linear = [_efficiency(model, n, "fifo") > 0.9 for n in (2, 4)]
        close = [_efficiency(model, 8, "mg-wfbp") > 0.9]
        cells = [
            *_speedups(figure, model, 8),
            claim(figure, _LABELS[model], "WFBP near linear on 2 and 4 nodes", linear),
            claim(figure, _LABELS[model], "MG-WFBP close to linear on 8 nodes", close),
            claim(figure, _LABELS[model], "MG-WFBP is the fastest", _fastest(model, nodes)),
        ]
        return Part(tuple(cells), (_scaling(figure, model, nodes),))

    return part


def _fastest(model: str, nodes: tuple[int, ...]) -> list[bool]:
    times = [{name: _iteration_s(model, n, scheduler) for name, scheduler in _SCHEDULERS.items()} for n in nodes]
    return [row["MG-WFBP"] <= min(row.values()) * (1 + 1e-9) for row in times]


def _breakdown() -> Part:
    """Compute exposed communication (Fig. 8)."""
    cells, figures = [], []
    for model in _MODELS:
        exposed = {
            name: [_iteration_s(model, n, scheduler) - _job(model).compute_s for n in _STARTUP_S]
            for name, scheduler in _SCHEDULERS.items()
        }
        grows = [a < b for a, b in pairwise(exposed["SyncEASGD"])]
        small = [seconds < 0.1 * _job(model).compute_s for seconds in exposed["MG-WFBP"]]
        cells.append(claim("Fig. 8", _LABELS[model], "SyncEASGD's exposed communication grows with nodes", grows))
        cells.append(claim("Fig. 8", _LABELS[model], "MG-WFBP's is very small up to 8 nodes", small))
        nodes = tuple(_STARTUP_S)
        curves = {name: (nodes, seconds) for name, seconds in exposed.items()}
        title = f"{_LABELS[model]}: exposed communication (computation {_job(model).compute_s:.3f} s)"
        figures.append(Figure("Fig. 8", title, "nodes", "seconds", curves))
    return Part(tuple(cells), tuple(figures))


def _simulated() -> Part:
    """Compute the speedups on 4 to 64 nodes, which the paper simulated (Fig. 9)."""
    cells: list[Cell] = []
    for model in _MODELS:
        cells += _speedups("Fig. 9", model, 64)
        early = [_iteration_s(model, n, "fifo") < _iteration_s(model, n, "single") for n in (4, 8, 16)]
        late = [_iteration_s(model, 64, "fifo") > _iteration_s(model, 64, "single")]
        cells.append(claim("Fig. 9", _LABELS[model], "WFBP ahead of SyncEASGD on 4 to 16 nodes", early))
        cells.append(claim("Fig. 9", _LABELS[model], "slower than it on 64: the lines cross", late))
        cells.append(claim("Fig. 9", _LABELS[model], "MG-WFBP is the fastest", _fastest(model, _NODES)))
    for name in ("WFBP", "SyncEASGD"):
        ours = _efficiency("resnet-v1-50-caffe", 64, _SCHEDULERS[name])
        cells.append(Cell("Fig. 9", f"ResNet-50 on 64 nodes, {name}", "scaling efficiency", 0.55, ours))
    ours = _efficiency("resnet-v1-50-caffe", 64, "mg-wfbp")
    cells.append(Cell("Fig. 9", "ResNet-50 on 64 nodes, MG-WFBP", "scaling efficiency (almost linear)", 1.0, ours))
    return Part(tuple(cells), tuple(_scaling("Fig. 9", model, _NODES) for model in _MODELS))


PAPER = Paper(
    name="mg-wfbp",
    title="MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms",
    parts={
        "Table 2": _cost_table,
        "Fig. 5": _network,
        "Fig. 6": _measured("Fig. 6", "googlenet"),
        "Fig. 7": _measured("Fig. 7", "resnet-v1-50-caffe"),
        "Fig. 8": _breakdown,
        "Fig. 9": _simulated,
    },
    constants={"compute times": "a K80's at the zoo's efficiency; nothing is fitted"},
    left_out={
        "Fig. 5 (b), measured points": "a measurement of their cluster, printed only as a picture",
        "Figs. 6 and 7, TensorFlow": "a measurement of TensorFlow 1.3's parameter servers; no number is printed",
        "Fig. 6 and 7, the gain over WFBP on 8 nodes": (
            "with the start-up that the paper measured (633.64 us), the backward pass hides all messages of WFBP but "
            "the last one; the published 1.2x needs the 1.2 ms that section I implies, and overheads of B-Caffe"
        ),
        "Convergence (13 epochs)": "merging does not change what is computed; no accuracy is printed",
    },
)
