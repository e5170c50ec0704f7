"""The units of a model that `fully_shard` can wrap, in the order in which the forward pass runs them.

A unit is a block (an element of a list of modules), or a module outside all blocks, such as an embedding. On a finer
level, a unit is a part of a block. The name of a parameter or an op says to which unit it belongs:
`layers.3.mlp.up.weight` and `layers.3.mlp.up/addmm` belong to the block `layers.3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from legato.core.errors import InputError, TooLargeError
from legato.core.workload import Module, Parameter, Phase, Workload

__all__ = ["Precision", "Unit", "units_of"]

#: The most units. Each unit costs FSDP2's host a millisecond a step.
_MOST_UNITS = 2000
#: A component of a name that numbers a block: `3` in torch's names, `layer3` in the zoo's names.
_NUMBERED = {".": re.compile(r"\d+"), "/": re.compile(r"\D*\d+")}


class Precision(NamedTuple):
    """The bytes of an element of stored parameters, of gathered parameters, and of reduced gradients.

    Gathered parameters have the `param_dtype` of `MixedPrecisionPolicy`, and reduced gradients its `reduce_dtype`.
    """

    stored: int = 4
    gathered: int = 4
    reduced: int = 4


class Unit(NamedTuple):
    """A module that runs once in a step, and that no wrapping splits between groups.

    `gathered` are the bytes of its parameters in an all-gather, `gradients` the bytes of its gradients as computed, and
    `scattered` the bytes of its gradients in a reduce-scatter. `gradients` and `scattered` are 0 if the unit is frozen.
    `named` is the unit's index in the order of `named_modules()`. For an embedding, `input_needs_gradient` and
    `read_in_backward` are False. Only the root can hold a `rooted` unit: a unit that shares parameters with another
    unit, runs more than once, never runs as a whole, or contains other units. `ends` says whether a gradient comes back
    to the unit's output; only then can a group end with the unit.
    """

    path: str
    forward_s: float
    backward_s: float
    gathered: int
    scattered: int
    gradients: int
    trained: bool = True
    input_needs_gradient: bool = True
    read_in_backward: bool = True
    named: int = 0
    rooted: bool = False
    ends: bool = True

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.gathered, self.scattered, self.gradients


def units_of(workload: Workload, ranks: int, precision: Precision, *, level: int = 1) -> list[Unit]:
    """Return the units of a workload that is sharded over `ranks`: blocks at `level` 1, parts of blocks above.

    Times are in seconds. Without `workload.modules`, it is assumed that dimensions are multiples of the number of
    ranks, that all parameters are trained, and that a parameter is shared by all units that read it. The time of an op
    that belongs to no unit is added to the unit that runs before the op. Raises `InputError` if no parameter has the
    name of a module, and `TooLargeError` on more than 2,000 units.
    """
    modules = workload.modules or _modules(workload)
    separator = "." if workload.modules or not any("/" in tensor.name for tensor in workload.tensors) else "/"
    held: dict[str, list[Module]] = {}
    for module in modules:
        if module.parameters:
            held.setdefault(_unit_path(module.path, separator, level), []).append(module)
    if not held:
        raise InputError(f"{workload.name}: no parameter has the name of a module (expected one to wrap)")
    if len(held) > _MOST_UNITS:
        raise TooLargeError(f"{len(held):,} modules to wrap (expected at most {_MOST_UNITS:,})")
    by_path = {module.path: module for module in modules}
    paths = list(held)
    root_only = {"", *(path[:end] for path in paths for end in range(len(path)) if path[end] == separator)}
    root_only.update(path for path in paths if path not in by_path and workload.modules)  # modules that are not called
    seconds = zip(_seconds(workload, "forward", paths), _seconds(workload, "backward", paths), strict=True)
    return [
        _unit(path, held[path], by_path.get(path), ranks, precision, *times, root_only=path in root_only)
        for path, times in zip(paths, seconds, strict=True)
    ]


def _unit_path(path: str, separator: str, level: int) -> str:
    """Return a module's path up to the `level`-th number of a block; each missing number adds the next component."""
    parts = path.split(separator)
    numbered = [k for k, part in enumerate(parts) if _NUMBERED[separator].fullmatch(part)]
    if not numbered:
        return path
    end = numbered[level - 1] if level <= len(numbered) else numbered[-1] + 1 + level - len(numbered) - 1
    return separator.join(parts[: end + 1])


