"""Horovod: at every tick of a clock, fuse the gradients that are ready, up to a threshold.

Idea: a background thread wakes up once per cycle, agrees with the other workers on the gradients that are ready on
every worker, and sends those together. Fusing gradients costs fewer startup times than one message per tensor, and
needs no plan. The forward pass waits for all messages.
Paper: Horovod (Sergeev, Del Balso, 2018), Tensor Fusion. Cycle time and threshold are HOROVOD_CYCLE_TIME and
HOROVOD_FUSION_THRESHOLD of Horovod's code.
Units: seconds and bytes.

The defaults are Horovod's since version 0.21 (2020): 1 ms and 128 MiB. Earlier versions of Horovod, and the papers that
compare with it, used 5 ms and 64 MiB.

Deviations:
- A plan says which tensors are sent together and in which order, and has no clock. The messages are those that the
  cycles form with the captured op times, if the first tick is at the start of the backward pass. Predictions ignore the
  wait from a message's last gradient to the next tick (up to a cycle). Predictions also ignore the cost of the
  negotiation. So predicted iterations are too short by the waits and the cost of negotiation.
- Ticks continue while messages are being sent, as with NCCL. With MPI or Gloo, the background thread itself sends
  messages, so a long message delays the next tick.
- A workload has only one dtype, and there is no response cache.
"""

from __future__ import annotations

import math

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import (
    compose,
    message_limit,
    message_of,
    ready_order,
    release_times,
    resolve_collective,
)

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
    max_message_bytes: int | None = None,
) -> Plan:
    """Return a plan that sends the messages that the cycles form, in ready order.

    A tensor larger than the threshold is a message of its own, and a threshold of 0 turns fusion off. If
    `max_message_bytes` is below the threshold, it replaces the threshold. Raises `InputError` if the threshold is below
    0, the limit is below 16 bytes, a cycle is shorter than a nanosecond, or the cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    if fusion_threshold_bytes < 0:
        raise InputError(f"fusion_threshold_bytes: {fusion_threshold_bytes} (expected at least 0)")
    if not _SHORTEST_CYCLE_S <= cycle_time_s < math.inf:
        raise InputError(f"cycle_time_s: {cycle_time_s} (expected finite seconds, at least {_SHORTEST_CYCLE_S})")
    ready, most = release_times(workload), min(most, fusion_threshold_bytes)
    groups: list[list[int]] = []
    tick = held = 0  # the cycle in which the last group leaves, and its bytes
    for t in ready_order(workload):
        sees, nbytes = math.ceil(ready[t] / cycle_time_s), workload.tensors[t].nbytes
        if groups and sees == tick and held + nbytes <= most:
            groups[-1].append(t)
            held += nbytes
        else:
            groups.append([t])
            tick, held = sees, nbytes
    return compose("horovod", [message_of(workload, group, name) for group in groups], workload)
