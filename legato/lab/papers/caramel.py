"""Caramel: Accelerating Decentralized Distributed Deep Learning with Computation Scheduling (Hashemi et al., 2020).

The setting is from section 6: one K80 per worker, 10 Gbps, 8 and 16 workers.
Caramel runs on the shuffle. Parameter servers are simulated transfer by transfer
with TensorFlow's round robin and random order. Horovod has its defaults of that
time (a cycle of 5 ms, fusion up to 64 MiB). In all systems, the latency is assumed to be 100 us per hop, and the sends
of a worker do not wait for each other.

At the full 10 Gbps, all of Horovod's communication would be hidden, unlike in the paper. So one constant is fitted for
each of two systems, and none for a model. `HOROVOD_BPS` is the bandwidth that Horovod's MPI achieves, fitted to
Horovod's 68% utilization on Inception-v3 with 8 workers (section 6.2). For the stages of Figs. 11 and 12, `SHUFFLE_BPS`
is the bandwidth that TensorFlow's transfers achieve, fitted to the utilization of 82% at the first stage. All other
values follow from these constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from legato import zoo
from legato.core.cluster import PARAMETER_SERVER, Cluster
from legato.core.workload import Workload
from legato.lab.papers.result import Cell, Figure, Paper, Part, claim
from legato.schedule import schedule
from legato.schedule.published.caramel import MAX_DEPTH
from legato.simulator.collective import simulate
from legato.simulator.flow import Network, simulate_flow
from legato.simulator.flow.fabrics import fabric
from legato.simulator.pipelining import pipelined_s

__all__ = ["HOROVOD_BPS", "MODELS", "PAPER", "SHUFFLE_BPS", "STAGES", "WORKERS", "stages", "without"]

HOROVOD_BPS = 2.67e9
SHUFFLE_BPS = 3.19e9
_BANDWIDTH_BPS, _LATENCY_S = 10e9, 100e-6
#: The assumption for the depth (Fig. 13): adding takes as long as both transfers, so that pipelining gains most.
_REDUCE_S_PER_BYTE = 2 * 8 / _BANDWIDTH_BPS
#: Section 6: parameters, MiB.
MODELS = {
    "alexnet-v2": (16, 191.9),
    "inception-v3": (196, 103.5),
    "resnet-v1-50": (108, 97.4),
    "resnet-v2-152": (363, 229.5),
    "vgg-16": (32, 527.8),
}
WORKERS = (8, 16)
_HOROVOD = {"fusion_threshold_bytes": 64 * 2**20, "cycle_time_s": 5e-3}
#: Section 6.2, Fig. 11: utilization on Inception-v3 with 8 workers, as parts of Caramel are added one by one.
STAGES = {"Horovod": 0.68, "adaptive all-reduce": 0.82, "+ batching": 0.86, "+ transfer boundaries": 0.92}
_SYSTEMS = ("Caramel", "Horovod", "PS = workers", "PS = workers/2")


class _Run(NamedTuple):
    iteration_s: float
    overlap: float
    communication_s: float


@cache
def _job(model: str) -> Workload:
    return zoo.workload(model, device="k80")


@cache
def _run(model: str, system: str, workers: int) -> _Run:
    job = _job(model)
    if system.startswith("PS"):
        servers = workers if system == "PS = workers" else workers // 2
        cluster = Cluster.derive(
            workers, _BANDWIDTH_BPS, _LATENCY_S, servers=servers, collectives=[PARAMETER_SERVER], send_s=0.0
        )
        network = Network(workers=workers, bandwidth_bps=_BANDWIDTH_BPS, latency_s=_LATENCY_S, send_s=0.0)
        plan = schedule("random", job, cluster)
        flow = simulate_flow(job, plan, fabric(PARAMETER_SERVER, servers=servers), network)
        line = flow.timeline(workers=[0])
        return _Run(flow.iteration_s, flow.overlap, line.communication_s)
    if system == "Horovod":
        return _collective(job, "horovod", Cluster.derive(workers, HOROVOD_BPS, _LATENCY_S), _HOROVOD)
    cluster = Cluster.derive(workers, _BANDWIDTH_BPS, _LATENCY_S, collectives=["shuffle"], send_s=0.0)
    return _collective(job, "caramel", cluster, {})


def _collective(job: Workload, scheduler: str, cluster: Cluster, options: Mapping[str, Any]) -> _Run:
    line = simulate(job, schedule(scheduler, job, cluster, **options), cluster)
    return _Run(line.iteration_s, line.overlap, line.communication_s)


def _utilization(model: str, system: str, workers: int) -> float:
    return _job(model).compute_s / _run(model, system, workers).iteration_s


def _models() -> Part:
    """Compute the properties of the five models (section 6)."""
    cells = []
    for model, (count, mib) in MODELS.items():
        layers = zoo.model(model)
        cells.append(Cell("Section 6", model, "parameters", count, len(layers.trainable)))
        cells.append(Cell("Section 6", model, "size (MiB)", mib, layers.nbytes / 2**20))
    return Part(tuple(cells))


def _iteration_times() -> Part:
    """Compute iteration times (Fig. 8)."""
    cells, gains = [], {}
    for model in MODELS:
        for n in WORKERS:
            ours = _run(model, "Caramel", n).iteration_s
            others = {system: _run(model, system, n).iteration_s for system in _SYSTEMS[1:]}
            gains[model, n] = others["Horovod"] / ours
            ahead = [seconds >= ours for seconds in others.values()]
            cells.append(claim("Fig. 8", f"{model} on {n} workers", "Caramel is the fastest", ahead))
    cells.append(Cell("Fig. 8", "five models", "greatest gain over Horovod", 3.62, max(gains.values())))
    where = max(gains, key=lambda key: gains[key])
    cells.append(claim("Fig. 8", "five models", "it is VGG-16's on 16 workers", [where == ("vgg-16", 16)]))
    return Part(tuple(cells), _bars("Fig. 8", "Iteration time", "s", "iteration_s"))


def _utilizations() -> Part:
    """Compute utilizations (Fig. 9)."""
    shares = {(model, n): _utilization(model, "Caramel", n) for model in MODELS for n in WORKERS}
    gain = max(share / _utilization(model, "Horovod", n) for (model, n), share in shares.items())
    cells = (
        Cell("Fig. 9", "five models", "greatest gain in utilization over Horovod", 3.5, gain),
        claim("Fig. 9", "five models, 8 and 16 workers", "at least 70%", [share >= 0.7 for share in shares.values()]),
    )
    figures = []
    for n in WORKERS:
        curves = {system: (list(MODELS), [_utilization(model, system, n) for model in MODELS]) for system in _SYSTEMS}
        figures.append(Figure("Fig. 9", f"GPU utilization on {n} workers", "model", "share", curves))
    return Part(cells, tuple(figures))


def _bars(label: str, title: str, unit: str, field: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            label,
            f"{title} on {n} workers",
            "model",
            unit,
            {
                system: (list(MODELS), [getattr(_run(model, system, n), field) for model in MODELS])
                for system in _SYSTEMS
            },
        )
        for n in WORKERS
    )


def _overlap() -> Part:
    """Compute overlap coefficients and communication times (Fig. 10)."""
    runs = [{system: _run(model, system, n) for system in _SYSTEMS} for model in MODELS for n in WORKERS]
    cheaper = [run["Caramel"].communication_s < run["Horovod"].communication_s for run in runs]
    better = [run["Caramel"].overlap > run["Horovod"].overlap for run in runs]
    saved = max(1 - run["Caramel"].communication_s / run["Horovod"].communication_s for run in runs)
    row = "five models, 8 and 16 workers"
    cells = (
        claim("Fig. 10", row, "less communication than Horovod", cheaper),
        claim("Fig. 10", row, "more overlap than Horovod", better),
        Cell("Fig. 10", "five models (section 1)", "greatest saving of network cost", 0.73, saved),
    )
    return Part(cells, _bars("Fig. 10", "Overlap coefficient", "alpha", "overlap"))


def stages(model: str, workers: int, bandwidth_bps: float) -> list[float]:
    """Return the utilization at each stage of Fig. 11, from Horovod to all parts of Caramel."""
    job = _job(model)
    cluster = Cluster.derive(workers, bandwidth_bps, _LATENCY_S, collectives=["shuffle"], send_s=0.0)
    found = [_utilization(model, "Horovod", workers)]
    for batching, rest in ((False, False), (True, False), (True, True)):
        options = {"batching": batching, "serialization": rest, "scheduling": rest}
        found.append(job.compute_s / _collective(job, "caramel", cluster, options).iteration_s)
    return found


def without(model: str, workers: int, bandwidth_bps: float, parts: Sequence[str]) -> float:
    """Return the utilization without these parts of Caramel, if gradients are added up at the speed of Fig. 13."""
    job, off = _job(model), dict.fromkeys(parts, False)
    cluster = Cluster.derive(
        workers, bandwidth_bps, _LATENCY_S, send_s=0.0, collectives=["shuffle"], reduce_s_per_byte=_REDUCE_S_PER_BYTE
    )
    return job.compute_s / _collective(job, "caramel", cluster, off).iteration_s


def _one_model() -> Part:
    """Compute the gain of each part of Caramel on one model (Fig. 11)."""
    cells = []
    for mode, bandwidth in (("10 Gbps", _BANDWIDTH_BPS), ("fitted", SHUFFLE_BPS)):
        for (stage, share), ours in zip(STAGES.items(), stages("inception-v3", 8, bandwidth), strict=True):
            cells.append(Cell("Fig. 11", f"inception-v3, {stage}", f"utilization, {mode}", share, ours))
    curves = {"published": (list(STAGES), list(STAGES.values()))}
    curves["ours"] = (list(STAGES), stages("inception-v3", 8, SHUFFLE_BPS))
    return Part(tuple(cells), (Figure("Fig. 11", "Inception-v3 on 8 workers", "stage", "utilization", curves),))


def _all_models() -> Part:
    """Compute the gain of each part of Caramel on all models (Fig. 12)."""
    cells, curves = [], {}
    for model in MODELS:
        shares = stages(model, 8, SHUFFLE_BPS)
        grows = [a <= b + 1e-3 for a, b in pairwise(shares)]
        cells.append(claim("Fig. 12", model, "each part adds to utilization", grows))
        curves[model] = (list(STAGES), shares)
    return Part(tuple(cells), (Figure("Fig. 12", "Parts of Caramel, 8 workers", "stage", "utilization", curves),))


def _depth_s(nbytes: float, depth: int) -> float:
    return pipelined_s(
        "shuffle",
        16,
        nbytes,
        depth,
        bandwidth_bps=_BANDWIDTH_BPS,
        latency_s=_LATENCY_S,
        reduce_s_per_byte=_REDUCE_S_PER_BYTE,
    )


def _depths() -> Part:
    """Compute the times of transfers by size and by depth, which is the number of chunks (Fig. 13)."""
    sizes = [10.0 ** (e / 2) for e in range(6, 17)]
    depths = (1, 2, 4, 8)
    adaptive = [min(_depth_s(size, d) for d in range(1, MAX_DEPTH + 1)) for size in sizes]
    cells = (
        Cell("Fig. 13", "100 MB", "saved by depth 8 over depth 1", 0.6, 1 - _depth_s(100e6, 8) / _depth_s(100e6, 1)),
        claim("Fig. 13", "1 KB", "depth 8 is slower than depth 1", [_depth_s(1e3, 8) > _depth_s(1e3, 1)]),
        claim(
            "Fig. 13",
            "1 KB to 100 MB",
            "adaptive depth is the best at every size",
            [best <= _depth_s(size, d) for best, size in zip(adaptive, sizes, strict=True) for d in depths],
        ),
    )
    curves = {f"depth {d}": (sizes, [_depth_s(size, d) for size in sizes]) for d in depths}
    curves["adaptive"] = (sizes, adaptive)
    figure = Figure("Fig. 13", "Shuffle on 16 workers", "bytes", "s", curves, log_x=True, log_y=True)
    return Part(cells, (figure,))


def _schemes() -> Part:
    """Compute the times of a small and a large transfer with three schemes (Fig. 14)."""
    names, counts = ("shuffle", "ring", "halving-doubling"), (4, 8, 16, 32)
    figures, few = [], []
    for nbytes in (64e3, 64e6):
        times = {
            name: [Cluster.derive(n, _BANDWIDTH_BPS, _LATENCY_S, send_s=0.0).cost(name).cost(nbytes) for n in counts]
            for name in names
        }
        few.append(times["shuffle"][0] <= min(times[name][0] for name in names))
        curves = {name: (counts, values) for name, values in times.items()}
        figures.append(Figure("Fig. 14", f"An all-reduce of {nbytes / 1e6:g} MB", "workers", "s", curves, log_y=True))
    return Part((claim("Fig. 14", "64 KB and 64 MB", "shuffle is the best with few workers", few),), tuple(figures))


PAPER = Paper(
    name="caramel",
    title="Caramel: Accelerating Decentralized Distributed Deep Learning with Computation Scheduling",
    parts={
        "Section 6": _models,
        "Fig. 8": _iteration_times,
        "Fig. 9": _utilizations,
        "Fig. 10": _overlap,
        "Fig. 11": _one_model,
        "Fig. 12": _all_models,
        "Fig. 13": _depths,
        "Fig. 14": _schemes,
    },
    constants={
        f"Horovod's bandwidth: {HOROVOD_BPS / 1e9:g} Gbps": "fitted to 68% utilization, Inception-v3 on 8 workers",
        f"Figs. 11 and 12, shuffle's bandwidth: {SHUFFLE_BPS / 1e9:g} Gbps": "fitted to the first stage's 82%",
        f"latency per hop: {_LATENCY_S * 1e6:g} us": "assumed",
        "Fig. 13: adding takes as long as both transfers": "assumed; pipelining gains most there",
        "Horovod: a cycle of 5 ms, fusion up to 64 MiB": "its defaults at the time",
    },
    left_out={
        "Figs. 2 to 4": "measurements of their cluster, printed only as pictures",
        "Fig. 8, the gain of 3.62": "measured against Horovod's MPI, whose cost is not printed; ours is Fig. 11's",
        "Fig. 10, communication of parameter servers": (
            "all workers' transfers share a server's link; the paper counts only one worker's transfers, which is not "
            "a cost of the network"
        ),
        "Fig. 13, 60% at 100 MB": (
            "overlapping two stages can save at most half; the paper's third stage, serialization, has no printed cost"
        ),
        "Fig. 13, 3x slower small transfers": "every chunk has a latency here, so ours are 8x slower; theirs overlap",
        "Fig. 14, halving-doubling best with many workers": (
            "here, shuffle has two latencies for any number of workers; the text hints at incast, but prints no cost"
        ),
    },
)
