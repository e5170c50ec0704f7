"""One rank of a rehearsal: calibrate, plan, and try every plan on an emulated accelerator.

The iterations of the plans are interleaved in blocks, so that other work on the
machine slows all plans alike. An iteration lasts from the start of one backward
pass to the start of the next, on rank 0.

[Note: memory] The models do not learn, so all plans share the memory of
parameters and gradients. Only one plan of legato's runtime has message buffers
at a time, and DDP has buckets only during its turn. In total, memory is at most four
times the size of the gradients, or 18 GB for VGG-16 on eight hosts.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.core.workload import Workload
from legato.lab.hypothetical import scale_compute
from legato.lab.testbed.accelerator import Clock, EmulatedModel, EmulatedOptimizer
from legato.lab.testbed.graphs import CompiledModel, with_nodes
from legato.lab.testbed.launch import Advance
from legato.lab.testbed.rank import rehearse_task
from legato.lab.testbed.rehearsal import BUCKETS, HOOKED, ROUNDED, SHARDED, STAGES, ZERO, Rehearsal, Task, Trial
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of
from legato.pytorch.runtime.sending.tracing import trace_ddp
from legato.schedule.compare import Candidate, compare
from legato.schedule.published.ddp import bucket_caps

__all__ = ["rehearse_here"]

_BLOCK = 5  # the most iterations that are timed together
_WARM = 2  # iterations before each block, which are not timed
_WARM_GRAPHS = 4  # the same for compiled models, whose graphs are cut only after some iterations
_HOOKS: dict[Any, Any] = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
_TRACED = 3  # iterations that are traced; the one of median length is kept


class _Runner(Protocol):
    """A plan with a model and an optimizer that train under it."""

    name: str

    def iterations(self, count: int) -> list[float]:
        """Run `count` iterations, and return the times, by the host's clock, at which their backward passes began."""

    def trace(self) -> list[Timeline]:
        """Return the timelines of a few iterations."""


