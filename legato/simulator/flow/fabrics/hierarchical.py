"""Hierarchical all-reduce: rings inside the hosts, and one ring between the hosts for each part.

`group` neighbouring workers share a host and its network link. Inside the host,
they reduce-scatter on local links; then the workers with the same place l in
their hosts all-reduce part l over the network; then the workers of each host
all-gather on local links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError
from legato.simulator.flow.fabrics.protocol import Collective
from legato.simulator.flow.fragments import Fragments
from legato.simulator.flow.graph import Ids
from legato.simulator.flow.topology import Topology

__all__ = ["Hierarchical"]


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Collective):
    """`group` workers per host, with a link of `local_bandwidth_bps` (bits per second) to each neighbour."""

    group: int = 8
    local_bandwidth_bps: float = 100e9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 1:
            raise InputError(f"group: {self.group} (expected at least 1)")
        if not (math.isfinite(self.local_bandwidth_bps) and self.local_bandwidth_bps > 0):
            raise InputError(f"local_bandwidth_bps: {self.local_bandwidth_bps} (expected a finite number above 0)")

    def simulated(self, workers: int) -> int:
        if workers % self.group:
            raise InputError(f"group: {self.group} workers per host (expected a divisor of {workers})")
        return self.group

    def services(self, workers: int) -> tuple[int, int]:
        half = 2 * workers * (self.group - 1 + workers // self.group - 1)
        return half, half

    def reduce(self, topology: Topology, fragments: Fragments, ready: Ids) -> Ids:
        part = self._around(topology, fragments, ready, self.group, local=True, adds=True)
        return self._around(topology, fragments, part, topology.workers // self.group, local=False, adds=True)

    def distribute(self, topology: Topology, fragments: Fragments, held: Ids) -> Ids:
        part = self._around(topology, fragments, held, topology.workers // self.group, local=False, adds=False)
        return self._around(topology, fragments, part, self.group, local=True, adds=False)

    def _around(self, topology: Topology, fragments: Fragments, ready: Ids, n: int, *, local: bool, adds: bool) -> Ids:
        """Reduce-scatter or all-gather in rings of n workers: inside each host, or between hosts for each part."""
        ranks = topology.ranks
        left, right = self._neighbour(topology, -1, local), self._neighbour(topology, 1, local)
        arrived = topology.pass_around(
            right if local else self._host(right),
            left,
            fragments.nbytes / (n if local else n * self.group),
            ready,
            n - 1,
            key=fragments.order,
            source=ranks if local else self._host(ranks),
            adds=adds,
            local=local,
        )
        # A sum needs the last chunk received and the worker's own; all-gather needs all chunks.
        needed = [arrived[:, -1:] if adds else arrived, ready[:, None]]
        return topology.graph.join(np.concatenate(needed, axis=1), axis=1)

    def _neighbour(self, topology: Topology, step: int, local: bool) -> NDArray[np.int64]:
        ranks = topology.ranks
        if not local:
            return topology.worker(ranks + step * self.group)
        return self._host(ranks) + (ranks + step) % self.group

    def _host(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The worker whose link is the host's."""
        return ranks // self.group * self.group
