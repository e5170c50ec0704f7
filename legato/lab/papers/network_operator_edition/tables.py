"""Compute Tables 1 to 10, Figure 2 and the numbers in the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from legato import zoo
from legato.core.plan import Plan
from legato.core.workload import Op, Tensor, Workload
from legato.lab.papers.network_operator_edition.model import MODES, iteration_s, job, placement, run
from legato.lab.papers.network_operator_edition.published import (
    MODELS,
    TABLE_1,
    TABLE_1_GBPS,
    TABLE_1_WORKERS,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_9,
    TABLE_10,
)
from legato.lab.papers.result import Cell, Part, claim
from legato.simulator.flow import Network, plain_plan, simulate_flow
from legato.simulator.flow.fabrics import fabric

__all__ = ["TABLES"]

_BASELINE, _BOTH = "parameter-server", "multicast+aggregation"


def _validation() -> Part:
    """Compute column "Sim" of Table 1, and again for VGG-16 with parameters pulled in random order (section 9.4)."""
    cells = []
    for model, published in TABLE_1.items():
        for mode in MODES:
            cells += _servers(model, published, mode, job(model, mode), None)
    shuffled = job("VGG-16", "literal")
    return Part((*cells, *_servers("VGG-16", TABLE_1["VGG-16"], "random order", shuffled, _random_order(shuffled))))


def _servers(model: str, published: Sequence[float], mode: str, workload: Workload, plan: Plan | None) -> list[Cell]:
    cells = []
    for servers, seconds in zip((1, 2, 4, 8), published, strict=True):
        ours = run(
            workload,
            _BASELINE,
            workers=TABLE_1_WORKERS,
            gbps=TABLE_1_GBPS,
            plan=plan,
            servers=servers,
            placement=placement(model, servers),
        )
        cells.append(Cell("Table 1", f"{model} Sim", f"{servers} PS, {mode} (s)", seconds, ours.iteration_s))
    return cells


def _random_order(workload: Workload) -> Plan:
    plan = plain_plan(workload, _BASELINE)
    pulls = [message for message in plan.messages if message.kind == "pull"]
    random.Random(0).shuffle(pulls)
    pushes = [message for message in plan.messages if message.kind == "push"]
    return msgspec.structs.replace(plan, messages=(*pushes, *pulls))


def _complexity() -> Part:
    """Compute Table 2 from the zoo's models instead of the published sizes; auxiliary classifiers are left out."""
    cells = []
    for model, (weights, gigabits, flops) in TABLE_2.items():
        network = zoo.model(MODELS[model])
        sizes = [variable.size for variable in network.trainable if not variable.name.startswith("aux")]
        cells.append(Cell("Table 2", model, "weights", weights, float(sum(sizes))))
        cells.append(Cell("Table 2", model, "size (Gb)", gigabits, sum(sizes) * 32 / 1e9))
        cells.append(Cell("Table 2", model, "FLOPs", flops, float(network.flops)))
    return Part(tuple(cells))


def _times() -> Part:
    """Compute those columns of Table 3 that follow from its other columns and Table 2."""
    cells = []
    for model, (_, backward_s, network_s, ratio) in TABLE_3.items():
        ours = TABLE_2[model][1] / 25
        cells.append(Cell("Table 3", model, "backward network at 25 Gbps (s), from Table 2", network_s, ours))
        cells.append(Cell("Table 3", model, "computation to network", ratio, backward_s / ours))
    return Part(tuple(cells))


def _speedups(table: str, published: Mapping[str, Sequence[float]], names: Sequence[str]) -> Callable[[], Part]:
    """Compute speedups over one parameter server (Tables 4 and 6)."""

    def part() -> Part:
        cells = [
            Cell(table, model, f"{name}, {mode}", factor, _speedup(model, mode, name))
            for model, factors in published.items()
            for mode in MODES
            for name, factor in zip(names, factors, strict=True)
        ]
        return Part(tuple(cells))

    return part


def _speedup(model: str, mode: str, name: str) -> float:
    return iteration_s(model, mode, _BASELINE) / iteration_s(model, mode, name)


def _shares() -> Part:
    """Compute the shares of bytes that servers hold (Table 7)."""
    cells = []
    for servers, model, least, most, second in TABLE_7:
        held = [0] * servers
        where = placement(model, servers)
        for variable in zoo.variables(MODELS[model]):
            held[where[variable.name]] += variable.nbytes
        shares = sorted(nbytes / sum(held) for nbytes in held)
        row = f"{model} on {servers} PS"
        cells.append(Cell("Table 7", row, "Min", least, shares[0]))
        column = "Max (ours: the second largest)" if second else "Max"
        cells.append(Cell("Table 7", row, column, most, shares[-2 if second else -1]))
    return Part(tuple(cells))


def _even_shares() -> Part:
    """Compute iteration times with even shares (Table 8)."""
    cells = []
    for model, published in TABLE_8.items():
        for mode in MODES:
            ours = (
                iteration_s(model, mode, _BOTH),
                run(job(model, mode), _BOTH, servers=8, placement="equal").iteration_s,
                iteration_s(model, mode, "ring"),
            )
            for name, seconds, value in zip(("multiagg", "8 PS multiagg", "ring"), published, ours, strict=True):
                cells.append(Cell("Table 8", model, f"{name}, {mode} (s)", seconds, value))
    return Part(tuple(cells))


