"""Measures the costs of a process group's collectives.

[Note: in a stream] Training sends one message after another, and packs the next one while the previous one is in
flight. Calibration measures messages as training sends them: it launches several messages in order through the
runtime's own channel, and divides their total time by their number.

[Note: what a floor hides] If a cost has a floor, the transfer of a large message hides the work that the hosts do for
it. Then a line fitted to large messages has an alpha of 0, as if it cost nothing to partition a large message. In fact,
each part of a partitioned message costs time. In rehearsals of ResNet-50 on four hosts at 1 Gbit, a plan with 92
messages and a plan with 98 took 70 ms longer than predicted with an alpha of 0. So each message took longer by an
eighth of the floor (5.8 ms). Therefore, alpha is at least an eighth of the floor.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Slice
from legato.pytorch.device import clock_for, group_device
from legato.pytorch.network.agreement import unique_name
from legato.pytorch.network.channel import Channel, channel_for, check_message
from legato.pytorch.network.contention import measure_contention
from legato.pytorch.private.groups import group_timeout, own_group

__all__ = ["Calibration", "Sample", "calibrate", "sizes_up_to"]

#: Sizes of the measured messages, in bytes: from 1 KiB to 1 MiB in steps of four, then to 64 MiB in steps of two.
SIZES = (*(2**k for k in range(10, 20, 2)), *(2**k for k in range(20, 27)))
_SECONDS_PER_SIZE = 0.4
#: Limits of a stream: its number of messages, and their total bytes and seconds. (A stream has at least two messages.)
_STREAM, _STREAM_BYTES, _STREAM_S = 8, 64 * 2**20, 2.0
#: If a message takes longer than this, no larger messages are measured, because their cost is linear.
_LONG_S = 1.0
#: Size of the copy with which unpacking is measured, in bytes.
_COPIED = 25 * 2**20
#: The number of sends that are measured together.
_SENDS = 32
#: Alpha is at least this fraction of the floor (see [Note: what a floor hides]).
_UNHIDDEN = 1 / 8


def sizes_up_to(nbytes: int) -> tuple[int, ...]:
    """Return the default sizes of messages up to `nbytes`, and in any case the default sizes up to 1 MiB."""
    return tuple(size for size in SIZES if size <= max(nbytes, 2**20))


class Sample(msgspec.Struct, frozen=True):
    """The measured cost of one message.

    A message of `nbytes`, sent in `depth` chunks, took `seconds` (the median); the fitted cost is `fitted_s`.
    """

    nbytes: int
    seconds: float
    fitted_s: float
    collective: str
    depth: int = 1

    @property
    def error(self) -> float:
        """Return the relative error of the fit."""
        return self.fitted_s / self.seconds - 1


class Calibration(msgspec.Struct, frozen=True):
    """A cluster for the planner, and the measurements to which it was fitted.

    `compute_s` is how long the computation alone takes, in seconds, or 0 if messages were not measured during
    computation. `compute_s` is the median over all repetitions, each timed on its slowest rank.
    """

    cluster: Cluster
    samples: tuple[Sample, ...]
    compute_s: float = 0.0

    @property
    def median_error(self) -> float:
        """Return the median of the absolute relative errors of the fit."""
        return statistics.median(abs(s.error) for s in self.samples)

    @property
    def worst_error(self) -> float:
        """Return the maximum of the absolute relative errors of the fit."""
        return max(abs(s.error) for s in self.samples)


def calibrate(
    process_group: Any = None,
    *,
    sizes: Sequence[int] = SIZES,
    collectives: Sequence[str] = (),
    depths: Sequence[int] = (1,),
    compute: Callable[[], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measure all-reduce on all ranks of a process group, and fit alpha + beta * bytes.

    Every rank must call `calibrate`, and gets the same result.

    The backend's own all-reduce is measured under the backend's name (`gloo`, `nccl`), and becomes the cluster's
    default. Each of `collectives`, which consist of sends and receives over gloo (`legato.collectives`), is measured in
    one chunk and in `depths` chunks. All collectives take turns, so that a disturbance affects all of them. Over gloo,
    calibration also measures how long a send keeps its sender busy (`Cluster.send_s`). The time of a repetition is the
    time on its slowest rank; the time of a size is the median of its repetitions. On a slow network the largest sizes
    are skipped.

    Args:
        process_group: the ranks to measure; with None, all ranks.
        sizes: bytes of the messages, at least two different sizes of at least 4 bytes.
        collectives: names of further collectives (`ring`, `shuffle`, `halving-doubling`, ...).
        depths: numbers of chunks in which these collectives are measured, in addition to one chunk.
        compute: a function that computes as in training, for some milliseconds or more, on every rank. On a CPU,
            `compute` serves to measure how much messages and computation slow each other down
            (`legato.pytorch.network.contention`); without it, the cluster has no contention. On other devices, only
            packing is measured, with or without `compute`.
        progress: called as `progress(done, total)` after each size, and after each measurement during computation.

    Raises:
        InputError: no process group is initialized, or `sizes` or `depths` are invalid.
        PlanError: the runtime cannot run one of the collectives.
    """
    _check(sizes, depths)
    given: Any = process_group if process_group is not None else dist.group.WORLD
    # A separate group for everything: if a rank fails here, training can go on.
    group = own_group(given, unique_name(given), group_timeout(given, group_device(given)))
    ways = [(group.name(), 1), *((name, depth) for name in collectives for depth in sorted({1, *depths}))]
    channel = channel_for(group)
    messages = [Message((Slice("measured", 0, 4),), collective=name, depth=depth) for name, depth in ways]
    for message in messages:
        check_message(message, "calibrate", group.name())
    measured = dict(zip(ways, _measured(messages, sizes, channel, group, progress), strict=True))
    fits = {way: _fit(points) for way, points in measured.items()}
    samples = [Sample(n, s, fits[way].cost(n), *way) for way, points in measured.items() for n, s in points]
    deeper: dict[str, dict[int, LinearCost]] = {}
    for (name, depth), cost in fits.items():
        if depth > 1:
            deeper.setdefault(name, {})[depth] = cost
    cluster = Cluster(
        workers=group.size(),
        collectives={name: cost for (name, depth), cost in fits.items() if depth == 1},
        depths=deeper,
        unpack_s_per_byte=_unpack_s_per_byte(group),
        send_s=_send_s(group),
    )
    compute_s, contention = 0.0, None
    if group_device(group).type != "cpu":
        free = LinearCost(0.0, 0.0)
        contention = Contention(delay=free, overhead=free, pack_s_per_byte=_pack_s_per_byte(group))
    elif compute is not None:
        packing = _pack_s_per_byte(group)
        contention, compute_s = measure_contention(compute, cluster, channel, group, packing, progress=progress)
    cluster = msgspec.structs.replace(cluster, contention=contention)
    group.shutdown()
    return Calibration(cluster, tuple(samples), compute_s)


