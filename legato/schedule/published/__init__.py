"""Published schedulers, one file per paper or system."""

from __future__ import annotations

from collections.abc import Callable

from legato.core.plan import Plan
from legato.schedule.published import (
    baselines,
    bytescheduler,
    caramel,
    ddp,
    dear,
    horovod,
    merge_optimal,
    mg_wfbp,
    p3,
    pace,
    pulls,
    tictac,
)

__all__ = ["PUBLISHED", "SERVER_SCHEDULERS"]

#: Published schedulers of all-reduces (or their halves), by their names on the command line.
PUBLISHED: dict[str, Callable[..., Plan]] = {
    "fifo": baselines.fifo,
    "single": baselines.single,
    "ddp": ddp.ddp,
    "mg-wfbp": mg_wfbp.mg_wfbp,
    "merge-optimal": merge_optimal.merge_optimal,
    "p3": p3.p3,
    "caramel": caramel.caramel,
    "pace": pace.pace,
    "dear": dear.dear,
    "horovod": horovod.horovod,
    "bytescheduler": bytescheduler.bytescheduler,
}

#: Schedulers that order pushes to parameter servers and pulls from the servers, by their names on the command line.
SERVER_SCHEDULERS: dict[str, Callable[..., Plan]] = {
    "random": pulls.random_pulls,
    "tic": tictac.tic,
    "tac": tictac.tac,
    "pull-optimal": pulls.pull_optimal,
}
