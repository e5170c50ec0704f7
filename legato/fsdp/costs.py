"""The costs of the collectives of fully sharded training on a cluster."""

from __future__ import annotations

import msgspec

from legato.collectives import RING
from legato.core.cluster import PARAMETER_SERVER, Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.job import Machine, WorkerGroup

__all__ = ["Costs", "Hosts"]


class Hosts(msgspec.Struct, frozen=True):
    """The hosts of the ranks: `gpus` ranks share a host, connected by links of `bandwidth_bps` bits per second.

    On each host, groups of `gpus_per_card` ranks share a network card, which has the bandwidth of the cluster.
    """

    gpus: int = 1
    bandwidth_bps: float = 100e9
    gpus_per_card: int = 1

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_card < 1 or self.gpus % self.gpus_per_card:
            raise InputError(
                f"hosts: {self.gpus} GPUs, {self.gpus_per_card} per card (expected a card for each group of that size)"
            )


class Costs(msgspec.Struct, frozen=True):
    """The costs of one rank's collectives, each as a function of a group's bytes on all ranks together.

    The model is sharded over `ranks`. If parameters were resharded to the ranks of one host, `gather_in_host` is the
    cost of gathering them. `all_reduce` adds up shards of gradients among replicas, and is None without replicas.
    `copy_s_per_byte` is the time to copy a byte into or out of a buffer, and `host_s` the CPU time for one group in a
    step.
    """

    ranks: int
    gather: LinearCost
    gather_in_host: LinearCost
    scatter: LinearCost
    all_reduce: LinearCost | None = None
    copy_s_per_byte: float = 0.0
    host_s: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster, hosts: Hosts, *, replicas: int = 1, host_s: float = 0.0) -> Costs:
        """Return the costs on a cluster whose workers hold `replicas` sharded copies of a model.

        A gather or a reduce-scatter takes half as long as the cluster's default collective takes to all-reduce the same
        bytes. For a gather among fewer ranks, the cost shrinks as much as the cost of a ring would. If the cluster is
        derived from a bandwidth, and hosts have several GPUs, rings use all cards of a host, as NCCL's do. Ranks that
        share a host use the links inside the host. Raises `InputError` if the replicas, or the GPUs of a host, do not
        divide the workers, or if each replica has only one rank.
        """
        if cluster.default_collective == PARAMETER_SERVER:
            raise InputError(f"collective: {PARAMETER_SERVER} (expected one of workers: FSDP2 has no servers)")
        ranks = _ranks(cluster.workers, replicas, hosts.gpus)
        network = _Network(cluster, hosts)
        gather = network.gather(ranks)
        return cls(ranks, gather, network.gather(hosts.gpus), gather, network.all_reduce(replicas), host_s=host_s)

    @classmethod
    def of_machine(cls, machine: Machine, workers: int, *, replicas: int = 1, host_s: float = 0.0) -> Costs:
        """Return the costs among workers that fill hosts of a machine. Raises the same errors as `of`."""
        gpus = machine.gpus_per_host
        ranks = _ranks(workers, replicas, min(gpus, workers))
        gather = _on_machine(machine, WorkerGroup(ranks, -(-ranks // gpus), min(ranks, gpus)))
        in_host = _on_machine(machine, WorkerGroup(gpus, 1, gpus))
        among = None if replicas == 1 else _on_machine(machine, WorkerGroup(replicas, replicas, 1))
        both = None if among is None else LinearCost(among.alpha_s, 2 * among.beta_s_per_byte)
        return cls(ranks, gather, in_host, gather, both, host_s=host_s)


def _ranks(workers: int, replicas: int, gpus: int) -> int:
    """Return the number of ranks over which a model is sharded."""
    for name, number in (("replicas", replicas), ("gpus per host", gpus)):
        if number < 1 or workers % number:
            raise InputError(f"{name}: {number} (expected a divisor of the {workers} workers)")
    if workers // replicas < 2:
        raise InputError(f"workers: {workers} in {replicas} replicas (expected 2 or more ranks to shard over)")
    return workers // replicas


def _on_machine(machine: Machine, group: WorkerGroup) -> LinearCost:
    """Return the cost of an all-gather among this group of ranks on a machine."""
    ring = machine.ring(group)
    return LinearCost(ring.alpha_s, RING.half(group.size, 0.0, ring.beta_s_per_byte)[1])


class _Network:
    """The costs of rings of ranks on a cluster."""

    def __init__(self, cluster: Cluster, hosts: Hosts) -> None:
        self.cluster, self.hosts = cluster, hosts
        derived = cluster.cost().line.alpha_s / 2 / max(cluster.workers - 1, 1)
        self.latency_s = derived if cluster.latency_s is None else cluster.latency_s

    def gather(self, ranks: int) -> LinearCost:
        """Return the cost of an all-gather, or of a reduce-scatter, among neighbouring ranks."""
        bps, hosts = self.cluster.bandwidth_bps, self.hosts
        if ranks <= hosts.gpus:
            return _ring(ranks, self.latency_s, hosts.bandwidth_bps)
        if bps is None or hosts.gpus == 1:
            return _scaled(self.cluster.cost().line, self.cluster.workers, ranks)
        return _ring(ranks, self.latency_s, min(hosts.bandwidth_bps, bps * hosts.gpus / hosts.gpus_per_card))

    def all_reduce(self, replicas: int) -> LinearCost | None:
        """Return the cost of an all-reduce of each GPU with its peers in other replicas, or None for one replica."""
        if replicas == 1:
            return None
        bps = self.cluster.bandwidth_bps
        if bps is None:
            one_way = _scaled(self.cluster.cost().line, self.cluster.workers, replicas)
        else:
            one_way = _ring(replicas, self.latency_s, bps / self.hosts.gpus_per_card)
        return one_way.times(2)


def _ring(ranks: int, latency_s: float, bandwidth_bps: float) -> LinearCost:
    """Return the cost of an all-gather in a ring of ranks, whose links have this latency and bandwidth."""
    return LinearCost(*RING.half(ranks, latency_s, 8 / bandwidth_bps))


def _scaled(all_reduce: LinearCost, workers: int, ranks: int) -> LinearCost:
    """Return half of an all-reduce's cost among `workers`, scaled to `ranks` by the ratio of the costs of two rings."""
    hops, share = RING.half(workers, 2.0, 2.0)
    own = RING.half(ranks, all_reduce.alpha_s / hops, all_reduce.beta_s_per_byte / share)
    return LinearCost(*own, all_reduce.floor_s / 2, off=all_reduce.off)
