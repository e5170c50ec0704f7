"""Schedulers turn a `Workload` and a `Cluster` into a `Plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from legato.core.cluster import Cluster
from legato.core.errors import unknown_name
from legato.core.files import identity
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import with_node_order
from legato.schedule.published import PUBLISHED, SERVER_SCHEDULERS
from legato.schedule.search.legato import legato

__all__ = ["SCHEDULERS", "SERVER_SCHEDULERS", "schedule", "scheduler_names"]

#: Every scheduler of all-reduces (or their halves), by its name on the command line.
SCHEDULERS: dict[str, Callable[..., Plan]] = PUBLISHED | {"legato": legato}


def scheduler_names(cluster: Cluster) -> list[str]:
    """The names of the schedulers for a cluster: those for parameter servers if it has servers."""
    return list(SERVER_SCHEDULERS if cluster.servers else SCHEDULERS)


def schedule(name: str, workload: Workload, cluster: Cluster, **options: Any) -> Plan:
    """Plan with the scheduler of this name; `options` are passed to it.

    Where computation and messages share a machine (`Cluster.contention`), a published
    scheduler plans with what messages cost beside computation; `legato` knows more.
    Raises `InputError`, with the nearest names, on a scheduler or an option that does
    not exist, and whatever the scheduler itself raises.
    """
    every = SCHEDULERS | SERVER_SCHEDULERS
    if name not in every:
        raise unknown_name("scheduler", name, every)
    known = list(inspect.signature(every[name]).parameters)[2:]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    if name == "legato" or cluster.contention is None:
        return with_node_order(every[name](workload, cluster, **options), workload)
    plan = every[name](workload, cluster.while_computing(), **options)
    return with_node_order(msgspec.structs.replace(plan, cluster_id=identity(cluster)), workload)
