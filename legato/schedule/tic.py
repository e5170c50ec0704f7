"""TIC: pull the parameters in the order in which the graph can use them, without knowing any time.

Idea: what a worker computes first should arrive first. A parameter is the more
urgent, the fewer transfers it takes to start the first op that needs it
together with others.
Paper: TicTac (Hashemi, Abdu Jyothi, Campbell, SysML 2019), section 4.2,
Algorithm 2: the priority is M+ when every transfer takes 1 and every op 0.
Units: transfers.

Deviations:
- M+ leaves ties: the first two parameters of a chain have the same (the first
  one holds up an op by itself, which M+ does not count), and TicTac sends equals
  in any order. Here equals stand in the order in which the captured forward
  pass reads them first.
- The plan starts with the pushes, as gradients become ready (`fifo`).
"""

from __future__ import annotations

from legato.core.cluster import Cluster
from legato.core.placement import Placement
from legato.core.plan import Plan
from legato.core.workload import Workload
from legato.schedule.compose import urgency
from legato.schedule.servers import push_and_pull
from legato.schedule.transfer_properties import TransferProperties, find_dependencies

__all__ = ["tic", "tic_order"]


def tic(
    workload: Workload, cluster: Cluster, *, collective: str | None = None, placement: Placement = "round-robin"
) -> Plan:
    """Pushes in ready order, pulls in TIC's. Raises `InputError` without servers, or on an unknown setting."""
    return push_and_pull("tic", tic_order(workload), workload, cluster, collective, placement)


def tic_order(workload: Workload, *, inference: bool = False) -> list[int]:
    """Indices of the tensors in TIC's order, for a worker or for an inference agent."""
    needs = find_dependencies(workload, inference=inference)
    properties = TransferProperties(needs, [0] * len(needs), [1] * len(workload.tensors))
    impending, place = properties.impending(), urgency(workload)
    return sorted(range(len(place)), key=lambda t: (impending[t], place[t], t))
