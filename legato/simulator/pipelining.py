"""The time of a collective in chunks: while one chunk is added up, another one is sent.

In each round a worker sends, adds up what it received, and then sends the sum
on; the network is idle while the worker adds. If a message is split into d
chunks (the *depth*), both can be busy, but every latency is paid d times
(Caramel, section 4.4 and Figure 13).

A worker's link carries one chunk at a time, which takes `latency + byte * bytes`
seconds per round; the worker adds up one chunk at a time, which takes
`reduce * bytes`. In the reducing half, each round handles all chunks, one after
another, before the next round starts; in the distributing half, each chunk goes
through all rounds before the next chunk starts. If each half has R rounds, in
each of which a chunk takes x to send and y to add up,

    T(d) = max(2 R d x,  (R-1) P + x + max(y + d R x, d y + R x)),   P = max(d x, d y, x + y)

Either the link is never idle; or each of R-1 reducing rounds takes P, the time
of their bottleneck (the link, the addition, or both in turn: with d = 1 they
cannot overlap), and after the last reducing round, distribution waits for the
sum of the first chunk or for the sum of the last one.

    collective          R           bytes sent per round, of a chunk of c bytes on n workers
    shuffle             1           c (n-1)/n: all-to-all, local sum, all-gather; n-1 sends
    ring                n-1         c / n
    halving-doubling    log2(n)     c/2, c/4, ... c/n, and back; first c where n is not a power of two

The rounds of halving-doubling differ, so `_rounds` simulates them one by one. With
depth 1, all three times are the linear costs of `legato.core.cluster.COLLECTIVES`.

A second half adds nothing up, and takes half of what the whole would take if
additions took no time; the first half takes the rest.
"""

from __future__ import annotations

import math

import msgspec

from legato.core.cluster import PIPELINED, Cluster
from legato.core.errors import InputError, unknown_name
from legato.core.plan import MOST_CHUNKS

__all__ = ["PIPELINED", "message_s", "pipelined_s", "second_half_s"]


def message_s(cluster: Cluster, collective: str | None, depth: int, nbytes: float) -> float:
    """Return the seconds of an all-reduce of `nbytes` bytes on a cluster.

    If this depth or a smaller one was measured, the measured cost is used; if
    the cluster's costs were derived, `pipelined_s`; otherwise the cost of one
    chunk. Raises `InputError` on a collective that the cluster lacks.
    """
    name = cluster.default_collective if collective is None else collective
    cost = cluster.cost(name, depth)
    bandwidth, latency = cluster.bandwidth_bps, cluster.latency_s
    if depth == 1 or name in cluster.depths or name not in PIPELINED or bandwidth is None or latency is None:
        return cost.cost(nbytes)
    return pipelined_s(
        name,
        cluster.workers,
        nbytes,
        depth,
        bandwidth_bps=bandwidth,
        latency_s=latency,
        reduce_s_per_byte=cluster.reduce_s_per_byte,
        send_s=cluster.sending_s,
    )


def second_half_s(cluster: Cluster, collective: str | None, depth: int, nbytes: float) -> float:
    """Return the seconds of the second half of a message: an all_gather or a pull of `nbytes` bytes.

    Arguments and errors are those of `message_s`.
    """
    name = cluster.default_collective if collective is None else collective
    whole_s = message_s(cluster, name, depth, nbytes)
    reduction_s = cluster.reduction_s_per_byte(name) * nbytes
    if depth > 1 and reduction_s and name in PIPELINED:
        free = msgspec.structs.replace(cluster, reduce_s_per_byte=0.0)
        return message_s(free, name, depth, nbytes) / 2
    return (whole_s - reduction_s) / 2


def pipelined_s(
    collective: str,
    workers: int,
    nbytes: float,
    depth: int,
    *,
    bandwidth_bps: float,
    latency_s: float,
    reduce_s_per_byte: float,
    send_s: float = 0.0,
) -> float:
    """Return the seconds of an all-reduce of `nbytes` bytes in `depth` chunks.

    The other arguments are those of `Cluster`. Raises `InputError` on a
    collective that is not in `PIPELINED`, on fewer than one worker or chunk, or on more
    chunks than a plan can have.
    """
    if collective not in PIPELINED:
        raise unknown_name("pipelined collective", collective, PIPELINED)
    if workers < 1 or not 1 <= depth <= MOST_CHUNKS:
        raise InputError(f"{workers} workers, depth {depth} (expected at least 1 of each, and {MOST_CHUNKS:,} chunks)")
    if workers == 1:
        return 0.0
    chunk, s_per_byte = nbytes / depth, 8 / bandwidth_bps
    if collective == "halving-doubling":
        return _rounds(
            [
                (latency_s + s_per_byte * chunk * share, reduce_s_per_byte * chunk * share)
                for share in _halvings(workers)
            ],
            depth,
        )
    rounds = workers - 1 if collective == "ring" else 1
    moved = chunk * (workers - 1) / workers / rounds
    begins_s = latency_s + (send_s * (workers - 2) if collective == "shuffle" else 0.0)
    return _equal_rounds(rounds, begins_s + s_per_byte * moved, reduce_s_per_byte * moved, depth)


def _equal_rounds(rounds: int, send: float, add: float, depth: int) -> float:
    """The closed form T(d) of rounds that all take the same time."""
    period = max(depth * send, depth * add, send + add)
    distribute = rounds * send
    last = send + max(add + depth * distribute, depth * add + distribute)
    return max(2 * rounds * depth * send, (rounds - 1) * period + last)


def _rounds(rounds: list[tuple[float, float]], depth: int) -> float:
    """The time for any rounds (seconds to send, seconds to add up): simulate every chunk in every round."""
    link = adder = 0.0
    summed = [0.0] * depth
    for send, add in rounds:
        for c in range(depth):
            link = max(link, summed[c]) + send
            adder = max(adder, link) + add
            summed[c] = adder
    distribute = math.fsum(send for send, _ in rounds)
    for done in summed:
        link = max(link, done) + distribute
    return link


def _halvings(workers: int) -> list[float]:
    """The share of the bytes that each round of a half sends."""
    rounds = workers.bit_length() - 1
    folds = [1.0] if workers > 1 << rounds else []
    return [*folds, *(0.5 ** (k + 1) for k in range(rounds))]
