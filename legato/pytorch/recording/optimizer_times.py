"""Measures how long the optimizer works on each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from legato.pytorch.recording.operators import tensors
from legato.pytorch.recording.storages import Owners, Storages

__all__ = ["OptimizerTimes"]


class OptimizerTimes:
    """Attributes the time of the optimizer's ops to parameters.

    An op belongs to a parameter if it reads or writes the parameter, its gradient, its optimizer state, or something
    computed from these. The time of an op on lists of tensors (foreach, fused) is divided among its parameters in
    proportion to their numbers of elements.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, storages: Storages):
        self._parameters = parameters
        self._optimizer = optimizer
        self._owners = Owners(storages)
        self._notes: list[tuple[Any, dict[int, int]]] = []
        for i, parameter in enumerate(parameters):
            state = optimizer.state.get(parameter, {})
            for tensor in (parameter, *tensors(parameter.grad), *tensors(state)):
                self._owners.add(tensor, i)

    def note(self, arguments: Sequence[Any], out: Any, marks: Any) -> None:
        """Record an op that has run: its arguments, its result, and the clock's marks at its start and its stop."""
        rows, counts = _rows(arguments), dict[int, int]()  # by owner: elements
        split = isinstance(out, (list, tuple)) and len(out) == len(rows)
        for i, row in enumerate(rows):
            found = list(tensors(row))
            owners = {owner for tensor in found for owner in self._owners.of(tensor)}
            for owner in owners:
                counts[owner] = counts.get(owner, 0) + self._parameters[owner].numel()
            for tensor in tensors(out[i] if split else out):
                for owner in owners:
                    self._owners.add(tensor, owner)
        self._notes.append((marks, counts))

    def seconds(self, updated: Sequence[int], read: Callable[[Any, Any], float]) -> list[tuple[int, float]]:
        """Return (parameter, seconds) for each parameter of `updated` that the optimizer has, in the optimizer's order.

        Parameters are indices; `read(start, stop)` returns the seconds between two marks. Time that belongs to no
        parameter is divided among all parameters in proportion to their bytes.
        """
        index = {id(self._parameters[i]): i for i in updated}
        order = [index[id(p)] for group in self._optimizer.param_groups for p in group["params"] if id(p) in index]
        total = dict.fromkeys(order, 0.0)
        spare = 0.0
        for marks, counts in self._notes:
            duration = read(*marks)
            mine = {owner: own for owner, own in counts.items() if owner in total}
            elements = sum(mine.values())
            if not elements:
                spare += duration
            for owner, own in mine.items():
                total[owner] += duration * own / elements
        nbytes = {i: self._parameters[i].nbytes for i in order}
        every = sum(nbytes.values())
        return [(i, total[i] + spare * nbytes[i] / every) for i in order]


def _rows(arguments: Sequence[Any]) -> list[list[Any]]:
    """Return an op's arguments in rows: one row for each position in its lists of tensors, or one row without lists."""
    columns = [arg for arg in arguments if isinstance(arg, (list, tuple)) and any(True for _ in tensors(arg))]
    if not columns:
        return [list(arguments)]
    return [[c[i] for c in columns if i < len(c)] for i in range(max(map(len, columns)))]
