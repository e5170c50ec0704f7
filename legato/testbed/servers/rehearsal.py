"""A rehearsal with parameter servers: orders of pulls tried for real between shaped hosts, against their predictions.

Workers come first, each on a host of its own, then servers, each on one of its
own, then inference agents, as `torchrun` places ranks. This module needs no
torch itself: the processes do (`legato.testbed.servers.trial`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from legato.core.errors import InputError, unknown_name
from legato.core.timeline import Timeline, overlap_coefficient
from legato.core.workload import Workload
from legato.schedule import SERVER_SCHEDULERS
from legato.testbed.launch import Advance
from legato.testbed.rehearsal import check_task, run_task
from legato.testbed.servers.model import ServerCosts

__all__ = ["ServerRehearsal", "ServerTask", "ServerTrial", "rehearse_servers", "select_orders"]


class ServerTask(msgspec.Struct, frozen=True):
    """What the ranks are to do: `iterations` of each order are timed, at least.

    With a `ratio`, computation is scaled until all pushes and pulls alone take
    `ratio` times as long. With `agents`, each order also trains while they infer,
    which is not among the iterations that are timed.
    """

    workload: Workload
    schedulers: tuple[str, ...]
    servers: int = 1
    agents: int = 0
    iterations: int = 20
    ratio: float | None = None

    def __post_init__(self) -> None:
        for name in self.schedulers:
            if name not in SERVER_SCHEDULERS:
                raise unknown_name("scheduler for parameter servers", name, SERVER_SCHEDULERS)
        for field in ("servers", "agents"):
            if getattr(self, field) < (field == "servers"):
                raise InputError(f"{field}: {getattr(self, field)} (expected at least {int(field == 'servers')})")
        check_task(self.workload, self.schedulers, self.iterations, self.ratio)


class ServerTrial(msgspec.Struct, frozen=True):
    """One order of pulls, over iterations of worker 0 (seconds each), with what was predicted of one.

    `waited_s`: how long it stood still for parameters; `straggler_s`: how long
    the worker that was done first with its backward pass waited for the last;
    `communication_s`: predicted, of all pushes and pulls alone (TicTac's N);
    `agent_s`: of each pull and forward pass of an agent, while others train; `transfers` and
    `out_of_order` of an extra turn, in which the order of arrival was looked at.
    """

    scheduler: str
    computation_s: float
    measured_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    straggler_s: tuple[float, ...]
    predicted_s: float
    communication_s: float
    predicted: Timeline
    num_messages: int
    agent_s: tuple[float, ...] = ()
    transfers: int = 0
    out_of_order: int = 0

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.median_s - 1

    @property
    def overlap(self) -> float:
        """TicTac's coefficient, (N + C - T) / min(N, C), of the median iteration."""
        return overlap_coefficient(self.communication_s, self.computation_s, self.median_s)

    def row(self, random_s: float | None) -> dict[str, Any]:
        """The JSON of `legato rehearse --servers`."""
        return {
            "scheduler": self.scheduler,
            "measured_s": self.median_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "speedup_over_random": None if random_s is None else random_s / self.median_s,
            "iterations_per_s": len(self.measured_s) / sum(self.measured_s),
            "overlap": self.overlap,
            "straggler": statistics.mean(s / t for s, t in zip(self.straggler_s, self.measured_s, strict=True)),
            "variation": statistics.pstdev(self.measured_s) / statistics.mean(self.measured_s),
            "agent_s": statistics.median(self.agent_s) if self.agent_s else None,
            "out_of_order": self.out_of_order / self.transfers if self.transfers else None,
            "num_messages": self.num_messages,
        }


class ServerRehearsal(msgspec.Struct, frozen=True):
    """What came of it; the workload is the one that was run, scaled if a ratio was asked for."""

    workload: Workload
    costs: ServerCosts
    fit_error: float
    trials: tuple[ServerTrial, ...]

    def rows(self) -> list[dict[str, Any]]:
        random_s = next((trial.median_s for trial in self.trials if trial.scheduler == "random"), None)
        return [trial.row(random_s) for trial in self.trials]


def select_orders(names: Sequence[str]) -> tuple[str, ...]:
    """The orders that are meant: `all`, or these; random order is always among them, and first."""
    chosen = tuple(SERVER_SCHEDULERS) if "all" in names else tuple(dict.fromkeys(names))
    return ("random", *(name for name in chosen if name != "random"))


def rehearse_servers(task: ServerTask, hosts: int, bandwidth_bps: float, advance: Advance) -> ServerRehearsal:
    """Try the orders between `hosts` workers and the task's servers and agents, with links of `bandwidth_bps`.

    Raises `InputError` if this machine cannot have such hosts, and `RankError`
    with the last words of the process that failed, whose log is then kept.
    """
    if hosts < 1:
        raise InputError(f"{hosts} hosts: there is no worker (expected at least 1)")
    processes = hosts + task.servers + task.agents
    return run_task("legato.testbed.servers.trial", task, ServerRehearsal, processes, bandwidth_bps, advance)
