"""Schedulers turn a `Workload` and a `Cluster` into a `Plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from legato.core.cluster import Cluster
from legato.core.code import guarded, installed, load_installed
from legato.core.errors import InputError, PlanError, unknown_name
from legato.core.files import identity
from legato.core.placement import Placement
from legato.core.plan import Plan, Rounding, Shard, check_plan
from legato.core.text import with_article
from legato.core.workload import Workload
from legato.schedule.basics.compose import in_halves, with_node_order
from legato.schedule.basics.sharded import check_shard, sharded
from legato.schedule.published import PUBLISHED, SERVER_SCHEDULERS
from legato.schedule.search.budget import Budget
from legato.schedule.search.legato import legato
from legato.schedule.search.rounding import check_rounding, rounded

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

#: A function from a workload and a cluster, and options of its own, to a plan.
Scheduler = Callable[..., Plan]
#: The entry points of installed packages that are schedulers.
GROUP = "legato.schedulers"

#: The work, and the most seconds, that the choice of messages to be rounded takes for a published scheduler.
_ROUNDING, _ROUNDING_LIMIT_S = 1.0, 20.0
#: Every scheduler of all-reduces (or their halves), by its name on the command line.
SCHEDULERS: dict[str, Scheduler] = PUBLISHED | {"legato": legato}


class PlanOptions(TypedDict, total=False):
    """The options of all schedulers, for type checkers; each scheduler documents the ones that it takes."""

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
    """The names of the schedulers for a cluster: those for parameter servers if it has servers."""
    return list(SERVER_SCHEDULERS) if cluster.servers else [*SCHEDULERS, *installed(GROUP)]


def scheduler_named(name: str | Scheduler) -> Scheduler:
    """The scheduler of this name: one of legato's, or of an installed package; a function is one itself.

    Raises `InputError`, with the nearest names, on an unknown one.
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
    """The name of a scheduler in tables: its own, or the function's."""
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
    """Plan with a scheduler, by its name or as a function; `options` are passed to it.

    With `shard`, the plan shards the optimizer or also the gradients: `legato` searches for
    such a plan, and plans of other schedulers are turned into such ones (`sharded`).
    With `wire`, gradients travel in bf16 or fp16: with `"bf16"` the fewest bytes that make
    the iteration as fast as possible (`rounded`), with `"all-bf16"` all of them.
    Where computation and messages share a machine (`Cluster.contention`), another
    scheduler plans with what messages cost during computation; `legato` knows more.
    Raises `InputError`, with the nearest names, on a scheduler or an option that does
    not exist, on shards where the collective has no halves, on a `wire` with shards,
    parameter servers or gradients that are not float32,
    and whatever the scheduler itself raises; and `PlanError` on a plan of another one that does not fit the workload.
    """
    name, function = label(scheduler), scheduler_named(scheduler)
    check_shard(shard)
    check_rounding(wire, workload, servers=function in SERVER_SCHEDULERS.values(), shard=shard)
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
        plan = rounded(plans, workload, cluster, wire, Budget(_ROUNDING, _ROUNDING_LIMIT_S))
    if costs is not cluster or wire != "none":
        plan = msgspec.structs.replace(plan, cluster_id=identity(cluster))
    return with_node_order(sharded(plan, workload, shard), workload)


def _planned(function: Scheduler, name: str, workload: Workload, cluster: Cluster, **options: Any) -> Plan:
    """The plan of a function that may be anyone's."""
    plan = function(workload, cluster, **options)
    if not isinstance(plan, Plan):
        raise InputError(f"{name}: returned {with_article(type(plan).__name__)} (expected a legato.Plan)")
    try:
        check_plan(plan, workload)
    except PlanError as error:
        raise PlanError(f"{name}: {error}") from None
    return plan
