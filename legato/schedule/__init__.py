"""Floor 2: a Workload and a Cluster become a Plan. One file a published algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from legato.core.cluster import Cluster
from legato.core.errors import unknown_name
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.bytescheduler import bytescheduler
from legato.schedule.caramel import caramel
from legato.schedule.ddp import ddp
from legato.schedule.dear import dear
from legato.schedule.fifo import fifo
from legato.schedule.horovod import horovod
from legato.schedule.legato import legato
from legato.schedule.merge_optimal import merge_optimal
from legato.schedule.mg_wfbp import mg_wfbp
from legato.schedule.p3 import p3
from legato.schedule.pace import pace
from legato.schedule.pull_optimal import pull_optimal
from legato.schedule.random_pulls import random_pulls
from legato.schedule.single import single
from legato.schedule.tac import tac
from legato.schedule.tic import tic

__all__ = ["SCHEDULERS", "SERVER_SCHEDULERS", "schedule", "scheduler_names"]

#: Every scheduler of all-reduces (or their halves) by the name that the command line knows it under.
SCHEDULERS: dict[str, Callable[..., Plan]] = {
    "fifo": fifo,
    "single": single,
    "ddp": ddp,
    "mg-wfbp": mg_wfbp,
    "merge-optimal": merge_optimal,
    "p3": p3,
    "caramel": caramel,
    "pace": pace,
    "dear": dear,
    "horovod": horovod,
    "bytescheduler": bytescheduler,
    "legato": legato,
}

#: Those that order pushes to parameter servers and pulls from them: for clusters that have some.
SERVER_SCHEDULERS: dict[str, Callable[..., Plan]] = {
    "random": random_pulls,
    "tic": tic,
    "tac": tac,
    "pull-optimal": pull_optimal,
}


def scheduler_names(cluster: Cluster) -> list[str]:
    """The schedulers that are made for a cluster: for its servers, where it has any."""
    return list(SERVER_SCHEDULERS if cluster.servers else SCHEDULERS)


def schedule(name: str, workload: Workload, cluster: Cluster, **options: Any) -> Plan:
    """The plan of a scheduler by its name.

    Raises `InputError`, with the nearest names, on a scheduler or an option
    that does not exist, and whatever the scheduler raises.
    """
    every = SCHEDULERS | SERVER_SCHEDULERS
    if name not in every:
        raise unknown_name("scheduler", name, every)
    known = list(inspect.signature(every[name]).parameters)[2:]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    return every[name](workload, cluster, **options)
