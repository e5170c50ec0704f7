"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from legato.core import files
from legato.core.cluster import COLLECTIVES, PARAMETER_SERVER, Cluster
from legato.core.errors import InputError
from legato.core.units import parse_bandwidth, parse_seconds

__all__ = ["Bandwidth", "ClusterFile", "Collective", "Json", "Latency", "Reduce", "Servers", "Workers", "cluster_from"]

Json = Annotated[bool, typer.Option("--json", help="Machine-readable result on standard output.")]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", metavar="C.json", help="A calibrated cluster, instead of the four below.")
]
Workers = Annotated[int | None, typer.Option(help="Number of workers. (default: 8)", max=2**20)]
Servers = Annotated[
    int | None,
    typer.Option(help="Number of parameter servers, for tic, tac and the like. (default: none)", min=1, max=2**16),
]
Bandwidth = Annotated[str | None, typer.Option(help="Of a worker's link, like 10Gbit. (default: 10Gbit)")]
Latency = Annotated[str | None, typer.Option(help="Of one hop, like 30us. (default: 30us)")]
Reduce = Annotated[str | None, typer.Option(help="Time to add up one MiB of gradients, like 50us. (default: 0)")]
Collective = Annotated[
    str | None, typer.Option(help=f"{', '.join(COLLECTIVES)}, or one of the cluster's. (default: its first)")
]


def cluster_from(
    cluster: Path | None,
    workers: int | None,
    bandwidth: str | None,
    latency: str | None,
    reduce: str | None,
    collective: str | None,
    servers: int | None = None,
) -> Cluster:
    """The cluster that the options describe; its default collective is the one asked for."""
    if cluster is not None:
        given = [
            f"--{name}"
            for name, value in (
                ("workers", workers),
                ("bandwidth", bandwidth),
                ("latency", latency),
                ("reduce", reduce),
                ("servers", servers),
            )
            if value is not None
        ]
        if given:
            raise InputError(f"--cluster and {given[0]}: give one or the other")
        found = files.read(cluster, Cluster)
        found.cost(collective)  # names the known ones if it is unknown
        return found
    return Cluster.derive(
        workers if workers is not None else 8,
        parse_bandwidth(bandwidth or "10Gbit"),
        parse_seconds(latency or "30us"),
        reduce_s_per_byte=parse_seconds(reduce or "0") / 2**20,
        collectives=[collective] if collective else [PARAMETER_SERVER] if servers else list(COLLECTIVES),
        servers=servers or 0,
    )
