"""The same communication on all of its ranks: the n-th one of a group on one rank is the n-th one on the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from legato.core.errors import InputError
from legato.core.text import count
from legato.ingest.kineto.step import TracedStep
from legato.ingest.names import ranks_in_words
from legato.ingest.traced import TracedTransfer

__all__ = ["Joint", "matched"]


class Joint(NamedTuple):
    """A communication: the ranks of its group (empty if the traces do not tell), and its number in each rank's step.

    The group of a send has the sender, then the receiver.
    """

    kind: str
    group: tuple[int, ...]
    parts: dict[int, int]

    def transfers(self, steps: Mapping[int, TracedStep]) -> dict[int, TracedTransfer]:
        return {rank: steps[rank].transfers[number] for rank, number in self.parts.items()}


def matched(steps: Mapping[int, TracedStep]) -> list[Joint]:
    """Match the communications of one step of several ranks. Raises `InputError` where these contradict each other."""
    found: dict[tuple[bool, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, step in steps.items():
        for number, transfer in enumerate(step.transfers):
            one_way = transfer.kind in ("send", "recv") and transfer.peer is not None
            group = _pair(rank, transfer) if one_way else transfer.group
            found.setdefault((one_way, group), {}).setdefault(rank, []).append(number)
    result = []
    for (one_way, group), numbers in found.items():
        ranks = [rank for rank in group or steps if rank in steps]
        if outside := [rank for rank in numbers if rank not in ranks]:
            raise InputError(f"rank {outside[0]}: in a collective of {ranks_in_words(group)} (expected one of these)")
        most = max(numbers, key=lambda rank: len(numbers[rank]))
        for rank in ranks:
            if len(numbers.get(rank, ())) != len(numbers[most]):
                raise InputError(
                    f"rank {rank}: {count(len(numbers.get(rank, ())), 'collective')} of {ranks_in_words(group)} "
                    f"(expected {len(numbers[most])}, as on rank {most})"
                )
        for parts in zip(*(numbers[rank] for rank in ranks), strict=True):
            kinds = [steps[rank].transfers[part].kind for rank, part in zip(ranks, parts, strict=True)]
            if not one_way and (other := next((k for k, kind in enumerate(kinds) if kind != kinds[0]), 0)):
                raise InputError(
                    f"rank {ranks[other]}: {kinds[other]} in {ranks_in_words(group)} "
                    f"(expected {kinds[0]}, as on rank {ranks[0]})"
                )
            result.append(Joint("send" if one_way else kinds[0], group, dict(zip(ranks, parts, strict=True))))
    return result


def _pair(rank: int, transfer: TracedTransfer) -> tuple[int, ...]:
    assert transfer.peer is not None
    return (rank, transfer.peer) if transfer.kind == "send" else (transfer.peer, rank)
