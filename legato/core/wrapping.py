"""The wrapping of a model for `fully_shard` (FSDP2): the groups of modules that are gathered and reduced together."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from legato.core.errors import InputError
from legato.core.table import Table
from legato.core.text import count, shorten
from legato.core.units import Int64

__all__ = ["Group", "Sync", "Wrapping"]

#: When gradients of accumulated micro-batches are reduced. `each`: gradients are reduced in every micro-batch.
#: `all-reduce-last`: gradients are reduce-scattered in every micro-batch, and all-reduced among replicas in the last.
#: `last`: gradients are reduced only in the last micro-batch. `gathered-once`: gradients are reduced in every
#: micro-batch, but parameters are gathered once a step.
Sync = Literal["each", "all-reduce-last", "last", "gathered-once"]

#: The most groups that `set_modules_to_forward_prefetch` may name. With more, the model would be gathered all at once.
_MOST_PREFETCHED = 64
#: The most groups in a picture.
_MOST_ROWS = 20


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A call of `fully_shard`: modules that share an all-gather of parameters and a reduce-scatter of gradients.

    `modules` are the paths of the modules in the model, in the order in which they run. `reshard` is
    `reshard_after_forward`: with True, the parameters are freed after the forward pass, and with False, they are kept
    until the backward pass has used them. If `reshard` is a number n, each of n ranks keeps 1/n of the parameters. If
    `in_backward` is False, the backward pass does not read the parameters, so they are not gathered for it
    (`set_unshard_in_backward`).
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

    Parameters of modules that are in no group belong to the root group, which is gathered first, and kept until the
    backward pass has used it. `forward_prefetch` and `backward_prefetch` say how many of the groups after it each group
    prefetches (`set_modules_to_forward_prefetch`); with 0, FSDP2 itself chooses what to prefetch. `buffers` is
    `set_reduce_scatter_max_input_buffers`. The model is sharded over workers / `replicas` ranks, and replicated
    `replicas` times (HSDP). The gradients of `micro_batches` micro-batches are accumulated in one step and reduced as
    `sync` says. `workload_id` is the identity of the workload for which the wrapping was planned. Raises `InputError`
    on numbers out of range, and on a module that is in two groups or inside another module of a group.
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
        self._check_modules()

    def _check_modules(self) -> None:
        modules = [module for group in self.groups for module in group.modules]
        seen: set[str] = set()
        for module in modules:
            if module in seen:
                raise InputError(f"groups: {module!r} twice (expected each module in one group)")
            seen.add(module)
        if "" in seen:
            raise InputError("groups: '' (expected modules of the model; its own parameters belong to the root)")
        for module in modules:
            for end, character in enumerate(module):
                if character == "." and module[:end] in seen:
                    raise InputError(f"groups: {module!r} is in {module[:end]!r}, too (expected one of them)")

    def __str__(self) -> str:
        """Return one line: the number of groups of modules, and how gradients are reduced."""
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        accumulated = f", {self.micro_batches} micro-batches reduced {self.sync}" if self.micro_batches > 1 else ""
        return (
            f"{shorten(self.name)}: {count(len(self.groups), 'group')} of modules and the root{replicas}{accumulated}"
        )

    def _repr_html_(self) -> str:
        """Return a table of the groups (only the first groups if there are many), and PyTorch code, for notebooks."""
        rows = [
            (k, len(group.modules), str(reshard), shorten(", ".join(group.modules), 90))
            for k, (group, reshard) in enumerate(zip(self.groups, self.reshards(), strict=True))
        ]
        write = {"#": str, "modules": str, "reshard_after_forward": None, "paths": None}
        shown = Table.of(str(self), write, rows[:_MOST_ROWS])._repr_html_()
        more = f"<p>and {len(rows) - _MOST_ROWS:,} more groups</p>" if len(rows) > _MOST_ROWS else ""
        return f"{shown}{more}<pre>{html.escape(self.as_code())}</pre>"

    def reshards(self) -> list[bool | int]:
        """Return each group's `reshard_after_forward`: always False if parameters are gathered only once a step."""
        return [group.reshard if self.sync != "gathered-once" else False for group in self.groups]

    def as_code(self, model_name: str = "model") -> str:
        """Return the lines of torch that wrap a model as `legato.fully_shard` does.

        If several micro-batches are accumulated and `sync` is not `each`, the lines end with a comment that shows the
        training loop.
        """
        return "\n".join([*self._imports(), "", *self._groups(), *self._calls(model_name), *self._loop(model_name), ""])

    def _imports(self) -> list[str]:
        fully_shard = "from torch.distributed.fsdp import fully_shard"
        if self.replicas == 1:
            return [fully_shard]
        mesh = "from torch.distributed.device_mesh import init_device_mesh"
        return ["import torch.distributed as dist", mesh, fully_shard]

    def _groups(self) -> Iterator[str]:
        options = "options = {}"
        if self.replicas > 1:
            shape = f"({self.replicas}, dist.get_world_size() // {self.replicas})"
            yield f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=("replicate", "shard"))'
            options = 'options = {"mesh": mesh}'
        yield f"{options}  # for every call of fully_shard: add mp_policy and others here"
        yield "groups = [  # modules that are gathered and reduced together, and reshard_after_forward"
        groups = zip((group.modules for group in self.groups), self.reshards(), strict=True)
        for (_, reshard), same in groupby(groups, lambda group: (_shape(group[0]), repr(group[1]))):
            yield from (f"    {line}," for line in _lines([paths for paths, _ in same], reshard))
        yield "]"

    def _calls(self, model: str) -> Iterator[str]:
        yield "for paths, reshard in groups:"
        modules = f"[{model}.get_submodule(path) for path in paths]"
        yield f"    fully_shard({modules}, reshard_after_forward=reshard, **options)"
        yield f"fully_shard({model}, **options)"
        if self.forward_prefetch or self.backward_prefetch:
            yield f"firsts = [{model}.get_submodule(paths[0]) for paths, _ in groups]"
            yield "for k, module in enumerate(firsts):"
        if self.forward_prefetch:
            yield f"    module.set_modules_to_forward_prefetch(firsts[k + 1 : k + {1 + self.forward_prefetch}])"
        if self.backward_prefetch:
            named = f"firsts[max(k - {self.backward_prefetch}, 0) : k][::-1]"
            yield f"    module.set_modules_to_backward_prefetch({named})"
        for group in self.groups:
            if not group.in_backward:
                yield f"{model}.get_submodule({_list(group.modules[:1])[1:-1]}).set_unshard_in_backward(False)"
        if self.buffers > 1:
            yield f"{model}.set_reduce_scatter_max_input_buffers({self.buffers})"

    def _loop(self, model: str) -> list[str]:
        if self.micro_batches == 1 or self.sync == "each":
            return []
        return [
            "",
            f"# In each step, {self.micro_batches} micro-batches:",
            "# for k, batch in enumerate(batches):",
            f"#     {model}.{_LAST_ONLY[self.sync]}(k == {self.micro_batches - 1})",
            f"#     loss({model}, batch).backward()",
        ]


