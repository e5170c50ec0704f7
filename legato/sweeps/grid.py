"""The grid of a sweep: every combination of workloads, fabrics, schedulers and machines."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from legato.collectives import COLLECTIVES
from legato.core import __version__, files
from legato.core.axes import NETWORK, SERVERS
from legato.core.cluster import PARAMETER_SERVER
from legato.core.code import installed
from legato.core.errors import InputError, unknown_name
from legato.core.workload import Workload
from legato.schedule import GROUP, SCHEDULERS, SERVER_SCHEDULERS, Scheduler, label
from legato.simulator.flow import Network, fabrics
from legato.simulator.flow.fabrics import Fabric, check_options, fitting
from legato.simulator.flow.iterations.run import check_iterations
from legato.simulator.flow.network.disturbances import UNDISTURBED, parse_disturbances

__all__ = ["PLAIN", "THIS_RUN", "Cell", "Fidelity", "Grid", "check_axes", "fabric_names", "network_of"]

Fidelity = Literal["formulas", "transfers"]

#: The name for planning without a scheduler: one message per tensor, sent when it is ready.
PLAIN = "plain"
_MOST_CELLS = 1_000_000
#: Part of the keys of cells with code of the user's own, so that every process runs them again.
THIS_RUN = secrets.token_hex(8)
_FIELDS = [axis.field for axis in NETWORK]
#: The axes in the order of the grid, slowest first: the reverse order of the table, except for the number of servers.
_SLOWEST_FIRST = [field for field in reversed(_FIELDS) if field != SERVERS.field]
_SLOWEST_FIRST.insert(_SLOWEST_FIRST.index("latency_s"), SERVERS.field)


def network_of(values: Mapping[str, Any]) -> Network:
    """Return the network with these values of the axes (by field). Raises `InputError` on numbers out of range."""
    fields = {name: value for name, value in values.items() if name != SERVERS.field}
    disturbances = parse_disturbances(fields.pop("disturb"))
    return Network(**fields, disturbances=disturbances)


def check_axes(axes: Mapping[str, tuple[Any, ...]], known: Sequence[str]) -> None:
    """Raise `InputError` if an axis is not among the `known` fields, or has a value of another type."""
    kinds = {axis.field: type(axis.usual) for axis in NETWORK}
    for name, values in axes.items():
        if name not in known:
            raise unknown_name("axis", name, known)
        for value in values:
            kind = kinds[name]
            if kind in (int, float) and (not isinstance(value, (int, kind)) or isinstance(value, bool)):
                raise InputError(f"{name}: {value!r} (expected a {'whole ' if kind is int else ''}number)")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines the result of one simulation of a sweep.

    `inputs` are the identities of workloads or of a job (`files.identity`), `settings` says how they are simulated, and
    `axes` has values of the network's axes, by field. The user's own schedulers and fabrics are named by their `label`,
    and make `own` different in every process: their code may change.
    """

    inputs: tuple[str, ...]
    settings: dict[str, Any]
    axes: dict[str, Any]
    own: str = ""
    version: str = __version__

    @property
    def key(self) -> str:
        """Return a hash of the cell and of the version of legato."""
        return files.identity(self)


def fabric_names(fidelity: Fidelity) -> list[str]:
    """Return the fabrics that a fidelity can simulate; formulas exist only for some fabrics."""
    return fabrics.fabric_names() if fidelity == "transfers" else [*COLLECTIVES, PARAMETER_SERVER]


