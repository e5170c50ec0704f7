"""TicTac: Accelerating Distributed Deep Learning with Communication Scheduling (Hashemi et al., SysML 2019).

The paper's section 6 describes two settings. *env_G* has one K80 per worker on Azure with 10 Gbps, and *env_C* has CPUs
on 1 GbE. Whole variables are assigned to servers in turn. The baseline pulls the variables in a random order. Training
is timed from barrier to barrier, and inference from the first pull to the end of the forward pass. Nothing is fitted.
The paper prints no compute time for env_C: a forward pass is assumed to take as long as its transfers, because the
order matters most then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from legato import zoo
from legato.core.cluster import PARAMETER_SERVER, Cluster
from legato.core.plan import Plan
from legato.core.timeline import overlap_coefficient
from legato.core.workload import Workload
from legato.lab.hypothetical import scale_compute
from legato.lab.papers.result import Cell, Figure, Paper, Part, claim
from legato.schedule import schedule
from legato.simulator.flow import Network, simulate_flow
from legato.simulator.flow.fabrics import fabric

__all__ = ["PAPER"]

_GPU_BPS, _CPU_BPS, _LATENCY_S = 10e9, 1e9, 50e-6
#: Table 1: parameters, MiB, batch size, and the ops of training (Fig. 12's axis).
_TABLE_1 = {
    "alexnet-v2": (16, 191.89, 512, 483),
    "inception-v1": (116, 25.24, 128, 2246),
    "inception-v2": (141, 42.64, 128, 2706),
    "inception-v3": (196, 103.54, 32, 3672),
    "resnet-v1-50": (108, 97.39, 32, 2096),
    "resnet-v1-101": (210, 169.74, 64, 3898),
    "resnet-v2-50": (125, 97.45, 64, 2813),
    "resnet-v2-101": (244, 169.86, 32, 5380),
    "vgg-16": (32, 527.79, 32, 758),
    "vgg-19": (38, 548.05, 32, 857),
}
_WORKERS, _SERVERS, _BATCHES = (4, 8, 16), (1, 2, 4), (0.5, 1.0, 2.0)
#: The seeds of the random orders; the baseline is the mean over these orders.
_SEEDS = range(4)
#: The number of runs of section 6.2; the paper has 1,000.
_RUNS = 200
#: How much computation varies between runs (sigma of a lognormal factor): the same authors find "less than 3% error in
#: the worst case" (Caramel, 4.1). Without noise, N and C are constant, so the overlap coefficient is always a linear
#: function of T.
_NOISE = 0.01
_KINDS = ("training", "inference")


@cache
def _job(model: str, batch: float) -> Workload:
    return zoo.workload(model, device="k80", batch_size=round(zoo.model(model).batch_size * batch))


@cache
def _seconds(
    model: str, batch: float, workers: int, servers: int, scheduler: str, seed: int = 0
) -> tuple[float, float]:
    """Return the seconds of an iteration of training, and of inference."""
    job, cluster = _job(model, batch), _cluster(workers, servers, _GPU_BPS)
    return _simulate(job, cluster, _plan(scheduler, job, cluster, seed))[:2]


def _cluster(workers: int, servers: int, bandwidth_bps: float) -> Cluster:
    return Cluster.derive(
        workers, bandwidth_bps, _LATENCY_S, servers=servers, collectives=[PARAMETER_SERVER], send_s=0.0
    )


def _plan(scheduler: str, job: Workload, cluster: Cluster, seed: int) -> Plan:
    options: dict[str, Any] = {"seed": seed} if scheduler == "random" else {}
    return schedule(scheduler, job, cluster, **options)


def _simulate(
    job: Workload, cluster: Cluster, plan: Plan, seed: int = 0, noise: float = 0.0
) -> tuple[float, float, float]:
    """Return the seconds of training and of inference, and the overlap coefficient of inference on the first worker."""
    network = Network(
        workers=cluster.workers,
        bandwidth_bps=cluster.bandwidth_bps or _GPU_BPS,
        latency_s=_LATENCY_S,
        send_s=0.0,
        jitter=noise,
        seed=seed,
    )
    servers = fabric(PARAMETER_SERVER, servers=cluster.servers)
    done = simulate_flow(job, plan, servers, network)
    inference_s = float(done.compute.op_times("forward", 0)[1].max())
    compute_s = sum(op.duration_s for op in job.ops if op.phase == "forward") * float(network.slowdown(1)[0, 0])
    # All pulls are requested at the start, so the network is busy until the last byte arrives.
    network_s = float(done.received_s[0].max())
    return done.iteration_s, inference_s, overlap_coefficient(network_s, compute_s, inference_s)


def _gain(kind: str, model: str, batch: float, workers: int, servers: int, scheduler: str = "tic") -> float:
    """Return the throughput divided by the mean throughput of the random orders."""
    k = _KINDS.index(kind)
    baseline = [_seconds(model, batch, workers, servers, "random", seed)[k] for seed in _SEEDS]
    return sum(baseline) / len(baseline) / _seconds(model, batch, workers, servers, scheduler)[k]


def _models() -> Part:
    cells = []
    for model, (count, mib, batch, _) in _TABLE_1.items():
        layers = zoo.model(model)
        cells.append(Cell("Table 1", model, "#Par", count, len(layers.trainable)))
        cells.append(Cell("Table 1", model, "Total Par Size (MiB)", mib, layers.nbytes / 2**20))
        cells.append(Cell("Table 1", model, "Batch Size", batch, layers.batch_size))
    return Part(tuple(cells))


def _scaling(label: str, title: str, axis: str, settings: dict[float, tuple[float, int, int]]) -> Callable[[], Part]:
    """Compute TIC's throughput divided by the throughput of random orders (Figs. 9 to 11).

    `settings` maps x to (batch, workers, servers).
    """

    def part() -> Part:
        gains = {
            (kind, model): [_gain(kind, model, *setting) for setting in settings.values()]
            for kind in _KINDS
            for model in _TABLE_1
        }
        cells = []
        for kind in _KINDS:
            found = [gain for model in _TABLE_1 for gain in gains[kind, model]]
            if label == "Fig. 9" and kind == "training":
                cells.append(Cell(label, kind, "greatest gain of ten models", 1.377, max(found)))
                cells.append(Cell(label, kind, "greatest loss of ten models", 1 - 0.042, min(found)))
            else:
                cells.append(Cell(label, kind, "greatest gain of ten models", None, max(found)))
            cells.append(claim(label, kind, "no more than 4.2% slower than random", [gain > 0.958 for gain in found]))
        more = [max(gains["inference", model]) >= max(gains["training", model]) for model in _TABLE_1]
        cells.append(claim(label, "ten models", "inference gains more than training", more))
        figures = tuple(
            Figure(
                label,
                f"{title}: {kind}",
                axis,
                "throughput over random",
                {model: (list(settings), gains[kind, model]) for model in _TABLE_1},
            )
            for kind in _KINDS
        )
        return Part(tuple(cells), figures)

    return part


def _sizes() -> Part:
    """Compute how the gain depends on the size of the graph (Fig. 12)."""
    models = sorted(_TABLE_1, key=lambda model: _TABLE_1[model][3])
    ops = [float(_TABLE_1[model][3]) for model in models]
    cells, curves = [], {}
    for kind in _KINDS:
        gains = [_gain(kind, model, 1.0, 8, 2) for model in models]
        correlation = float(np.corrcoef(ops, gains)[0, 1])
        cells.append(claim("Fig. 12", kind, "larger graphs gain more (positive correlation)", [correlation > 0]))
        curves[kind] = (ops, gains)
    title = "8 workers, 2 servers"
    figure = Figure("Fig. 12", title, "ops (Table 1)", "throughput over random", curves, mode="markers")
    return Part(tuple(cells), (figure,))


@cache
def _runs() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [run, (seconds, overlap)] of inference with Inception v2 in env_C, for random orders and for TAC."""
    job = _job("inception-v2", 1.0)
    forward_s = sum(op.duration_s for op in job.ops if op.phase == "forward")
    job = scale_compute(job, forward_s / (job.nbytes * 8 / _CPU_BPS))
    cluster = _cluster(1, 1, _CPU_BPS)
    random = [_simulate(job, cluster, _plan("random", job, cluster, k), k, _NOISE)[1:] for k in range(_RUNS)]
    best = _plan("tac", job, cluster, 0)
    return np.array(random), np.array([_simulate(job, cluster, best, k, _NOISE)[1:] for k in range(_RUNS)])


