"""The grid of a sweep: every combination of workloads, fabrics, schedulers and machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

from legato.core import __version__, files
from legato.core.cluster import COLLECTIVES, PARAMETER_SERVER
from legato.core.errors import InputError, unknown_name
from legato.core.workload import Workload
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS
from legato.simulator.flow import FABRICS, Network
from legato.simulator.flow.disturbances import UNDISTURBED, parse_disturbances
from legato.simulator.flow.fabrics import check_options, fitting
from legato.simulator.flow.network import Sharing, last_worker
from legato.simulator.flow.run import check_iterations
from legato.simulator.flow.switches import Balance, TopologyName

__all__ = ["MACHINE_AXES", "PLAIN", "Cell", "Fidelity", "Grid", "fabric_names"]

Fidelity = Literal["collective", "flow"]

#: No scheduler: one message per tensor, sent when it is ready.
PLAIN = "plain"
_MOST_CELLS = 1_000_000


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation: all its inputs, with `workload_id` (`files.identity`) in place of the workload.

    `servers` is 0 for fabrics without servers. `disturb` is the text of disturbances
    (`legato.simulator.flow.disturbances.parse_disturbances`). `slow` and `slow_link` are
    slowdown factors of the last worker's computation and of its link. `options`
    are those of the fabric.
    """

    workload_id: str
    fabric: str
    scheduler: str
    fidelity: Fidelity
    workers: int
    servers: int
    bandwidth_bps: float
    latency_s: float
    send_s: float | None
    gpus_per_host: int
    gpus_per_card: int
    local_bandwidth_bps: float
    topology: TopologyName
    racks: int
    spines: int
    ports: int | None
    oversubscription: float
    core_oversubscription: float
    balance: Balance
    slow: float
    slow_link: float
    jitter: float
    disturb: str
    server_bandwidth_bps: float | None
    reduce_s_per_byte: float
    sharing: Sharing
    seed: int
    iterations: int | None
    options: tuple[tuple[str, Any], ...]
    version: str = __version__

    @property
    def key(self) -> str:
        """A hash of the cell, which also depends on the version of legato."""
        return files.identity(self)

    @property
    def machines(self) -> tuple[Any, ...]:
        """The cell's values on the axes of the machines."""
        return tuple(getattr(self, axis) for axis in MACHINE_AXES)

    @property
    def network(self) -> Network:
        """The cell's network; raises `InputError` on numbers outside their range."""
        return Network(
            workers=self.workers,
            bandwidth_bps=self.bandwidth_bps,
            latency_s=self.latency_s,
            send_s=self.send_s,
            gpus_per_host=self.gpus_per_host,
            gpus_per_card=self.gpus_per_card,
            local_bandwidth_bps=self.local_bandwidth_bps,
            topology=self.topology,
            racks=self.racks,
            spines=self.spines,
            ports=self.ports,
            oversubscription=self.oversubscription,
            core_oversubscription=self.core_oversubscription,
            balance=self.balance,
            link_scale=last_worker("slow_link", self.slow_link, self.workers, self.gpus_per_card),
            server_bandwidth_bps=self.server_bandwidth_bps,
            sharing=self.sharing,
            reduce_s_per_byte=self.reduce_s_per_byte,
            compute_scale=last_worker("slow", self.slow, self.workers),
            jitter=self.jitter,
            seed=self.seed,
            disturbances=parse_disturbances(self.disturb),
        )


#: The axes of the machines: the field of a cell, and that of the grid; the last one changes fastest.
MACHINE_AXES = {
    "disturb": "disturbs",
    "jitter": "jitters",
    "slow_link": "slow_links",
    "slow": "slows",
    "oversubscription": "oversubscriptions",
    "spines": "spines",
    "racks": "racks",
    "gpus_per_host": "gpus_per_host",
    "servers": "servers",
    "latency_s": "latencies_s",
    "bandwidth_bps": "bandwidths_bps",
    "workers": "workers",
}


