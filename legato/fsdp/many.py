"""The rules of FSDP2 for many wrappings of one model at once, for the planner.

The results are the same seconds and bytes as those from `rules.run`, for wrappings of contiguous groups with one
micro-batch, on a host that launches all kernels in time. All wrappings with the same number of groups are evaluated at
once: every number is an array with an entry for each wrapping. Units: seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from legato.core.cluster import LinearCost
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.units import Precision, Unit

__all__ = ["KEEP", "NODE", "RESHARD", "Chain", "Layout", "evaluate"]

Array = npt.NDArray[Any]

#: The states of a group's parameters after its forward pass.
RESHARD, KEEP, NODE = 0, 1, 2


class Layout(NamedTuple):
    """A wrapping of a chain: the starts of its groups, their states after the forward pass, and its prefetch depths."""

    begins: tuple[int, ...]
    states: tuple[int, ...]
    forward: int = 0
    backward: int = 0
    buffers: int = 1


class Chain:
    """The units that groups can hold, in the order of the forward pass, and the parameters and computation of the root.

    The root also computes: `leading` is the root's work before the first unit, `behind` its work after each unit.
    """

    def __init__(self, units: Sequence[Unit], costs: Costs, precision: Precision, node: int | None = None) -> None:
        """Build a chain. `node` is the number of ranks to which groups may be resharded, or None without resharding."""
        self.units, self.costs, self.precision, self.node = units, costs, precision, node
        self.held = [u for u, unit in enumerate(units) if not unit.rooted and unit.gathered]
        self.root = [sum(sizes) for sizes in zip((0, 0, 0), *(u.sizes for u in units if u.rooted), strict=True)]
        self.reached = min((u for u, unit in enumerate(units) if unit.trained), default=len(units))
        first = self.held[0]
        self.leading = _times(units[:first], 0, self.reached)
        own, behind = [], []
        for u, after in zip(self.held, [*self.held[1:], len(units)], strict=True):
            own.append(_times(units[u : u + 1], u, self.reached))
            behind.append(_times(units[u + 1 : after], u + 1, self.reached))
        self.sizes = _cumulated(units[u].sizes for u in self.held)
        self.own, self.behind = _cumulated(own), np.array(behind, dtype=float).T
        self.all_behind = _cumulated(behind)

    @property
    def starts(self) -> list[int]:
        """Return the units with which a group may begin: the first unit, and units whose input needs a gradient.

        The unit before a new group must be able to end a group: either the backward pass computes a gradient of this
        unit's output, or the pass never reaches this unit.
        """
        units = [self.units[u] for u in self.held]
        ends = [unit.ends and (unit.trained or unit.input_needs_gradient) for unit in units]
        frozen = [u < self.reached for u in self.held]  # without a backward pass, these units may end groups
        may = [k == 0 or (units[k].input_needs_gradient and (ends[k - 1] or frozen[k - 1])) for k in range(len(units))]
        return [k for k, begins in enumerate(may) if begins]

    def wrapping(self, layout: Layout, name: str) -> Wrapping:
        """Return the wrapping of a layout. A group that the backward pass does not read is always resharded."""
        states: dict[int, bool | int] = {RESHARD: True, KEEP: False, NODE: self.node or True}
        ends = [*layout.begins[1:], len(self.held)]
        groups = []
        for begin, end, state in zip(layout.begins, ends, layout.states, strict=True):
            members = [self.units[u] for u in self.held[begin:end]]
            in_backward = any(unit.read_in_backward for unit in members)
            reshard = states[state] if in_backward else True
            groups.append(Group(tuple(unit.path for unit in members), reshard, in_backward))
        return Wrapping(name, tuple(groups), layout.forward, layout.backward, layout.buffers)


def _times(units: Sequence[Unit], begin: int, reached: int) -> tuple[float, float, float]:
    """Return (forward seconds, backward seconds, gradient bytes) of units; the backward pass ends at unit `reached`."""
    back = [unit for u, unit in enumerate(units, begin) if u >= reached and (unit.trained or unit.input_needs_gradient)]
    return (
        sum(unit.forward_s for unit in units),
        sum(unit.backward_s for unit in back),
        sum(unit.gradients for unit in back),
    )


def _cumulated(rows: Iterable[Sequence[float]]) -> Array:
    """Return, for each column, the sums of its first 0, 1, 2, ... entries."""
    columns = [list(accumulate(column, initial=0)) for column in zip(*rows, strict=True)]
    return np.array(columns, dtype=float)


def evaluate(chain: Chain, layouts: Sequence[Layout]) -> tuple[Array, Array]:
    """Return the seconds of a step without the optimizer, and the peak of allocated bytes, for each layout."""
    seconds, nbytes = np.empty(len(layouts)), np.empty(len(layouts))
    by_count: dict[int, list[int]] = {}
    for i, layout in enumerate(layouts):
        by_count.setdefault(len(layout.begins), []).append(i)
    for chosen in by_count.values():
        seconds[chosen], nbytes[chosen] = _Many(chain, [layouts[i] for i in chosen]).step()
    return seconds, nbytes


class _Many:
    """A simulation of one step, with its times and its memory, for all layouts with the same number of groups."""

    def __init__(self, chain: Chain, layouts: Sequence[Layout]) -> None:
        self.chain, self.costs = chain, chain.costs
        begins = np.array([layout.begins for layout in layouts])
        ends = np.concatenate([begins[:, 1:], np.full((len(begins), 1), len(chain.held))], axis=1)
        between = [
            (of[:, ends] - of[:, begins]).transpose(0, 2, 1) for of in (chain.sizes, chain.own, chain.all_behind)
        ]
        self.gathered, self.scattered, self.gradients = between[0]  # each has the axes [group, layout]
        # including the root's gradients
        self.new_gradients = between[1][2] + between[2][2] - chain.behind[2, ends.T - 1]
        self.behind = chain.behind[:, ends.T - 1]
        self.compute_s = between[1][:2] + between[2][:2] - self.behind[:2]
        states = np.array([layout.states for layout in layouts]).T
        self.keep, self.in_node = states == KEEP, states == NODE
        self.part = np.where(self.in_node, self.gathered // (chain.node or 1), 0.0)
        units = np.array([*chain.held, len(chain.units)])
        self.active = units[ends.T - 1] >= chain.reached
        needs = np.array([chain.units[u].input_needs_gradient for u in chain.held])
        #: `late` groups are reduced after the root, when the backward pass has ended, because no hook is called at
        #: their input.
        self.late = self.active & ((units[begins.T] <= chain.reached) | ~needs[begins.T])
        self.depth, self.back, self.buffers = (
            np.array([getattr(layout, field) for layout in layouts]) for field in ("forward", "backward", "buffers")
        )
        self.cast = self.gathered // self.costs.ranks
        self.cast *= chain.precision.gathered != chain.precision.stored
        self.count, self.many = self.gathered.shape
        self.every = np.arange(self.many)
        zeros = np.zeros(self.many)
        self.compute, self.wire, self.gather_stream, self.gather_after = (zeros.copy() for _ in range(4))
        self.nbytes, self.peak = zeros.copy(), zeros.copy()
        self.gathered_s = np.zeros((self.count, self.many))  # when the gathers of the backward pass end
        self.issued = self.keep.copy()
        # when reductions end, in their order, starting at index 1
        self.reduced_s = np.zeros((self.count + 2, self.many))
        self.reduced = np.zeros((self.count + 2, self.many))  # the bytes of these reductions, cumulated
        self.reductions, self.returned = np.zeros(self.many, dtype=int), np.zeros(self.many, dtype=int)

    def step(self) -> tuple[Array, Array]:
        self._forward()
        self._backward()
        return np.maximum(self.compute, np.maximum(self.wire, self.gather_stream)), self.peak

    def _forward(self) -> None:
        root = float(self.chain.root[0])
        copied = np.zeros((self.count + 1, self.many))  # when groups have been copied out; index 0 is the root
        if root:
            self.wire += self.costs.gather.cost(root)
            self.gather_stream = self.wire.copy()
            self.compute = self.wire + self.costs.copy_s_per_byte * root
            copied[0] = self.compute
            self.peak += 2 * root
        self.compute = self.compute + self.chain.leading[0]
        ahead = np.maximum(self.depth, 1)
        for k in range(self.count):
            since = copied[np.maximum(k - ahead, 0), self.every] if k else 0.0
            self.wire = np.maximum(self.wire, since) + self._cost(self.costs.gather, self.gathered[k])
            self.compute = np.maximum(self.compute, self.wire) + self.costs.copy_s_per_byte * self.gathered[k]
            copied[k + 1] = self.compute
            self.compute = self.compute + self.compute_s[0, k] + self.behind[0, k]
        self.gather_stream, self.gather_after = self.wire, copied[-1]
        self.ended = self.compute - self.behind[0, -1]  # when the last group's forward pass ended
        self._forward_memory(root)

    def _forward_memory(self, root: float) -> None:
        """Record the memory of the root, of kept groups, and of gathered parameters until they are copied."""
        until = np.concatenate([np.zeros((1, self.many)), np.cumsum(self.gathered, axis=0)])
        stays = np.full(self.many, root)
        held = np.full(self.many, root)  # the output of the last gather that was copied
        for k in range(self.count):
            own = self.gathered[k]
            pending = until[np.minimum(k + np.maximum(self.depth, 1), self.count) if k else 1, self.every] - until[k]
            self.peak = np.maximum(self.peak, stays + held + pending + own)
            # Each round issues one gather of each layout. The hook of the first group issues several gathers.
            for depth in range(0 if k == 0 else int(self.depth.min()), int(self.depth.max()) + 1):
                issued = (self.depth >= depth) if k == 0 else (self.depth == depth)
                target = min(k + depth, self.count - 1)
                cast = np.where(issued, self.cast[target], 0.0) if depth and target == k + depth else 0.0
                ahead = np.where(issued, until[target + 1] - until[k], 0.0)
                self.peak = np.maximum(self.peak, stays + ahead + own + np.maximum(cast, self.part[k]))
            stays = stays + np.where(self.keep[k], own, self.part[k])
            held = own
        self.nbytes = stays

    def _backward(self) -> None:
        last = self.count - 1
        self.gather_after = np.where(
            self.in_node[last] & self.active[last], np.maximum(self.gather_after, self.ended), self.gather_after
        )
        self._gather(last, self.active[last] | (self.chain.root[0] > 0))  # the root's hook gathers the last group, too
        waits = np.ones(self.many, dtype=bool)  # layouts that wait for the root's reduction
        for k in reversed(range(self.count)):
            alive = self.active[k]
            self.compute = self.compute + self.behind[1, k]
            self._add(self.behind[2, k])
            self._copy_out(k, alive)
            back = np.maximum(self.back, 1)
            for depth in range(1, int(back.max()) + 1):
                if k - depth >= 0:
                    self._gather(k - depth, alive & (back >= depth))
            self.compute = self.compute + np.where(alive, self.compute_s[1, k], 0.0)
            self._add(np.where(alive, self.new_gradients[k], 0.0))
            if self.late[k].any():
                if k == 0:  # in all layouts
                    self._lead()
                self._reduce_root(self.late[k] & waits)
                waits &= ~self.late[k]
                frozen = (self.gathered * self.keep)[:k].sum(axis=0)
                self.nbytes = self.nbytes - np.where(self.late[k], frozen, 0.0)
            self._free_and_reduce(k, alive)
        if not self.late[0].any():
            self._lead()
        self._reduce_root(waits)

    def _lead(self) -> None:
        """Run the backward pass of the root's modules that precede the first group."""
        self.compute = self.compute + self.chain.leading[1]
        self._add(np.full(self.many, self.chain.leading[2]))

    def _gather(self, k: int, where: Array) -> None:
        where = where & ~self.issued[k]
        self.issued[k] |= where
        inside = where & self.in_node[k]
        across = where & ~self.in_node[k]
        free = np.maximum(self.gather_after, self.gather_stream)
        end = np.where(
            self.in_node[k],
            free + self._cost(self.costs.gather_in_host, self.gathered[k]),
            np.maximum(free, self.wire) + self._cost(self.costs.gather, self.gathered[k]),
        )
        self.gather_stream = np.where(inside | across, end, self.gather_stream)
        self.wire = np.where(across, end, self.wire)
        self.gathered_s[k] = np.where(where, end, self.gathered_s[k])
        self._add(np.where(where, self.cast[k] + self.gathered[k], 0.0))
        self.nbytes = self.nbytes - np.where(where, self.cast[k], 0.0)

    def _copy_out(self, k: int, alive: Array) -> None:
        where = alive & ~self.keep[k]
        copied = np.maximum(self.compute, self.gathered_s[k]) + self.costs.copy_s_per_byte * self.gathered[k]
        self.compute = np.where(where, copied, self.compute)
        self.gather_after = np.where(where, copied, self.gather_after)
        self._add(np.where(where, self.gathered[k], 0.0))
        self.nbytes = self.nbytes - np.where(where, self.gathered[k] + self.part[k], 0.0)

    def _free_and_reduce(self, k: int, alive: Array) -> None:
        self.nbytes = self.nbytes - np.where(alive, self.gathered[k], 0.0)
        self._wait_for_buffers(alive)
        reduces = alive & (self.scattered[k] > 0)
        self._reduce(np.where(reduces, self.scattered[k], 0.0), reduces, self.gradients[k])

    def _reduce_root(self, where: Array) -> None:
        """Free the root's parameters, and reduce the root's gradients."""
        gathered, scattered, gradients = map(float, self.chain.root)
        if gathered:
            self.nbytes = self.nbytes - np.where(where, gathered, 0.0)
            self._wait_for_buffers(where)
            if scattered:
                self._reduce(np.where(where, scattered, 0.0), where, np.full(self.many, gradients))

    def _wait_for_buffers(self, where: Array) -> None:
        """Wait until another reduction may be launched, and free the inputs of finished reductions."""
        returned = np.maximum(self.returned, self.reductions - self.buffers + 1)
        returned = np.where(where, returned, self.returned)
        self.compute = np.maximum(self.compute, np.where(where, self.reduced_s[returned, self.every], 0.0))
        self.nbytes = self.nbytes - (self.reduced[returned, self.every] - self.reduced[self.returned, self.every])
        self.returned = returned

    def _reduce(self, scattered: Array, where: Array, gradients: Array) -> None:
        self.compute = self.compute + self.costs.copy_s_per_byte * scattered
        self._add(scattered)
        self.nbytes = self.nbytes - np.where(where, gradients, 0.0)
        end = np.maximum(self.compute, self.wire) + self._cost(self.costs.scatter, scattered)
        self.wire = np.where(where, end, self.wire)
        before = self.reduced[self.reductions, self.every]
        self.reductions = self.reductions + where
        self.reduced_s[self.reductions, self.every] = np.where(where, end, self.reduced_s[self.reductions, self.every])
        self.reduced[self.reductions, self.every] = before + scattered
        self._add(scattered // self.costs.ranks)

    def _add(self, nbytes: Array) -> None:
        self.nbytes = self.nbytes + nbytes
        self.peak = np.maximum(self.peak, self.nbytes)

    @staticmethod
    def _cost(cost: LinearCost, nbytes: Array) -> Array:
        return np.maximum(cost.floor_s, cost.alpha_s + cost.beta_s_per_byte * nbytes)
