"""Hypothetical models, derived from workloads (Network Operator Edition, sections 8.5 and 8.6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from legato.core.errors import InputError, unknown_name
from legato.core.workload import Op, Tensor, Workload

__all__ = ["add_modules", "scale_compute"]

_SEPARATORS = "/."
#: The most copies of a module; the paper adds up to 125.
_MOST_COPIES = 10_000


def scale_compute(workload: Workload, speedup: float) -> Workload:
    """Return the workload on a device that computes `speedup` times as fast (section 8.6).

    Raises `InputError` if the speedup is not between 1e-6 and 1e6.
    """
    if not 1e-6 <= speedup <= 1e6:
        raise InputError(f"speedup: {speedup} (expected 1e-06 to 1e+06)")
    return msgspec.structs.replace(
        workload,
        ops=tuple(Op(op.name, op.phase, op.duration_s / speedup, op.deps) for op in workload.ops),
        device=f"{workload.device} x {speedup:g}",
        untraced_s=None if workload.untraced_s is None else workload.untraced_s / speedup,
    )


def add_modules(workload: Workload, module: str, count: int) -> Workload:
    """Return the workload with a chain of `count` copies of a module inserted after the module (section 8.5).

    `module` is the prefix of the names of the module's ops, up to a `/` or `.`. The paper adds 1 to 125 modules to
    Inception-v3: copies of `mixed_35x35x288b`, which is compute-intensive, or of `mixed_17x17x768e`, which is
    network-intensive. A copy has the module's ops, times and tensors. The module's output must have the shape of its
    input; a workload has no shapes, so this is not checked. The module's forward ops must read exactly one value of
    other ops, and other forward ops must read exactly one value of the module. Raises `InputError` if the module does
    not exist or breaks this rule.
    """
    if not 0 <= count <= _MOST_COPIES:
        raise InputError(f"count: {count} (expected 0 to {_MOST_COPIES:,})")
    if count == 0:
        return workload
    part = _find(workload, module)
    order = _order(workload, part, count)
    position = {key: i for i, key in enumerate(order)}
    ops = []
    for copy, i in order:
        op = workload.ops[i]
        keys = {key for dep in op.deps for key in _dependencies(workload, part, count, copy, i, dep)}
        deps = tuple(sorted(position[key] for key in keys))
        ops.append(Op(_renamed(op.name, module, copy), op.phase, op.duration_s, deps))
    tensors: list[Tensor] = []
    for copy in range(count, -1, -1):
        for tensor in workload.tensors:
            if copy == 0 or tensor.ready_after in part.backward:
                tensors.append(
                    Tensor(
                        _renamed(tensor.name, module, copy),
                        tensor.nbytes,
                        position[copy, tensor.ready_after],
                        tuple(position.get((copy, reader), position[0, reader]) for reader in tensor.readers),
                    )
                )
    tensors.sort(key=lambda tensor: tensor.ready_after)
    name = f"{workload.name}+{count}x{module}"
    return msgspec.structs.replace(workload, name=name, ops=tuple(ops), tensors=tuple(tensors), untraced_s=None)


@dataclass(frozen=True, slots=True)
class _Module:
    """A module, as ids of ops: its ops, the op that it reads, its output, and the ops for its input's gradient."""

    forward: Collection[int]
    backward: Collection[int]
    source: int
    output: int
    gradients: Collection[int]


def _inside(ops: Sequence[Op], module: str) -> set[int]:
    return {i for i, op in enumerate(ops) if op.name.startswith(module) and op.name[len(module) :][:1] in _SEPARATORS}


def _deps(ops: Sequence[Op], users: Iterable[int]) -> set[int]:
    return {dep for i in users for dep in ops[i].deps}


def _find(workload: Workload, module: str) -> _Module:
    ops, inside = workload.ops, _inside(workload.ops, module)
    every_forward, every_backward = (set(workload.phase_ops(phase)) for phase in ("forward", "backward"))
    forward, backward = (dict.fromkeys(sorted(every & inside)) for every in (every_forward, every_backward))
    if not module or not forward or not backward:
        first = (op.name.split("/")[0] for op in ops if op.phase == "forward" and "/" in op.name)
        raise unknown_name("module", module, dict.fromkeys(first))
    others = every_forward - inside
    sources, outputs = _deps(ops, forward) - inside, _deps(ops, others) & forward.keys()
    if len(sources) != 1 or len(outputs) != 1:
        raise InputError(
            f"module {module!r}: reads {len(sources)} values and gives {len(outputs)} to others (expected one of each)"
        )
    used = min(i for i in others if not forward.keys().isdisjoint(ops[i].deps))
    later = _deps(ops, backward) & every_backward - inside
    if used < max(forward) or max(later, default=-1) > min(backward):
        raise InputError(f"module {module!r}: its ops are mixed with those that follow it (expected in one piece)")
    gradients = _deps(ops, every_backward - inside) & backward.keys()
    return _Module(forward, backward, sources.pop(), outputs.pop(), gradients)


def _order(workload: Workload, part: _Module, count: int) -> list[tuple[int, int]]:
    """Return every op of the workload with copies, in order, as (copy, id); copy 0 is the original module."""
    order: list[tuple[int, int]] = []
    last, first = max(part.forward), min(part.backward)
    for i in range(len(workload.ops)):
        if i == first:
            order += [(copy, b) for copy in range(count, 0, -1) for b in part.backward]
        order.append((0, i))
        if i == last:
            order += [(copy, f) for copy in range(1, count + 1) for f in part.forward]
    return order


def _dependencies(workload: Workload, part: _Module, count: int, copy: int, i: int, dep: int) -> list[tuple[int, int]]:
    """Return the ops (copy, id) on which op `i` of a copy depends if op `i` of the workload depends on op `dep`."""
    inside = i in part.forward or i in part.backward
    if not inside:
        return [(count if dep == part.output else 0, dep)]
    if dep in part.forward or dep in part.backward:
        return [(copy, dep)]
    if dep == part.source:
        return [(copy - 1, part.output) if copy else (0, dep)]
    if workload.ops[dep].phase == "backward" and copy < count:
        return [(copy + 1, gradient) for gradient in part.gradients]
    return [(0, dep)]


def _renamed(name: str, module: str, copy: int) -> str:
    if copy == 0:
        return name
    return f"{module}+{copy}{name.removeprefix(module)}" if name.startswith(module) else f"{name}+{copy}"
