"""What the collectives of this process group cost, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.pytorch.agreement import group_device

__all__ = ["Calibration", "Sample", "calibrate"]

#: Bytes of the messages that are measured: 1 KiB to 64 MiB, times four.
SIZES = tuple(1024 * 4**k for k in range(9))
_SECONDS_A_SIZE = 0.3


class Sample(msgspec.Struct, frozen=True):
    """A message of `nbytes` took `seconds` (median), and the fit says `fitted_s`."""

    nbytes: int
    seconds: float
    fitted_s: float

    @property
    def error(self) -> float:
        """Relative error of the fit."""
        return self.fitted_s / self.seconds - 1


class Calibration(msgspec.Struct, frozen=True):
    """The cluster that the planner needs, and the measurements it was fitted to."""

    cluster: Cluster
    samples: tuple[Sample, ...]

    @property
    def median_error(self) -> float:
        """Median of the fit's relative errors, without sign."""
        return statistics.median(abs(s.error) for s in self.samples)

    @property
    def worst_error(self) -> float:
        """Largest of the fit's relative errors, without sign."""
        return max(abs(s.error) for s in self.samples)


def calibrate(
    process_group: Any = None,
    *,
    sizes: Sequence[int] = SIZES,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measure all-reduce over `sizes` bytes on all ranks of the group, and fit alpha + beta * bytes.

    A repetition takes as long as its slowest rank says; a size, the median of
    its repetitions. Every rank gets the same answer, and every rank has to
    call it. The collective is called after the backend (`gloo`, `nccl`).
    `progress(done, total)` is called after each size.
    """
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    if len(set(sizes)) < 2 or min(sizes) < 4:
        raise InputError("sizes: expected at least two different ones, of at least 4 bytes")
    group: Any = process_group if process_group is not None else dist.group.WORLD
    measured = []
    for i, nbytes in enumerate(sizes):
        measured.append((nbytes // 4 * 4, _time(nbytes // 4, group)))
        if progress:
            progress(i + 1, len(sizes))
    cost = LinearCost.fit(measured)
    cluster = Cluster(workers=group.size(), collectives={group.name(): cost})
    return Calibration(cluster, tuple(Sample(n, s, cost.cost(n)) for n, s in measured))


def _time(elements: int, group: Any) -> float:
    """Median seconds of an all-reduce of `elements` float32 numbers; the same on all ranks."""
    device = group_device(group)
    buffer = torch.zeros(elements, device=device)
    _once(buffer, group)
    trial = torch.tensor([_once(buffer, group)], dtype=torch.float64, device=device)
    dist.all_reduce(trial, op=dist.ReduceOp.MAX, group=group)  # all ranks repeat equally often
    repeats = max(5, min(50, int(_SECONDS_A_SIZE / max(trial.item(), 1e-6))))
    times = torch.tensor([_once(buffer, group) for _ in range(repeats)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return float(statistics.median(times.tolist()))


def _once(buffer: torch.Tensor, group: Any) -> float:
    start = time.perf_counter()
    dist.all_reduce(buffer, group=group)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - start
