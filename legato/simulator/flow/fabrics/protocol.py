"""What a fabric is, and what collectives have in common.

A fabric says how gradients become sums (`reduce`) and how sums reach all
workers (`distribute`), by adding transfers to a graph; it never sees the clock.
Both take and return arrays of ids of services, one row a fragment: `ready[m, r]`
ends when worker r may send fragment m, `held[m, ...]` when a sum, or one worker's
or server's part of it, is complete; what `distribute` returns ends when worker r
has the whole sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from legato.core.errors import InputError
from legato.core.workload import Workload
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.topology import Topology

__all__ = ["Collective", "Fabric", "is_power_of_two"]


class Fabric(Protocol):
    """`servers`: server hosts (0: workers exchange with one another). `synchronous`: whether all workers begin an
    iteration in step. `message_bytes`: the largest piece of a message, or None. `in_flight`: how many messages at
    once, or None."""

    @property
    def servers(self) -> int: ...
    @property
    def synchronous(self) -> bool: ...
    @property
    def message_bytes(self) -> int | None: ...
    @property
    def in_flight(self) -> int | None: ...
    @property
    def local_bandwidth_bps(self) -> float: ...

    def simulated(self, workers: int) -> int:
        """How many of that many like workers need to be simulated (see topology.py). Raises `InputError` if the
        fabric does not work with so many."""
        ...

    def placed(self, workload: Workload) -> Mapping[str, int] | None:
        """The server of each tensor, if there is more than one place."""
        ...

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids: ...
    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids: ...


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Workers exchange with one another, and all see the same: what fabrics without servers start from.

    `in_flight` bounds the messages on their way at once (None: all that are
    ready; 1: one after another, as at collective fidelity); messages are cut
    into pieces of at most `message_bytes` bytes.
    """

    in_flight: int | None = None
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

    @property
    def local_bandwidth_bps(self) -> float:
        return 1.0

    def simulated(self, workers: int) -> int:
        return 1

    def placed(self, workload: Workload) -> None:
        return None


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
