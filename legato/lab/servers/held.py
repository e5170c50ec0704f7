"""The state that one server holds: its shards of the parameters, and the user's optimizer for these shards.

[Note: optimizer state of a shard] Each shard is a parameter of the server's optimizer. A shard that is part of a
parameter gets the matching elements of every state tensor that has the parameter's shape (momentum), and a copy of
every other state tensor (counters). This division of the state is exact for an optimizer that updates each element from
its own gradient and state. An optimizer that uses rows or norms of a parameter (Adafactor, Muon) needs whole
parameters.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from legato.core.errors import InputError, RankError
from legato.core.text import count
from legato.lab.servers.protocol import StepRequest
from legato.lab.servers.shards import Shard
from legato.pytorch.private.optimizers import has_step_hooks
from legato.pytorch.runtime.sharding.shards import ELEMENTWISE
from legato.pytorch.runtime.waiting.update import Update

__all__ = ["HeldState", "check_optimizer", "check_step", "describe_state", "settings"]

#: torch's other optimizers that update each parameter from its own values, gradient and state only.
_BY_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], shards: Sequence[Shard]) -> None:
    """Raise `InputError` unless the servers can apply the optimizer to each of their shards separately."""
    known = {id(p) for p in parameters.values()}
    kind = type(optimizer)
    by_element = kind in ELEMENTWISE or getattr(kind, "steps_elements_alone", False)
    if not (by_element or kind in _BY_PARAMETER or getattr(kind, "steps_parameters_alone", False)):
        raise InputError(f"optimizer: {kind.__name__} (expected one that updates each parameter independently)")
    if not by_element:
        partitioned = next((s for s in shards if not s.whole), None)
        if partitioned is not None:
            raise InputError(
                f"optimizer: {kind.__name__} needs whole parameters, but {partitioned.name!r} is partitioned"
            )
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        raise InputError("the optimizer has a parameter that does not belong to the model, so no server would hold it")
    check_step(optimizer)


def check_step(optimizer: Optimizer) -> None:
    """Raise `InputError` if a step of the optimizer does something that a server cannot do."""
    if has_step_hooks(optimizer):
        raise InputError("the optimizer has hooks on its step, which a server cannot call")
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        raise InputError(
            "GradScaler lets a fused optimizer scale its gradients, which a server cannot (use fused=False)"
        )


def settings(optimizer: Optimizer, changed: list[tuple[int, bool]]) -> bytes:
    """Encode the body of a STEP command: the groups' hyper-parameters, and which gradients have `changed`."""
    groups = []
    for group in optimizer.param_groups:
        groups.append({k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"})
    try:
        return msgspec.json.encode(StepRequest(groups, changed))
    except (TypeError, msgspec.EncodeError) as error:
        raise InputError(f"a setting of the optimizer cannot be sent to a server: {error}") from None


def describe_state(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Return a digest of the optimizer's state and its groups; `names` maps `id()` of a parameter to its name."""
    digest = hashlib.blake2b(digest_size=8)
    for group in optimizer.param_groups:
        digest.update(repr([names.get(id(p)) for p in group["params"]]).encode())
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
            for key, value in sorted(state.items()):
                digest.update(key.encode())
                plain = isinstance(value, Tensor)
                digest.update(_bytes(value).numpy().tobytes() if plain else repr(value).encode())
    return f"state {digest.hexdigest()} (load the same checkpoint on every rank)"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


class HeldState:
    """A server's shards and its optimizer; `parameters[shard index]` is the tensor that the optimizer updates."""

    def __init__(self, shards: Sequence[Shard], parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self.shards = shards
        self.parameters: dict[int, nn.Parameter] = {}
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        pieces: defaultdict[int, list[nn.Parameter]] = defaultdict(list)
        for shard in shards:
            whole = parameters[shard.name]
            own = whole if shard.whole else nn.Parameter(shard.of(whole.detach().contiguous()).clone())
            self.parameters[shard.index] = own
            pieces[id(whole)].append(own)
            if whole in optimizer.state:
                state[own] = {k: _part(v, shard, whole) for k, v in optimizer.state[whole].items()}
        self._base = type(optimizer)
        self._optimizer = object.__new__(self._base)
        vars(self._optimizer).update(vars(optimizer))
        self._optimizer.state = state
        self._optimizer.param_groups = [
            {**group, "params": [own for p in group["params"] for own in pieces[id(p)]]}
            for group in optimizer.param_groups
        ]
        self._updated = {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def configure(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Apply the hyper-parameters of all groups. Raises `RankError` if the server has more or fewer groups."""
        if len(groups) != len(self._optimizer.param_groups):
            here = len(self._optimizer.param_groups)
            raise RankError(f"the optimizer has {count(len(groups), 'group')} on the workers, {here} on a server")
        for mine, theirs in zip(self._optimizer.param_groups, groups, strict=True):
            for key, value in theirs.items():
                before = mine.get(key)
                if isinstance(before, Tensor):
                    before.fill_(value)
                else:
                    mine[key] = tuple(value) if isinstance(before, tuple) else value

    def aggregate(self, shard: Shard, gradients: Sequence[Tensor]) -> None:
        """Set the gradient of a shard to the sum of `gradients`, added in their order, or to None if there are none."""
        own = self.parameters[shard.index]
        if not gradients:
            own.grad = None
            return
        if own.grad is None:
            own.grad = torch.empty_like(own, memory_format=torch.contiguous_format)
        flat = own.grad.detach().view(-1)
        if len(gradients) == 1:
            flat.copy_(gradients[0])
            return
        if flat.device == gradients[0].device:
            torch.add(gradients[0], gradients[1], out=flat)
        else:
            flat.copy_(gradients[0]).add_(gradients[1].to(flat.device))
        for gradient in gradients[2:]:
            flat.add_(gradient.to(flat.device))

    def update(self, shards: Sequence[Shard]) -> None:
        """Let the optimizer update only these shards."""
        chosen = [self.parameters[shard.index] for shard in shards]
        chosen = [p for p in chosen if id(p) in self._updated]
        if chosen:
            Update(self._optimizer, self._base).apply(chosen)

    def state(self) -> tuple[bytes, Tensor]:
        """Return the optimizer's state for all shards: a JSON list, and the bytes of its tensors in the same order."""
        listed: list[tuple[int, str, str | None, list[int] | None, Any]] = []
        blocks = []
        for shard in self.shards:
            for key, value in self._optimizer.state.get(self.parameters[shard.index], {}).items():
                if isinstance(value, Tensor):
                    block = _bytes(value)
                    listed.append((shard.index, key, str(value.dtype).removeprefix("torch."), list(value.shape), None))
                    blocks.append(block)
                else:
                    listed.append((shard.index, key, None, None, value))
        joined = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
        return msgspec.json.encode(listed), joined


def _part(value: Any, shard: Shard, whole: nn.Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    if shard.whole:
        return value
    return shard.of(value).clone() if value.shape == whole.shape else value.clone()
