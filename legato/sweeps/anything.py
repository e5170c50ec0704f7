"""Sweep workloads or whole jobs over every combination of networks, in one line of Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from legato.core.axes import NETWORK
from legato.core.errors import InputError
from legato.core.job import Job
from legato.core.results import Results
from legato.core.workload import Workload
from legato.reports.model import SweepRow
from legato.schedule import Scheduler
from legato.simulator.flow import Fabric
from legato.sweeps.grid import PLAIN, Grid, check_axes
from legato.sweeps.jobs import JobRow, sweep_jobs
from legato.sweeps.results import named
from legato.sweeps.run import sweep as sweep_grid

__all__ = ["Axes", "sweep"]

_AXES = {axis.field: axis for axis in NETWORK}
#: The options of a sweep of workloads other than the network, and the parts of a network that are axes of whole jobs.
_OF_WORKLOADS = ("fabric", "scheduler", "iterations")
_OF_JOBS = {"formulas": ("links",), "flows": ("links", "switches")}
T = TypeVar("T")
OneOrMore = T | Sequence[T]


class Axes(TypedDict, total=False):
    """The types of the axes, the properties of a network that a sweep can vary (`core/axes.py` explains them)."""

    workers: OneOrMore[int]
    servers: OneOrMore[int]
    bandwidth_bps: OneOrMore[float]
    latency_s: OneOrMore[float]
    send_s: float | None
    gpus_per_host: OneOrMore[int]
    gpus_per_card: int
    local_bandwidth_bps: OneOrMore[float]
    topology: OneOrMore[str]
    racks: OneOrMore[int]
    spines: OneOrMore[int]
    ports: int | None
    oversubscription: OneOrMore[float]
    core_oversubscription: float
    balance: str
    sharing: str
    server_bandwidth_bps: float | None
    reduce_s_per_byte: float
    jitter: OneOrMore[float]
    seed: int
    disturb: OneOrMore[str]


@overload
def sweep(
    what: OneOrMore[Job],
    *,
    fidelity: Literal["formulas", "flows"] | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    progress: Callable[[int, int], object] | None = None,
    **axes: Unpack[Axes],
) -> Results[JobRow]: ...
@overload
def sweep(
    what: OneOrMore[Workload],
    *,
    fabric: OneOrMore[str | Fabric] = "ring",
    scheduler: OneOrMore[str | Scheduler] = PLAIN,
    fidelity: Literal["formulas", "transfers"] | None = None,
    iterations: int | None = None,
    jobs: int | None = None,
    dask: str | None = None,
    progress: Callable[[int, int], object] | None = None,
    **axes: Unpack[Axes],
) -> Results[SweepRow]: ...
def sweep(what: Any, *, jobs: int | None = None, dask: str | None = None, progress: Any = None, **given: Any) -> Any:
    """Simulate workloads or whole jobs on every combination of networks, on all cores.

    A property of the network may have one value or several: `bandwidth_bps=[10e9, 25e9], workers=8`. `fabric` (names or
    fabrics) and `scheduler` (names or functions) may also have several values. `fidelity` is by default `transfers`, or
    `flows` for whole jobs. `jobs` is the number of cores of this machine to run on; `dask` is the address of the
    scheduler of a Dask cluster to run on instead. Each result is a row; `pandas.DataFrame(results.rows)` has all rows.
    A cell that fails is a row with an error. Raises `InputError` on unknown names and on numbers outside their range.
    """
    several, how = _several(what), {"jobs": jobs, "dask": dask, "progress": progress}
    whole = [isinstance(one, Job) for one in several]
    if any(whole) != all(whole) or not several:
        raise InputError("workloads and whole jobs in one sweep, or nothing (expected only one kind)")
    fidelity = given.pop("fidelity", None)
    options: dict[str, Any] = {} if whole[0] else {name: given.pop(name) for name in _OF_WORKLOADS if name in given}
    axes = {name: _several(value) for name, value in given.items()}
    parts = _OF_JOBS.get(fidelity or "flows", ())
    check_axes(axes, [field for field, axis in _AXES.items() if not whole[0] or axis.part in parts])
    if whole[0]:
        inputs = dict(zip(named(several), several, strict=True))
        return sweep_jobs(inputs, axes, fidelity or "flows", **how)
    grid = Grid(
        workloads=several,
        fabrics=_several(options.get("fabric", "ring")),
        schedulers=_several(options.get("scheduler", PLAIN)),
        fidelity=fidelity or "transfers",
        axes=axes,
        iterations=options.get("iterations"),
    )
    return sweep_grid(grid, **how)


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
