"""The machines and the network between them, for flow simulations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from legato.collectives import COLLECTIVES, RING
from legato.core.cluster import PARAMETER_SERVER, SEND_S, Cluster, sending_s
from legato.core.errors import InputError, unknown_name
from legato.simulator.flow.network.disturbances import Disturbance, check_numbers
from legato.simulator.flow.network.switches import Balance, HostShape, Switches, TopologyName

__all__ = ["PRICED_AS", "SHARING", "Network", "Sharing"]

#: How transfers share a link: first come, first served, or all at once at max-min fair rates.
Sharing = Literal["fifo", "fair"]
SHARING: tuple[Sharing, ...] = ("fifo", "fair")
_MOST_WORKERS = 2**20
#: The largest factor between the speeds of two machines, in both directions.
_LARGEST_FACTOR = 1e6
#: Fabrics that cost the same as a collective with another name.
PRICED_AS = {"butterfly": "recursive-doubling"}


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with full-duplex links to one switch that never blocks, or to several switches (`switches.py`).

    `bandwidth_bps` (bits per second) is the bandwidth of each host's link, in each direction. On the link of worker w,
    a byte takes `link_scale[w]` times as long (if empty: 1). The links of servers have `server_bandwidth_bps` (None:
    the same as the links of workers). `latency_s` (seconds) is added once to each transfer between hosts. `send_s` is
    the part of the latency in which the sender is busy with the transfer and sends nothing else (None: as
    `Cluster.derive` assumes).

    Workers are numbered host by host: `gpus_per_host` neighbours share a host, and `gpus_per_card` of them share a
    network card. A worker's link is always the link of its card. Each worker also has a link of `local_bandwidth_bps`
    (bits per second, in each direction) to a switch inside the host, which carries all transfers within the host,
    without latency.

    `topology` says how switches connect the hosts. In "leaf-spine", neighbouring hosts share one of `racks` racks, and
    each rack has a leaf that is connected to `spines` spines. A single rack means a single switch. "fat-tree" consists
    of switches with `ports` ports (None: the smallest sufficient even number). In "rails", card i of every host is
    connected to leaf i, and the leaves to `spines` spines. With 0 spines, a transfer to another rail first goes through
    a host's inner switch to a GPU on that rail (NCCL's PXN); a transfer between a server and a worker uses the worker's
    host for this. Server i is connected to leaf i, modulo the number of leaves. Together, the links from a leaf to its
    spines have the bandwidth of the leaf's cards divided by `oversubscription`. In a fat tree, the links from a pod's
    spines to the cores together have the bandwidth of the links from its leaves to its spines divided by
    `core_oversubscription`. `balance` spreads flows over paths: a hash of the flow's ends and the `seed` chooses one
    path ("ecmp"), or the flow uses all paths at once ("spray").

    With `cut_through`, switches forward a transfer while they receive it; otherwise they wait for the whole transfer.
    `reduce_s_per_byte` is the time to add a received byte to a sum.

    The computation of worker w takes `compute_scale[w]` times as long as in its workload (if empty: 1). In every
    iteration, each worker's time is also multiplied by a random factor, which is lognormal with median 1 and sigma
    `jitter`, drawn from `seed`. `disturbances` slow links and workers down temporarily.

    Raises `InputError` on numbers outside their range.
    """

    workers: int
    bandwidth_bps: float
    latency_s: float = 0.0
    gpus_per_host: int = 1
    gpus_per_card: int = 1
    local_bandwidth_bps: float = 100e9
    topology: TopologyName = "leaf-spine"
    racks: int = 1
    spines: int = 1
    ports: int | None = None
    oversubscription: float = 1.0
    core_oversubscription: float = 1.0
    balance: Balance = "ecmp"
    link_scale: tuple[float, ...] = ()
    server_bandwidth_bps: float | None = None
    cut_through: bool = True
    sharing: Sharing = "fifo"
    reduce_s_per_byte: float = 0.0
    compute_scale: tuple[float, ...] = ()
    jitter: float = 0.0
    seed: int = 0
    disturbances: tuple[Disturbance, ...] = ()
    send_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= _MOST_WORKERS:
            raise InputError(f"workers: {self.workers} (expected 1 to {_MOST_WORKERS})")
        for field in ("bandwidth_bps", "local_bandwidth_bps", "server_bandwidth_bps"):
            bandwidth = getattr(self, field)
            if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
                raise InputError(f"{field}: {bandwidth} (expected a finite number above 0)")
        for field in ("latency_s", "reduce_s_per_byte", "jitter"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected a finite number, at least 0)")
        sending_s(self.send_s, self.latency_s)
        if self.sharing not in SHARING:
            raise unknown_name("sharing", self.sharing, SHARING)
        self._check_scales()
        if self.jitter > 10:
            raise InputError(f"jitter: {self.jitter} (expected at most 10)")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed: {self.seed} (expected 0 to 2**63 - 1)")
        self._check_disturbances()  # this check also builds the switches, which know how many GPUs can share a card
        shared = np.reshape(self.link_scale, (-1, self.gpus_per_card))
        if (shared != shared[:, :1]).any():
            raise InputError(f"link_scale: several factors on one card (expected one for {self.gpus_per_card} GPUs)")

    def _check_scales(self) -> None:
        for field in ("compute_scale", "link_scale"):
            factors = getattr(self, field)
            if factors and len(factors) != self.workers:
                raise InputError(f"{field}: {len(factors)} factors (expected {self.workers}, or none)")
            for factor in factors:
                _check_factor(field, factor)

    def _check_disturbances(self) -> None:
        switches = self.switches
        there = {
            "link": self.workers,
            "compute": self.workers,
            "uplink": switches.num_leaves,
            "spine": switches.num_spines,
        }
        sprayed = [one for one in self.disturbances if one.kind == "spine"] if self.balance == "spray" else []
        if sprayed and switches.has_choice:
            raise InputError(f"spine: {sprayed[0].number} with sprayed packets, which take all spines (expected ecmp)")
        check_numbers(self.disturbances, there)

    @classmethod
    def of(cls, cluster: Cluster) -> Network:
        """Return the network of a cluster: identical hosts below one switch.

        If the costs were measured, bandwidth and latency are chosen so that the formulas in MG-WFBP's Table II give the
        measured cost of the default collective. A collective that the table lacks (`gloo`, `nccl`) counts as a ring.
        Raises `InputError` if additions alone take the measured time per byte, so that no bandwidth fits.
        """
        bandwidth_bps, latency_s, reduce = cluster.bandwidth_bps, cluster.latency_s, cluster.reduce_s_per_byte
        if bandwidth_bps is None or latency_s is None:
            cost, name = cluster.cost().line, cluster.default_collective
            if name == PARAMETER_SERVER:
                raise InputError(f"{name}: measured (expected a cluster with a bandwidth_bps and a latency_s)")
            formula = COLLECTIVES.get(name, RING).cost
            hops, _ = formula(cluster.workers, 1.0, 0.0, 0.0, 0.0)
            _, copies = formula(cluster.workers, 0.0, 1.0, 0.0, 0.0)
            _, reduce_s = formula(cluster.workers, 0.0, 0.0, reduce, 0.0)
            sends, _ = formula(cluster.workers, 0.0, 0.0, 0.0, 1.0)
            if not (copies and cost.beta_s_per_byte > reduce_s):
                raise InputError(f"{name}: {cost.beta_s_per_byte} seconds per byte (expected more, for a bandwidth)")
            bandwidth_bps = 8 * copies / (cost.beta_s_per_byte - reduce_s)
            # If the known time of a send exceeds the latency, all of the latency is spent on sending.
            known = SEND_S if cluster.send_s is None else cluster.send_s
            latency_s = max((cost.alpha_s - sends * known) / hops, cost.alpha_s / (hops + sends))
        return cls(
            workers=cluster.workers,
            bandwidth_bps=bandwidth_bps,
            latency_s=latency_s,
            reduce_s_per_byte=reduce,
            send_s=None if cluster.send_s is None else min(cluster.send_s, latency_s),
        )

    def cluster(self, fabric: str, servers: int = 0) -> Cluster:
        """Return these machines as a cluster for planners, in which all links are as slow as the slowest link.

        The cluster has one collective: pushes and pulls if there are servers, and otherwise the collective of the
        fabric (or the one that is most similar to the fabric).
        """
        own = PRICED_AS.get(fabric, fabric if fabric in COLLECTIVES else "ring")
        slowest_bps = self.bandwidth_bps / max(self.link_scale, default=1.0)
        if servers and self.server_bandwidth_bps is not None:
            slowest_bps = min(slowest_bps, self.server_bandwidth_bps)
        return Cluster.derive(
            self.workers,
            slowest_bps,
            self.latency_s,
            send_s=self.send_s,
            reduce_s_per_byte=self.reduce_s_per_byte,
            collectives=[PARAMETER_SERVER if servers else own],
            servers=servers,
        )

    @property
    def host_shape(self) -> HostShape:
        return HostShape(self.gpus_per_host, self.gpus_per_card)

    @property
    def switches(self) -> Switches:
        """Return the switches above the hosts' links."""
        return Switches(
            topology=self.topology,
            workers=self.workers,
            shape=self.host_shape,
            racks=self.racks,
            spines=self.spines,
            ports=self.ports,
            balance=self.balance,
            oversubscription=self.oversubscription,
            core_oversubscription=self.core_oversubscription,
            seed=self.seed,
        )

    @property
    def sending_s(self) -> float:
        """Return the seconds for which a transfer keeps its sender busy before its bytes are sent."""
        return sending_s(self.send_s, self.latency_s)

    @property
    def on_the_way_s(self) -> float:
        """Return the rest of the latency in seconds, during which the sender is free."""
        return self.latency_s - self.sending_s

    @property
    def s_per_byte(self) -> float:
        """Return the seconds that a byte takes on a link of `bandwidth_bps`."""
        return 8 / self.bandwidth_bps

    def host_s_per_byte(self, workers: int, servers: int) -> NDArray[np.float64]:
        """Return the seconds that a byte takes on each link of the first `workers` workers and of the servers."""
        rates = np.full(workers + servers, self.s_per_byte)
        if self.link_scale:
            rates[:workers] *= self.link_scale[:workers]
        if self.server_bandwidth_bps is not None:
            rates[workers:] = 8 / self.server_bandwidth_bps
        return rates

    @property
    def disturbed(self) -> bool:
        """Return whether there are disturbances."""
        return any(one.factor != 1 for one in self.disturbances)

    @property
    def uniform(self) -> bool:
        """Return whether all workers have the same speed and equal links at all times."""
        alike = self.jitter == 0 and len(set(self.compute_scale)) <= 1 and len(set(self.link_scale)) <= 1
        return alike and not self.disturbed

    @property
    def flat(self) -> bool:
        """Return whether every worker has its own host, and all hosts share one switch."""
        return self.switches.one and self.gpus_per_host == 1

    @property
    def plain(self) -> bool:
        """Return whether all hosts are alike and share one switch, as formulas require."""
        alike = self.uniform and set(self.compute_scale + self.link_scale) <= {1.0}
        return alike and self.server_bandwidth_bps is None and self.flat and self.sharing == "fifo"

    def slowdown(self, iterations: int, workers: int | None = None) -> NDArray[np.float64]:
        """Return an array [iterations, workers] of the factors by which the workers' computation takes longer.

        If all workers are alike, `workers` may be smaller than the number of workers of the network.
        """
        if workers is not None:
            return np.full((iterations, workers), self.compute_scale[0] if self.compute_scale else 1.0)
        factors = np.ones((iterations, self.workers))
        if self.jitter > 0:
            factors *= np.exp(self.jitter * np.random.default_rng(self.seed).standard_normal(factors.shape))
        if self.compute_scale:
            factors *= np.asarray(self.compute_scale)
        return factors


def _check_factor(name: str, factor: float) -> None:
    if not 1 / _LARGEST_FACTOR <= factor <= _LARGEST_FACTOR:
        raise InputError(f"{name}: {factor} (expected {1 / _LARGEST_FACTOR:.0e} to {_LARGEST_FACTOR:.0e})")
