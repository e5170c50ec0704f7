"""The paper's traces, rebuilt from what the paper prints, and their simulation.

*Literal* uses only published inputs: sizes from Table 2, and forward and backward times from Table 3, distributed over
the layers in proportion to the zoo's times. In the simulation, the first gradient is ready when the backward pass
begins, since the paper's traces begin with the first gradient. The auxiliary classifier of Inception is not sent
(section 5).

*Fitted* changes one constant per model: the backward time becomes the time that the
ring column of Table 8 implies. The time in Table 3 is 0.09 to 0.2 s too short for the ring column. VGG-16 needs no
change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from legato import zoo
from legato.core.plan import Plan
from legato.core.workload import Op, Workload
from legato.lab.hypothetical import add_modules
from legato.lab.papers.network_operator_edition.published import GBPS, MODELS, TABLE_2, TABLE_3, WORKERS
from legato.simulator.flow import FlowResult, Network, simulate_flow
from legato.simulator.flow.fabrics import fitting

__all__ = ["FITTED_BACKWARD_S", "MODES", "iteration_s", "job", "placement", "run", "synthetic"]

#: The fitted constants, one per model: the seconds of the backward pass after its first layer.
FITTED_BACKWARD_S = {"Inception-v3": 0.386, "Resnet-101": 0.380, "Resnet-200": 0.467}
MODES = ("literal", "fitted")


@cache
def job(model: str, mode: str) -> Workload:
    """Return the trace of a model in one of the `MODES`."""
    forward_s, backward_s = TABLE_3[model][:2]
    if mode == "fitted":
        backward_s = FITTED_BACKWARD_S.get(model, backward_s)
    full = zoo.workload(MODELS[model], device="k80", forward_s=forward_s)
    sent = [tensor for tensor in full.tensors if not tensor.name.startswith("aux")]
    scale = TABLE_2[model][1] * 1e9 / 8 / sum(tensor.nbytes for tensor in sent)
    tensors = [msgspec.structs.replace(tensor, nbytes=max(1, round(tensor.nbytes * scale))) for tensor in sent]
    first = min(tensor.ready_after for tensor in tensors)
    after = sum(op.duration_s for i, op in enumerate(full.ops) if op.phase == "backward" and i > first)
    ops = [
        Op(op.name, op.phase, 0.0 if i <= first else op.duration_s * backward_s / after, op.deps)
        if op.phase == "backward"
        else op
        for i, op in enumerate(full.ops)
    ]
    return msgspec.structs.replace(full, ops=tuple(ops), tensors=tuple(tensors))


@cache
def synthetic(mode: str, module: str, count: int) -> Workload:
    """Return Inception-v3 with `count` more copies of a module (section 8.5)."""
    return add_modules(job("Inception-v3", mode), module, count)


def placement(model: str, servers: int) -> dict[str, int]:
    """Return TensorFlow's placement, which is round robin over all variables in the order of creation (Table 7)."""
    return {variable.name: i % servers for i, variable in enumerate(zoo.variables(MODELS[model]))}


def run(
    workload: Workload,
    name: str,
    *,
    workers: int = WORKERS,
    gbps: float = GBPS,
    plan: Plan | None = None,
    iterations: int | None = None,
    **options: Any,
) -> FlowResult:
    """Simulate without latency, with a cut-through switch, and with any number of messages in flight."""
    network = Network(workers=workers, bandwidth_bps=gbps * 1e9)
    found = fitting(name, {"in_flight": None} | options)
    return simulate_flow(workload, plan, found, network, iterations=iterations)


@cache
def iteration_s(model: str, mode: str, name: str, workers: int = WORKERS, gbps: float = GBPS) -> float:
    """Return the seconds of an iteration on the named fabric with default options."""
    return run(job(model, mode), name, workers=workers, gbps=gbps).iteration_s