def fabric_names(fidelity: Fidelity) -> list[str]:
    """Return the fabrics that a fidelity can simulate: at collective fidelity, those that have a cost formula."""
    return list(FABRICS) if fidelity == "flow" else [*COLLECTIVES, PARAMETER_SERVER]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The axes of a sweep, in the order of its rows; repeated values count once.

    `schedulers` may contain `PLAIN`, and "all" for every scheduler that suits a
    cell's fabric. `servers` is an axis of fabrics with servers only. `jitters`
    are sigmas of a lognormal factor on computation, drawn from `seed`. `slows`
    and `slow_links` are slowdown factors of the last worker's computation and of
    its link. `disturbs` are texts of disturbances ("none" is the undisturbed
    network); beside them, all cells are of one iteration. `options` go to the fabrics that have them
    (`legato.simulator.flow.fabric`). Speedups are relative to the first fabric
    with its first scheduler. At collective fidelity, all hosts are alike, behind
    one switch. Raises `InputError` on unknown names and numbers outside their
    range.
    """

    workloads: tuple[Workload, ...]
    fabrics: tuple[str, ...] = ("ring",)
    schedulers: tuple[str, ...] = (PLAIN,)
    fidelity: Fidelity = "flow"
    workers: tuple[int, ...] = (8,)
    servers: tuple[int, ...] = (1,)
    bandwidths_bps: tuple[float, ...] = (10e9,)
    latencies_s: tuple[float, ...] = (0.0,)
    send_s: float | None = None
    gpus_per_host: tuple[int, ...] = (1,)
    gpus_per_card: int = 1
    local_bandwidth_bps: float = 100e9
    topology: TopologyName = "leaf-spine"
    racks: tuple[int, ...] = (1,)
    spines: tuple[int, ...] = (1,)
    ports: int | None = None
    oversubscriptions: tuple[float, ...] = (1.0,)
    core_oversubscription: float = 1.0
    balance: Balance = "ecmp"
    slows: tuple[float, ...] = (1.0,)
    slow_links: tuple[float, ...] = (1.0,)
    jitters: tuple[float, ...] = (0.0,)
    disturbs: tuple[str, ...] = (UNDISTURBED,)
    server_bandwidth_bps: float | None = None
    reduce_s_per_byte: float = 0.0
    sharing: Sharing = "fifo"
    seed: int = 0
    iterations: int | None = None
    options: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.fidelity not in get_args(Fidelity):
            raise unknown_name("fidelity", self.fidelity, get_args(Fidelity))
        for field, value in msgspec.structs.asdict(self).items():
            if value == ():
                raise InputError(f"{field}: empty (expected at least one)")
        for name in self.fabrics:
            if name not in fabric_names(self.fidelity):
                raise unknown_name(f"fabric at {self.fidelity} fidelity", name, fabric_names(self.fidelity))
        known = [PLAIN, "all", *SCHEDULERS, *SERVER_SCHEDULERS]
        for name in self.schedulers:
            if name not in known:
                raise unknown_name("scheduler", name, known)
        for count in self.servers:
            if count < 1:
                raise InputError(f"servers: {count} (expected at least 1)")
        if self.num_cells_at_most > _MOST_CELLS:
            raise InputError(f"a grid of {self.num_cells_at_most:,} cells (expected at most {_MOST_CELLS:,})")
        if self.iterations is not None:
            check_iterations(self.iterations)
        if self._disturbed and self.iterations not in (None, 1):
            raise InputError(
                f"iterations: {self.iterations} (expected 1 with disturb, whose times count from its start)"
            )
        check_options(self.fabrics, self.options)
        for name in self.fabrics:
            fitting(name, self.options)
        for machines in self._machines(has_servers=True):
            network = self._cell("", "", "", machines).network
            if self.fidelity == "collective" and not (network.plain and not self.options):
                raise InputError(
                    "fidelity: collective has identical hosts and one switch (expected flow for anything else)"
                )

    @property
    def _disturbed(self) -> bool:
        return set(self.disturbs) != {UNDISTURBED}

    @property
    def num_cells_at_most(self) -> int:
        axes: list[Any] = [self.workloads, self.fabrics, *(getattr(self, axis) for axis in MACHINE_AXES.values())]
        each = max(len(SCHEDULERS), len(SERVER_SCHEDULERS)) if "all" in self.schedulers else 0
        return math.prod(map(len, axes)) * (len(self.schedulers) + each)

    def cells(self) -> list[Cell]:
        """Return every combination once; the last axes (latency, bandwidth, workers) change fastest."""
        return list(dict.fromkeys(self._cells()))

    def _cells(self) -> Iterator[Cell]:
        for job in dict.fromkeys(map(files.identity, self.workloads)):
            for name in self.fabrics:
                for scheduler in self._schedulers(name):
                    for machines in self._machines(has_servers=bool(FABRICS[name].servers)):
                        yield self._cell(job, name, scheduler, machines)

    def _schedulers(self, fabric: str) -> list[str]:
        every = SERVER_SCHEDULERS if FABRICS[fabric].servers else SCHEDULERS
        return [one for name in self.schedulers for one in (every if name == "all" else [name])]

    def _machines(self, *, has_servers: bool) -> Iterator[dict[str, Any]]:
        values = {axis: getattr(self, field) for axis, field in MACHINE_AXES.items()}
        if not has_servers:
            values["servers"] = (0,)
        for chosen in itertools.product(*values.values()):
            yield dict(zip(values, chosen, strict=True))

    def _cell(self, job: str, fabric: str, scheduler: str, machines: dict[str, Any]) -> Cell:
        return Cell(
            workload_id=job,
            fabric=fabric,
            scheduler=scheduler,
            fidelity=self.fidelity,
            send_s=self.send_s,
            gpus_per_card=self.gpus_per_card,
            local_bandwidth_bps=self.local_bandwidth_bps,
            topology=self.topology,
            ports=self.ports,
            core_oversubscription=self.core_oversubscription,
            balance=self.balance,
            server_bandwidth_bps=self.server_bandwidth_bps,
            reduce_s_per_byte=self.reduce_s_per_byte,
            sharing=self.sharing,
            seed=self.seed,
            iterations=1 if self._disturbed else self.iterations,
            options=tuple(sorted(self.options.items())),
            **machines,
        )
