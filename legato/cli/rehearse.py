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
    scheduler: Scheduler = "ddp,legato",
    iterations: Iterations = 20,
    ratio: Ratio = None,
    output: Timelines = None,
    json: Json = False,
) -> None:
    """Try plans for real on this machine: hosts, shaped links, real TCP, and an accelerator that is emulated.

    Needs root, for the hosts are network namespaces. All of them are removed at the end.

    Example: [bold]legato rehearse resnet.json --hosts 4 --bandwidth 1Gbit --scheduler ddp,legato --ratio 1[/]
    """
    from legato.testbed.rehearsal import STAGES
    from legato.testbed.rehearsal import rehearse as run

    task = _task(workload, scheduler, iterations, ratio, None, output)
    bandwidth_bps = parse_bandwidth(bandwidth)
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


def _task(
    workload: Path, scheduler: str, iterations: int, ratio: float | None, cluster: Path | None, output: Path | None
) -> Task:
    from legato.testbed.rehearsal import Task, select

    names = select([name.strip() for name in scheduler.split(",")])
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{output}: {error.strerror}") from None
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
    errors = sorted(abs(trial.error) for trial in found.trials)
    note(f"predictions are off by {errors[len(errors) // 2]:.1%} (median), {errors[-1]:.1%} (worst)")


def _write(found: Rehearsal, folder: Path) -> None:
    files.write(folder / "workload.json", found.workload)
    files.write(folder / "cluster.json", found.cluster)
    for trial in found.trials:
        timelines: list[tuple[str, Timeline | None]] = [("predicted", trial.predicted), ("measured", trial.measured)]
        for kind, timeline in timelines:
            if timeline is not None:
                files.write(folder / f"{trial.scheduler}.{kind}.json", timeline)
    note(f"timelines -> {folder} (legato report {folder}/*.json shows them)")
