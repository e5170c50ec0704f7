"""Schedulers turn a `Workload` and a `Cluster` into a `Plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

from legato.core.cluster import Cluster
from legato.core.code import guarded, installed, load_installed
from legato.core.errors import InputError, PlanError, unknown_name
from legato.core.placement import Placement
from legato.core.plan import Plan, Rounding, Shard, check_plan
from legato.core.text import with_article
from legato.core.workload import Workload
from legato.schedule.basics.compose import in_halves, with_node_order
from legato.schedule.basics.sharded import check_shard, sharded
from legato.schedule.basics.wire import check_wire
from legato.schedule.published import PUBLISHED, SERVER_SCHEDULERS
from legato.schedule.search.legato import legato
from legato.simulator.collective import iteration_time

__all__ = [
    "GROUP",
    "SCHEDULERS",
    "SERVER_SCHEDULERS",
    "PlanOptions",
    "Scheduler",
    "label",
    "schedule",
    "scheduler_named",
    "scheduler_names",
]

#: A function that makes a plan from a workload, a cluster and its own options.
Scheduler = Callable[..., Plan]
#: The entry point group in which installed packages register their schedulers.
GROUP = "legato.schedulers"

#: Every scheduler of all-reduces (or their halves), by its name on the command line.
SCHEDULERS: dict[str, Scheduler] = PUBLISHED | {"legato": legato}


class PlanOptions(TypedDict, total=False):
    """The options of all schedulers, for type checkers; each scheduler documents the options that it accepts."""

    batching: bool
    bucket_bytes: int | None
    bucket_cap_mb_list: Sequence[float] | None
    buffer_bytes: int
    collective: str | None
    compute: Literal["one", "unlimited"]
    credit_bytes: int
    cycle_time_s: float
    depth: bool
    first_bucket_bytes: int | None
    fusion: bool
    fusion_threshold_bytes: int
    gap: float
    limit_s: float
    max_message_bytes: int | None
    partition_bytes: int
    placement: Placement
    rounds: int
    scheduling: bool
    seed: int
    serialization: bool
    shard: Shard
    slice_bytes: int
    threshold: float | None
    wire: Rounding
    work: float


def scheduler_names(cluster: Cluster) -> list[str]:
    """Return the names of the schedulers for a cluster; there are separate schedulers for parameter servers."""
    return list(SERVER_SCHEDULERS) if cluster.servers else [*SCHEDULERS, *installed(GROUP)]


def scheduler_named(name: str | Scheduler) -> Scheduler:
    """Return the scheduler with this name, from legato or an installed package; a function is returned as it is.

    Raises `InputError`, which lists the nearest names, if no scheduler has this name.
    """
    if not isinstance(name, str):
        return name
    every = SCHEDULERS | SERVER_SCHEDULERS
    if name in every:
        return every[name]
    if name in installed(GROUP):
        return guarded(load_installed(GROUP, name), name)
    raise unknown_name("scheduler", name, [*every, *installed(GROUP)])


def label(scheduler: str | Scheduler) -> str:
    """Return the name to show for a scheduler in tables; for a function, this is the function's name."""
    return scheduler if isinstance(scheduler, str) else getattr(scheduler, "__name__", type(scheduler).__name__)


def schedule(
    scheduler: str | Scheduler,
    workload: Workload,
    cluster: Cluster,
    *,
    shard: Shard = "none",
    wire: Rounding = "none",
    **options: Any,
) -> Plan:
    """Plan with a scheduler, given by its name or as a function, and pass `options` to it.

    With `shard`, the plan shards the optimizer, or the optimizer and the gradients. `legato` searches for sharded
    plans; the plan of any other scheduler is converted to a sharded one (`sharded`). With `wire`, all gradients are
    sent in bf16 or fp16; a published scheduler then plans with the costs of exact and of rounded messages, and the
    faster plan is returned. If computation and messages share a machine (`Cluster.contention`), published schedulers
    plan with the cost of messages during computation; `legato` also uses the cost of messages without computation.
    Raises `InputError` if the scheduler or an option does not exist (the error lists the nearest names), if `shard` is
    set but the collective cannot be sent in halves, or if `wire` is combined with shards, parameter servers or
    gradients that are not float32. Raises `PlanError` if the scheduler's plan does not fit the workload. Errors of the
    scheduler itself pass through unchanged.
    """
    name, function = label(scheduler), scheduler_named(scheduler)
    check_shard(shard)
    check_wire(wire, workload.tensors, servers=function in SERVER_SCHEDULERS.values(), shard=shard)
    own = list(inspect.signature(function).parameters.values())[2:]
    known = [option.name for option in own if option.name not in ("shard", "wire")]
    for option in options:
        if option not in known and not any(one.kind is one.VAR_KEYWORD for one in own):
            raise unknown_name(f"option of {name}", option, known)
    if any(option.name == "shard" for option in own):  # it plans for shards and wire formats itself
        return with_node_order(_planned(function, name, workload, cluster, shard=shard, wire=wire, **options), workload)
    costs = cluster.while_computing()
    if shard != "none":
        costs = in_halves(costs, options.get("collective"), f"shard {shard!r}")
    plan = _planned(function, name, workload, costs, **options)
    if wire != "none":
        plans = plan, _planned(function, name, workload, costs.in_wire_format(), **options)
        rounded = [one.in_wire_format(wire) for one in plans]
        plan = min(rounded, key=lambda one: iteration_time(workload, one, cluster))
    return with_node_order(sharded(plan, workload, shard), workload)


def _planned(function: Scheduler, name: str, workload: Workload, cluster: Cluster, **options: Any) -> Plan:
    """Return a scheduler's plan after checking it, since the scheduler may come from another package."""
    plan = function(workload, cluster, **options)
    if not isinstance(plan, Plan):
        raise InputError(f"{name}: returned {with_article(type(plan).__name__)} (expected a legato.Plan)")
    try:
        check_plan(plan, workload)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    return plan
