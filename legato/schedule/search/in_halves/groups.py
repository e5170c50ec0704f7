"""Groups of gradients that are each sent in two halves: a reduce-scatter, and an all-gather of the same bytes.

`period.py` arranges their halves, and `group_search.py` searches for groups.

Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from legato.core.plan import Message
from legato.core.workload import Workload
from legato.schedule.basics.joined import Joined
from legato.simulator.period import Period

__all__ = ["Arranged", "Groups", "Part", "groups_between", "groups_of"]

#: Bytes of a tensor (its index): from a start to a stop.
Part = tuple[int, int, int]
#: What is scattered together and gathered together.
Groups = list[list[Part]]


class Arranged(NamedTuple):
    """An iteration: its seconds, its halves as they begin (k scatters group k, and k + the number of groups gathers
    it), and the order of its ops.
    """

    seconds: float
    halves: tuple[int, ...]
    op_order: tuple[int, ...]


def groups_of(messages: Iterable[Message], workload: Workload) -> Groups:
    """The groups of a plan in halves, in the order in which they are scattered."""
    tensor_id = Period.of(workload).tensor_id
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in message.slices]
        for message in messages
        if message.kind == "reduce_scatter"
    ]


def groups_between(workload: Workload, tensors: Sequence[int], cuts: Sequence[int], partition: bool) -> Groups:
    """The bytes of these tensors, end to end, divided at the nearest offsets that are possible.

    Without `partition`, these are borders of tensors. A group may be empty.
    """
    joined, tensor_id = Joined([workload.tensors[t] for t in tensors]), Period.of(workload).tensor_id
    borders = [0, *(_border(joined, at, partition) for at in cuts), joined.nbytes]
    return [
        [(tensor_id[piece.tensor], piece.start, piece.stop) for piece in joined.slices(start, stop)]
        for start, stop in pairwise(borders)
    ]


def _border(joined: Joined, at: int, partition: bool) -> int:
    if partition:
        return joined.aligned(min(max(at, 0), joined.nbytes))
    return min((*joined.starts, joined.nbytes), key=lambda start: abs(start - at))
