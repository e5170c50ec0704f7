"""Checks before the first step that all ranks have the same model, plan and settings.

[Note: agreement] Ranks with different models, plans or dtypes would hang, or silently add the wrong numbers. Each rank
describes its model, plan and settings, and the ranks compare hashes of these descriptions. If the hashes differ, rank 0
broadcasts its description, and every rank compares it with its own. All ranks then raise an error about the first
difference. Only JSON is exchanged; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from legato.core.errors import RankError
from legato.core.files import identity
from legato.core.plan import Plan
from legato.core.text import count
from legato.pytorch.device import group_device
from legato.pytorch.logger import logger
from legato.pytorch.network.watchdog import ANSWER_S, Watchdog, reason
from legato.pytorch.private.groups import PrefixStore, default_store

__all__ = [
    "agree",
    "broadcast_bytes",
    "broadcast_tensors",
    "describe_model",
    "describe_optimizer",
    "difference",
    "first_said",
    "gather_bytes",
    "gather_numbers",
    "gather_tensor",
    "raise_together",
    "sum_tensors",
    "told_at_the_store",
    "unique_name",
]

#: The number of seconds after which a rank says that it waits for the other ranks.
SAY_S = 20.0
_MESSAGE_BYTES = 1024
_BROADCAST_BYTES = 250 * 2**20


def describe_model(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Describe what must be equal on all ranks: a dictionary from the name of a fact to its value on this rank."""
    facts = {f"parameter {name!r}": f"{tuple(p.shape)} {p.dtype} on {p.device.type}" for name, p in parameters.items()}
    facts["number of trained parameters"] = str(len(parameters))
    facts["plan"] = f"{plan.scheduler} {identity(plan)}"
    facts["torch"] = torch.__version__
    facts["torch.get_default_dtype()"] = str(torch.get_default_dtype())
    facts["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    facts["torch.are_deterministic_algorithms_enabled()"] = str(torch.are_deterministic_algorithms_enabled())
    return facts


def describe_optimizer(optimizer: Any) -> dict[str, str]:
    """Describe the settings of an optimizer that must be equal on all ranks to keep their weights equal.

    The program's own entries in a parameter group, which the optimizer does not know, may differ.
    """
    facts = {"optimizer": "none" if optimizer is None else type(optimizer).__name__}
    for i, group in enumerate(optimizer.param_groups if isinstance(optimizer, Optimizer) else ()):
        own = {k: group[k] for k in getattr(optimizer, "defaults", {}) if k in group}
        settings = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
        known = {k: v for k, v in sorted(settings.items()) if isinstance(v, (bool, int, float, str, tuple, list))}
        facts[f"group {i} of the optimizer"] = f"{count(len(group['params']), 'parameter')}, {known}"
    return facts


def agree(facts: dict[str, str], group: Any) -> None:
    """Raise `RankError` on every rank if the facts of any rank differ from rank 0's."""
    if said := difference(facts, group):
        raise RankError(said)


def difference(facts: dict[str, str], group: Any) -> str:
    """Return, on every rank, how the first rank whose facts differ from rank 0's differs; "" if all are equal."""
    mine = json.dumps(facts).encode()
    if len(set(_gathered(hashlib.sha256(mine).digest(), group))) == 1:
        return ""
    theirs: dict[str, str] = json.loads(broadcast_bytes(mine, group))
    problem = ""
    for key in [*theirs, *facts]:
        if facts.get(key) != theirs.get(key):
            problem = f"{key}: {facts.get(key, 'missing')} here, {theirs.get(key, 'missing')} on rank 0"
            break
    return first_said(problem, group)


def raise_together(problem: str, group: Any) -> None:
    """Raise `RankError` on every rank if any rank has a problem. An empty string means that there is no problem."""
    if said := first_said(problem, group):
        raise RankError(said)


def first_said(problem: str, group: Any) -> str:
    """Return, on every rank, the number and the message of the first rank with a message; "" if no rank has one."""
    gathered = _gathered(problem.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"), group)
    for rank, text in enumerate(gathered):
        if said := text.rstrip(b"\0").decode(errors="replace"):
            return f"rank {rank}: {said}"
    return ""


def unique_name(group: Any) -> str:
    """Return a name that is the same on all ranks of the group, and that nothing else in this job has or gets."""
    return broadcast_bytes(uuid.uuid4().bytes, group).hex()


def told_at_the_store(problem: str, group: Any, name: str, watchdog: Watchdog, limit_s: float) -> str:
    """Return what `first_said` returns, but wait at the store, so that no collective waits for a rank that is slow.

    `name` must be the same on all ranks, and another one in each call. Raises `RankError` if the `watchdog` hears that
    a rank has failed, or if a rank does not make this call within `limit_s` seconds.
    """
    store, ranks, until = (
        PrefixStore(f"legato/{name}", default_store()),
        range(group.size()),
        time.monotonic() + limit_s,
    )
    store.set(str(group.rank()), problem.encode()[:_MESSAGE_BYTES])
    while late := [rank for rank in ranks if not store.check([str(rank)])]:
        if watchdog.failed or time.monotonic() > until:
            raise watchdog.failure("planning", RuntimeError(f"rank {late[0]} has not answered"))
        time.sleep(0.02)
    found = [store.get(str(rank)).decode(errors="replace") for rank in ranks]
    return next((f"rank {rank}: {said}" for rank, said in enumerate(found) if said), "")


def _gathered(mine: bytes, group: Any) -> list[bytes]:
    """Return the bytes of all ranks, in the order of the ranks. All ranks must pass equally many bytes."""
    tensor = _to_tensor(mine, group)
    gathered = [torch.empty_like(tensor) for _ in range(group.size())]
    _wait_for_all(dist.all_gather(gathered, tensor, group=group, async_op=True), group)
    return list(map(_from_tensor, gathered))


#: The number of collectives of `_gathered` that have begun on this rank, by group.
_begun: dict[str, int] = {}


def _wait_for_all(work: Any, group: Any) -> None:
    """Wait for a collective that all ranks must call; after `SAY_S` seconds, say which ranks are missing.

    Raises `RankError` if the collective fails, or takes longer than the group's timeout.
    """
    number = _begun[group.group_name] = _begun.get(group.group_name, 0) + 1
    store = PrefixStore(f"legato/calls/{group.group_name}", default_store())

    def missing() -> str:
        others = sorted({*range(group.size())} - {group.rank()})
        late = [r for r in others if not store.check([str(r)]) or int(store.get(str(r))) < number]
        names = ", ".join(map(str, late[:8])) + (" and others" if len(late) > 8 else "")
        who = f"rank {names} has" if len(late) == 1 else f"ranks {names} have"
        return f"{who} not called what this rank has (legato.distribute()?)" if late else ""

    started, told, pause_s = time.monotonic(), False, 1e-4
    try:
        store.set(str(group.rank()), str(number))
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
            if not told and time.monotonic() - started > SAY_S:
                told = True
                logger.warning("rank %d waits: %s", group.rank(), missing() or "all ranks have called it")
        work.wait()
    except RuntimeError as error:
        why = reason(error)
        with contextlib.suppress(RuntimeError):  # the store is gone
            until = time.monotonic() + ANSWER_S
            while missing() and time.monotonic() < until:  # other ranks may only be late
                time.sleep(0.1)
            why = f"{missing() or 'all ranks have called it'}: {why}"
        raise RankError(f"rank {group.rank()}: {why}") from error


def broadcast_bytes(data: bytes, group: Any, source: int = 0) -> bytes:
    """Return the bytes of rank `source` on every rank."""
    length = _to_tensor(len(data).to_bytes(8, "little"), group)
    dist.broadcast(length, group=group, group_src=source)
    n = int.from_bytes(_from_tensor(length), "little")
    content = _to_tensor(data.ljust(n, b"\0")[:n] if n else b"\0", group)
    dist.broadcast(content, group=group, group_src=source)
    return _from_tensor(content)[:n]


def gather_bytes(data: bytes, group: Any, wait: Callable[[Any], None]) -> list[bytes]:
    """Return the bytes of all ranks, in the order of the ranks; `wait` is called to wait for each collective."""
    sizes = [int(size) for (size,) in gather_numbers([len(data)], group, wait)]
    mine = _to_tensor(data.ljust(max(1, *sizes), b"\0"), group)
    gathered = [torch.empty_like(mine) for _ in sizes]
    wait(dist.all_gather(gathered, mine, group=group, async_op=True))
    return [_from_tensor(content)[:size] for content, size in zip(gathered, sizes, strict=True)]


def gather_numbers(numbers: Sequence[float], group: Any, wait: Callable[[Any], None]) -> list[tuple[float, ...]]:
    """Return the numbers of all ranks, in the order of the ranks. Every rank must pass equally many numbers.

    `wait` waits for the collective.
    """
    return [tuple(row) for row in gather_tensor(torch.tensor(numbers, dtype=torch.float64), group, wait).tolist()]


def gather_tensor(tensor: torch.Tensor, group: Any, wait: Callable[[Any], None]) -> torch.Tensor:
    """Return the tensors of all ranks, stacked in the order of the ranks, on the device of the group's collectives.

    `wait` waits for the collective.
    """
    mine = tensor.to(group_device(group))
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    wait(dist.all_gather(gathered, mine, group=group, async_op=True))
    return torch.stack(gathered)


def broadcast_tensors(tensors: list[torch.Tensor], group: Any, wait: Callable[[Any], None], source: int = 0) -> None:
    """Overwrite tensors with rank `source`'s; tensors of one dtype and device share collectives of about 250 MiB.

    `wait` waits for a collective.
    """
    for part in _parts([t.detach() for t in tensors]):
        flat = torch.cat([tensor.reshape(-1) for tensor in part])
        wait(dist.broadcast(flat, group=group, async_op=True, group_src=source))
        if group.rank() != source:
            _unpack(flat, part)


def sum_tensors(tensors: list[torch.Tensor], group: Any, wait: Callable[[Any], None]) -> None:
    """Replace tensors by their sums; tensors of one dtype and device share collectives of about 250 MiB."""
    for part in _parts(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in part])
        wait(dist.all_reduce(flat, group=group, async_op=True))
        _unpack(flat, part)


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def _parts(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        part: list[torch.Tensor] = []
        nbytes = 0
        for tensor in same:
            part.append(tensor)
            nbytes += tensor.nbytes
            if nbytes >= _BROADCAST_BYTES:
                yield part
                part, nbytes = [], 0
        if part:
            yield part


def _to_tensor(data: bytes, group: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group_device(group))


def _from_tensor(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().tolist()) if tensor.numel() < 4096 else tensor.cpu().numpy().tobytes()
