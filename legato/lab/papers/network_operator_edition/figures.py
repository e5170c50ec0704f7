"""Compute Figures 3 to 12, in the fitted mode. The paper prints no values for them, only claims, which are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

from legato.lab.hypothetical import scale_compute
from legato.lab.papers.network_operator_edition.model import iteration_s, job, run, synthetic
from legato.lab.papers.network_operator_edition.published import WORKERS
from legato.lab.papers.result import Cell, Figure, Part, claim

__all__ = ["FIGURES"]

_BASELINE, _BOTH = "parameter-server", "multicast+aggregation"
_TOP = ("ring", _BOTH, "butterfly")
_ALL = ("aggregation", "multicast", _BOTH, "ring", "ring+multicast", "butterfly")
_GBPS = (5.0, 10.0, 25.0, 40.0, 100.0)
_WORKERS = (4, 8, 16, 32)
_COUNTS = (0, 25, 75, 125)
_SPEEDS = (1.0, 1.5, 2.0, 2.5, 3.0)
#: Section 8.5: 17x17x768 and 35x35x288.
_NETWORK_HEAVY, _COMPUTE_HEAVY = "mixed_17x17x768e", "mixed_35x35x288b"
#: Times within 3% count as equal.
_ALIKE = 1.03


def _bandwidths(label: str, model: str) -> Callable[[], Part]:
    """Compute iteration times on 32 workers by bandwidth (Figs. 3 to 5)."""

    def part() -> Part:
        times = {name: [iteration_s(model, "fitted", name, gbps=gbps) for gbps in _GBPS] for name in _TOP}
        row = f"{model}, 5 to 100 Gbps"
        cells = [_not_behind(label, row, times)]
        ten = _GBPS.index(10.0)
        ahead = times["butterfly"][ten] > times["ring"][ten] * _ALIKE
        words = "alike at 10 Gbps (8.2.3)" if model == "Inception-v3" else "ring ahead at 10 Gbps (8.2.3)"
        cells.append(claim(label, f"{model}, butterfly and ring", words, [ahead != (model == "Inception-v3")]))
        figure = Figure(label, f"{model}, 32 workers", "Gbps", "s an iteration", _curves(_GBPS, times), log_y=True)
        return Part(tuple(cells), (figure,))

    return part


def _not_behind(label: str, row: str, times: dict[str, list[float]]) -> Cell:
    holds = [ring <= both * _ALIKE for ring, both in zip(times["ring"], times[_BOTH], strict=True)]
    return claim(label, row, f"ring equal to or faster than {_BOTH}", holds)


def _curves(x: Sequence[float], y: dict[str, list[float]]) -> dict[str, tuple[Sequence[float], list[float]]]:
    return {name: (x, values) for name, values in y.items()}


def _workers(label: str, model: str) -> Callable[[], Part]:
    """Compute iteration times at 25 Gbps by the number of workers (Figs. 6 to 8)."""

    def part() -> Part:
        names = (*_TOP, "ring+multicast")
        times = {name: [iteration_s(model, "fitted", name, workers=n) for n in _WORKERS] for name in names}
        cells = [_not_behind(label, f"{model}, 4 to 32 workers", times)]
        if model == "Inception-v3":
            alike = [b <= a * _ALIKE and a <= b * _ALIKE for a, b in zip(times["ring"], times[names[3]], strict=True)]
            cells.append(claim(label, model, "ring with multicast equals ring (8.4)", alike))
        if model == "VGG-16":
            for n, factor in ((4, 2.0), (32, 1.3)):
                k = _WORKERS.index(n)
                ours = times[_BOTH][k] / times["ring"][k]
                cells.append(Cell(label, f"{model}, {n} workers (8.3)", f"ring over {_BOTH}", factor, ours))
        figure = Figure(label, f"{model} at 25 Gbps", "workers", "s an iteration", _curves(_WORKERS, times))
        return Part(tuple(cells), (figure,))

    return part


@cache
def _synthetic_speedups(module: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in _ALL}
    for count in _COUNTS:
        workload = synthetic("fitted", module, count)
        baseline = run(workload, _BASELINE).iteration_s
        for name in _ALL:
            found[name].append(baseline / run(workload, name).iteration_s)
    return found


def _ranking(label: str, row: str, gains: dict[str, list[float]]) -> Cell:
    """Check the ranking of section 8.7: each fabric has to be faster than the next one, or about as fast.

    The ranking is ring, multicast with aggregation, butterfly, multicast, and aggregation.
    """
    names = ("ring", _BOTH, "butterfly", "multicast", "aggregation")
    holds = [all(gains[a][k] * _ALIKE >= gains[b][k] for a, b in pairwise(names)) for k in range(len(gains["ring"]))]
    return claim(label, row, "ranking of 8.7 holds", holds)


def _network_heavy() -> Part:
    """Compute speedups with more network-heavy modules (Fig. 9)."""
    label, row, gains = "Fig. 9", "Inception-v3 + 0 to 125 network-heavy modules", _synthetic_speedups(_NETWORK_HEAVY)
    below = [gains[name][k] < 2 for name in ("aggregation", "multicast") for k in range(len(_COUNTS))]
    grow = [a < b for name in _TOP for a, b in pairwise(gains[name])]
    cells = (
        _ranking(label, row, gains),
        claim(label, row, "aggregation or multicast alone stay below 2x", below),
        claim(label, row, "ring, both and butterfly grow with modules", grow),
    )
    figure = Figure(label, "Network-heavy modules, 25 Gbps", "modules added", "speedup", _curves(_COUNTS, gains))
    return Part(cells, (figure,))


def _compute_heavy() -> Part:
    """Compute speedups with more compute-heavy modules (Fig. 10)."""
    label, row, gains = "Fig. 10", "Inception-v3 + 0 to 125 compute-heavy modules", _synthetic_speedups(_COMPUTE_HEAVY)
    fall = [a > b for name in _TOP for a, b in pairwise(gains[name])]
    equal = [gains["multicast"][k] * _ALIKE >= gains[_BOTH][k] for k in range(1, len(_COUNTS))]
    cells = (
        _ranking(label, row, gains),
        claim(label, row, "speedups fall with modules", fall),
        Cell(label, "125 modules", "speedup by aggregation", 1.0, gains["aggregation"][-1]),
        claim(label, "25 to 125 modules", "multicast alone equals multicast + aggregation", equal),
    )
    figure = Figure(label, "Compute-heavy modules, 25 Gbps", "modules added", "speedup", _curves(_COUNTS, gains))
    return Part(cells, (figure,))


def _faster(label: str, model: str) -> Callable[[], Part]:
    """Compute speedups with faster computation (Figs. 11 and 12)."""

    def part() -> Part:
        gains: dict[str, list[float]] = {name: [] for name in _ALL}
        for speed in _SPEEDS:
            workload = scale_compute(job(model, "fitted"), speed)
            baseline = run(workload, _BASELINE).iteration_s
            for name in _ALL:
                gains[name].append(baseline / run(workload, name).iteration_s)
        cells, curves = [], _curves(_SPEEDS, gains)
        if model == "Resnet-200":
            for name, factor in (("butterfly", 10.0), (_BOTH, 19.5)):
                curves[f"{name}, published"] = (_SPEEDS[-1:], [factor])
                cells.append(Cell(label, f"{model}, 3x computation", f"speedup by {name}", factor, gains[name][-1]))
            passes = [gains[_BOTH][-1] > gains["ring"][-1], gains[_BOTH][-1] > gains["butterfly"][-1]]
            cells.append(claim(label, f"{model}, 3x computation", f"{_BOTH} passes ring and butterfly", passes))
        else:
            keeps = [c * 1.1 >= max(a, b) for a, b, c in zip(*(gains[name] for name in _TOP), strict=True)]
            cells.append(claim(label, model, "butterfly keeps pace (10%) up to 3x", keeps))
        title = f"{model}, {WORKERS} workers, 25 Gbps"
        figure = Figure(label, title, "x computation", "speedup", curves)
        return Part(tuple(cells), (figure,))

    return part


#: Every figure by its label.
FIGURES: dict[str, Callable[[], Part]] = {
    "Fig. 3": _bandwidths("Fig. 3", "Inception-v3"),
    "Fig. 4": _bandwidths("Fig. 4", "Resnet-200"),
    "Fig. 5": _bandwidths("Fig. 5", "VGG-16"),
    "Fig. 6": _workers("Fig. 6", "Inception-v3"),
    "Fig. 7": _workers("Fig. 7", "Resnet-200"),
    "Fig. 8": _workers("Fig. 8", "VGG-16"),
    "Fig. 9": _network_heavy,
    "Fig. 10": _compute_heavy,
    "Fig. 11": _faster("Fig. 11", "Inception-v3"),
    "Fig. 12": _faster("Fig. 12", "Resnet-200"),
}
