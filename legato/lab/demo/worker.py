"""One rank of `legato demo` for one model; torchrun starts one such process for each rank.

All ranks capture and calibrate at the same time, so the machine is as busy as
during training. All ranks use the plan of rank 0.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from legato.core import files
from legato.core.plan import Plan
from legato.core.timeline import Timeline
from legato.lab.demo.models import MODELS, Training
from legato.lab.demo.result import STAGES, ModelResult, measured_names
from legato.lab.testbed.launch import Advance
from legato.lab.testbed.rank import gloo_rank
from legato.pytorch.network.agreement import broadcast_bytes
from legato.pytorch.network.calibrate import calibrate, sizes_up_to
from legato.pytorch.recording.capture import at_pace, capture
from legato.pytorch.runtime.attached.attach import attach, attachment, attachment_of
from legato.pytorch.runtime.sending.tracing import trace_ddp
from legato.schedule.compare import Candidate, best, compare

BLOCK = 4  # steps that are timed together, after one untimed step
TRACED = 4  # number of steps that are traced at the end
SEED = 20


class Trainee:
    """One of the two models that are compared: it trains with DDP or with a plan, and has its own random numbers."""

    def __init__(self, build: Callable[[], Training], wrap: Callable[[Training], nn.Module]) -> None:
        torch.manual_seed(SEED)
        self.training = build()
        self.wrapped = wrap(self.training)
        torch.manual_seed(SEED + dist.get_rank())
        self._random = torch.get_rng_state()
        self.block_s: list[float] = []

    def steps(self, count: int) -> float:
        """Train `count` steps; return the mean seconds from the start of one backward pass to the start of the next."""
        torch.set_rng_state(self._random)
        dist.barrier()
        began = []
        for _ in range(count):
            self.training.optimizer.zero_grad()
            loss: Any = self.training.loss(self.wrapped)
            began.append(time.perf_counter())
            loss.backward()
            self.training.optimizer.step()
        if (attached := attachment_of(self.wrapped)) is not None:
            attached.flush()
        self._random = torch.get_rng_state()
        return (began[-1] - began[0]) / (count - 1)


def main(model: str, steps: int, folder: Path) -> None:
    """Run the demo for one model on this rank; rank 0 writes the files into `folder`."""
    with gloo_rank() as advance:
        _run(model, steps, folder, advance)


def _run(model: str, steps: int, folder: Path, advance: Advance) -> None:
    build = MODELS[model]
    torch.manual_seed(SEED)
    training = build()
    workload = capture(
        training.model,
        training.optimizer,
        functools.partial(training.loss, training.model),
        name=model,
        batch_size=training.batch_size,
        progress=functools.partial(advance, STAGES[0]),
    )
    calibration = calibrate(
        sizes=sizes_up_to(workload.nbytes),
        compute=functools.partial(_passes, training),
        progress=functools.partial(advance, STAGES[1]),
    )
    workload = at_pace(workload, calibration.compute_s)
    del training
    candidates: list[Candidate] = []
    chosen = b""
    if dist.get_rank() == 0:
        candidates = compare(workload, calibration.cluster, progress=functools.partial(advance, STAGES[2]))
        chosen = files.encode(best(candidates).plan)
    plan = files.decode(broadcast_bytes(chosen, dist.group.WORLD), Plan, "the plan of rank 0")
    ddp, ours = _train(build, plan, steps, functools.partial(advance, STAGES[3]))
    difference = _difference(ddp.wrapped, ours.wrapped)
    measured = _trace(ddp, ours, plan)
    if dist.get_rank() == 0:
        files.write(folder / "workload.json", workload)
        files.write(folder / "cluster.json", calibration.cluster)
        files.write(folder / "plan.json", plan)
        result = ModelResult(
            model=model,
            workload=workload,
            cluster=calibration.cluster,
            fit_error=calibration.median_error,
            worst_fit_error=calibration.worst_error,
            rows=[candidate.columns for candidate in candidates],
            predicted=[c.timeline for c in candidates if c.plan.carrier == "ddp" or c.plan == plan],
            measured=measured,
            plan=plan,
            merged=next((c.plan for c in candidates if c.plan.scheduler == "merge-optimal"), plan),
            ddp_blocks_s=ddp.block_s,
            legato_blocks_s=ours.block_s,
            max_relative_difference=difference,
            steps=steps,
        )
        files.write_text(folder / "result.json", msgspec.json.encode(result).decode())


def _passes(training: Training) -> None:
    """Run one forward and backward pass."""
    training.optimizer.zero_grad()
    loss: Any = training.loss(training.model)
    loss.backward()


def _train(build: Callable[[], Training], plan: Plan, steps: int, advance: Any) -> tuple[Trainee, Trainee]:
    """Train both models in alternating blocks, so that other work slows both equally; the first block is a warm-up."""
    ddp = Trainee(build, lambda t: nn.parallel.DistributedDataParallel(t.model))
    ours = Trainee(build, lambda t: attach(t.model, t.optimizer, plan)[0])
    blocks = 1 + max(1, steps // BLOCK)
    for i in range(blocks):
        for k, trainee in enumerate((ddp, ours)):
            seconds = trainee.steps(BLOCK + 1)
            if i > 0:
                trainee.block_s.append(seconds)
            advance(2 * i + k + 1, 2 * blocks)
    return ddp, ours


def _trace(ddp: Trainee, ours: Trainee, plan: Plan) -> list[Timeline]:
    """Trace both trainings, and return the iteration of median length of each, named as in `result.measured_names`."""
    with trace_ddp(ddp.wrapped, ddp.training.optimizer) as under_ddp:
        ddp.steps(TRACED)
    with attachment(ours.wrapped).trace() as under_plan:
        ours.steps(TRACED)
    traced = zip(measured_names(plan), (under_ddp, under_plan), strict=True)
    return [msgspec.structs.replace(_typical(timelines), name=name) for name, timelines in traced if timelines]


def _typical(timelines: list[Timeline]) -> Timeline:
    return sorted(timelines, key=lambda t: t.iteration_s)[len(timelines) // 2]


def _difference(a: nn.Module, b: nn.Module) -> float:
    """Return the largest difference between two models' states on any rank, relative to each tensor's largest value."""
    worst = torch.zeros(1, dtype=torch.float64)
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        x, y = x.double(), y.double()
        worst = torch.maximum(worst, (x - y).abs().max() / x.abs().max().clamp(min=1e-30))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst.item())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