def _check(sizes: Sequence[int], depths: Sequence[int]) -> None:
    if not dist.is_initialized():
        raise InputError("no process group: start with torchrun and call torch.distributed.init_process_group() first")
    if len(set(sizes)) < 2 or min(sizes) < 4:
        raise InputError(f"sizes: {sorted(set(sizes))} (expected at least two different sizes of at least 4 bytes)")
    if min(depths, default=1) < 1:
        raise InputError(f"depths: {min(depths)} (expected at least 1)")


def _measured(
    messages: Sequence[Message],
    sizes: Sequence[int],
    channel: Channel,
    group: Any,
    progress: Callable[[int, int], None] | None,
) -> list[list[tuple[int, float]]]:
    """Return (bytes, seconds) for each kind of message and size. Sizes that would take too long are skipped."""
    measured: list[list[tuple[int, float]]] = [[] for _ in messages]
    for i, nbytes in enumerate(sizes):
        count = _stream(nbytes, [points[-1] for points in measured if points])
        buffers = [torch.zeros(nbytes // 4, device=group_device(group)) for _ in range(1 + count)]
        once = [functools.partial(_once, buffers, message, channel) for message in messages]
        for points, seconds in zip(measured, _times(once, group), strict=True):
            points.append((buffers[0].nbytes, seconds))
        if progress:
            progress(i + 1, len(sizes))
        if i and max(points[-1][1] for points in measured) > _LONG_S:
            break
    return measured


def _stream(nbytes: int, before: Sequence[tuple[int, float]]) -> int:
    """Return how many messages of this size to measure in a stream, given the (bytes, seconds) of smaller messages."""
    expected_s = max((seconds * nbytes / size for size, seconds in before if size <= nbytes), default=0.0)
    fits = [_STREAM_BYTES // nbytes, *([int(_STREAM_S / expected_s)] if expected_s else [])]
    return min(_STREAM, max(2, min(fits)))


def _times(once: Sequence[Callable[[], float]], group: Any) -> list[float]:
    """Return the median seconds of each function, the same on all ranks; the functions take turns."""
    device = group_device(group)
    for do in once:
        do()
    trial = torch.tensor([do() for do in once], dtype=torch.float64, device=device)
    dist.all_reduce(trial, op=dist.ReduceOp.MAX, group=group)  # so that all ranks repeat equally often
    repeats = max(4, min(50, int(_SECONDS_PER_SIZE * len(once) / max(trial.sum().item() * _STREAM, 1e-6))))
    times = torch.tensor([[do() for do in once] for _ in range(repeats)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return [statistics.median(column) for column in times.T.tolist()]


def _once(buffers: Sequence[torch.Tensor], message: Message, channel: Channel) -> float:
    gradient, first, *rest = buffers
    clock = clock_for(first.device)
    start = clock.now()
    works = [channel(first, message)]
    for buffer in rest:
        torch.mul(gradient, 0.5, out=buffer)  # the runtime packs a message in this way
        works.append(channel(buffer, message))
    for work in works:
        work.wait()
    return clock.seconds(start, clock.now()) / (1 + len(rest))


def _unpack_s_per_byte(group: Any) -> float:
    """Return the seconds per byte of copying a received message into new gradients, while all ranks copy."""
    message = torch.ones(_COPIED // 4, device=group_device(group))
    return _s_per_byte(lambda: torch.empty_like(message).copy_(message), group)


def _pack_s_per_byte(group: Any) -> float:
    """Return the seconds per byte of packing (gradients divided by the number of ranks), while all ranks pack."""
    gradients = torch.ones(_COPIED // 4, device=group_device(group))
    message = torch.empty_like(gradients)
    return _s_per_byte(lambda: torch.mul(gradients, 0.5, out=message), group)


def _s_per_byte(copy: Callable[[], object], group: Any) -> float:
    """Return the seconds per byte of a function that copies `_COPIED` bytes, on the slowest rank."""
    clock = clock_for(group_device(group))

    def once() -> float:
        start = clock.now()
        copy()
        return clock.seconds(start, clock.now())

    return _times([once], group)[0] / _COPIED


def _send_s(group: Any) -> float | None:
    """Return the seconds between small sends to one neighbour while the other neighbour sends to this rank.

    Returns None if there is only one rank, or if the backend sends on a device, because the device's queue would be
    measured instead.
    """
    ranks, rank = group.size(), group.rank()
    if ranks == 1 or group_device(group).type != "cpu":
        return None
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    small, taken = torch.zeros(1), torch.zeros(_SENDS, 1)

    def once() -> float:
        receiving = [group.recv([place], before, 0) for place in taken]
        start = time.perf_counter()
        sending = [group.send([small], after, 0) for _ in receiving]
        for work in (*sending, *receiving):
            work.wait()
        return (time.perf_counter() - start) / _SENDS

    return _times([once], group)[0]


def _fit(points: Sequence[tuple[int, float]]) -> LinearCost:
    cost = LinearCost.fit(points)
    return msgspec.structs.replace(cost, alpha_s=max(cost.alpha_s, cost.floor_s * _UNHIDDEN))
