"""ByteScheduler: partitions in a priority queue, and a window of credit in front of the network.

Idea: a message cannot be called back once the network has it, and a network that gets one small message at a time is
not fully used. So tensors are partitioned, and the most urgent ready partition is always sent next. Credit limits how
many partitions can be in the network at once: a partition takes as much credit as it has bytes when it leaves, and
returns the credit when it arrives.
Paper: A Generic Communication Scheduler for Distributed DNN Training Acceleration (Peng et al., SOSP 2019). As in
ByteScheduler's code, a partition may leave while any credit is left.
Units: seconds and bytes.

The plan is the order in which this queue releases its partitions, with the captured op times. The network sends
partitions in the order in which they come, so an urgent partition waits for all partitions that are already in the
window. More credit delays preemption. With credit for a single partition, ByteScheduler is the same as P3.

The defaults are the values that ByteScheduler's documentation gives for all-reduce: 8 million parameters of 4 bytes per
partition, and credit for 16 million parameters. (For parameter servers, the documentation gives 1 million and 4
million.)

Deviations:
- In this model the network carries one message at a time, and one message uses it fully. The window exists to hide the
  gap between two messages. Such a gap costs nothing here, so only the disadvantage of the window is visible.
- ByteScheduler tunes partition and credit during training (Bayesian optimisation); here they are options.
- With all-reduce there are no pushes and pulls that could run at the same time.
"""

from __future__ import annotations

import heapq
import math
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

__all__ = ["CREDIT_BYTES", "PARTITION_BYTES", "bytescheduler"]

#: The values that ByteScheduler's documentation suggests for all-reduce.
PARTITION_BYTES = 32_000_000
CREDIT_BYTES = 64_000_000


def bytescheduler(
    workload: Workload,
    cluster: Cluster,
    *,
    collective: str | None = None,
    partition_bytes: int = PARTITION_BYTES,
    credit_bytes: int = CREDIT_BYTES,
    max_message_bytes: int | None = None,
) -> Plan:
    """Return a plan that sends partitions of at most `partition_bytes` in the queue's order, with forward overlap.

    The runtime sends whole elements, so `partition_bytes` should be a multiple of 16. If `max_message_bytes` is lower
    than `partition_bytes`, partitions have at most `max_message_bytes` bytes, rounded down to a multiple of 16. Raises
    `InputError` if `partition_bytes` or `credit_bytes` is below 1, `max_message_bytes` is below 16, there are too many
    partitions, or the cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    for option, value in (("partition_bytes", partition_bytes), ("credit_bytes", credit_bytes)):
        if value < 1:
            raise InputError(f"{option}: {value} (expected at least 1)")
    option, partition_bytes = least_partition("partition_bytes", partition_bytes, most)
    check_partitions(workload, option, partition_bytes)
    cost, tensors = cluster.cost(name), workload.tensors
    ready, place = release_times(workload), priorities(workload)
    arriving = deque(ready_order(workload))
    queue: list[tuple[int, int, int]] = []  # priority, tensor, first byte not yet sent
    window: deque[tuple[float, int]] = deque()  # partitions under way: arrival time and bytes
    now, free, credit = 0.0, 0.0, credit_bytes  # `free`: when the window will be empty
    messages = []
    while arriving or queue:
        while arriving and ready[arriving[0]] <= now:
            t = arriving.popleft()
            heapq.heappush(queue, (place[t], t, 0))
        while window and window[0][0] <= now:
            credit += window.popleft()[1]
        if queue and credit > 0:
            first, t, start = heapq.heappop(queue)
            stop = min(start + partition_bytes, tensors[t].nbytes)
            if stop < tensors[t].nbytes:
                heapq.heappush(queue, (first, t, stop))
            messages.append(Message((Slice(tensors[t].name, start, stop),), collective=name))
            free = max(free, now) + cost.cost(stop - start)
            credit -= stop - start
            window.append((free, stop - start))
        else:
            now = min(ready[arriving[0]] if arriving else math.inf, window[0][0] if window else math.inf)
    return compose("bytescheduler", messages, workload, forward_overlap=True)
