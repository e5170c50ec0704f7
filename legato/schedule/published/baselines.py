"""The two extremes: `fifo` sends every gradient as its own message, and `single` sends all gradients in one message.

`fifo` is wait-free backpropagation (WFBP), as restated in MG-WFBP (Shi, Chu, Li, INFOCOM 2019), section II-C, equations
6 to 8. Idea: layers that have finished their backward pass send their gradients while earlier layers still compute.
Every tensor is one message, and messages are sent in the order in which they become ready.

`single` is the single-layer communication of You et al. (2017), the baseline "SyncEASGD" of MG-WFBP, section V. Idea: a
single message pays the startup time alpha only once. Communication and computation do not overlap.

Deviation: a tensor is a parameter, not a layer. If the same op produces several gradients, `fifo` sends each gradient
as its own message.
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
    """Return a plan that sends one message per tensor, in ready order.

    `max_message_bytes` has no effect, since tensors are sent whole. Raises `InputError` if the limit is below 16 bytes
    or the cluster lacks the collective.
    """
    name = resolve_collective(cluster, collective)
    message_limit(max_message_bytes)
    return compose("fifo", [message_of(workload, [t], name) for t in ready_order(workload)], workload)


def single(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, max_message_bytes: int | None = None
) -> Plan:
    """Return a plan that sends all tensors in one message, or in as few messages as `max_message_bytes` allows.

    A tensor above the limit is a message of its own. Raises `InputError` if the limit is below 16 bytes or the cluster
    lacks the collective.
    """
    name, most = resolve_collective(cluster, collective), message_limit(max_message_bytes)
    groups = in_turn(workload, ready_order(workload), most)
    return compose("single", [message_of(workload, group, name) for group in groups], workload)
