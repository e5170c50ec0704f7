"""Measure the cost of pushes and pulls between the ranks' hosts, with legato's runtime as in training.

The calibration trains models of equal tensors without computation. Without computation, an iteration consists of all
pushes, the servers' turn (from the last gradient to the first value), and all pulls. All workers start an iteration
together. The slowest links are the links of servers, or the links of workers if there are more servers than workers.
The numbers of messages and bytes on the slowest links are known, so a linear fit gives the time of a message, of a byte
and of the servers' turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from legato.core.workload import Op, Tensor, Workload
from legato.lab.testbed.servers.loop import ServerLoop
from legato.lab.testbed.servers.model import ServerCosts, predict
from legato.pytorch.network.agreement import broadcast_bytes
from legato.schedule import schedule

__all__ = ["Calibrated", "calibrate_servers"]

#: (tensors per server, bytes of each)
_MODELS = ((1, 4096), (16, 16384), (16, 262144), (4, 1 << 20), (4, 1 << 22))
_ITERATIONS = 7
_COPY_BYTES = 1 << 23


class Calibrated(msgspec.Struct, frozen=True):
    """The costs of pushes and pulls, and the relative error of predictions with these costs (median over the sizes)."""

    costs: ServerCosts
    fit_error: float


def calibrate_servers(servers: int, agents: int, progress: Callable[[int, int], None]) -> Calibrated:
    """Measure on all ranks together, and return the same costs on all ranks."""
    workers = dist.get_world_size() - servers - agents
    copies = max(1.0, workers / servers)
    rows, seconds = [], []
    for i, (count, nbytes) in enumerate(_MODELS):
        seconds.append(_exchange_s(_flat(count * servers, nbytes), workers, servers, agents))
        messages = count * servers * copies
        rows.append((1.0, 2 * messages, 2 * messages * nbytes))
        progress(i + 1, len(_MODELS))
    copy_s_per_byte = _copy_s_per_byte()
    content = b""
    if dist.get_rank() == 0:
        costs = _fit(rows, seconds, copy_s_per_byte)
        errors = [
            abs(_predicted(_flat(count * servers, nbytes), costs, workers, servers) / s - 1)
            for (count, nbytes), s in zip(_MODELS, seconds, strict=True)
        ]
        content = msgspec.json.encode(Calibrated(costs, statistics.median(errors)))
    return msgspec.json.decode(broadcast_bytes(content, dist.group.WORLD), type=Calibrated)


def _fit(rows: list[tuple[float, float, float]], seconds: list[float], copy_s_per_byte: float) -> ServerCosts:
    """Fit the costs by least squares of the relative errors, with no cost below zero."""
    weighted = np.array(rows) / np.array(seconds)[:, None]
    scale = weighted.max(axis=0)
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    turn_s, message_s, s_per_byte = (found / scale).tolist()
    return ServerCosts(8 / s_per_byte, message_s, turn_s, copy_s_per_byte)


def _predicted(workload: Workload, costs: ServerCosts, workers: int, servers: int) -> float:
    plan = schedule("pull-optimal", workload, costs.cluster(workers, servers))
    return predict(workload, plan, costs, workers, servers).iteration_s


def _exchange_s(workload: Workload, workers: int, servers: int, agents: int) -> float:
    cluster = ServerCosts(1e9, 0.0, 0.0, 0.0).cluster(workers, servers)
    plan = schedule("pull-optimal", workload, cluster)
    return statistics.median(ServerLoop(workload, servers, agents).exchange(plan, _ITERATIONS))


def _flat(count: int, nbytes: int) -> Workload:
    """Return a chain of layers that take no time and have one tensor each."""
    ops = [Op(f"f{i}", "forward", 0.0, (i - 1,) if i else ()) for i in range(count)]
    ops += [Op(f"b{i}", "backward", 0.0, (count + i - 1,)) for i in range(count)]
    tensors = [Tensor(f"t{i}", nbytes, 2 * count - 1 - i, (i,)) for i in range(count)]
    return Workload(f"{count} of {nbytes} bytes", tuple(ops), tuple(tensors))


def _copy_s_per_byte() -> float:
    """Return the seconds per byte of a copy, measured on rank 0 while the other ranks wait."""
    source, target = torch.zeros(_COPY_BYTES // 4), torch.zeros(_COPY_BYTES // 4)
    seconds = []
    if dist.get_rank() == 0:
        for _ in range(9):
            start = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - start)
    dist.barrier()
    return statistics.median(seconds) / _COPY_BYTES if seconds else 0.0
