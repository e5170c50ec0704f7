"""Groups of gradients; each group is sent in two halves, a reduce-scatter and an all-gather of the same bytes.

`period.py` arranges the halves of groups, and `group_search.py` searches for groups.

Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from legato.core.plan import Message
from legato.core.workload import Workload
from legato.simulator.period import Period

__all__ = ["Arranged", "Groups", "Part", "groups_of"]

#: Part of a tensor: the tensor's index, the first byte, and the end.
Part = tuple[int, int, int]
#: Groups of parts; the parts of a group are scattered together and gathered together.
Groups = list[list[Part]]


class Arranged(NamedTuple):
    """An iteration: its seconds, its halves in the order in which they begin, and the order of its ops.

    Of n groups, half k scatters group k, and half k + n gathers it.
    """

    seconds: float
    halves: tuple[int, ...]
    op_order: tuple[int, ...]


def groups_of(messages: Iterable[Message], workload: Workload) -> Groups:
    """Return the groups of a plan that sends halves, in the order in which they are scattered."""
    tensor_id = Period.of(workload).tensor_id
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in message.slices]
        for message in messages
        if message.kind == "reduce_scatter"
    ]