def _regression() -> Part:
    """Compute how the step time depends on overlap, and the consistency of step times (Figs. 13a and 13b)."""
    (seconds, overlap), (tac_s, tac_overlap) = (found.T for found in _runs())
    r2 = float(np.corrcoef(seconds, overlap)[0, 1] ** 2)
    normalized = {"random": np.sort(tac_s.min() / seconds), "TAC": np.sort(tac_s.min() / tac_s)}
    cells = (
        Cell("Fig. 13", "inception-v2, random", "R2 of step time on overlap", 0.98, r2),
        *(
            Cell("Fig. 13", name, "95th percentile of normalized step", value, ours)
            for name, value in (("random", 0.63403), ("TAC", 0.99825))
            for ours in [float(np.quantile(normalized[name], 0.95))]
        ),
        claim("Fig. 13", "TAC", "faster than every random order", [bool(step > tac_s.max()) for step in seconds]),
        Cell("Fig. 13", "TAC", "overlap coefficient (approaching 1)", 1.0, float(tac_overlap.mean())),
    )
    curves = {
        "random": (overlap.tolist(), seconds.tolist()),
        "TAC": (tac_overlap.tolist(), tac_s.tolist()),
    }
    shares = ((np.arange(_RUNS) + 1) / _RUNS).tolist()
    cdf = {name: (values.tolist(), shares) for name, values in normalized.items()}
    figures = (
        Figure("Fig. 13a", "Inception v2 in env_C", "overlap coefficient", "s a step", curves, mode="markers"),
        Figure("Fig. 13b", "Consistency", "normalized step", "share of runs", cdf),
    )
    return Part(cells, figures)


