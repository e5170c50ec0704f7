"""Rehearsals: run plans between shaped hosts on this machine, and compare measurements with predictions.

legato's runtime runs over real `torch.distributed` and TCP; only the arithmetic is
replaced by an emulated accelerator. This module does not need torch, but
the worker processes do (`legato.lab.testbed.trial`).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from legato.core.cluster import Cluster
from legato.core.errors import InputError, RankError, unknown_name
from legato.core.files import write_text
from legato.core.measurement import MeasuredPlan, Measurement
from legato.core.plan import SHARDS, Plan, Rounding, Shard
from legato.core.text import count
from legato.core.timeline import Timeline
from legato.core.units import format_seconds
from legato.core.workload import Workload
from legato.lab.testbed.launch import Advance, run_workers
from legato.reports.doubts import doubts
from legato.reports.model import ModelReport
from legato.schedule import SCHEDULERS
from legato.schedule.basics.wire import check_wire

__all__ = [
    "BUCKETS",
    "HOOKED",
    "ROUNDED",
    "SHARDED",
    "STAGES",
    "ZERO",
    "Rehearsal",
    "Task",
    "Trial",
    "check_task",
    "rehearse",
    "run_task",
    "select",
]

#: The name of stock DDP with the buckets of merge-optimal (`bucket_cap_mb_list`).
BUCKETS = "ddp+merge-optimal"
#: The name of stock DDP with torch's ZeroRedundancyOptimizer, and the suffix for names of sharded plans.
ZERO, SHARDED = "ddp+zero", " sharded"
#: The name of stock DDP with torch's compression hook, and the suffix for names of plans that round gradients.
HOOKED, ROUNDED = "ddp+hook", " rounded"
#: The stages that are reported as progress, in order.
STAGES = ("calibrate", "plan", "rehearse")
#: The schedulers that `all` means, in the order in which they are tried.
ALL = ("ddp", BUCKETS, *(name for name in SCHEDULERS if name != "ddp"))

Result = TypeVar("Result")


class Task(msgspec.Struct, frozen=True):
    """The task of the ranks of a rehearsal.

    `schedulers` may include `BUCKETS`. At least `iterations` iterations are timed with each scheduler. With a `ratio`,
    computation is scaled so that sending all gradients in one message takes `ratio` times as long as computation. With
    a `cluster`, plans and predictions are made for this cluster, not for the calibrated one. One iteration of each
    scheduler in `traced` is recorded as a timeline. With `compiled`, the plans run in compiled models, which can
    compute in a plan's own order. DDP's models are not compiled, so that DDP has each gradient as soon as its op ends.
    With a `shard`, plans are also tried sharded, and DDP is also tried with torch's ZeroRedundancyOptimizer, for which
    there is no prediction. With a `wire` format, plans are also tried with all gradients in this format, and DDP with
    torch's hook.
    """

    workload: Workload
    schedulers: tuple[str, ...]
    iterations: int = 20
    ratio: float | None = None
    cluster: Cluster | None = None
    traced: tuple[str, ...] = ()
    compiled: bool = False
    shard: Shard = "none"
    wire: Rounding = "none"

    def __post_init__(self) -> None:
        if self.shard not in SHARDS:
            raise unknown_name("shard", self.shard, SHARDS)
        check_wire(self.wire, self.workload.tensors, shard=self.shard)
        if self.compiled and (self.shard, self.wire) != ("none", "none"):
            raise InputError("compiled: given with shard or wire (expected only one of the two)")
        for name in self.schedulers:
            if name not in ALL:
                raise unknown_name("scheduler", name, ALL)
        check_task(self.workload, self.schedulers, self.iterations, self.ratio)


def check_task(workload: Workload, schedulers: Sequence[str], iterations: int, ratio: float | None) -> None:
    """Raise `InputError` on a task that cannot be rehearsed."""
    for tensor in workload.tensors:
        if tensor.nbytes % 2:
            raise InputError(f"{tensor.name!r}: {tensor.nbytes} bytes (expected an even number to rehearse with)")
    if len(set(schedulers)) < len(schedulers):
        raise InputError("schedulers: one is named twice (expected each once)")
    if iterations < 1:
        raise InputError(f"iterations: {iterations} (expected at least 1)")
    if ratio is not None and not 1e-6 <= ratio <= 1e6:
        raise InputError(f"ratio: {ratio} (expected 1e-6 to 1e6)")


class Trial(msgspec.Struct, frozen=True):
    """The result for one plan: the seconds of every timed iteration, and the prediction, if there is one.

    `measured` is the timeline of one iteration if the plan was traced. `plan` is the plan that legato's runtime ran, or
    the plan whose buckets DDP used; without such a plan, it is None.
    """

    scheduler: str
    measured_s: tuple[float, ...]
    predicted: Timeline | None
    lower_bound_s: float
    num_messages: int
    measured: Timeline | None = None
    plan: Plan | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.measured_s)

    @property
    def error(self) -> float | None:
        """Return the relative error of the prediction: predicted / measured - 1."""
        return None if self.predicted is None else self.predicted.iteration_s / self.median_s - 1

    def measured_plan(self) -> MeasuredPlan:
        return MeasuredPlan.of(
            self.scheduler,
            self.measured_s,
            predicted_s=None if self.predicted is None else self.predicted.iteration_s,
            lower_bound_s=None if self.predicted is None else self.lower_bound_s,
            num_messages=self.num_messages,
        )


class Rehearsal(msgspec.Struct, frozen=True):
    """The result of a rehearsal; `workload` is the workload that was run, scaled if the task has a ratio."""

    workload: Workload
    cluster: Cluster
    fit_error: float
    trials: tuple[Trial, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that `legato rehearse --json` prints."""
        ddp_s = self.trials[0].median_s  # `select` puts it first
        return [
            {
                "scheduler": t.scheduler,
                "measured_s": t.median_s,
                "quartiles_s": t.measured_plan().quartiles_s,
                "predicted_s": None if t.predicted is None else t.predicted.iteration_s,
                "error": t.error,
                "speedup_over_ddp": ddp_s / t.median_s,
                "lower_bound_s": t.lower_bound_s,
                "num_messages": t.num_messages,
            }
            for t in self.trials
        ]

    def describe(self) -> str:
        """Return in words how long computation takes, and the lower bound of all plans."""
        bound_s = min(t.lower_bound_s for t in self.trials if t.predicted is not None)
        return f"computation {format_seconds(self.workload.compute_s)}, bound {format_seconds(bound_s)}"

    def report(self, network: str) -> ModelReport:
        """Return the report that is saved and shown; `network` describes the workers and their links in words."""
        job, bounds = self.workload.name, {t.scheduler: t.lower_bound_s for t in self.trials if t.predicted is not None}
        drawn = [(t.scheduler, line) for t in self.trials for line in (t.predicted, t.measured) if line is not None]
        return ModelReport(
            job,
            self.workload,
            self.cluster,
            timelines=tuple(replace(line, name=name, job=job, network=network) for name, line in drawn),
            plans=tuple(replace(t.plan, scheduler=t.scheduler) for t in self.trials if t.plan is not None),
            measured=Measurement(
                job,
                network,
                tuple(t.measured_plan() for t in self.trials),
                tuple(doubts({t.scheduler: t.measured_s for t in self.trials}, bounds)),
            ),
        )


