"""How a model is wrapped by `fully_shard` (FSDP2): the groups of modules that are gathered and reduced together."""

from __future__ import annotations

from typing import Literal

import msgspec

from legato.core.errors import InputError
from legato.core.units import Int64

__all__ = ["Group", "Sync", "Wrapping"]

#: When gradients are reduced under accumulation: in every micro-batch; reduce-scattered in every one, and all-reduced
#: among replicas in the last; only in the last; or in every one, with the parameters gathered once a step.
Sync = Literal["each", "all-reduce-last", "last", "gathered-once"]

#: As many groups as `set_modules_to_forward_prefetch` may name; more would gather the model at once.
_MOST_PREFETCHED = 64


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One call of `fully_shard`: modules that share an all-gather of parameters and a reduce-scatter of gradients.

    `modules` are their paths in the model, in the order in which they run. `reshard` is `reshard_after_forward`:
    True frees the parameters after the forward pass, False keeps them until they have been used in the backward
    pass, and a number n keeps 1/n of them on each of n ranks. Without `in_backward` they are not gathered for the
    backward pass, which does not read them (`set_unshard_in_backward`).
    """

    modules: tuple[str, ...]
    reshard: bool | Int64 = True
    in_backward: bool = True

    def __post_init__(self) -> None:
        if not self.modules:
            raise InputError("modules: none given (expected the paths of one or more modules)")
        if not isinstance(self.reshard, bool) and self.reshard < 2:
            raise InputError(f"reshard: {self.reshard} (expected true, false or a number of ranks of at least 2)")


class Wrapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="format", tag="legato.wrapping/1"):
    """A plan for fully sharded training: groups of modules in the order in which the forward pass runs them.

    Parameters of modules that are in no group belong to the root, which is gathered first and kept. With
    `forward_prefetch` and `backward_prefetch`, each group names as many next ones
    (`set_modules_to_forward_prefetch`); with 0, FSDP2's own rule holds. `buffers` is
    `set_reduce_scatter_max_input_buffers`. The model is sharded over workers / `replicas` ranks, and replicated
    `replicas` times (HSDP). `micro_batches` are accumulated in one step, as `sync` says. `workload_id` names the
    workload for which it was planned. Raises `InputError` on numbers out of range, and on a module in two groups.
    """

    name: str
    groups: tuple[Group, ...]
    forward_prefetch: Int64 = 0
    backward_prefetch: Int64 = 0
    buffers: Int64 = 1
    replicas: Int64 = 1
    micro_batches: Int64 = 1
    sync: Sync = "each"
    workload_id: str = ""

    def __post_init__(self) -> None:
        for field in ("forward_prefetch", "backward_prefetch"):
            if not 0 <= getattr(self, field) <= _MOST_PREFETCHED:
                raise InputError(f"{field}: {getattr(self, field)} (expected 0 to {_MOST_PREFETCHED} groups)")
        for field in ("buffers", "replicas", "micro_batches"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}: {getattr(self, field)} (expected at least 1)")
        seen: set[str] = set()
        for group in self.groups:
            for module in group.modules:
                if module in seen:
                    raise InputError(f"groups: {module!r} twice (expected each module in one group)")
                seen.add(module)

    def as_code(self, model: str = "model") -> str:
        """The lines of torch that wrap a model so."""
        lists = [(", ".join(f"{model}.{path}" for path in group.modules), group.reshard) for group in self.groups]
        lines = [f"fully_shard([{modules}], reshard_after_forward={reshard})" for modules, reshard in lists]
        return "\n".join([*lines, f"fully_shard({model})"])
