"""MG-WFBP: merge a gradient with the next one if the next one is ready within alpha.

Idea: a layer that is sent as its own message costs the startup time alpha. A layer that is held back until the next
gradient is ready costs the time of waiting. Layer l is merged into the next layer, l-1, when the wait is shorter than
alpha: ready(l-1) - tau_c(l) < alpha, where tau_c(l) is the earliest moment at which the network could start to send
layer l.
Paper: MG-WFBP (Shi, Chu, Li, INFOCOM 2019), Theorem 1 and Algorithm 1.
Units: seconds and bytes.

Deviations:
- The paper recomputes every start time after every merge, in O(L^2). A merge changes only the start times of later
  layers, which the loop has not reached yet. So one scan in O(L) finds the same merges.
- Here each tensor is a layer, and layers are in ready order. If two tensors are ready at the same op, the second one
  takes no backward time.
- As printed, line 9 leaves the backward start of layer 1 unset, and line 13 reads the start of layer 0. In both lines,
  the paper means the end of the backward pass (equation 26).
- The theorem claims that the result of Algorithm 1 is optimal, but it is not; `merge_optimal.py` finds the optimum.
"""

from __future__ import annotations

from legato.core.cluster import Cluster
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

__all__ = ["mg_wfbp"]


def mg_wfbp(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, max_message_bytes: int | None = None
) -> Plan:
    """Return a plan that sends each group of Algorithm 1 as one message.

    A layer is not merged if the message would exceed `max_message_bytes`. Raises `InputError` if the limit is below 16
    bytes or the cluster lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    cost = cluster.cost(name)
    order, ready = ready_order(workload), release_times(workload)
    groups: list[list[int]] = []
    start, nbytes = 0.0, 0  # when the network could start to send the last group, and its bytes
    for t in order:
        merged = nbytes + workload.tensors[t].nbytes
        if groups and ready[t] - start < cost.startup_s and merged <= most:
            groups[-1].append(t)
            start, nbytes = max(start, ready[t]), merged
        else:
            free = start + cost.cost(nbytes) if groups else 0.0
            groups.append([t])
            start, nbytes = max(free, ready[t]), workload.tensors[t].nbytes
    return compose("mg-wfbp", [message_of(workload, group, name) for group in groups], workload)
