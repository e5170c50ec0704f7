"""`legato simulate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli import nouns
from legato.cli.options import Options, taken_by


def simulate(
    workloads: Annotated[
        list[Path],
        typer.Argument(
            metavar="W.json...", help="A workload for all workers, or one each; with --share, one for each job."
        ),
    ],
    options: Annotated[Options, taken_by(*nouns.faces("simulate"))],
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Simulate jobs that share a network: --workers, --fabric, --scheduler, --plan and the options below "
            "take a value for all, or one each.",
        ),
    ] = False,
) -> None:
    """Simulate one iteration of a workload, or a step of a whole job or program, on a network.

    A workload's fabrics are collectives; parameter servers, which switches may help (multicast, aggregation, as in the
    Network Operator Edition); and sharp (SHARP, NCCL's CollNet). Speedups are over one parameter server without help,
    if it has at most a million pushes, and no second server is disturbed. A measured cluster's bandwidth and
    latency are derived from the cost of its default collective.

    A whole job (legato workload --tensor) and a program (legato import --program) have the links and hosts of their
    machine, or of --machine, below switches. With --share, each job is compared with itself alone on its hosts.

    Example: [bold]legato simulate vgg.json --workers 32 --bandwidth 25Gbit --fabric all[/]
    """
    nouns.run("simulate", workloads, options, share=share)
