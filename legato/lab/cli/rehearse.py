"""`legato rehearse` and `legato verify`"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cli.axes import NO_SERVERS, option
from legato.cli.options import (
    SCHEDULER_HELP,
    ClusterFile,
    Json,
    Shard,
    Wire,
    check_installed,
    make_folder,
    quantity,
    setting,
    split,
)
from legato.cli.output import note, print_json, print_rows, stages
from legato.core import files
from legato.core.cluster import Cluster
from legato.core.errors import InputError
from legato.core.quantities import parse_bandwidth
from legato.core.text import count, percent
from legato.core.units import format_bandwidth
from legato.core.workload import Workload

if TYPE_CHECKING:
    from legato.core.measurement import Measurement
    from legato.lab.testbed.rehearsal import Rehearsal, Task
    from legato.lab.testbed.servers.rehearsal import ServerRehearsal

#: Up to this number, the error of every prediction is printed; above it, only the median and the worst.
_FEW = 2

WorkloadFile = Annotated[Path, typer.Argument(metavar="W.json", help="The workload to rehearse.")]


@dataclass(frozen=True)
class Trials:
    """The options that say how plans are run."""

    iterations: int = setting(20, "Number of timed iterations of each plan.", min=1, max=2**20)
    ratio: float | None = setting(
        None,
        "Scale computation so that sending all gradients in one message takes RATIO times as long as computing.",
        show_default="computation as in the workload",
    )
    compiled: bool = setting(
        False,
        "Run plans in a compiled model, which can compute in the order of a plan. The model for DDP is not compiled, so"
        " that DDP gets each gradient as soon as it is computed.",
        "--compiled",
    )
    shard: Shard = "none"
    wire: Wire = "none"


@dataclass(frozen=True)
class Results:
    """The options that say where results are written."""

    output: Path | None = setting(
        None,
        "Write measurements, timelines, plans, the workload and the cluster to this folder.",
        "--output",
        "-o",
        metavar="DIR",
    )
    json: Json = False


@dataclass(frozen=True)
class Hosts:
    """The options about the emulated hosts on this machine."""

    workers: Annotated[int, option("workers")] = 4
    servers: Annotated[int | None, option("servers", **NO_SERVERS)] = None
    bandwidth: Annotated[str, option("bandwidth")] = "1Gbit"
    agents: int = setting(
        0, "Number of inference agents, which only pull parameters.", min=0, rich_help_panel="Network"
    )


def rehearse(
    workload: WorkloadFile,
    *,
    scheduler: Annotated[
        str | None, typer.Option(help=SCHEDULER_HELP, show_default="ddp,legato; random,tic,tac with servers")
    ] = None,
    hosts: Hosts,
    trials: Trials,
    results: Results,
) -> None:
    """Run plans on this machine over real TCP on shaped links, with emulated computation.

    Every worker and server runs in its own network namespace. The command needs no root, and removes the namespaces at
    the end. For comparison, DDP is always measured as well. With parameter servers, a plan is an order of pulls, and a
    random order is measured instead of DDP. With --shard or --wire, plans are measured with and without the option. DDP
    is then also measured with torch's ZeroRedundancyOptimizer or compression hook.

    Example: [bold]legato rehearse resnet.json --workers 4 --bandwidth 1Gbit --scheduler ddp,legato --ratio 1[/]
    """
    check_installed("torch", "torch", "legato rehearse")
    if results.output is not None:
        make_folder(results.output)  # before measurements that take minutes

    from legato.lab.testbed.rehearsal import STAGES
    from legato.lab.testbed.rehearsal import rehearse as run

    bandwidth_bps = quantity("bandwidth", hosts.bandwidth, parse_bandwidth)
    machines, link = count(hosts.workers, "worker"), format_bandwidth(bandwidth_bps)
    if hosts.servers or hosts.agents:
        if (trials.shard, trials.wire) != ("none", "none"):
            raise InputError("--shard and --wire: not available with parameter servers")
        served = _rehearse_servers(workload, hosts, bandwidth_bps, scheduler, trials)
        tell(served, f"{machines} and {count(hosts.servers or 0, 'server')}, {link}", results)
        return
    task = _task(workload, scheduler or "ddp,legato", None, trials, results)
    with stages(STAGES) as advance:
        found = run(task, hosts.workers, bandwidth_bps, advance)
    tell(found, f"{machines}, {link}", results)


def verify(
    workload: WorkloadFile,
    *,
    scheduler: Annotated[str, typer.Option(help=SCHEDULER_HELP)] = "ddp,legato",
    cluster: ClusterFile = None,
    trials: Trials,
    results: Results,
) -> None:
    """Run plans on your own cluster, with emulated computation, and compare the measurements with predictions.

    Start this command with torchrun, on the same machines and with the same number of processes as the training. DDP is
    always measured for comparison. Predictions use the file of --cluster; without a file, the network is calibrated
    first.

    Example: [bold]torchrun --nproc-per-node 2 --no-python legato verify resnet.json --scheduler ddp,legato[/]
    """
    import os

    if "RANK" not in os.environ:
        raise InputError("verify measures between processes: start it under torchrun (see legato verify --help)")
    if results.output is not None:
        make_folder(results.output)  # before measurements that take minutes
    import torch
    import torch.distributed as dist

    from legato.lab.testbed.rehearsal import STAGES
    from legato.lab.testbed.trial import rehearse_here

    task = _task(workload, scheduler, cluster, trials, results)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # the accelerator is emulated, so gradients are in the host's memory
    try:
        if dist.get_rank() == 0:
            with stages(STAGES) as advance:
                found = rehearse_here(task, advance)
            source = "measured in this job" if cluster is None else f"{cluster}"
            tell(found, f"{count(dist.get_world_size(), 'worker')} ({source})", results)
        else:
            rehearse_here(task, lambda stage, done, total: None)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _rehearse_servers(
    workload: Path, hosts: Hosts, bandwidth_bps: float, scheduler: str | None, trials: Trials
) -> ServerRehearsal:
    from legato.lab.testbed.rehearsal import STAGES
    from legato.lab.testbed.servers.rehearsal import ServerTask, rehearse_servers, select_orders

    task = ServerTask(
        workload=files.read(workload, Workload),
        schedulers=select_orders(split(scheduler or "random,tic,tac")),
        servers=hosts.servers or 0,
        agents=hosts.agents,
        iterations=trials.iterations,
        ratio=trials.ratio,
    )
    with stages(STAGES) as advance:
        return rehearse_servers(task, hosts.workers, bandwidth_bps, advance)


def _task(workload: Path, scheduler: str, cluster: Path | None, trials: Trials, results: Results) -> Task:
    from legato.lab.testbed.rehearsal import Task, select

    names = select(split(scheduler))
    return Task(
        workload=files.read(workload, Workload),
        schedulers=names,
        iterations=trials.iterations,
        ratio=trials.ratio,
        cluster=None if cluster is None else files.read(cluster, Cluster),
        traced=() if results.output is None else names,
        compiled=trials.compiled,
        shard=trials.shard,
        wire=trials.wire,
    )


def tell(found: Rehearsal | ServerRehearsal, network: str, results: Results) -> None:
    """Print the measurements, and write them to the folder in `results`. `network` describes the network."""
    from legato.reports.model import save
    from legato.reports.schedulers import best_of, entries, headline

    report = found.report(network)
    table = entries(report)
    best = best_of(table)
    assert report.measured is not None and best is not None
    if results.json:
        print_json(found.rows())
    else:
        title = f"{report.name} on {network}: {found.describe()}"
        print_rows(title, found.rows(), by="measured_s", best=best.scheduler)
        _note_errors(report.measured)
        note("".join(text for text, _ in headline(table, report.name)))
    for doubt in report.measured.doubts:
        note(f"Beware: {doubt}.")
    if results.output is not None:
        save(report, results.output)
        shown = f"legato report {results.output} -o report.html shows them"
        note(f"results and timelines -> {results.output} ({shown})")


def _note_errors(measured: Measurement) -> None:
    errors = {plan.scheduler: plan.error for plan in measured.plans if plan.error is not None}
    if len(errors) > _FEW:
        far = [abs(error) for error in errors.values()]
        note(f"predictions are off by {percent(statistics.median(far))} (median), {percent(max(far))} (worst)")
    else:
        said = (f"{percent(error, signed=True)} ({name})" for name, error in errors.items())
        note(f"predictions are off by {' and '.join(said)}")
