"""Caramel's parameter batcher: small gradients share a message while the network is busy anyway.

Idea: a small message is mostly overhead. A gradient below a threshold joins the
current batch, which goes out when it has grown beyond the threshold, or when
the network has nothing else to do. So a batch holds gradients that become ready
at nearly the same time: none waits for another one while the network is idle.
Paper: Caramel (Hashemi, Jyothi, Campbell, MLSys 2020), section 4.2.
Units: seconds and bytes.

Deviation: the paper does not say what becomes of a batch when a large gradient
comes up. It stays open: the large one makes the network busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from legato.core.cluster import LinearCost

__all__ = ["batches", "threshold_bytes"]


def threshold_bytes(cost: LinearCost) -> float:
    """The least x with f(2x) / (2 f(x)) > 0.8, where f is the cost: 1.5 alpha / beta.

    0 where startup is free, infinite where only startup costs. With a floor
    that f(x) lies on, 0.8 is passed at (1.6 floor - alpha) / (2 beta).
    """
    if cost.startup_s == 0:
        return 0.0
    if cost.beta_s_per_byte == 0:
        return math.inf
    above = 1.5 * cost.alpha_s / cost.beta_s_per_byte
    if cost.alpha_s + cost.beta_s_per_byte * above >= cost.floor_s:
        return above
    return (1.6 * cost.floor_s - cost.alpha_s) / (2 * cost.beta_s_per_byte)


def batches(ready_s: Sequence[float], nbytes: Sequence[int], cost: LinearCost, threshold: float) -> list[list[int]]:
    """Gradients (indices) in groups, a message each, in the order in which they go out.

    `ready_s` never falls. Gradients larger than `threshold` bytes are alone.
    Raises `ValueError` when the sequences differ in length.
    """
    if len(ready_s) != len(nbytes):
        raise ValueError(f"{len(ready_s)} ready times and {len(nbytes)} sizes (expected as many)")
    sent: list[list[int]] = []
    idle = 0.0  # when the network will be done with all in `sent`

    def send(group: list[int]) -> None:
        nonlocal idle
        idle = max(idle, ready_s[group[-1]]) + cost.cost(sum(nbytes[k] for k in group))
        sent.append(group)

    batch: list[int] = []
    size = 0
    for k, ready in enumerate(ready_s):
        if batch and max(idle, ready_s[batch[-1]]) < ready:
            send(batch)
            batch, size = [], 0
        if nbytes[k] > threshold:
            send([k])
            continue
        batch.append(k)
        size += nbytes[k]
        if size > threshold:
            send(batch)
            batch, size = [], 0
    if batch:
        send(batch)
    return sent