def _barrier() -> Part:
    """Compute the time of two iterations, between sums of the first parameter two iterations apart (Table 9)."""
    cells = []
    for model, published in TABLE_9.items():
        for mode in MODES:
            workload = job(model, mode)
            first = min(range(len(workload.tensors)), key=lambda t: workload.tensors[t].readers)
            for name, barrier, seconds in (
                ("multiagg", True, published[0]),
                ("ring", None, published[1]),
                ("multiagg no barrier", False, published[2]),
            ):
                if barrier is None:
                    done = run(workload, "ring", iterations=3)
                else:
                    done = run(workload, _BOTH, iterations=3, barrier=barrier)
                ours = float(done.aggregated_s[2, first] - done.aggregated_s[0, first])
                cells.append(Cell("Table 9", model, f"{name}, {mode} (s)", seconds, ours))
    return Part(tuple(cells))


def _block() -> Part:
    """Compute iteration times with block distribution (Table 10)."""
    cells = []
    for model, gbps, aggregation, block in TABLE_10:
        for mode in MODES:
            row = f"{model} at {gbps} Gbps"
            ours = iteration_s(model, mode, "aggregation", gbps=gbps)
            cells.append(Cell("Table 10", row, f"aggregation, {mode} (s)", aggregation, ours))
            ours = run(job(model, mode), _BASELINE, gbps=gbps, distribution="block").iteration_s
            cells.append(Cell("Table 10", row, f"block distribution, {mode} (s)", block, ours))
    return Part(tuple(cells))


def _toy() -> Part:
    """Compute Fig. 2: two workers with three ops of 3 s and three parameters of 3 s.

    The switch adds up bytes as they arrive. If a server sends to one worker after the other, the second worker starts 3
    s later, which is the time of one parameter. With multicast, both start together.
    """
    gbps, count = 1.0, 3
    nbytes = round(3 * gbps * 1e9 / 8)
    ops = [Op(f"forward{i}", "forward", 0.0, (i - 1,) if i else ()) for i in range(count)]
    ops += [Op(f"backward{i}", "backward", 3.0, (count + i - 1,)) for i in range(count)]
    tensors = [Tensor(f"w{count - 1 - i}", nbytes, count + i, (count - 1 - i,)) for i in range(count)]
    workload = Workload("toy", tuple(ops), tuple(tensors))
    cells = []
    for start, multicast, plain_s, aggregated_s in (("together", True, 21, 12), ("staggered", False, 21, 15)):
        for column, aggregation, seconds in (
            ("without aggregation (s)", None, plain_s),
            ("with aggregation (s)", "cut-through", aggregated_s),
        ):
            found = fabric(_BASELINE, multicast=multicast, aggregation=aggregation)
            done = simulate_flow(workload, None, found, Network(workers=2, bandwidth_bps=gbps * 1e9))
            cells.append(Cell("Fig. 2", f"workers start {start}", column, seconds, done.backward_to_aggregated_s))
    return Part(tuple(cells))


def _text() -> Part:
    """Compute the numbers and statements in the paper's text, in the fitted mode where the mode matters."""
    vgg = job("VGG-16", "literal")
    whole = run(vgg, "ring-whole", gbps=10).iteration_s
    largest = max(tensor.nbytes for tensor in vgg.tensors) * 8 / 1e9
    cells = [
        Cell("Text", "8.2.1 VGG-16, ring without messaging, 10 Gbps", "s", 34.0, whole),
        Cell("Text", "9.1 VGG-16, largest parameter", "Gb", 5.44, largest),
        Cell("Text", "8.1.4 VGG-16, multicast + aggregation (Table 4: 22.0)", "x", 21.2, _fitted("VGG-16", _BOTH)),
        Cell("Text", "8.1.2 Resnet-101, multicast (Table 4: 1.79)", "x", 1.78, _fitted("Resnet-101", "multicast")),
    ]
    ahead = [_fitted(model, "multicast") >= 0.99 * _fitted(model, "aggregation") for model in MODELS]
    cells.append(claim("Text", "8.1.3 all models", "multicast outperforms or approximates aggregation", ahead))
    more = [
        _fitted(model, _BOTH) - 1 > _fitted(model, "multicast") - 1 + _fitted(model, "aggregation") - 1
        for model in MODELS
    ]
    cells.append(claim("Text", "8.1.4 all models", "gains of both are more than additive", more))
    alike = [abs(_fitted(model, "ring+multicast") / _fitted(model, "ring") - 1) < 0.03 for model in MODELS]
    cells.append(claim("Text", "8.4 all models", "multicast gives ring-reduce nothing (3%)", alike))
    for name in (_BASELINE, _BOTH):
        piped = []
        for model in MODELS:
            cut = run(job(model, "fitted"), name, message_bytes=2**22).iteration_s
            piped.append(cut > 0.98 * iteration_s(model, "fitted", name))
        cells.append(claim("Text", f"9.2 all models, {name}", "message pipelining saves nothing (2%)", piped))
    return Part(tuple(cells))


def _fitted(model: str, name: str) -> float:
    return _speedup(model, "fitted", name)


#: The functions that compute every table and Figure 2, by label.
TABLES: dict[str, Callable[[], Part]] = {
    "Table 1": _validation,
    "Table 2": _complexity,
    "Table 3": _times,
    "Table 4": _speedups("Table 4", TABLE_4, ("aggregation", "multicast", _BOTH)),
    "Table 6": _speedups("Table 6", TABLE_6, ("ring", "ring+multicast", "butterfly")),
    "Table 7": _shares,
    "Table 8": _even_shares,
    "Table 9": _barrier,
    "Table 10": _block,
    "Fig. 2": _toy,
    "Text": _text,
}