class _Loop:
    """The training loop of an emulated model, which DDP or legato may wrap."""

    def __init__(self, model: EmulatedModel, wrapped: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer

    def run(self, count: int) -> list[float]:
        dist.barrier()
        self.model.clock.begin()
        began = []
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model.clock.ask()
            loss = self.wrapped()
            began.append(time.perf_counter())
            loss.backward()
            self.optimizer.step()
        if (attached := attachment_of(self.wrapped)) is not None:
            attached.flush()
        return began


class _Ddp:
    """`DistributedDataParallel` with default or given buckets, which exist only while it runs."""

    def __init__(self, name: str, shared: EmulatedModel, caps: Sequence[float] | None) -> None:
        self.name, self.shared = name, shared
        self.options: dict[str, Any] = {} if caps is None else {"bucket_cap_mb_list": list(caps)}

    def _loop(self) -> _Loop:
        model = EmulatedModel(self.shared.workload, clock=self.shared.clock, shared=self.shared)
        wrapped = DistributedDataParallel(model, init_sync=False, **self.options)
        return _Loop(model, wrapped, self._optimizer(model))

    def _optimizer(self, model: EmulatedModel) -> torch.optim.Optimizer:
        return EmulatedOptimizer(model)

    def iterations(self, count: int) -> list[float]:
        began = self._loop().run(count)
        gc.collect()  # wrapper and hooks refer to each other, and share memory with the model of all plans
        return began

    def trace(self) -> list[Timeline]:
        loop = self._loop()
        loop.run(_WARM)
        with trace_ddp(loop.wrapped, loop.optimizer) as timelines:
            loop.run(_TRACED)
        del loop
        gc.collect()  # it shares memory with the model of all plans, so no update of a plan may be pending
        return timelines


class _Zero(_Ddp):
    """`DistributedDataParallel` with torch's `ZeroRedundancyOptimizer`, whose ranks broadcast updated parameters."""

    def _optimizer(self, model: EmulatedModel) -> torch.optim.Optimizer:
        def of(parameters: Any, **_: Any) -> EmulatedOptimizer:
            return EmulatedOptimizer(model, parameters)

        kind: Any = of
        return ZeroRedundancyOptimizer(model.parameters(), kind, parameters_as_bucket_view=True)


class _Hooked(_Ddp):
    """`DistributedDataParallel` with torch's hook that sends gradients in two bytes."""

    def __init__(self, name: str, shared: EmulatedModel, plan: Plan) -> None:
        super().__init__(name, shared, None)
        self.compress = _HOOKS[plan.messages[0].wire]

    def _loop(self) -> _Loop:
        def hook(state: object, bucket: Any) -> Any:
            return self.compress(state, bucket)  # with another name, because DDP accepts the bf16 hook only for NCCL

        distributed: Any = dist
        hook.__annotations__ = {"state": object, "bucket": distributed.GradBucket}  # torch checks the annotations
        loop = super()._loop()
        loop.wrapped.register_comm_hook(None, hook)
        return loop


class _Planned:
    """A plan in legato's runtime; all plans share one wrapped model, which runs one plan at a time."""

    def __init__(self, name: str, plan: Plan, loop: _Loop) -> None:
        self.name, self.plan, self.loop = name, plan, loop

    def iterations(self, count: int) -> list[float]:
        attachment(self.loop.wrapped).adopt(self.plan)
        self.loop.model.follow(self.plan.op_order)
        return self.loop.run(count)

    def trace(self) -> list[Timeline]:
        self.iterations(_WARM_GRAPHS)
        with attachment(self.loop.wrapped).trace() as timelines:
            self.loop.run(_TRACED)
        found: list[Timeline] = timelines
        return found


class _Prediction(msgspec.Struct, frozen=True):
    """A plan and its prediction, as rank 0 sends them to the other ranks."""

    name: str
    plan: Plan
    timeline: Timeline | None
    lower_bound_s: float


def rehearse_here(task: Task, advance: Advance) -> Rehearsal:
    """Calibrate this process group, plan for it, and measure every plan of the task. All ranks must call this.

    `advance(stage, done, total)` reports progress. All ranks return the same
    plans and predictions, but each rank returns its own measurements.
    """
    sizes = sizes_up_to(task.workload.nbytes)
    calibration = calibrate(sizes=sizes, progress=lambda done, total: advance(STAGES[0], done, total))
    cluster = calibration.cluster if task.cluster is None else task.cluster
    workload = task.workload
    if task.ratio is not None:
        wanted_s = cluster.cost().cost(workload.nbytes) / task.ratio
        workload = scale_compute(workload, workload.compute_s / wanted_s)
    if task.compiled:
        workload = with_nodes(workload)
    predictions = _plan(workload, cluster, task, advance)
    runners = _runners(workload, predictions, task.compiled)
    measured: dict[str, list[float]] = {runner.name: [] for runner in runners}
    block, warm = min(_BLOCK, task.iterations), _WARM_GRAPHS if task.compiled else _WARM
    rounds = -(-task.iterations // block)
    for k in range(rounds):
        for i, runner in enumerate(runners):
            began = runner.iterations(warm + block)[warm - 1 :]
            measured[runner.name] += [after - before for before, after in itertools.pairwise(began)]
            advance(STAGES[2], k * len(runners) + i + 1, rounds * len(runners))
    traces = {r.name: r.trace() for r in runners if _plain(r.name) in task.traced}
    return Rehearsal(
        workload=workload,
        cluster=cluster,
        fit_error=calibration.median_error,
        trials=tuple(
            Trial(
                scheduler=p.name,
                measured_s=tuple(measured[p.name]),
                predicted=p.timeline,
                lower_bound_s=p.lower_bound_s,
                num_messages=len(p.plan.messages),
                measured=_typical(p.name, traces.get(p.name, [])),
                plan=None if p.timeline is None else p.plan,
            )
            for p in predictions
        ),
    )


def _predicted(candidate: Candidate, name: str | None = None) -> _Prediction:
    """Return the prediction of a plan under the given name, or by default under the scheduler's name."""
    plan = candidate.plan
    return _Prediction(name or plan.scheduler, plan, candidate.timeline, candidate.bound.seconds)


def _plan(workload: Workload, cluster: Cluster, task: Task, advance: Advance) -> list[_Prediction]:
    """Make the plans on rank 0, and return the plans on all ranks."""
    content = b""
    if dist.get_rank() == 0:
        names = dict.fromkeys("merge-optimal" if name == BUCKETS else name for name in task.schedulers)
        candidates = compare(workload, cluster, names, progress=lambda d, n: advance(STAGES[1], d, n))
        found = {c.plan.scheduler: _predicted(c) for c in candidates}
        if BUCKETS in task.schedulers:
            found[BUCKETS] = msgspec.structs.replace(found["merge-optimal"], name=BUCKETS)
        predictions = list(map(found.__getitem__, task.schedulers))
        planned = [name for name in task.schedulers if name not in ("ddp", BUCKETS)]
        if task.shard != "none":
            predictions.append(_Prediction(ZERO, found["ddp"].plan, None, 0.0))
            others = compare(workload, cluster, planned, shard=task.shard) if planned else []
            predictions += [_predicted(c, c.plan.scheduler + SHARDED) for c in others]
        if task.wire != "none":
            hooked, *others = compare(workload, cluster, ["ddp", *planned], wire=task.wire)
            predictions += [_predicted(hooked, HOOKED), *(_predicted(c, c.plan.scheduler + ROUNDED) for c in others)]
        content = msgspec.json.encode(predictions)
    return msgspec.json.decode(broadcast_bytes(content, dist.group.WORLD), type=list[_Prediction])


def _runners(workload: Workload, predictions: Sequence[_Prediction], compiled: bool) -> list[_Runner]:
    clock = Clock()
    first = (CompiledModel if compiled else EmulatedModel)(workload, clock=clock, seed=dist.get_rank())
    runners: list[_Runner] = []
    planned: _Loop | None = None
    for p in predictions:
        if p.name == HOOKED:
            runners.append(_Hooked(p.name, first, p.plan))
            continue
        if p.name == ZERO:
            runners.append(_Zero(p.name, first, None))
            continue
        if p.name in ("ddp", BUCKETS):
            runners.append(_Ddp(p.name, first, None if p.name == "ddp" else bucket_caps(p.plan)))
            continue
        if planned is None:
            planned = _Loop(first, *attach(first, EmulatedOptimizer(first), p.plan))
        runners.append(_Planned(p.name, p.plan, planned))
    return runners


def _plain(name: str) -> str:
    return name.removesuffix(SHARDED).removesuffix(ROUNDED)


def _typical(name: str, timelines: list[Timeline]) -> Timeline | None:
    """Return the timeline of median length, or None if there are none."""
    if not timelines:
        return None
    middle = sorted(timelines, key=lambda t: t.iteration_s)[len(timelines) // 2]
    return msgspec.structs.replace(middle, name=name)


if __name__ == "__main__":
    rehearse_task(Task, rehearse_here)
