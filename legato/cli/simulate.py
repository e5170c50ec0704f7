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
            metavar="W.json...", help="One workload for all workers, or one for each; with --share, one for each job."
        ),
    ],
    options: Annotated[Options, taken_by(*nouns.faces("simulate"))],
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Simulate jobs that share a network. Then --workers, --fabric, --scheduler, --plan and the options of "
            "jobs take one value for all jobs, or one for each, separated by commas.",
        ),
    ] = False,
) -> None:
    """Simulate one iteration on parameter servers, with help from switches, and on collectives.

    Switches that are sold to add up gradients (SHARP, NCCL's CollNet) are the fabric sharp: no server, sums inside
    hosts first, message by message. The fabrics multicast, aggregation and multicast+aggregation are parameter servers
    that switches help, as in the Network Operator Edition: all gradients cross a server's link, with a barrier.

    Speedups are over one parameter server without help from switches; beyond a million pushes to it, there
    are speedups only if it is one of the fabrics, and none where a second server is disturbed. A measured cluster's
    bandwidth and latency are those that explain the measured cost of its default collective.

    With --share, several jobs run on one network, and a row per job compares its iteration beside the others with
    that alone on the same hosts.

    A whole job, as legato workload --tensor writes it, is simulated on the links and hosts of its machine, with the
    topology and the disturbances that are given here, or by formulas; and so is a traced one, as legato
    import --program writes it, also on more --workers. With --share, several whole jobs run on one network.

    Example: [bold]legato simulate vgg.json --workers 32 --bandwidth 25Gbit --fabric all[/]
    """
    nouns.run("simulate", workloads, options, share=share)