def select(names: Sequence[str]) -> tuple[str, ...]:
    """Return the schedulers to try: the named ones, or every scheduler for `all`. DDP always comes first."""
    chosen = ALL if "all" in names else tuple(dict.fromkeys(names))
    return ("ddp", *(name for name in chosen if name != "ddp"))


def rehearse(task: Task, hosts: int, bandwidth_bps: float, advance: Advance) -> Rehearsal:
    """Try the plans of a task between `hosts` hosts with links of `bandwidth_bps` (bits per second).

    Raises `InputError` if such hosts cannot be created on this machine. Raises `RankError`
    with the error message of a process that fails, and keeps its log.
    """
    if hosts < 2:
        raise InputError(f"{count(hosts, 'host')}: there is nothing to exchange (expected at least 2)")
    return run_task("legato.lab.testbed.trial", task, Rehearsal, hosts, bandwidth_bps, advance)


def run_task(
    module: str, task: Any, kind: type[Result], processes: int, bandwidth_bps: float, advance: Advance
) -> Result:
    """Run `python -m module` on a task in `processes` hosts, one process in each, and return the result of rank 0."""
    with ExitStack() as cleanup:
        folder = Path(tempfile.mkdtemp(prefix="legato-rehearsal-"))
        cleanup.callback(shutil.rmtree, folder)
        given, result = folder / "task.json", folder / "result.json"
        write_text(given, msgspec.json.encode(task).decode())
        try:
            run_workers([module, str(given), str(result)], processes, folder / "workers.log", advance, bandwidth_bps)
        except RankError:  # the message names the log
            cleanup.pop_all()
            raise
        return msgspec.json.decode(result.read_bytes(), type=kind)
