"""Plan, prove, simulate and run the gradient transfers of data-parallel training.

    workload = legato.read("workload.json")  # or legato.capture(model, optimizer, loss)
    cluster = legato.Cluster.derive(workers=8, bandwidth_bps=10e9, latency_s=30e-6)  # or legato.calibrate().cluster
    plan = legato.plan(workload, cluster)
    print(legato.simulate(workload, plan, cluster).iteration_s, legato.lower_bound(workload, cluster).seconds)
    model, optimizer = legato.distribute(DistributedDataParallel(model), optimizer, plan)

Plan and predict: `plan`, `simulate`, `lower_bound`, `check_plan`; `compare` several plans, `sweep` many clusters;
`share` a network among jobs.
Whole jobs: `job`, `predict`, `layouts`. Traces: `advise`. Pages and figures of all results: `report`.
Train and measure, with PyTorch: `distribute`, `attachment`, `fully_shard`, `parameter_servers`, `capture`, `calibrate`.
Files: `read`, `write`, `identity`.

`import legato` is fast: a function loads its libraries when it is first used. If PyTorch is missing, `legato` does not
list the functions that need it, and using such a function raises `ModuleNotFoundError`.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal
from typing import overload as _overload

from legato.core import __version__
from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.errors import CaptureError, FileError, InputError, LegatoError, PlanError, RankError
from legato.core.files import identity, read, write
from legato.core.job import Job, Machine
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.timeline import Span, Timeline
from legato.core.workload import Op, Tensor, Workload
from legato.core.wrapping import Group, Wrapping

if TYPE_CHECKING:  # the names that `__getattr__` loads, and types
    from typing import Unpack

    from legato.advice import of_traces as advise
    from legato.auto import distribute
    from legato.fsdp.table import ShardingOptions
    from legato.lab.servers import parameter_servers
    from legato.pages import report
    from legato.pytorch import GradScaler, attachment, calibrate, capture
    from legato.pytorch.fully_shard import fully_shard
    from legato.pytorch.runtime.sharding.checkpoint import OptimizerState
    from legato.schedule import PlanOptions, Scheduler
    from legato.schedule.bound.lower_bound import Bound, lower_bound
    from legato.schedule.compare import compare
    from legato.simulator.flow import Fabric
    from legato.sweeps.anything import sweep
    from legato.sweeps.share import share
    from legato.whole_jobs.layouts import layouts
    from legato.whole_jobs.step import predict
    from legato.zoo.jobs import job

__all__ = [
    "Bound",
    "CaptureError",
    "Cluster",
    "Contention",
    "FileError",
    "GradScaler",
    "Group",
    "InputError",
    "Job",
    "LegatoError",
    "LinearCost",
    "Machine",
    "Message",
    "Op",
    "OptimizerState",
    "Plan",
    "PlanError",
    "RankError",
    "Slice",
    "Span",
    "Tensor",
    "Timeline",
    "Workload",
    "Wrapping",
    "__version__",
    "advise",
    "attachment",
    "calibrate",
    "capture",
    "check_plan",
    "compare",
    "distribute",
    "fully_shard",
    "identity",
    "job",
    "layouts",
    "lower_bound",
    "parameter_servers",
    "plan",
    "predict",
    "read",
    "report",
    "share",
    "simulate",
    "sweep",
    "write",
]

_WITH_TORCH = {
    "GradScaler": "legato.pytorch",
    "OptimizerState": "legato.pytorch.runtime.sharding.checkpoint",
    "attachment": "legato.pytorch",
    "calibrate": "legato.pytorch",
    "capture": "legato.pytorch",
    "distribute": "legato.auto",
    "fully_shard": "legato.pytorch.fully_shard",
    "parameter_servers": "legato.lab.servers",
}
#: Names that are loaded when they are first used, each with its module, and with its name in that module if different.
_LAZY = {
    "Bound": "legato.schedule.bound.lower_bound",
    "advise": "legato.advice:of_traces",
    "compare": "legato.schedule.compare",
    "job": "legato.zoo.jobs",
    "layouts": "legato.whole_jobs.layouts",
    "lower_bound": "legato.schedule.bound.lower_bound",
    "predict": "legato.whole_jobs.step",
    "report": "legato.pages",
    "share": "legato.sweeps.share",
    "sweep": "legato.sweeps.anything",
    **_WITH_TORCH,
}


@_overload
def plan(
    workload: Workload, cluster: Cluster, scheduler: str | Scheduler = "legato", **options: Unpack[PlanOptions]
) -> Plan: ...
@_overload
def plan(
    workload: Workload, cluster: Cluster, *, shard: Literal["parameters"], **options: Unpack[ShardingOptions]
) -> Wrapping: ...
def plan(
    workload: Workload, cluster: Cluster, scheduler: str | Scheduler = "legato", **options: Any
) -> Plan | Wrapping:
    """Plan the gradient transfers of a workload on a cluster.

    `scheduler` is a name from `legato.schedule.SCHEDULERS` (the published algorithms and `"legato"`), or from
    `SERVER_SCHEDULERS` for a cluster with parameter servers. `scheduler` may also be your own function. `options` are
    the scheduler's keyword arguments. Raises `InputError` on an unknown scheduler or option; errors of the scheduler
    are passed on.

    With `shard="parameters"`, the plan is a `Wrapping` for FSDP2. It is the simplest of all ways to shard the model
    that are predicted to be within 1% of the fastest way. The options of a plan for FSDP2 are the fields of
    `legato.fsdp.table.Sharding`: `memory_bytes`, `gpus_per_host`, `micro_batches` and others.
    `legato.fsdp.table.compare` returns the whole table.
    """
    if options.get("shard") == "parameters":
        from legato.fsdp.table import plan_wrapping

        return plan_wrapping(workload, cluster, scheduler, **options)
    from legato.schedule import schedule

    return schedule(scheduler, workload, cluster, **options)


def simulate(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    fabric: str | Fabric | None = None,
    compute: Literal["one", "unlimited"] = "one",
    fault: str = "none",
) -> Timeline:
    """Predict one steady-state training iteration.

    By default, the network is one shared resource, as planners see it. This network carries one message at a time, in
    the plan's order, and each message takes as long as its collective costs on the cluster. A worker computes on one
    stream, or, with `compute="unlimited"`, starts every op as soon as its inputs exist.

    With a `fabric` (a name from `legato.simulator.flow.FABRICS`, or a `Fabric`), every transfer on every link is
    simulated, on the network that `Network.of` derives from the cluster; workers have one stream. Then a `fault` can
    slow links and workers down for a while, or let them fail, as in `legato simulate --disturb`; the timeline is one
    such iteration. `legato.simulator.flow` has more settings: other topologies, hosts with several GPUs, slow workers
    and links, jitter.

    Raises `PlanError` on a plan that does not fit the workload or that can never finish because its messages wait for
    each other, and `InputError` on an unknown fabric or setting.
    """
    if fabric is None:
        if fault != "none":
            raise InputError(f"fault: {fault!r} (expected none without a fabric)")
        from legato.simulator import collective

        return collective.simulate(workload, plan, cluster, compute=compute)
    if compute != "one":
        raise InputError(f"compute: {compute!r} (expected 'one' on a fabric)")
    from dataclasses import replace

    from legato.simulator.flow import Network, simulate_flow
    from legato.simulator.flow.fabrics import fitting
    from legato.simulator.flow.network.disturbances import parse_disturbances

    if isinstance(fabric, str):
        fabric = fitting(fabric, {"servers": cluster.servers} if cluster.servers else {})
    network = replace(Network.of(cluster), disturbances=parse_disturbances(fault))
    return simulate_flow(workload, plan, fabric, network, iterations=1 if network.disturbances else None).timeline()


if not TYPE_CHECKING:  # otherwise, type checkers would accept every misspelt name
    if find_spec("torch") is None:  # `from legato import *` and `help(legato)` touch every name
        __all__ = [name for name in __all__ if name not in _WITH_TORCH]

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'legato' has no attribute {name!r}")
        try:
            module, _, other = _LAZY[name].partition(":")
            found = getattr(importlib.import_module(module), other or name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "torch":
                raise
            needed = f"legato.{name} needs PyTorch: pip install torch"
            raise ModuleNotFoundError(needed, name="torch") from None
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
