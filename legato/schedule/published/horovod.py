"""Horovod: at every tick of a clock, fuse what is ready, up to a threshold.

Idea: a background thread wakes up once a cycle, agrees with the other workers
on the gradients that all of them have, and sends those together: fewer startup
times than a message a tensor, and no plan. The forward pass waits for all.
Paper: Horovod (Sergeev, Del Balso, 2018), Tensor Fusion; cycle time and
threshold are HOROVOD_CYCLE_TIME and HOROVOD_FUSION_THRESHOLD of its code.
Units: seconds and bytes.

The defaults are those of Horovod since version 0.21 (2020): 1 ms and 128 MiB.
Before, and so in the papers that compare with it, they were 5 ms and 64 MiB.

Deviations:
- A plan says what goes together and in which order, and has no clock. The
  messages are those that the cycles form with the captured op times, the first
  tick at the start of the backward pass; that a message waits for its tick, up
  to a cycle after its last gradient, is not in the plan, nor what the
  negotiation costs. A prediction flatters Horovod by so much.
- Ticks go on while messages are under way, as with NCCL; with MPI or Gloo the
  thread sends by itself, and a long message puts the next tick off.
- A workload has one dtype, and no response cache.
"""

from __future__ import annotations

import math

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_of, ready_order, release_times, resolve_collective

__all__ = ["CYCLE_TIME_S", "FUSION_THRESHOLD_BYTES", "horovod"]

#: Horovod's defaults since version 0.21.
CYCLE_TIME_S = 1e-3
FUSION_THRESHOLD_BYTES = 128 * 2**20

_SHORTEST_CYCLE_S = 1e-9


def horovod(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    fusion_threshold_bytes: int = FUSION_THRESHOLD_BYTES,
    cycle_time_s: float = CYCLE_TIME_S,
) -> Plan:
    """The messages of the cycles, in ready order; a threshold of 0 turns fusion off.

    A tensor larger than the threshold goes alone. Raises `InputError` on a
    threshold below 0, a cycle shorter than a nanosecond, or a collective the
    cluster lacks.
    """
    name = resolve_collective(cluster, collective)
    if fusion_threshold_bytes < 0:
        raise InputError(f"fusion_threshold_bytes: {fusion_threshold_bytes} (expected at least 0)")
    if not _SHORTEST_CYCLE_S <= cycle_time_s < math.inf:
        raise InputError(f"cycle_time_s: {cycle_time_s} (expected finite seconds, at least {_SHORTEST_CYCLE_S})")
    ready = release_times(workload)
    groups: list[list[int]] = []
    tick = held = 0  # of the last group: the cycle it leaves in, and its bytes
    for t in ready_order(workload):
        sees, nbytes = math.ceil(ready[t] / cycle_time_s), workload.tensors[t].nbytes
        if groups and sees == tick and held + nbytes <= fusion_threshold_bytes:
            groups[-1].append(t)
            held += nbytes
        else:
            groups.append([t])
            tick, held = sees, nbytes
    return compose("horovod", [message_of(workload, group, name) for group in groups], workload, cluster)
