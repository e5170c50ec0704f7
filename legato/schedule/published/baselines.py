"""The two extremes: `fifo` sends every gradient on its own, `single` sends all of them together.

`fifo` is wait-free backpropagation (WFBP), as restated in MG-WFBP (Shi, Chu, Li,
INFOCOM 2019), section II-C, equations 6 to 8. Idea: layers that are done with the
backward pass communicate while the layers before them still compute. One message
per tensor; the first one ready is the first one sent.

`single` is the single-layer communication of You et al. (2017), the baseline
"SyncEASGD" of MG-WFBP, section V. Idea: one message pays the startup time alpha
once. Nothing overlaps.

Deviation: a tensor is a parameter, not a layer. Where the same op makes several
gradients, `fifo` sends each of them as its own message.
"""

from __future__ import annotations

from legato.core.cluster import Cluster
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, in_turn, message_limit, message_of, ready_order, resolve_collective

__all__ = ["fifo", "single"]


def fifo(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, max_message_bytes: int | None = None
) -> Plan:
    """Send one message per tensor, in ready order.

    `max_message_bytes` changes nothing, since tensors are sent whole. Raises `InputError`
    on a limit below 16 bytes or a collective the cluster lacks.
    """
    name = resolve_collective(cluster, collective)
    message_limit(max_message_bytes)
    return compose("fifo", [message_of(workload, [t], name) for t in ready_order(workload)], workload, cluster)


def single(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, max_message_bytes: int | None = None
) -> Plan:
    """Send all tensors as one message, or as few as `max_message_bytes` allows; a larger tensor is sent alone.

    Raises `InputError` on a limit below 16 bytes or a collective the cluster lacks.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    groups = in_turn(workload, ready_order(workload), most)
    return compose("single", [message_of(workload, group, name) for group in groups], workload, cluster)
