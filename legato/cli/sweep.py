"""`legato sweep`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli import nouns
from legato.cli.options import Options, taken_by


def sweep(
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="The workloads, or whole jobs.")],
    options: Annotated[Options, taken_by(*nouns.faces("sweep"))],
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Let the workloads be jobs that share each network. Then --workers, --fabric and --scheduler take one "
            "value for all jobs, or one for each.",
        ),
    ] = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, on all cores.

    Finished cells are kept in a file next to the output: after an interruption, or with more values, the same command
    continues from there. In a list, a number without a unit has the unit of the next one. Speedups are over the first
    fabric and scheduler named. A measured cluster's bandwidth and latency are derived from the cost of its default
    collective.

    Whole jobs are swept over the links of their machines and, by flows, over the switches above them. With --share,
    the workloads are jobs that run together on each network, and a row has the iteration of each.

    Example: [bold]legato sweep vgg.json --bandwidth 1,10,25Gbit --workers 4,8,16,32 --fabric all -o sweep.html[/]
    """
    nouns.run("sweep", workloads, options, share=share)
