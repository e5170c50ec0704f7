"""What a sweep computes: every combination of workloads, fabrics, schedulers and machines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import msgspec

import legato
from legato.core import files
from legato.core.cluster import COLLECTIVES, PARAMETER_SERVER
from legato.core.errors import InputError, unknown_name
from legato.core.workload import Workload
from legato.schedule import SCHEDULERS, SERVER_SCHEDULERS
from legato.simulate.flow import FABRICS, Network

__all__ = ["PLAIN", "Cell", "Fidelity", "Grid", "fabric_names"]

Fidelity = Literal["collective", "flow"]

#: No scheduler: a message a tensor, as soon as it is ready.
PLAIN = "plain"
_MOST_CELLS = 1_000_000


class Cell(msgspec.Struct, frozen=True):
    """One simulation, complete but for the workload itself, which `workload_id` (`files.identity`) stands for.

    `servers` is 0 on fabrics without any.
    """

    workload_id: str
    fabric: str
    scheduler: str
    fidelity: Fidelity
    workers: int
    servers: int
    bandwidth_bps: float
    latency_s: float
    reduce_s_per_byte: float
    jitter: float
    seed: int
    version: str = legato.__version__

    @property
    def key(self) -> str:
        """What differs where cells differ, also between versions of legato."""
        return files.identity(self)

    @property
    def network(self) -> Network:
        """Its machines; raises `InputError` on numbers outside their range."""
        return Network(
            workers=self.workers,
            bandwidth_bps=self.bandwidth_bps,
            latency_s=self.latency_s,
            reduce_s_per_byte=self.reduce_s_per_byte,
            jitter=self.jitter,
            seed=self.seed,
        )


def fabric_names(fidelity: Fidelity) -> list[str]:
    """The fabrics that can be simulated: as one shared resource, those that have a formula."""
    return list(FABRICS) if fidelity == "flow" else [*COLLECTIVES, PARAMETER_SERVER]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The axes of a sweep, in the order in which its rows stand; what is named twice is there once.

    `schedulers` may have `PLAIN`, and "all", which is those that are made for a
    cell's fabric; `servers` is an axis of the fabrics that have some. Speedups
    are over the first fabric with its first scheduler. `jitter` is the sigma of
    a lognormal factor on computation (flow fidelity only), drawn from `seed`.
    Raises `InputError` on unknown names and numbers outside their range.
    """

    workloads: tuple[Workload, ...]
    fabrics: tuple[str, ...] = ("ring",)
    schedulers: tuple[str, ...] = (PLAIN,)
    fidelity: Fidelity = "flow"
    workers: tuple[int, ...] = (8,)
    servers: tuple[int, ...] = (1,)
    bandwidths_bps: tuple[float, ...] = (10e9,)
    latencies_s: tuple[float, ...] = (0.0,)
    reduce_s_per_byte: float = 0.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.fidelity not in get_args(Fidelity):
            raise unknown_name("fidelity", self.fidelity, get_args(Fidelity))
        for field, value in msgspec.structs.asdict(self).items():
            if value == ():
                raise InputError(f"{field}: none given (expected at least one)")
        for name in self.fabrics:
            if name not in fabric_names(self.fidelity):
                raise unknown_name(f"fabric at {self.fidelity} fidelity", name, fabric_names(self.fidelity))
        known = [PLAIN, "all", *SCHEDULERS, *SERVER_SCHEDULERS]
        for name in self.schedulers:
            if name not in known:
                raise unknown_name("scheduler", name, known)
        if self.jitter and self.fidelity == "collective":
            raise InputError(f"jitter: {self.jitter} (expected 0 at collective fidelity: all workers are alike there)")
        for count in self.servers:
            if count < 1:
                raise InputError(f"servers: {count} (expected at least 1)")
        if self.num_cells_at_most > _MOST_CELLS:
            raise InputError(f"a grid of {self.num_cells_at_most:,} cells (expected at most {_MOST_CELLS:,})")
        for workers, bandwidth, latency in itertools.product(self.workers, self.bandwidths_bps, self.latencies_s):
            self._cell("", "", "", workers, 0, bandwidth, latency).network  # noqa: B018

    @property
    def num_cells_at_most(self) -> int:
        axes: list[Any] = [self.workloads, self.fabrics, self.workers, self.servers, self.bandwidths_bps]
        each = max(len(SCHEDULERS), len(SERVER_SCHEDULERS)) if "all" in self.schedulers else 0
        return math.prod(map(len, [*axes, self.latencies_s])) * (len(self.schedulers) + each)

    def cells(self) -> list[Cell]:
        """Every combination once, the rightmost axes (latency, bandwidth, workers) the fastest to change."""
        return list(dict.fromkeys(self._cells()))

    def _cells(self) -> Iterator[Cell]:
        for job in dict.fromkeys(map(files.identity, self.workloads)):
            for name in self.fabrics:
                servers = self.servers if FABRICS[name].servers else (0,)
                machines = itertools.product(servers, self.latencies_s, self.bandwidths_bps, self.workers)
                named = itertools.product(self._schedulers(name), machines)
                for scheduler, (count, latency, bandwidth, workers) in named:
                    yield self._cell(job, name, scheduler, workers, count, bandwidth, latency)

    def _schedulers(self, fabric: str) -> list[str]:
        every = SERVER_SCHEDULERS if FABRICS[fabric].servers else SCHEDULERS
        return [one for name in self.schedulers for one in (every if name == "all" else [name])]

    def _cell(
        self, job: str, fabric: str, scheduler: str, workers: int, servers: int, bandwidth: float, latency: float
    ) -> Cell:
        return Cell(
            workload_id=job,
            fabric=fabric,
            scheduler=scheduler,
            fidelity=self.fidelity,
            workers=workers,
            servers=servers,
            bandwidth_bps=bandwidth,
            latency_s=latency,
            reduce_s_per_byte=self.reduce_s_per_byte,
            jitter=self.jitter,
            seed=self.seed,
        )
