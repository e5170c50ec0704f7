"""SyncEASGD: send everything at once, after the backward pass.

Idea: one message pays the startup time alpha once; nothing overlaps.
Paper: single-layer communication of You et al. (2017), the baseline
"SyncEASGD" of MG-WFBP (Shi et al., 2019), section V.
"""

from __future__ import annotations

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.compose import compose, known_collective, ready_order, whole

__all__ = ["single"]


def single(workload: Workload, cluster: Cluster, *, collective: str | None = None) -> Plan:
    """One message of all tensors. Raises `InputError` on a collective the cluster lacks."""
    name = known_collective(cluster, collective)
    return compose("single", [whole(workload, ready_order(workload), name)], workload, cluster)
