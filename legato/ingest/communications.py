"""The communications of a job, from the traces of its ranks: their groups, kinds and bytes.

The n-th communication of a group on one rank is the n-th communication of this group on every other rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast, get_args

from legato.core.errors import InputError
from legato.core.program import Communication, Operation
from legato.core.text import count
from legato.ingest.names import GROUPED, ranks_in_words
from legato.ingest.source import one_line
from legato.ingest.traced import Notes, TracedTransfer

__all__ = ["Joint", "Transfers", "check", "communications", "matched", "numbered"]

#: The transfers of each rank, in the order in which the rank issues them.
Transfers: TypeAlias = Mapping[int, Sequence[TracedTransfer]]

#: Operations of NCCL, each with the operation of a `Program` that has the same cost.
_SAME_COST = {"barrier": "all_reduce", "reduce": "broadcast"}
_OPERATIONS = {*get_args(Operation), *_SAME_COST} - {"send"}
_WORDS = {
    "tensor": {"tensor", "tp"},
    "pipeline": {"pipeline", "pipe", "pp"},
    "expert": {"expert", "ep", "moe"},
    "context": {"context", "cp"},
    "data": {"data", "dp", "ddp", "fsdp", "hsdp", "replicate", "shard"},
}
_NOT_NAMED = {"", "default_pg", "undefined"}


class Joint(NamedTuple):
    """A communication: the ranks of its group (empty if unknown), and its index among each rank's transfers.

    The group of a send lists the sender first, and then the receiver.
    """

    kind: str
    group: tuple[int, ...]
    parts: dict[int, int]

    def of(self, transfers: Transfers) -> dict[int, TracedTransfer]:
        """Return the transfer of this communication on each of its ranks."""
        return {rank: transfers[rank][number] for rank, number in self.parts.items()}


def matched(transfers: Transfers) -> list[Joint]:
    """Match the communications of one step of several ranks. Raises `InputError` if the ranks contradict each other."""
    found: dict[tuple[bool, tuple[int, ...]], dict[int, list[int]]] = {}
    for rank, own in transfers.items():
        for number, transfer in enumerate(own):
            one_way = transfer.kind in ("send", "recv") and transfer.peer is not None
            group = _pair(rank, transfer) if one_way else transfer.group
            found.setdefault((one_way, group), {}).setdefault(rank, []).append(number)
    result = []
    for (one_way, group), numbers in found.items():
        ranks = [rank for rank in group or transfers if rank in transfers]
        _check_same_number(group, ranks, numbers)
        for each in zip(*(numbers[rank] for rank in ranks), strict=True):
            parts = dict(zip(ranks, each, strict=True))
            kinds = {rank: transfers[rank][part].kind for rank, part in parts.items()}
            result.append(Joint("send" if one_way else _same_kind(group, kinds), group, parts))
    return result


def _check_same_number(group: tuple[int, ...], ranks: Sequence[int], numbers: Mapping[int, Sequence[int]]) -> None:
    """Raise `InputError` unless exactly these ranks take part in the group's communications, all equally often."""
    if outside := [rank for rank in numbers if rank not in ranks]:
        raise InputError(f"rank {outside[0]}: in a collective of {ranks_in_words(group)} (expected one of these)")
    most = max(numbers, key=lambda rank: len(numbers[rank]))
    for rank in ranks:
        if len(numbers.get(rank, ())) != len(numbers[most]):
            raise InputError(
                f"rank {rank}: {count(len(numbers.get(rank, ())), 'collective')} of {ranks_in_words(group)} "
                f"(expected {len(numbers[most])}, as on rank {most})"
            )


def _same_kind(group: tuple[int, ...], kinds: Mapping[int, str]) -> str:
    """Return the kind that a collective has on all of its ranks."""
    first = next(iter(kinds))
    for rank, kind in kinds.items():
        if kind != kinds[first]:
            raise InputError(
                f"rank {rank}: {kind} in {ranks_in_words(group)} (expected {kinds[first]}, as on rank {first})"
            )
    return kinds[first]


def numbered(joints: Sequence[Joint], ranks: Iterable[int]) -> dict[int, dict[int, int]]:
    """Return, for each rank, a map from the index of a communication on this rank to its index in the job."""
    found: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    for k, joint in enumerate(joints):
        for rank, part in joint.parts.items():
            found[rank][part] = k
    return found