def _label(one: str | Scheduler | Fabric) -> str:
    return fabrics.label(one) if isinstance(one, Fabric) else label(one)


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The axes of a sweep, in the order of its rows; repeated values count once.

    A fabric is a name or an object; a scheduler is a name or a function. `schedulers` may contain `PLAIN` (one message
    per tensor) and "all" (every scheduler that suits a cell's fabric). `axes` has the values of axes of the network
    (`core/axes.py`), by field; axes that are left out have their default. With disturbances, all cells simulate one
    iteration. Each fabric uses the `options` that exist for it (`legato.simulator.flow.fabric`). Speedups are relative
    to the first fabric with its first scheduler. Formulas need identical hosts behind one switch. Raises `InputError`
    on unknown names and on numbers outside their range.
    """

    workloads: tuple[Workload, ...]
    fabrics: tuple[str | Fabric, ...] = ("ring",)
    schedulers: tuple[str | Scheduler, ...] = (PLAIN,)
    fidelity: Fidelity = "transfers"
    axes: dict[str, tuple[Any, ...]] = {}
    iterations: int | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        self._check_names()
        for count in self.values[SERVERS.field]:
            if count < 1:
                raise InputError(f"servers: {count} (expected at least 1)")
        if self.num_cells_at_most > _MOST_CELLS:
            raise InputError(f"a grid of {self.num_cells_at_most:,} cells (expected at most {_MOST_CELLS:,})")
        if self.iterations is not None:
            check_iterations(self.iterations)
        if self._disturbed and self.iterations not in (None, 1):
            raise InputError(
                f"iterations: {self.iterations} (expected 1 with disturb, whose times refer to one iteration)"
            )
        check_options(self.fabrics, self.options)
        for name in self.fabrics:
            fitting(name, self.options)
        for values in self._networks(has_servers=True):
            network = network_of(values)
            if self.fidelity == "formulas" and not (network.plain and not self.options):
                raise InputError("fidelity: formulas need identical hosts behind one switch (expected transfers)")

    def _check_names(self) -> None:
        if self.fidelity not in get_args(Fidelity):
            raise unknown_name("fidelity", self.fidelity, get_args(Fidelity))
        for field, values in {**msgspec.structs.asdict(self), **self.axes}.items():
            if values == ():
                raise InputError(f"{field}: empty (expected at least one)")
        schedulers = [PLAIN, "all", *SCHEDULERS, *SERVER_SCHEDULERS, *installed(GROUP)]
        for kind, names, known in (
            ("axis", self.axes, _FIELDS),
            (f"fabric by {self.fidelity}", self.fabrics, fabric_names(self.fidelity)),
            ("scheduler", self.schedulers, schedulers),
        ):
            own = [_label(name) for name in names if not isinstance(name, str)]
            for name in names:
                if isinstance(name, str) and name not in known:
                    raise unknown_name(kind, name, known)
            for name in own:
                if name in known or own.count(name) > 1:
                    raise InputError(f"{kind} {name!r}: another has this name (expected a name of its own)")

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of every axis of the network by field, without repetitions."""
        return {axis.field: tuple(dict.fromkeys(self.axes.get(axis.field, (axis.usual,)))) for axis in NETWORK}

    @property
    def _disturbed(self) -> bool:
        return set(self.values["disturb"]) != {UNDISTURBED}

    @property
    def num_cells_at_most(self) -> int:
        each = max(len(SCHEDULERS) + len(installed(GROUP)), len(SERVER_SCHEDULERS)) if "all" in self.schedulers else 0
        networks = math.prod(map(len, self.values.values()))
        return len(self.workloads) * len(self.fabrics) * networks * (len(self.schedulers) + each)

    def cells(self) -> list[Cell]:
        """Return every combination once, in an order in which latency, bandwidth and workers change fastest."""
        return list(self._cells())

    def _cells(self) -> Iterator[Cell]:
        iterations, options = 1 if self._disturbed else self.iterations, dict(sorted(self.options.items()))
        how = {"fidelity": self.fidelity, "iterations": iterations, "options": options}
        for job in dict.fromkeys(map(files.identity, self.workloads)):
            for name, fabric in self._by_label(self.fabrics).items():
                has_servers = fitting(fabric, {}).servers > 0
                for scheduler, planner in self._schedulers(has_servers).items():
                    for values in self._networks(has_servers=has_servers):
                        yield Cell(
                            inputs=(job,),
                            settings={"fabric": name, "scheduler": scheduler, **how},
                            axes={field: values[field] for field in _FIELDS},
                            own="" if isinstance(fabric, str) and isinstance(planner, str) else THIS_RUN,
                        )

    def parts(self, cell: Cell) -> tuple[str | Scheduler, str | Fabric]:
        """Return the scheduler and the fabric of a cell: their names, or the user's own objects."""
        schedulers, fabrics = self._by_label(self.schedulers), self._by_label(self.fabrics)
        scheduler = cell.settings["scheduler"]
        return schedulers.get(scheduler, scheduler), fabrics[cell.settings["fabric"]]

    def _by_label(self, given: tuple[Any, ...]) -> dict[str, Any]:
        return {_label(one): one for one in given}

    def _schedulers(self, has_servers: bool) -> dict[str, str | Scheduler]:
        every = SERVER_SCHEDULERS if has_servers else [*SCHEDULERS, *installed(GROUP)]
        return self._by_label(tuple(one for name in self.schedulers for one in (every if name == "all" else [name])))

    def _networks(self, *, has_servers: bool) -> Iterator[dict[str, Any]]:
        """Yield every combination of the values of the network's axes."""
        values = self.values if has_servers else self.values | {SERVERS.field: (0,)}
        for chosen in itertools.product(*(values[field] for field in _SLOWEST_FIRST)):
            yield dict(zip(_SLOWEST_FIRST, chosen, strict=True))
