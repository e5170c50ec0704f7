"""`legato rehearse` and `legato verify`"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.options import (
    BANDWIDTH_HELP,
    SCHEDULER_HELP,
    WORKERS_HELP,
    ClusterFile,
    Json,
    Servers,
    Shard,
    Wire,
    check_installed,
    quantity,
    split,
)
from legato.cli.output import note, print_json, print_rows, stages
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.timeline import Timeline
from legato.core.units import format_bandwidth, format_seconds, parse_bandwidth
from legato.core.workload import Workload
from legato.report.doubts import doubts

if TYPE_CHECKING:
    from legato.testbed.rehearsal import Rehearsal, Task
    from legato.testbed.servers.rehearsal import ServerRehearsal

#: The errors of so many predictions are listed; of more, the median and the worst are.
_FEW = 2

WorkloadFile = Annotated[Path, typer.Argument(metavar="W.json", help="The workload to rehearse.")]
Iterations = Annotated[int, typer.Option(help="Number of timed iterations of each plan.", min=1, max=2**20)]
Ratio = Annotated[
    float | None,
    typer.Option(
        help="Scale computation so that one message of all gradients takes this many times as long.",
        show_default="computation as in the workload",
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compiled",
        help="Run plans in a compiled model, so that they may have orders of computation of their own. "
        "DDP's model is not compiled, which is never slower.",
    ),
]
Timelines = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write timelines, predicted and measured, the workload and the cluster to this folder.",
    ),
]


def rehearse(
    workload: WorkloadFile,
    scheduler: Annotated[
        str | None, typer.Option(help=SCHEDULER_HELP, show_default="ddp,legato; random,tic,tac with servers")
    ] = None,
    workers: Annotated[int, typer.Option(help=WORKERS_HELP, max=2**20, rich_help_panel="Network")] = 4,
    servers: Servers = None,
    bandwidth: Annotated[str, typer.Option(help=BANDWIDTH_HELP, rich_help_panel="Network")] = "1Gbit",
    agents: Annotated[
        int, typer.Option(help="Number of inference agents, which only pull.", min=0, rich_help_panel="Network")
    ] = 0,
    iterations: Iterations = 20,
    ratio: Ratio = None,
    compiled: Compiled = False,
    shard: Shard = "none",
    wire: Wire = "none",
    output: Timelines = None,
    json: Json = False,
) -> None:
    """Run plans on this machine, over real TCP on shaped links, with computation emulated.

    Every worker and server gets a host of its own, a network namespace, which takes no root; all of them are removed
    at the end. DDP is always measured too; with parameter servers, which try orders of pulls, the order random is.
    With --shard or --wire, plans are measured with and without it, and so is DDP with torch's ZeroRedundancyOptimizer,
    or with torch's hook that compresses.

    Example: [bold]legato rehearse resnet.json --workers 4 --bandwidth 1Gbit --scheduler ddp,legato --ratio 1[/]
    """
    check_installed("torch", "torch", "legato rehearse")

    from legato.testbed.rehearsal import STAGES
    from legato.testbed.rehearsal import rehearse as run

    bandwidth_bps = quantity("bandwidth", bandwidth, parse_bandwidth)
    link = format_bandwidth(bandwidth_bps)
    if servers or agents:
        if (shard, wire) != ("none", "none"):
            raise InputError("--shard and --wire: not with parameter servers")
        where = f"{workers} workers and {servers or 0} servers, {link}"
        _rehearse_servers(
            workload, workers, bandwidth_bps, where, servers or 0, agents, scheduler, iterations, ratio, output, json
        )
        return
    task = _task(workload, scheduler or "ddp,legato", iterations, ratio, compiled, None, output, shard, wire)
    with stages(STAGES) as advance:
        found = run(task, workers, bandwidth_bps, advance)
    tell(found, f"{workers} workers, {link}", output, json)


def verify(
    workload: WorkloadFile,
    scheduler: Annotated[str, typer.Option(help=SCHEDULER_HELP)] = "ddp,legato",
    cluster: ClusterFile = None,
    iterations: Iterations = 20,
    ratio: Ratio = None,
    compiled: Compiled = False,
    shard: Shard = "none",
    wire: Wire = "none",
    output: Timelines = None,
    json: Json = False,
) -> None:
    """Compare predictions with measurements on your own cluster: run plans, with only computation emulated.

    Start it under torchrun, on the machines and with the number of processes that will train. DDP is always measured
    too. With --cluster, predictions are for that file; otherwise for a calibration that is made first.

    Example: [bold]torchrun --nproc-per-node 2 --no-python legato verify resnet.json --scheduler ddp,legato[/]
    """
    import os

    if "RANK" not in os.environ:
        raise InputError("verify measures between processes: start it under torchrun (see legato verify --help)")
    import torch
    import torch.distributed as dist

    from legato.testbed.rehearsal import STAGES
    from legato.testbed.trial import rehearse_here

    task = _task(workload, scheduler, iterations, ratio, compiled, cluster, output, shard, wire)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # the accelerator is emulated: its gradients are the host's
    try:
        if dist.get_rank() == 0:
            with stages(STAGES) as advance:
                found = rehearse_here(task, advance)
            source = "measured in this job" if cluster is None else f"{cluster}"
            tell(found, f"{dist.get_world_size()} workers ({source})", output, json)
        else:
            rehearse_here(task, lambda stage, done, total: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rehearse_servers(
    workload: Path,
    workers: int,
    bandwidth_bps: float,
    where: str,
    servers: int,
    agents: int,
    scheduler: str | None,
    iterations: int,
    ratio: float | None,
    output: Path | None,
    json: bool,
) -> None:
    from legato.testbed.rehearsal import STAGES
    from legato.testbed.servers.rehearsal import ServerTask, rehearse_servers, select_orders

    names = split(scheduler or "random,tic,tac")
    _make(output)
    task = ServerTask(
        workload=files.read(workload, Workload),
        schedulers=select_orders(names),
        servers=servers,
        agents=agents,
        iterations=iterations,
        ratio=ratio,
    )
    with stages(STAGES) as advance:
        found = rehearse_servers(task, workers, bandwidth_bps, advance)
    if output is not None:
        _write_servers(found, output)
    if json:
        print_json(found.rows())
        _note_doubts(found)
        return
    compute, alone = (format_seconds(s) for s in (found.trials[0].computation_s, found.trials[0].communication_s))
    print_rows(
        f"{found.workload.name} on {where}: computation {compute}, pushes and pulls alone {alone}",
        found.rows(),
        by="measured_s",
    )
    _note_errors(found)
    _note_doubts(found)


def _make(output: Path | None) -> None:
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{output}: {error.strerror}") from None


def _note_errors(found: Rehearsal | ServerRehearsal) -> None:
    errors = {trial.scheduler: trial.error for trial in found.trials if trial.error is not None}
    if len(errors) > _FEW:
        far = [abs(error) for error in errors.values()]
        note(f"predictions are off by {statistics.median(far):.1%} (median), {max(far):.1%} (worst)")
    else:
        note("predictions are off by " + " and ".join(f"{error:+.1%} ({name})" for name, error in errors.items()))


def _note_doubts(found: Rehearsal | ServerRehearsal) -> None:
    bounds = {t.scheduler: t.predicted.lower_bound_s or 0.0 for t in found.trials if t.predicted is not None}
    for doubt in doubts({trial.scheduler: trial.measured_s for trial in found.trials}, bounds):
        note(doubt)


def _task(
    workload: Path,
    scheduler: str,
    iterations: int,
    ratio: float | None,
    compiled: bool,
    cluster: Path | None,
    output: Path | None,
    shard: Shard,
    wire: Wire,
) -> Task:
    from legato.testbed.rehearsal import Task, select

    names = select(split(scheduler))
    _make(output)
    return Task(
        workload=files.read(workload, Workload),
        schedulers=names,
        iterations=iterations,
        ratio=ratio,
        cluster=None if cluster is None else files.read(cluster, Cluster),
        traced=() if output is None else names,
        compiled=compiled,
        shard=shard,
        wire=wire,
    )


def tell(found: Rehearsal, where: str, output: Path | None, json: bool) -> None:
    if output is not None:
        _write(found, output)
    if json:
        print_json(found.rows())
        _note_doubts(found)
        return
    compute, bound = found.workload.compute_s, min(t.lower_bound_s for t in found.trials if t.predicted is not None)
    print_rows(
        f"{found.workload.name} on {where}: computation {format_seconds(compute)}, bound {format_seconds(bound)}",
        found.rows(),
        by="measured_s",
    )
    _note_errors(found)
    _note_doubts(found)


def _write(found: Rehearsal, folder: Path) -> None:
    files.write(folder / "workload.json", found.workload)
    files.write(folder / "cluster.json", found.cluster)
    for trial in found.trials:
        timelines: list[tuple[str, Timeline | None]] = [("predicted", trial.predicted), ("measured", trial.measured)]
        for kind, timeline in timelines:
            if timeline is not None:
                files.write(folder / f"{trial.scheduler}.{kind}.json", timeline)
    note(f"timelines -> {folder} (legato report {folder}/*.json shows them)")


def _write_servers(found: ServerRehearsal, folder: Path) -> None:
    files.write(folder / "workload.json", found.workload)
    for trial in found.trials:
        files.write(folder / f"{trial.scheduler}.predicted.json", trial.predicted)
    note(f"timelines -> {folder} (legato report {folder}/*.predicted.json shows them)")
