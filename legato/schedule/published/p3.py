"""P3: partition gradients into slices, and send first what the next forward pass reads first.

Idea: the next forward pass begins with the first layers, whose gradients come last. With slices, an urgent gradient can
overtake a large gradient that is being sent, and a forward op starts as soon as its own parameters have arrived.
Paper: Priority-Based Parameter Propagation (Jayarajan et al., SysML 2019), section 4; cited by PACE (section VII) and
TicTac.
Units: seconds and bytes.

Deviations:
- P3 keeps a priority queue at run time and talks to parameter servers. Here the plan is a fixed order of all-reduces:
  the order that such a queue would produce with the captured op times. Whenever the network is free, the network sends
  the ready slice that the forward pass reads first.
- P3 partitions into slices of 50,000 parameters. The default here is 4 MiB, because every slice costs the startup time
  alpha of a message.
"""

from __future__ import annotations

import heapq
from collections import deque

from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Workload
from legato.schedule.basics.compose import (
    check_partitions,
    compose,
    least_partition,
    message_limit,
    priorities,
    ready_order,
    release_times,
    resolve_collective,
)

__all__ = ["p3"]


def p3(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    slice_bytes: int = 4 * 2**20,
    max_message_bytes: int | None = None,
) -> Plan:
    """Return a plan that sends slices of at most `slice_bytes`, the most urgent first, with forward overlap.

    The runtime sends whole elements, so `slice_bytes` should be a multiple of 8. If `max_message_bytes` is lower, it is
    used instead, rounded down to a multiple of 16. Raises `InputError` if `slice_bytes` is below 1, `max_message_bytes`
    is below 16, there are too many slices, or the cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    if slice_bytes < 1:
        raise InputError(f"slice_bytes: {slice_bytes} (expected at least 1)")
    option, slice_bytes = least_partition("slice_bytes", slice_bytes, most)
    check_partitions(workload, option, slice_bytes)
    cost, tensors = cluster.cost(name), workload.tensors
    ready, place = release_times(workload), priorities(workload)
    arriving = deque(ready_order(workload))
    queue: list[tuple[int, int, int]] = []  # priority, tensor, first byte not yet sent
    messages = []
    now = 0.0
    while arriving or queue:
        if not queue:
            now = max(now, ready[arriving[0]])
        while arriving and ready[arriving[0]] <= now:
            t = arriving.popleft()
            heapq.heappush(queue, (place[t], t, 0))
        first, t, start = heapq.heappop(queue)
        stop = min(start + slice_bytes, tensors[t].nbytes)
        if stop < tensors[t].nbytes:
            heapq.heappush(queue, (first, t, stop))
        messages.append(Message((Slice(tensors[t].name, start, stop),), collective=name))
        now += cost.cost(stop - start)
    return compose("p3", messages, workload, forward_overlap=True)
