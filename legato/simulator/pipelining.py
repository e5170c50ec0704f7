"""The time of a collective in chunks: while one chunk is added up, another chunk is sent.

In each round, a worker sends, adds up the bytes that it received, and then sends the sum on; the network is idle while
the worker adds. If a message is split into d chunks (the *depth*), network and worker can be busy at the same time, but
every latency is paid d times (Caramel, section 4.4 and Figure 13).

A worker's link carries one chunk at a time, which takes `latency + byte * bytes`
seconds per round; the worker adds up one chunk at a time, which takes
`reduce * bytes`. In the reducing half, each round handles all chunks, one after
another, before the next round starts; in the distributing half, each chunk goes
through all rounds before the next chunk starts. If each half has R rounds, in
each of which a chunk takes x to send and y to add up,

    T(d) = max(2 R d x,  (R-1) P + x + max(y + d R x, d y + R x)),   P = max(d x, d y, x + y)

The first term of T(d) holds if the link is never idle. In the second term, each of R-1 reducing rounds takes P, the
time of the round's bottleneck. The bottleneck is the link, the addition, or (with one chunk, which is not sent while it
is added up) both in turn. The last reducing round first sends one chunk (x). Then either the link distributes all
chunks without a pause once the first chunk is added up, or all chunks are added up before the last chunk is
distributed; the slower of the two counts.

Rounds and bytes come from the collective (`legato.collectives`). If rounds take different times, as in
halving-doubling, `_rounds` simulates the rounds one by one. With depth 1, all times equal the linear costs that
`Cluster.derive` computes.

The distributing half of a message adds nothing up. It takes half of the time that the whole message would take if
additions took no time. The reducing half takes the rest of the message's time.
"""

from __future__ import annotations

import math

import msgspec

from legato.collectives import COLLECTIVES, DIVIDED
from legato.core.cluster import Cluster
from legato.core.errors import InputError, unknown_name
from legato.core.plan import MOST_CHUNKS

__all__ = ["message_s", "pipelined_s", "second_half_s"]


def message_s(cluster: Cluster, collective: str | None, depth: int, nbytes: float) -> float:
    """Return the seconds of an all-reduce of `nbytes` bytes on a cluster.

    If the cluster has a measured cost for this depth or a smaller one, that cost is used. If the cluster's costs were
    derived, `pipelined_s` is used. In all other cases, the cost of sending the message as one chunk is used. Raises
    `InputError` on a collective that the cluster lacks.
    """
    name = cluster.default_collective if collective is None else collective
    cost = cluster.cost(name, depth)
    bandwidth, latency = cluster.bandwidth_bps, cluster.latency_s
    if depth == 1 or name in cluster.depths or name not in DIVIDED or bandwidth is None or latency is None:
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

    Arguments and errors are as in `message_s`.
    """
    name = cluster.default_collective if collective is None else collective
    whole_s = message_s(cluster, name, depth, nbytes)
    reduction_s = cluster.reduction_s_per_byte(name) * nbytes
    if depth > 1 and reduction_s and name in DIVIDED:
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

    The other arguments are as in `Cluster`. Raises `InputError` on a collective that is not in `DIVIDED`, on fewer than
    one worker or chunk, or on more chunks than a plan can have.
    """
    if collective not in DIVIDED:
        raise unknown_name("pipelined collective", collective, DIVIDED)
    if workers < 1 or not 1 <= depth <= MOST_CHUNKS:
        raise InputError(f"{workers} workers, depth {depth} (expected at least 1 of each, and {MOST_CHUNKS:,} chunks)")
    parts, rounds, _ = COLLECTIVES[collective].rounds(workers)
    chunk, s_per_byte, times = nbytes / depth, 8 / bandwidth_bps, []
    for one in rounds:
        moved = chunk * (one.laps * len(one.shifts) * one.block) / parts / one.laps
        begins_s = latency_s + send_s * (len(one.shifts) - 1)
        times.append((begins_s + s_per_byte * moved, reduce_s_per_byte * moved))
    if len(rounds) == 1:
        return _equal_rounds(rounds[0].laps, *times[0], depth=depth)
    return _rounds(times, depth)


def _equal_rounds(rounds: int, send: float, add: float, depth: int) -> float:
    """Return the closed form T(d) for rounds that all take the same time."""
    period = max(depth * send, depth * add, send + add)
    distribute = rounds * send
    last = send + max(add + depth * distribute, depth * add + distribute)
    return max(2 * rounds * depth * send, (rounds - 1) * period + last)


def _rounds(rounds: list[tuple[float, float]], depth: int) -> float:
    """Return the time for any rounds (seconds to send, seconds to add up), by simulating every chunk in every round."""
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