#: Calls that FSDP2 needs in the last micro-batch only.
_LAST_ONLY: dict[Sync, str] = {
    "all-reduce-last": "set_requires_all_reduce",
    "last": "set_requires_gradient_sync",
    "gathered-once": "set_reshard_after_backward",
}


#: A path split at its last number, which may be replaced by a counter: prefix, number, suffix.
_NUMBERED = re.compile(r"([\w./-]*?(?<![0-9]))(0|[1-9][0-9]*)((?:[^\W\d]|[./-])*)")


def _parts(path: str) -> tuple[str, int, str]:
    """Return a path split at its last number: prefix, number (-1 if there is none), suffix."""
    found = _NUMBERED.fullmatch(path)
    return (found[1], int(found[2]), found[3]) if found else (path, -1, "")


def _shape(paths: Sequence[str]) -> list[tuple[str, int, str]]:
    """Return the parts of paths, with numbers relative to the first: groups that differ by a number become equal."""
    parts = [_parts(path) for path in paths]
    return [(before, number - parts[0][1], behind) for before, number, behind in parts]


def _lines(groups: Sequence[Sequence[str]], reshard: str) -> list[str]:
    """Return code for groups that differ only by a number: a line each, or a loop over `k` for three or more groups."""
    starts = [_parts(paths[0])[1] for paths in groups]
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    counted = all(_parts(path)[1] >= 0 for path in groups[0])
    if len(groups) < 3 or not counted or step < 1 or starts != list(range(starts[0], starts[-1] + 1, step)):
        return [f"({_list(paths)}, {reshard})" for paths in groups]
    numbers = _range(starts[0], starts[-1] + step, step)
    return [f"*(({_list(groups[0], starts[0])}, {reshard}) for k in {numbers})"]


def _range(start: int | str, stop: int | str, step: int = 1) -> str:
    bounds = f"{stop}" if str(start) == "0" and step == 1 else f"{start}, {stop}"
    return f"range({bounds}, {step})" if step > 1 else f"range({bounds})"


def _list(paths: Sequence[str], base: int | None = None) -> str:
    """Return code for a list of paths. If `base` is given, a number is written as `k` plus its distance from `base`."""

    def number(n: int) -> str:
        return str(n) if base is None else "k" if n == base else f"k {'-' if n < base else '+'} {abs(n - base)}"

    items = []
    runs = groupby(enumerate(map(_parts, paths)), lambda item: (item[1][0], item[1][1] - item[0], item[1][2]))
    for _, run in runs:  # neighbours with consecutive numbers
        parts = [part for _, part in run]
        before, first, behind = parts[0]
        if len(parts) >= 3 and first >= 0:
            numbers = _range(number(first), number(first + len(parts)))
            items.append(f'*(f"{before}{{j}}{behind}" for j in {numbers})')
        elif first < 0:
            items.append(json.dumps(before, ensure_ascii=False))
        else:
            prefix, braces = ("", "{}") if base is None else ("f", "{{{}}}")
            items += [f'{prefix}"{before}{braces.format(number(n))}{behind}"' for _, n, _ in parts]
    if len(items) == 1 and items[0].startswith("*"):
        return f"[{items[0][2:-1]}]"
    return f"[{', '.join(items)}]"