def _unit(
    path: str,
    held: Sequence[Module],
    whole: Module | None,
    ranks: int,
    precision: Precision,
    forward_s: float,
    backward_s: float,
    *,
    root_only: bool,
) -> Unit:
    parameters = [parameter for module in held for parameter in module.parameters]
    trained = [parameter for parameter in parameters if parameter.trained]
    first, last = (held[0], held[-1]) if whole is None else (whole, whole)
    around = (*held, first)
    tied = any(not f"{other}.".startswith(f"{path}.") for module in around for other in module.tied)
    return Unit(
        path,
        forward_s,
        backward_s,
        gathered=precision.gathered * sum(_padded(parameter, ranks) for parameter in parameters),
        scattered=precision.reduced * sum(_padded(parameter, ranks) for parameter in trained),
        gradients=precision.gathered * sum(parameter.nbytes // parameter.itemsize for parameter in trained),
        trained=bool(trained),
        input_needs_gradient=first.input_needs_gradient,
        read_in_backward=any(module.read_in_backward for module in held),
        named=min(module.named for module in around),
        rooted=root_only or tied or any(module.calls > 1 for module in around),
        ends=last.reaches_loss,
    )


def _padded(parameter: Parameter, ranks: int) -> int:
    """Return the number of elements of a parameter whose rows are padded to a multiple of the number of ranks."""
    elements = parameter.nbytes // parameter.itemsize
    return elements // parameter.rows * (-(-parameter.rows // ranks) * ranks)


def _modules(workload: Workload) -> list[Module]:
    """Return the modules that the names of tensors imply, in the order in which the forward pass reads them."""
    forward = len(workload.phase_ops("forward"))
    read: dict[str, list[Parameter]] = {}
    tied: dict[str, set[str]] = {}
    first = {t: min(t.readers, default=forward) for t in workload.tensors}
    for tensor in sorted(workload.tensors, key=lambda tensor: first[tensor]):
        separator = "/" if "/" in tensor.name else "."
        path = tensor.name.rpartition(separator)[0] or tensor.name
        elements = tensor.nbytes // workload.itemsize
        read.setdefault(path, []).append(Parameter(tensor.name, tensor.nbytes, elements, workload.itemsize))
        own = path.split(separator)[0]
        others = {workload.ops[r].name.split("/")[0].split(".")[0] for r in tensor.readers if r < forward} - {own}
        tied.setdefault(path, set()).update(others)
    return [
        Module(path, tuple(own), tuple(sorted(tied[path])), named=k, input_needs_gradient=k > 0)
        for k, (path, own) in enumerate(read.items())
    ]


def _seconds(workload: Workload, phase: Phase, paths: Sequence[str]) -> list[float]:
    """Return the seconds of each unit in a phase. An op without a unit is added to the unit of the op before it."""
    place = {path: k for k, path in enumerate(paths)}
    seconds = [0.0] * len(paths)
    now = 0 if phase == "forward" else len(paths) - 1
    for op in workload.phase_ops(phase):
        now = next((place[path] for path in _prefixes(workload.ops[op].name) if path in place), now)
        seconds[now] += workload.ops[op].duration_s
    return seconds


def _prefixes(name: str) -> Iterator[str]:
    """Yield the prefixes of an op's name that end where a component ends, the longest first."""
    return (name[:end] for end in range(len(name), 0, -1) if end == len(name) or name[end] in "./")
