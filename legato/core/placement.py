"""The placement of tensors on parameter servers.

*Round robin* (TensorFlow's default): whole tensors, the i-th one on server
i mod k.

*Equal*: every tensor is partitioned into k pieces of (nearly) the same size, one for each server. So at any moment, all
servers hold equally many bytes, and send equally many bytes. Pieces begin at multiples of 8 bytes, which keeps every
element whole; a tensor with fewer than 8 bytes per server goes to the server with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from legato.core.errors import InputError, unknown_name

__all__ = ["PLACEMENTS", "Placement", "place"]

Placement = Literal["round-robin", "equal"]
PLACEMENTS: tuple[Placement, ...] = ("round-robin", "equal")

#: A number of bytes. No element of any dtype crosses a multiple of this number.
_ALIGN = 8


def place(sizes: Iterable[int], servers: int, placement: Placement = "round-robin") -> list[list[tuple[int, int, int]]]:
    """Return the pieces of each tensor as (first byte, end, server).

    `sizes` are the bytes of the tensors, in the order of their creation. Raises `InputError` if there are no servers,
    or on an unknown placement.
    """
    if servers < 1:
        raise InputError(f"{servers} parameter servers (expected at least 1: a cluster with servers, or --servers)")
    if placement not in PLACEMENTS:
        raise unknown_name("placement", placement, PLACEMENTS)
    placed = []
    held = [0] * servers
    for i, nbytes in enumerate(sizes):
        if placement == "round-robin":
            pieces = [(0, nbytes, i % servers)]
        elif nbytes < servers * _ALIGN:
            pieces = [(0, nbytes, min(range(servers), key=lambda s: (held[s], s)))]
        else:
            cuts = [nbytes * s // servers // _ALIGN * _ALIGN for s in range(servers)] + [nbytes]
            pieces = [(cuts[s], cuts[s + 1], s) for s in range(servers)]
        for start, stop, server in pieces:
            held[server] += stop - start
        placed.append(pieces)
    return placed
