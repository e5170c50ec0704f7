"""`legato sweep`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.cli import nouns
from legato.cli.options import Options, taken_by


def sweep(
    workloads: Annotated[list[Path], typer.Argument(metavar="W.json...", help="Workloads, or whole jobs.")],
    options: Annotated[Options, taken_by(*nouns.faces("sweep"))],
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Simulate the workloads as jobs that share each network. Then give --workers, --fabric and "
            "--scheduler either one value for all jobs, or one value for each job.",
        ),
    ] = False,
) -> None:
    """Simulate every combination of workloads, networks and schedulers, on all cores.

    Finished cells are kept in a file next to the output. Run the command again after an interruption, or with more
    values, to compute only the cells that are missing. In a list, a number without a unit has the unit of the next
    number. Speedups are relative to the fabric and the scheduler that come first in their lists. The bandwidth and
    latency of a measured cluster are derived from the cost of its default collective.

    For whole jobs, a sweep varies the links between the jobs' machines and, with --fidelity flows, the switches above
    the hosts. With --share, the workloads are jobs that run together on each network, and a row has the iteration time
    of every job.

    Example: [bold]legato sweep vgg.json --bandwidth 1,10,25Gbit --workers 4,8,16,32 --fabric all -o sweep.html[/]
    """
    nouns.run("sweep", workloads, options, share=share)
