"""Rehearsals with parameter servers: run orders of pulls between shaped hosts, and compare them with predictions.

Each rank has its own host. The first ranks are workers, then come servers, then inference
agents, as in training. This module does not need torch, but the worker processes
do (`legato.lab.testbed.servers.trial`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from legato.core.errors import InputError, unknown_name
from legato.core.measurement import MeasuredPlan, Measurement
from legato.core.text import count
from legato.core.timeline import Timeline, overlap_coefficient
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.lab.testbed.launch import Advance
from legato.lab.testbed.rehearsal import check_task, run_task
from legato.lab.testbed.servers.model import ServerCosts
from legato.reports.doubts import doubts
from legato.reports.model import ModelReport
from legato.schedule import SERVER_SCHEDULERS

__all__ = ["ServerRehearsal", "ServerTask", "ServerTrial", "rehearse_servers", "select_orders"]


class ServerTask(msgspec.Struct, frozen=True):
    """The task of a rehearsal; at least `iterations` iterations of each order of pulls are timed.

    With a `ratio`, computation is scaled so that all pushes and pulls, without overlap, take `ratio` times as long as
    computation. With `agents`, training also runs with each order while the agents infer; the iterations of these runs
    are not timed.
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
    """The result for one order of pulls: the iterations of worker 0 (seconds each), and the predicted iteration.

    `waited_s` is the time that each iteration waited for parameters. `straggler_s` is the time from the moment when the
    first worker ends its backward pass to the moment when the last worker does. `communication_s` is the predicted time
    of only the pushes and pulls (TicTac's N). `agent_s` has, for each forward pass of an agent during training, the
    time of the pull plus the time of the pass. `transfers` and `out_of_order` are from an additional run in which the
    order of arrival was observed.
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
        """Return the relative error of the prediction: predicted / measured - 1."""
        return self.predicted_s / self.median_s - 1

    @property
    def overlap(self) -> float:
        """Return TicTac's overlap coefficient of the median iteration: (N + C - T) / min(N, C)."""
        return overlap_coefficient(self.communication_s, self.computation_s, self.median_s)

    def measured_plan(self) -> MeasuredPlan:
        predicted_s, messages = self.predicted_s, self.num_messages
        return MeasuredPlan.of(self.scheduler, self.measured_s, predicted_s=predicted_s, num_messages=messages)

    def row(self, random_s: float) -> dict[str, Any]:
        """Return the row that `legato rehearse --servers --json` prints."""
        return {
            "scheduler": self.scheduler,
            "measured_s": self.median_s,
            "quartiles_s": self.measured_plan().quartiles_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "speedup_over_random": random_s / self.median_s,
            "iterations_per_s": len(self.measured_s) / sum(self.measured_s),
            "overlap": self.overlap,
            "straggler": statistics.mean(s / t for s, t in zip(self.straggler_s, self.measured_s, strict=True)),
            "variation": statistics.pstdev(self.measured_s) / statistics.mean(self.measured_s),
            "agent_s": statistics.median(self.agent_s) if self.agent_s else None,
            "out_of_order": self.out_of_order / self.transfers if self.transfers else None,
            "num_messages": self.num_messages,
        }


class ServerRehearsal(msgspec.Struct, frozen=True):
    """The result of a rehearsal; `workload` is the workload that was run, scaled if the task has a ratio."""

    workload: Workload
    costs: ServerCosts
    fit_error: float
    trials: tuple[ServerTrial, ...]

    def rows(self) -> list[dict[str, Any]]:
        random_s = self.trials[0].median_s  # `select_orders` puts it first
        return [trial.row(random_s) for trial in self.trials]

    def describe(self) -> str:
        """Return in words how long computation takes, and how long all transfers take without computation."""
        compute, alone = (format_seconds(s) for s in (self.trials[0].computation_s, self.trials[0].communication_s))
        return f"computation {compute}, pushes and pulls alone {alone}"

    def report(self, network: str) -> ModelReport:
        """Return the report that is saved and shown; `network` describes workers, servers and links in words."""
        job, trials = self.workload.name, self.trials
        measured = tuple(trial.measured_plan() for trial in trials)
        found = tuple(doubts({trial.scheduler: trial.measured_s for trial in trials}, {}))
        return ModelReport(
            job,
            self.workload,
            timelines=tuple(replace(t.predicted, name=t.scheduler, job=job, network=network) for t in trials),
            measured=Measurement(job, network, measured, found),
        )


def select_orders(names: Sequence[str]) -> tuple[str, ...]:
    """Return the orders to try: the named ones, or every order for `all`. The random order always comes first."""
    chosen = tuple(SERVER_SCHEDULERS) if "all" in names else tuple(dict.fromkeys(names))
    return ("random", *(name for name in chosen if name != "random"))


def rehearse_servers(task: ServerTask, hosts: int, bandwidth_bps: float, advance: Advance) -> ServerRehearsal:
    """Try the orders with `hosts` workers and the task's servers and agents, on links of `bandwidth_bps`.

    Raises `InputError` if such hosts cannot be created on this machine. Raises `RankError`
    with the error message of a process that fails, and keeps its log.
    """
    if hosts < 1:
        raise InputError(f"{count(hosts, 'host')}: there is no worker (expected at least 1)")
    processes = hosts + task.servers + task.agents
    return run_task("legato.lab.testbed.servers.trial", task, ServerRehearsal, processes, bandwidth_bps, advance)
