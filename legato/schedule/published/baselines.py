"""WFBP: send each gradient as soon as it is there.

Idea: layers that are done with the backward pass communicate while the layers
before them still compute; one message a tensor, first ready, first sent.
Paper: wait-free backpropagation, as restated in MG-WFBP (Shi et al., 2019),
section II-C, equations 6 to 8.
Deviation: a tensor is a parameter, not a layer; where several are ready at the
same op, each is its own message.

SyncEASGD: send everything at once, after the backward pass.

Idea: one message pays the startup time alpha once; nothing overlaps.
Paper: single-layer communication of You et al. (2017), the baseline
"SyncEASGD" of MG-WFBP (Shi et al., 2019), section V.
"""

from __future__ import annotations

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_of, ready_order, resolve_collective

__all__ = ["fifo", "single"]


def fifo(workload: Workload, cluster: Cluster, *, collective: str | None = None) -> Plan:
    """A message a tensor, in ready order. Raises `InputError` on a collective the cluster lacks."""
    name = resolve_collective(cluster, collective)
    return compose("fifo", [message_of(workload, [t], name) for t in ready_order(workload)], workload, cluster)


def single(workload: Workload, cluster: Cluster, *, collective: str | None = None) -> Plan:
    """One message of all tensors. Raises `InputError` on a collective the cluster lacks."""
    name = resolve_collective(cluster, collective)
    return compose("single", [message_of(workload, ready_order(workload), name)], workload, cluster)
