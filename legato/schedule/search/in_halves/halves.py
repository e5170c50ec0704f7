"""The best plan that sends all reduce-scatters before all all-gathers.

The plan uses DeAR's idea, but chooses the sizes of messages that are best by the cost model. `merge_optimal.py` merges
the reduce-scatters by the times at which gradients are ready. `merge_optimal.py` also merges the all-gathers, backwards
in time, by the times at which the forward pass reads them. With messages of whole tensors, the reduce-scatters end as
early as possible, and the all-gathers begin as late as possible, so the whole plan is optimal as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from legato.core.cluster import Cluster
from legato.core.plan import Kind, Message, Plan
from legato.core.workload import Workload
from legato.schedule.basics.compose import compose, message_of
from legato.schedule.published.merge_optimal import merge_neighbours

__all__ = ["halves"]


def halves(
    workload: Workload,
    cluster: Cluster,
    release_s: Sequence[float],
    tail_s: Sequence[float],
    collective: str,
    most: float = math.inf,
) -> Plan:
    """Return the plan for gradients with these release times and tails, by tensor.

    A message of several tensors has at most `most` bytes.
    """
    half = cluster.cost(collective).times(1 / 2)

    def merged(release_s: Sequence[float], kind: Kind) -> list[Message]:
        order = sorted(range(len(release_s)), key=release_s.__getitem__)
        nbytes = [workload.tensors[t].nbytes for t in order]
        _, groups = merge_neighbours([release_s[t] for t in order], nbytes, half, most)
        messages = [message_of(workload, order[start:stop], collective) for start, stop in groups]
        return [msgspec.structs.replace(message, kind=kind) for message in messages]

    messages = merged(release_s, "reduce_scatter") + merged(tail_s, "all_gather")[::-1]
    return compose("legato", messages, workload, forward_overlap=True)
