"""The units, costs and groups of a traced fully sharded training. A unit is a group, or one module of it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.text import percent
from legato.core.wrapping import Group, Sync, Wrapping
from legato.fsdp.costs import Costs, Hosts
from legato.fsdp.table import Comparison, compare_traced
from legato.fsdp.units import Precision, Unit
from legato.ingest.traced import Sharded, ShardedGroup

__all__ = ["Fit", "as_modules", "compare_groups", "costs_of", "traced_units", "traced_wrapping"]

#: Modules of a list whose paths differ only in their numbers are taken to be alike.
_NUMBERED = re.compile(r"(.*?)(\d+)$")
_SEPARATOR = ", "


class Fit(msgspec.Struct, frozen=True):
    """A cost that was fitted to traced collectives of some sizes; `off` is its largest relative error."""

    what: str
    cost: LinearCost
    sizes: int
    off: float

    @classmethod
    def of(cls, what: str, samples: Sequence[tuple[int, float]], *, waits_known: bool) -> Fit:
        """Fit a cost to each size's median time, or to its shortest time if times may include waits for late ranks."""
        times: dict[int, list[float]] = {}
        for nbytes, seconds in samples:
            if nbytes > 0 and seconds > 0:
                times.setdefault(nbytes, []).append(seconds)
        if not times:
            raise InputError(f"no {what} whose size is known (expected one, to fit its cost to)")
        typical = statistics.median if waits_known else min
        points = [(nbytes, float(typical(same))) for nbytes, same in sorted(times.items())]
        (nbytes, seconds), several = points[-1], len(points) > 1
        cost = LinearCost.fit(points) if several else LinearCost(0.0, seconds / nbytes)
        return cls(what, cost, len(points), max(abs(cost.cost(nbytes) / seconds - 1) for nbytes, seconds in points))

    def __str__(self) -> str:
        how = f"fitted to {self.sizes} sizes, off by at most {percent(self.off)}"
        return (
            f"A traced {self.what} takes {self.cost} ({how if self.sizes > 1 else 'in proportion to the only size'})."
        )


def compare_groups(
    found: Sharded, *, waits_known: bool, cluster: Cluster | None = None
) -> tuple[Comparison, tuple[Fit, ...]]:
    """Return a comparison of the traced groups with other groups, and the costs that were fitted to the collectives.

    Raises `InputError` if the trace lacks something that the rules need.
    """
    if not found.groups:
        raise InputError("the whole model is one group (expected fully_shard of its blocks, too)")
    if found.odd or not all(group.gathered for group in found.groups):
        raise InputError(found.odd or "the trace lacks the all-gathers of some groups")
    costs, fits = costs_of(found, waits_known=waits_known)
    if cluster is not None:
        given, fits = Costs.of(cluster, Hosts()), ()
        costs = msgspec.structs.replace(given, gather_in_host=given.gather, copy_s_per_byte=found.copy_s_per_byte)
    units = traced_units(found)
    node = min((g.reshard for g in found.groups if not isinstance(g.reshard, bool)), default=None)
    precision = Precision(4, found.gathered_itemsize, found.reduced_itemsize)
    return compare_traced(units, costs, precision, traced_wrapping(found), found.update_s, node), fits


def costs_of(found: Sharded, *, waits_known: bool) -> tuple[Costs, tuple[Fit, ...]]:
    """Return the costs of the job's collectives, and how well each cost fits the traced collectives."""
    samples = {"all-gather": found.gathers, "reduce-scatter": found.scatters}
    if found.gathers_in_host:
        samples["all-gather of what was resharded to fewer ranks"] = found.gathers_in_host
    fits = tuple(Fit.of(what, same, waits_known=waits_known) for what, same in samples.items())
    gather, scatter, *in_host = (fit.cost for fit in fits)
    return Costs(found.ranks, gather, (*in_host, gather)[0], scatter, copy_s_per_byte=found.copy_s_per_byte), fits


def traced_units(found: Sharded) -> list[Unit]:
    """Return the units from which groups can be made, and units for the root's computation before and after each group.

    A group is one unit, with one exception: if the paths of its modules differ only in their numbers, and each module's
    time is known, each module is a unit, and these units have the same size.
    """
    units: list[Unit] = []
    holds = next((k for back in (1, 0) for k, seconds in enumerate(found.root_s) if seconds[back] > 0), 0)
    for k, seconds in enumerate(found.root_s):
        if k > 0:
            units += _units(found, found.groups[k - 1])
        sizes = _sizes(found, found.root) if k == holds else (0, 0, 0)
        if any((*seconds, *sizes)):
            units.append(Unit("root", *seconds, *sizes, trained=sizes[1] > 0, rooted=True))
    return [unit._replace(named=k) for k, unit in enumerate(units)]


def _sizes(found: Sharded, group: ShardedGroup) -> tuple[int, int, int]:
    return group.gathered, group.scattered, group.scattered // found.reduced_itemsize * found.gathered_itemsize


def _paths(group: ShardedGroup) -> tuple[str, ...]:
    """Return the paths of a group's units: a path for each module if they are alike and timed, or else one path."""
    found = [_NUMBERED.match(path) for path in group.modules]
    alike = None not in found and len({match[1] for match in found if match}) == 1
    return group.modules if alike and len(group.forward_s) == len(group.modules) else (_SEPARATOR.join(group.modules),)


def _units(found: Sharded, group: ShardedGroup) -> Iterator[Unit]:
    paths, forward_s = _paths(group), math.fsum(group.forward_s)
    n = len(paths)
    for j, (path, seconds) in enumerate(zip(paths, group.forward_s if n > 1 else [forward_s], strict=True)):
        backward_s = group.backward_s * (seconds / forward_s if forward_s > 0 else 1 / n)
        gathered, scattered, gradients = (size * (j + 1) // n - size * j // n for size in _sizes(found, group))
        unit = Unit(path, seconds, backward_s, gathered, scattered, gradients, trained=scattered > 0)
        yield unit._replace(input_needs_gradient=j > 0 or group.input_needs_gradient)


def traced_wrapping(found: Sharded) -> Wrapping:
    """Return the wrapping of the traced groups."""
    sync: Sync = "each"
    scatters = {group.scatters for group in found.groups} - {0}  # a frozen group has no reduce-scatters
    if found.micro_batches > 1 and scatters == {1}:
        sync = "last"
    elif found.micro_batches > 1 and all(group.gathers == 1 for group in found.groups):
        sync = "gathered-once"
    forward, backward = (max(g.ahead[back] for g in found.groups) for back in (0, 1))
    return Wrapping(
        "groups as traced",
        tuple(Group(_paths(group), group.reshard) for group in found.groups),
        forward,
        backward if backward > 1 else 0,  # a depth of 1 is FSDP2's own rule
        found.buffers,
        micro_batches=found.micro_batches,
        sync=sync,
    )


def as_modules(wrapping: Wrapping) -> Wrapping:
    """Return the wrapping with each unit replaced by its modules, of which a unit may have several."""
    groups = (
        msgspec.structs.replace(g, modules=tuple(path for unit in g.modules for path in unit.split(_SEPARATOR)))
        for g in wrapping.groups
    )
    return msgspec.structs.replace(wrapping, groups=tuple(groups))
