"""What the collectives of fully sharded training cost on a cluster."""

from __future__ import annotations

import msgspec

from legato.core.cluster import LinearCost

__all__ = ["Costs"]


class Costs(msgspec.Struct, frozen=True):
    """The times of one rank's collectives, each as a function of the bytes of the whole group.

    The model is sharded over `ranks`. `gather_in_host` is an all-gather among the ranks of one host, of parameters
    that were resharded to it; `all_reduce` adds up shards of gradients among replicas, and is None without them.
    `copy_s_per_byte` is for copies into and out of buffers, and `host_s` what the host needs for one group in a step.
    """

    ranks: int
    gather: LinearCost
    gather_in_host: LinearCost
    scatter: LinearCost
    all_reduce: LinearCost | None = None
    copy_s_per_byte: float = 0.0
    host_s: float = 0.0
