"""Measures how messages and computation slow each other down on the machine of each rank (docs/contention.md).

Several messages of one size are launched at once, and the worker computes while they run one after another. The number
of messages that arrive before the computation ends shows how much each message was delayed. One number, the same for
all sizes, says how much longer computation takes for each second of processor time that messages use: the median of
(additional seconds of computation / processor seconds of messages).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.plan import Message, Slice
from legato.pytorch.network.channel import Channel

__all__ = ["Beside", "Contended", "fit_contention", "measure_contention"]

#: Sizes of the messages during computation, in bytes.
SIZES = (2**16, 2**20, 2**22, 2**24)
#: A size is left out if a message of this size takes longer than this number of seconds.
_LONG_S = 0.4
#: The computation is repeated until it takes at least this number of seconds.
_LEAST_S = 0.01
#: The number of messages of a size that should arrive while the worker computes.
_ARRIVALS = 4
#: The number of measurements of each size; the sizes take turns.
_REPEATS = 4
#: The greatest number of messages that are launched at once, and of repetitions of the computation meanwhile.
_MOST, _MOST_TIMES = 2048, 1000
#: The greatest loss: messages slow computation down by their processor time, and a little more for shared memory and
#: caches.
_MOST_LOST = 1.5
#: Bytes of memory for all messages together (but there is always memory for two).
_MEMORY = 64 * 2**20

_MESSAGE = Message((Slice("measured", 0, 4),))


class Contended(msgspec.Struct, frozen=True):
    """One measurement: seconds on the slowest rank, and processor time averaged over the ranks.

    While messages of `nbytes` bytes were in flight, computation took `beside_s` seconds instead of `alone_s`. Each
    message arrived after `message_s` seconds, and used the processor for `processor_s` seconds.
    """

    nbytes: int
    alone_s: float
    beside_s: float
    message_s: float
    processor_s: float

    @property
    def lost(self) -> float:
        """Return the additional seconds of computation for each second of processor time that messages used."""
        taken_s = self.processor_s * self.beside_s / self.message_s
        return (self.beside_s - self.alone_s) / taken_s if taken_s > 0 else 0.0


class Beside:
    """Messages of one size in flight during computation, from `begin()` to `end()`."""

    def __init__(self, channel: Channel, nbytes: int, count: int) -> None:
        self._channel, self._count = channel, count
        # As in training, messages use different memory, which is no longer in the processor's caches.
        self._buffers = [torch.ones(nbytes // 4) for _ in range(max(2, min(count, _MEMORY // nbytes)))]
        self._arrived: list[float] = []

    def begin(self) -> None:
        """Launch the messages."""
        self._began = time.perf_counter()
        self._works = [self._channel(self._buffers[k % len(self._buffers)], _MESSAGE) for k in range(self._count)]
        for work in self._works:
            work.get_future().add_done_callback(lambda _: self._arrived.append(time.perf_counter()))

    def end(self) -> tuple[float, float]:
        """Wait for all messages; return the seconds since `begin()`, in total and per message."""
        ended = time.perf_counter()
        for work in self._works:
            work.wait()
        before = [moment for moment in self._arrived if moment <= ended]
        beside_s = ended - self._began
        return beside_s, (before[-1] - self._began) / len(before) if before else beside_s


def measure_contention(
    compute: Callable[[], object],
    cluster: Cluster,
    channel: Channel,
    group: Any,
    pack_s_per_byte: float = 0.0,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Contention, float]:
    """Measure messages during `compute()`, on all ranks together. `compute()` should take some milliseconds or more.

    `cluster` has the costs of messages without computation; `pack_s_per_byte` is the cost of packing. Returns the
    contention, which is the same on all ranks, and the seconds of `compute()` alone. The time of `compute()` is the
    median over repetitions, each timed on its slowest rank, because the other ranks wait for the slowest rank in
    training.
    """
    cost = cluster.cost()
    compute()
    alone_s = _mean([statistics.median(_timed(compute)[0] for _ in range(3))], group)[0]
    samples: list[Contended] = []
    passes: list[float] = []
    sizes = [size for size in SIZES if cost.cost(size) <= _LONG_S] or [SIZES[0]]
    for k in range(_REPEATS * len(sizes)):
        nbytes = sizes[k % len(sizes)]
        wanted_s = max(_ARRIVALS * cost.cost(nbytes), _LEAST_S)
        times = max(1, min(_MOST_TIMES, math.ceil(wanted_s / max(alone_s, 1e-9))))
        # enough messages for the whole computation, even if it takes twice as long
        count = min(_MOST, 2 + int(2 * times * alone_s / cost.cost(nbytes)))
        dist.barrier(group)
        alone = [_timed(compute) for _ in range(times)]
        beside = Beside(channel, nbytes, count)
        dist.barrier(group)
        start = time.process_time()
        beside.begin()
        for _ in range(times):
            compute()
        seconds, message_s = beside.end()
        processor_s = (time.process_time() - start - sum(used for _, used in alone)) / count
        passes += [s for s, _ in alone]
        slowest = _slowest([sum(s for s, _ in alone), seconds, message_s], group)
        samples.append(Contended(nbytes, *slowest, *_mean([max(0.0, processor_s)], group)))
        if progress:
            progress(k + 1, _REPEATS * len(sizes))
    return fit_contention(samples, cost, pack_s_per_byte), statistics.median(_slowest(passes, group))


def fit_contention(samples: Sequence[Contended], cost: LinearCost, pack_s_per_byte: float = 0.0) -> Contention:
    """Fit the delay and the overhead of messages to measurements of at least one size.

    For each size, the medians of its measurements are used. The delay is the difference between the fitted time during
    computation and `cost`, the cost of messages alone.
    """
    beside, processor = [], []
    for size in sorted({sample.nbytes for sample in samples}):
        of_size = [sample for sample in samples if sample.nbytes == size]
        message_s = max(statistics.median(sample.message_s for sample in of_size), cost.cost(size))
        beside.append((size, message_s))
        processor.append((size, max(statistics.median(sample.processor_s for sample in of_size), 1e-3 * message_s)))
    slower, used = _line(beside), _line(processor)
    lost = min(_MOST_LOST, max(0.0, statistics.median(sample.lost for sample in samples)))
    delay = LinearCost(
        max(0.0, slower.alpha_s - cost.startup_s), max(0.0, slower.beta_s_per_byte - cost.beta_s_per_byte)
    )
    return Contention(delay, LinearCost(lost * used.alpha_s, lost * used.beta_s_per_byte), pack_s_per_byte)


def _line(points: Sequence[tuple[int, float]]) -> LinearCost:
    if len(points) == 1:
        return LinearCost(points[0][1], 0.0)
    cost = LinearCost.fit(points)
    return LinearCost(cost.startup_s, cost.beta_s_per_byte)


def _timed(compute: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `compute()` takes, and the processor seconds of the process."""
    start, used = time.perf_counter(), time.process_time()
    compute()
    return time.perf_counter() - start, time.process_time() - used


def _mean(values: Sequence[float], group: Any) -> list[float]:
    """Return the averages over all ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return [float(x) for x in total / group.size()]


def _slowest(values: Sequence[float], group: Any) -> list[float]:
    """Return the largest values of all ranks, because all ranks wait for the slowest in training."""
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [float(x) for x in largest]
