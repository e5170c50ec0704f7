"""The interface of a fabric, and the base class of collectives.

A fabric describes how gradients become sums (`reduce`) and how sums reach all workers (`distribute`), by adding
transfers to a graph; it does not compute times. `reduce` and `distribute` take and return arrays of ids of services,
with one row per fragment. Service `ready[m, r]` ends when worker r may send fragment m. The services `held[m, ...]` end
when the sum of fragment m is complete; if several workers or servers hold parts of the sum, each service ends when one
part is complete. `distribute` returns a service for each fragment and worker, which ends when the worker has the whole
sum of the fragment. Arrays that are passed to the topology have one row per fragment, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.simulator.flow.engine.services import Ids
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.network.network import Network
from legato.simulator.flow.network.switches import HostShape
from legato.simulator.flow.network.topology import Topology

__all__ = ["Collective", "Fabric"]


@runtime_checkable
class Fabric(Protocol):
    """The interface of a fabric.

    `servers` is the number of server hosts (0: workers send to one another). `synchronous` says whether all workers
    start an iteration together. `message_bytes` is the largest size of a fragment, or None for no limit. `in_flight` is
    the largest number of messages at once, or None for no limit.
    """

    @property
    def servers(self) -> int: ...
    @property
    def synchronous(self) -> bool: ...
    @property
    def message_bytes(self) -> int | None: ...
    @property
    def in_flight(self) -> int | None: ...

    def host_shape(self, network: Network) -> HostShape:
        """Return how workers share hosts and network cards; only hierarchical fabrics differ from the network."""
        ...

    def symmetric(self, network: Network) -> bool:
        """Return whether all workers send the same over equal links in this fabric when they compute the same."""
        ...

    def simulated(self, network: Network) -> int:
        """Return how many workers must be simulated if the network is symmetric (see topology.py)."""
        ...

    def services(self, network: Network) -> tuple[int, int]:
        """Return the least numbers of services on links: to reduce a fragment, and to distribute its sum.

        A transfer is two services. These numbers show that a simulation is too large before its graph is built.
        """
        ...

    def placed(self, workload: Workload) -> Mapping[str, int] | None:
        """Return the server of each tensor, or None if all tensors are in one place."""
        ...

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids: ...
    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids: ...


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The base class of fabrics without servers, in which all workers play the same role.

    `in_flight` limits the number of messages at once. With `in_flight` 1, messages are sent one after another, as
    planners assume and as the runtime sends them. With `in_flight` None, all ready messages are sent at once. Messages
    are split into fragments of at most `message_bytes` bytes.
    """

    in_flight: int | None = 1
    message_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("in_flight", "message_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InputError(f"{field}: {value} (expected at least 1)")

    @property
    def servers(self) -> int:
        return 0

    @property
    def synchronous(self) -> bool:
        return False

    def host_shape(self, network: Network) -> HostShape:
        return network.host_shape

    def symmetric(self, network: Network) -> bool:
        return network.flat

    def simulated(self, network: Network) -> int:
        return 1

    def services(self, network: Network) -> tuple[int, int]:
        return network.workers - 1, network.workers - 1

    def placed(self, workload: Workload) -> None:
        return None
