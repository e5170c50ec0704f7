"""`legato rehearse` and `legato verify`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.options import ClusterFile, Json
from legato.cli.output import note, print_json, print_rows, stages
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.timeline import Timeline
from legato.core.units import format_seconds, parse_bandwidth
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.testbed.rehearsal import Rehearsal, Task
    from legato.testbed.servers.rehearsal import ServerRehearsal

WorkloadFile = Annotated[Path, typer.Argument(metavar="W.json", help="The workload whose training is rehearsed.")]
Scheduler = Annotated[
    str,
    typer.Option(help="A scheduler's name, several with commas, or all. DDP is always measured beside them."),
]
Iterations = Annotated[int, typer.Option(help="Timed iterations of each.", min=1)]
Ratio = Annotated[
    float | None,
    typer.Option(help="Scale computation until one message of all gradients takes so many times as long as it."),
]
Timelines = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="A folder for predicted and measured timelines (legato report), workload and cluster."
    ),
]


def rehearse(
    workload: WorkloadFile,
    hosts: Annotated[int, typer.Option(help="Hosts on this machine, one worker each.")] = 4,
    bandwidth: Annotated[str, typer.Option(help="Of a host's link, like 1Gbit.")] = "1Gbit",
    servers: Annotated[
        int, typer.Option(help="Parameter servers, each on one more host: orders of pulls are tried.", min=0)
    ] = 0,
    agents: Annotated[int, typer.Option(help="Inference agents beside them, on hosts of their own.", min=0)] = 0,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="A scheduler's name, several with commas, or all. DDP (with servers: random) is always "
            "measured beside them. (default: ddp,legato; with servers random,tic,tac)"
        ),
    ] = None,
    iterations: Iterations = 20,
    ratio: Ratio = None,
    output: Timelines = None,
    json: Json = False,
) -> None:
    """Try plans for real on this machine: hosts, shaped links, real TCP, and an accelerator that is emulated.

    Needs root, for the hosts are network namespaces. All of them are removed at the end.

    Example: [bold]legato rehearse resnet.json --hosts 4 --bandwidth 1Gbit --scheduler ddp,legato --ratio 1[/]
    [bold]legato rehearse resnet.json --hosts 2 --servers 1 --scheduler random,tic,tac[/]
    """
    from legato.testbed.rehearsal import STAGES
    from legato.testbed.rehearsal import rehearse as run

    bandwidth_bps = parse_bandwidth(bandwidth)
    if servers or agents:
        where = f"{hosts} workers and {servers} servers, links of {bandwidth}"
        _rehearse_servers(
            workload, hosts, bandwidth_bps, where, servers, agents, scheduler, iterations, ratio, output, json
        )
        return
    task = _task(workload, scheduler or "ddp,legato", iterations, ratio, None, output)
    with stages(STAGES) as advance:
        found = run(task, hosts, bandwidth_bps, advance)
    _tell(found, f"{hosts} hosts with links of {bandwidth}", output, json)


def verify(
    workload: WorkloadFile,
    cluster: ClusterFile = None,
    scheduler: Scheduler = "all",
    iterations: Iterations = 20,
    ratio: Ratio = None,
    output: Timelines = None,
    json: Json = False,
) -> None:
    """Hold predictions against measurements on your own cluster: every plan is run, and only computation is emulated.

    Start it under torchrun, on the machines and with the number of processes that will train. With
    --cluster, an earlier calibration is put to the test; otherwise the one that is made first.

    Example: [bold]torchrun --nproc-per-node 2 --no-python legato verify resnet.json --scheduler ddp,legato[/]
    """
    import os

    if "RANK" not in os.environ:
        raise InputError("verify measures between processes: start it under torchrun (see legato verify --help)")
    import torch
    import torch.distributed as dist

    from legato.testbed.rehearsal import STAGES
    from legato.testbed.trial import rehearse_here

    task = _task(workload, scheduler, iterations, ratio, cluster, output)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # the accelerator is emulated: its gradients are the host's
    try:
        if dist.get_rank() == 0:
            with stages(STAGES) as advance:
                found = rehearse_here(task, advance)
            _tell(found, f"{dist.get_world_size()} workers", output, json)
        else:
            rehearse_here(task, lambda stage, done, total: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rehearse_servers(
    workload: Path,
    hosts: int,
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

    names = _names(scheduler or "random,tic,tac")
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
        found = rehearse_servers(task, hosts, bandwidth_bps, advance)
    if output is not None:
        _write_servers(found, output)
    if json:
        print_json(found.rows())
        return
    compute, alone = (format_seconds(s) for s in (found.trials[0].computation_s, found.trials[0].communication_s))
    print_rows(
        f"{found.workload.name} on {where}: computation {compute}, pushes and pulls alone {alone}",
        found.rows(),
        by="measured_s",
    )
    _note_errors([trial.error for trial in found.trials])


def _names(scheduler: str) -> list[str]:
    return [name.strip() for name in scheduler.split(",")]


def _make(output: Path | None) -> None:
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{output}: {error.strerror}") from None


def _note_errors(errors: list[float]) -> None:
    far = sorted(abs(error) for error in errors)
    note(f"predictions are off by {far[len(far) // 2]:.1%} (median), {far[-1]:.1%} (worst)")


def _task(
    workload: Path, scheduler: str, iterations: int, ratio: float | None, cluster: Path | None, output: Path | None
) -> Task:
    from legato.testbed.rehearsal import Task, select

    names = select(_names(scheduler))
    _make(output)
    return Task(
        workload=files.read(workload, Workload),
        schedulers=names,
        iterations=iterations,
        ratio=ratio,
        cluster=None if cluster is None else files.read(cluster, Cluster),
        traced=() if output is None else names,
    )


def _tell(found: Rehearsal, where: str, output: Path | None, json: bool) -> None:
    if output is not None:
        _write(found, output)
    if json:
        print_json(found.rows())
        return
    compute, bound = found.workload.compute_s, min(trial.lower_bound_s for trial in found.trials)
    print_rows(
        f"{found.workload.name} on {where}: computation {format_seconds(compute)}, bound {format_seconds(bound)}",
        found.rows(),
        by="measured_s",
    )
    _note_errors([trial.error for trial in found.trials])


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