def _stragglers() -> Part:
    """Compute how long workers wait for the slowest one, with random orders per worker or TIC's order (Fig. 14)."""
    cells, waits = [], []
    for model in _TABLE_1:
        times = [_seconds(model, 1.0, 4, 1, "random", seed)[1] for seed in range(8)]
        waits.append((max(times) - min(times)) / max(times))
    cells.append(claim("Fig. 14", "ten models, inference", "TIC reduces the straggler effect", [w > 0 for w in waits]))
    cells.append(Cell("Fig. 14", "random, inference", "greatest straggler effect (> 50% of the time)", 0.5, max(waits)))
    curves = {"random": (list(_TABLE_1), waits), "TIC": (list(_TABLE_1), [0.0] * len(waits))}
    figure = Figure("Fig. 14", "Longest wait over iteration time, inference", "model", "share", curves)
    return Part(tuple(cells), (figure,))


def _tic_and_tac() -> Part:
    """Compute the throughput of TIC and of TAC (Fig. 15), in env_G instead of the paper's env_C."""
    tic, tac = ([_gain("inference", model, 1.0, 4, 1, name) for model in _TABLE_1] for name in ("tic", "tac"))
    near = [abs(a / b - 1) < 0.05 for a, b in zip(tic, tac, strict=True)]
    curves = {"TIC": (list(_TABLE_1), tic), "TAC": (list(_TABLE_1), tac)}
    figure = Figure("Fig. 15", "Inference, 4 workers", "model", "throughput over random", curves)
    return Part((claim("Fig. 15", "ten models", "TIC comparable to TAC (5%)", near),), (figure,))


PAPER = Paper(
    name="tictac",
    title="TicTac: Accelerating Distributed Deep Learning with Communication Scheduling",
    parts={
        "Table 1": _models,
        "Fig. 9": _scaling("Fig. 9", "Servers : workers = 1 : 4", "workers", {n: (1.0, n, n // 4) for n in _WORKERS}),
        "Fig. 10": _scaling("Fig. 10", "8 workers", "servers", {k: (1.0, 8, k) for k in _SERVERS}),
        "Fig. 11": _scaling("Fig. 11", "4 workers, 1 server", "x batch size", {b: (b, 4, 1) for b in _BATCHES}),
        "Fig. 12": _sizes,
        "Fig. 13": _regression,
        "Fig. 14": _stragglers,
        "Fig. 15": _tic_and_tac,
    },
    constants={
        f"env_G: {_GPU_BPS / 1e9:g} Gbps, {_LATENCY_S * 1e6:g} us per hop": "assumed; Caramel names the bandwidth",
        "env_C: a forward pass takes as long as its transfers": "assumed; no compute time is printed",
        f"Fig. 13, sigma of computation: {_NOISE:.0%}": "from Caramel, 4.1: less than 3% error in the worst case",
    },
    left_out={
        "Table 1, #Ops": "nodes of a TensorFlow graph, with its constants and summaries; legato's ops are kernels",
        "Figs. 9 to 12, values": "printed only as pictures; the extremes and trends in the text are compared",
        "Fig. 8": "training InceptionV3 on ImageNet: an order of transfers changes no value",
        "Fig. 13, the noise of their runs": "not printed; a sigma of 1% of computation is assumed, which determines R2",
        "Fig. 14, per-worker orders": (
            "a plan has one order for all workers; the spread of times over different orders is used instead"
        ),
        "Fig. 15 in env_C": "no compute time of its CPUs is printed; compared in env_G",
    },
)
