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
            metavar="W.json...", help="One workload for all workers, or one per worker; with --share, one per job."
        ),
    ],
    options: Annotated[Options, taken_by(*nouns.faces("simulate"))],
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Simulate jobs that share a network. --workers, --fabric, --scheduler, --plan, --shift and --priority "
            "then take one value for all jobs, or one for each job.",
        ),
    ] = False,
) -> None:
    """Simulate one iteration of a workload, or a step of a whole job or program, on a network.

    A workload can run on collectives, on sharp (SHARP, NCCL's CollNet), and on parameter servers, with or without
    switches that help them by multicast or aggregation (as in the Network Operator Edition). Speedups are relative to
    one parameter server without help from switches. The table has no speedups if one server would receive more than a
    million pushes, or if --disturb slows down a server that this one-server network does not have. The bandwidth and
    latency of a measured cluster are derived from the cost of its default collective.

    A whole job (legato workload --tensor) and a program (legato import --program) use the hosts and links of --machine.
    The default is a whole job's own machine, or h100 for a program. Other options add switches between the hosts. With
    --share, each job is compared with the same job alone on the same hosts.

    Example: [bold]legato simulate vgg.json --workers 32 --bandwidth 25Gbit --fabric all[/]
    """
    nouns.run("simulate", workloads, options, share=share)