def _pair(rank: int, transfer: TracedTransfer) -> tuple[int, ...]:
    assert transfer.peer is not None
    return (rank, transfer.peer) if transfer.kind == "send" else (transfer.peer, rank)


def check(transfers: Transfers, number: int, notes: Notes, *, grouped: bool) -> None:
    """Raise `InputError` if the traces of a job of `number` ranks do not fully describe some communication.

    `grouped` says whether some communications of the job are in groups of fewer than `number` ranks.
    """
    for rank, own in transfers.items():
        for transfer in own:
            where, one_way = f"rank {rank}: {one_line(transfer.name, 60)}", transfer.kind in ("send", "recv")
            if (transfer.peer is None) if one_way else (transfer.kind not in _OPERATIONS):
                what = {GROUPED: "send and receive"}.get(transfer.kind, transfer.kind.replace("_", "-"))
                raise InputError(f"{where}: {what} (expected a collective, or a send or receive with its peer)")
            if not (one_way or transfer.group):
                if grouped or transfer.ranks not in (None, number):
                    raise InputError(f"{where}: of an unknown group (expected NCCL's Process Group Ranks)")
                notes.lacks("the groups of collectives", "each collective is of all ranks")
            if transfer.nbytes is None and transfer.kind != "barrier":
                raise InputError(f"{where}: of unknown size (expected a trace with record_shapes=True)")
            if outside := [other for other in (*transfer.group, transfer.peer or 0) if other >= number]:
                raise InputError(f"{where}: with rank {outside[0]} (expected ranks below {number})")


def communications(joints: Sequence[Joint], transfers: Transfers, number: int, notes: Notes) -> list[Communication]:
    """Return the communications with their kinds, sizes and traced times."""
    everyone = tuple(range(number))
    parts = [(joint, joint.group or everyone, list(joint.of(transfers).values())) for joint in joints]
    gradients = {group for joint, group, same in parts if joint.kind == "reduce_scatter" and _carries_gradients(same)}
    result, shared = list[Communication](), dict[tuple[int, ...], tuple[tuple[int, ...], ...]]()
    for joint, group, same in parts:
        operation = cast(Operation, _SAME_COST.get(joint.kind, joint.kind))
        if joint.kind == "reduce":
            notes.assume("a reduce takes as long as a broadcast")
        nbytes = _largest(joint.kind, group, same, notes)
        sent = _carries_gradients(same) or (joint.kind == "all_gather" and group in gradients)
        named = _named(next(filter(None, (t.purpose for t in same)), ""))
        kind = named or ("data" if sent else _described(operation, group, number))
        result.append(
            Communication(
                kind,
                operation,
                shared.setdefault(group, (group,)),
                nbytes * (len(group) if operation == "all_gather" else 1),
                traced_s=min(t.end_s - t.start_s for t in same),
            )
        )
    return result


def _carries_gradients(same: Sequence[TracedTransfer]) -> bool:
    return any(t.carries_gradients for t in same)


def _largest(kind: str, group: tuple[int, ...], same: Sequence[TracedTransfer], notes: Notes) -> int:
    """Return a communication's bytes on each rank; for an all-to-all, the bytes of the rank with the most bytes."""
    sizes = [t.nbytes or 0 for t in same]
    if min(sizes) < max(sizes):
        if kind != "all_to_all":
            told = ", ".join(f"{t.nbytes:,}" for t in same[:4])
            raise InputError(f"bytes of {kind} of {ranks_in_words(group)}: {told} (expected the same)")
        notes.assume("an all-to-all of unequal parts takes as long as one of the largest")
    return max(sizes)


def _named(purpose: str) -> str:
    """Return the kind of communication that a group's name implies, or else the name itself ("" for a default name)."""
    name = purpose.lower()
    words = set(re.split(r"[^a-z]+", name))
    kinds = [kind for kind, known in _WORDS.items() if words & known]
    # experts also have data parallelism, and gradients are also summed over context-parallel ranks
    for part_of in ("context", "expert"):
        if len(kinds) > 1 and part_of in kinds:
            kinds.remove(part_of)
    if len(kinds) == 1:
        return kinds[0]
    return "" if name in _NOT_NAMED else name


def _described(operation: str, group: tuple[int, ...], number: int) -> str:
    """Return a name for a communication whose group has no name: its operation and its ranks."""
    what = operation.replace("_", "-")
    if operation == "send":
        return what
    if len(group) == number:
        return f"{what} of all ranks"
    return f"{what} of groups like {ranks_in_words([rank - group[0] for rank in group])}"
