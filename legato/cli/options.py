"""Options that several commands share: the same name, default and help in all of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import typer

from legato.cli.output import describe_cost
from legato.core import files
from legato.core.cluster import COLLECTIVES, PARAMETER_SERVER, Cluster
from legato.core.errors import InputError, LegatoError, missing_extra
from legato.core.text import count
from legato.core.units import format_bandwidth, format_seconds, parse_bandwidth, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from legato.simulator.flow import Network
    from legato.simulator.flow.fabrics.protocol import Fabric

__all__ = [
    "Aggregation",
    "Balance",
    "Bandwidth",
    "Barrier",
    "ClusterFile",
    "Collective",
    "Compute",
    "CoreOversubscription",
    "Distribution",
    "Fidelity",
    "GpusPerCard",
    "InFlight",
    "Interrupted",
    "Iterations",
    "Json",
    "Latency",
    "LocalBandwidth",
    "Machines",
    "MessageBytes",
    "Placement",
    "Ports",
    "Reduce",
    "Seed",
    "Send",
    "ServerBandwidth",
    "Servers",
    "Shard",
    "Sharing",
    "Topology",
    "Wire",
    "Workers",
    "check_installed",
    "fabric_options",
    "in_flight_words",
    "machines_of",
    "quantity",
    "split",
]

Value = TypeVar("Value")

#: What `machines_of` takes where nothing is given.
WORKERS, BANDWIDTH, LATENCY, REDUCE = 8, "10Gbit", "30us", "0"

WORKERS_HELP = "Number of workers."
BANDWIDTH_HELP = "Bandwidth of each worker's link, such as 10Gbit."
LATENCY_HELP = "Latency from one worker to another, such as 30us."
SERVERS_HELP = "Number of parameter servers."
SCHEDULER_HELP = "Names of schedulers, separated by commas, or all."
FABRIC_HELP = "Names of fabrics, separated by commas, or all."
GPUS_PER_HOST_HELP = "Number of workers (GPUs) in each host; they are numbered host by host."
RACKS_HELP = "Number of racks that hold the hosts, with a leaf switch each."
SPINES_HELP = "Number of spine switches above the leaves; with 0, transfers between rails go through the hosts."
OVERSUBSCRIPTION_HELP = "Oversubscription of the links from a leaf to the spines; 4 means 4:1."
JITTER_HELP = "Jitter of computation: sigma of a lognormal factor."
SLOW_HELP = "Slowdown factor of the last worker's computation."
SLOW_LINK_HELP = "Slowdown factor of the last worker's link."
DISTURB_HELP = (
    "Make a link, server, uplink (of a leaf to its spines), spine or compute (a worker's computation) slower for a "
    "while, such as link:7:4:10ms:30ms; with the factor fails it stands still. Without TO, until the end."
)
DISTURB_METAVAR = "KIND:NUMBER:FACTOR:FROM:TO,..."
SEVERAL = " Several values are separated by commas."
SEVERAL_TIMES = " Given several times, each is a value; none is the undisturbed network."

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="C.json",
        help="A cluster file, as legato calibrate writes it, instead of workers, bandwidth, latency and so on.",
        rich_help_panel="Network",
    ),
]
Workers = Annotated[
    int | None, typer.Option(help=WORKERS_HELP, show_default=str(WORKERS), max=2**20, rich_help_panel="Network")
]
Bandwidth = Annotated[str | None, typer.Option(help=BANDWIDTH_HELP, show_default=BANDWIDTH, rich_help_panel="Network")]
Latency = Annotated[str | None, typer.Option(help=LATENCY_HELP, show_default=LATENCY, rich_help_panel="Network")]
Reduce = Annotated[
    str | None,
    typer.Option(
        help="Time to add up one MiB of gradients, such as 50us.", show_default=REDUCE, rich_help_panel="Network"
    ),
]
Servers = Annotated[
    int | None,
    typer.Option(help=SERVERS_HELP, show_default="none", min=1, max=2**16, rich_help_panel="Network"),
]
Collective = Annotated[
    str | None,
    typer.Option(
        help=f"Collective of the messages: {', '.join(COLLECTIVES)}, or one of the cluster file's.",
        show_default="the cluster's first",
        rich_help_panel="Network",
    ),
]
Compute = Annotated[
    Literal["one", "unlimited"], typer.Option(help="Streams on which a worker computes; PACE assumes unlimited ones.")
]
Shard = Annotated[
    Literal["none", "optimizer", "gradients"],
    typer.Option(
        help="What each worker keeps only its own part of: the optimizer's states (ZeRO-1), or the gradients as well "
        "(ZeRO-2)."
    ),
]
Wire = Annotated[
    Literal["none", "bf16", "fp16", "all-bf16", "all-fp16"],
    typer.Option(
        help="Let float32 gradients travel in a format of two bytes: the fewest that make the iteration as fast as "
        "possible, or all of them, as torch's compression hooks do."
    ),
]
Fidelity = Annotated[
    Literal["flow", "collective"],
    typer.Option(help="Simulate every transfer on every link (flow), or one shared resource, as planners do."),
]

ServerBandwidth = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth of each server's link.", show_default="the workers' bandwidth", rich_help_panel="Network"
    ),
]
Sharing = Annotated[
    Literal["fifo", "fair"],
    typer.Option(
        help="How transfers share a link: one after another, or fairly (max-min; for small cases).",
        rich_help_panel="Network",
    ),
]
LocalBandwidth = Annotated[
    str,
    typer.Option(
        help="Bandwidth of a GPU's link inside its host, to each of the other GPUs.", rich_help_panel="Network"
    ),
]
GpusPerCard = Annotated[
    int, typer.Option(help="Number of GPUs of a host that share a network card.", rich_help_panel="Network")
]
Topology = Annotated[
    Literal["leaf-spine", "fat-tree", "rails"],
    typer.Option(
        help="How switches connect the hosts: racks below spines (one rack is one switch), a fat tree, or rails "
        "(card i of every host is on leaf i).",
        rich_help_panel="Network",
    ),
]
Ports = Annotated[
    int | None,
    typer.Option(
        help="Number of ports of each switch of a fat tree.",
        show_default="the fewest that have room",
        rich_help_panel="Network",
    ),
]
CoreOversubscription = Annotated[
    float,
    typer.Option(
        help="Oversubscription of the links from a pod of a fat tree to the cores; 2 means 2:1.",
        rich_help_panel="Network",
    ),
]
Balance = Annotated[
    Literal["ecmp", "spray"],
    typer.Option(
        help="How flows use the paths between leaves: each has one, chosen by a hash, or its packets take all equally.",
        rich_help_panel="Network",
    ),
]
Placement = Annotated[
    Literal["round-robin", "equal"] | None,
    typer.Option(
        help="Placement of tensors on servers: in turn, or split equally.",
        show_default="round-robin",
        rich_help_panel="Fabric",
    ),
]
Distribution = Annotated[
    Literal["round-robin", "block"] | None,
    typer.Option(
        help="Order in which a server sends: each parameter to all workers, or all parameters to one worker.",
        show_default="round-robin",
        rich_help_panel="Fabric",
    ),
]
Barrier = Annotated[
    bool | None,
    typer.Option(
        "--barrier/--no-barrier",
        help="Whether servers wait for all gradients of an iteration before they send parameters.",
        show_default="barrier",
        rich_help_panel="Fabric",
    ),
]
Aggregation = Annotated[
    Literal["store-and-forward", "cut-through"] | None,
    typer.Option(
        help="How switches that aggregate forward.", show_default="store-and-forward", rich_help_panel="Fabric"
    ),
]
MessageBytes = Annotated[
    str | None,
    typer.Option(
        help="Partition messages into pieces of this size, such as 4MiB.",
        show_default="whole messages",
        rich_help_panel="Fabric",
    ),
]
InFlight = Annotated[
    str | None,
    typer.Option(
        help="Number of messages at once on fabrics without servers, or any, for all that are ready.",
        show_default="1, as planned and run",
        metavar="INTEGER",
        rich_help_panel="Fabric",
    ),
]
Send = Annotated[
    str | None,
    typer.Option(
        help="Part of the latency for which a send keeps its sender busy, such as 2us.",
        show_default="5us, or the latency if that is less",
        rich_help_panel="Network",
    ),
]
Iterations = Annotated[
    int | None,
    typer.Option(
        help="Number of iterations to simulate.", show_default="1, or 3 where they differ; 30 where jobs share"
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        help="Seed of all that is drawn at random, and of the paths that ECMP chooses.", rich_help_panel="Network"
    ),
]


def fabric_options(
    *,
    placement: str | None,
    distribution: str | None,
    barrier: bool | None,
    aggregation: str | None,
    message_bytes: str | None,
    in_flight: str | None,
) -> dict[str, Any]:
    """The fabric's options that were given; None is any number of messages in flight."""
    given = {
        "placement": placement,
        "distribution": distribution,
        "barrier": barrier,
        "aggregation": aggregation,
        "message_bytes": None if message_bytes is None else quantity("message-bytes", message_bytes, parse_bytes),
    }
    found = {name: value for name, value in given.items() if value is not None}
    return found if in_flight is None else found | {"in_flight": _in_flight(in_flight)}


def _in_flight(text: str) -> int | None:
    if text == "any":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise InputError(f"--in-flight: {text!r} (expected a whole number, at least 1, or any)")
    return int(text)


def in_flight_words(fabrics: Iterable[Fabric]) -> list[str]:
    """How many messages are in flight on these fabrics, in words; nothing if all of them have servers."""
    for fabric in fabrics:
        if not fabric.servers:
            number = fabric.in_flight
            return ["any number of messages in flight" if number is None else f"{count(number, 'message')} in flight"]
    return []


class Machines(NamedTuple):
    """The cluster that the options describe, and the file it comes from, if any."""

    cluster: Cluster
    file: Path | None

    def describe(self, collective: str | None = None) -> str:
        """The network in words, for the title of a table of plans."""
        cluster, name = self.cluster, collective or self.cluster.default_collective
        if self.file is None or cluster.bandwidth_bps is not None:
            link = self._link(cluster.bandwidth_bps, cluster.latency_s, cluster.sending_s)
            return f"{self._prefix}{self._workers}, {link}, {name}"
        return f"{self._prefix}{self._workers}, measured {name} ({describe_cost(cluster.cost(name))})"

    def describe_link(self, network: Network) -> str:
        """The network in words, for the title of a table of simulations."""
        measured = (
            "" if self.cluster.bandwidth_bps is not None else f" (as measured: {self.cluster.default_collective})"
        )
        link = f"{self._link(network.bandwidth_bps, network.latency_s, network.sending_s)}{measured}"
        return f"{self._prefix}{', '.join([self._workers, link, *_beyond_one_switch(network)])}"

    def describe_shared(self, network: Network) -> str:
        """The network that jobs share in words, for the title of a table."""
        hosts = count(network.workers // network.gpus_per_host, "host")
        link = self._link(network.bandwidth_bps, network.latency_s, network.sending_s)
        return f"{self._prefix}{', '.join([hosts, link, *_beyond_one_switch(network)])}"

    @property
    def _prefix(self) -> str:
        return "" if self.file is None else f"{self.file}: "

    @property
    def _workers(self) -> str:
        servers = f" and {count(self.cluster.servers, 'server')}" if self.cluster.servers else ""
        return count(self.cluster.workers, "worker") + servers

    def _link(self, bandwidth_bps: float | None, latency_s: float | None, sending_s: float) -> str:
        reduce_s = self.cluster.reduce_s_per_byte * 2**20
        reduction = f", reduction {format_seconds(reduce_s)} per MiB" if reduce_s else ""
        sends = f", {format_seconds(sending_s)} a send" if sending_s else ""
        return f"{format_bandwidth(bandwidth_bps or 0)}, latency {format_seconds(latency_s or 0)}{sends}{reduction}"


def _beyond_one_switch(network: Network) -> list[str]:
    """What sets the network apart from hosts with one GPU each behind one switch, in words."""
    words = []
    if network.gpus_per_host > 1:
        cards = network.gpus_per_host // network.gpus_per_card
        inside = format_bandwidth(network.local_bandwidth_bps)
        words.append(f"{network.gpus_per_host} GPUs ({inside}) and {count(cards, 'card')} a host")
    if network.switches.one:
        return words
    named = count(network.racks, "rack") if network.topology == "leaf-spine" else network.topology
    words.append(f"{named} ({network.switches.num_ports} ports)" if network.topology == "fat-tree" else named)
    if network.topology != "fat-tree":
        words.append(count(network.spines, "spine"))
    ratios = [ratio for ratio in (network.oversubscription, network.core_oversubscription) if ratio != 1]
    words += [f"{ratio:g}:1" for ratio in ratios]
    return [*words, network.balance] if network.switches.has_choice else words


def machines_of(
    file: Path | None,
    workers: int | None,
    bandwidth: str | None,
    latency: str | None,
    reduce: str | None,
    collective: str | None = None,
    servers: int | None = None,
    send: str | None = None,
) -> Machines:
    """The machines that the options describe; the cluster's default collective is the one asked for."""
    if file is not None:
        refuse_beside_cluster(
            workers=workers, bandwidth=bandwidth, latency=latency, send=send, reduce=reduce, servers=servers
        )
        found = files.read(file, Cluster)
        found.cost(collective)  # an unknown collective is an error that names the known ones
        return Machines(found, file)
    derived = Cluster.derive(
        WORKERS if workers is None else workers,
        quantity("bandwidth", BANDWIDTH if bandwidth is None else bandwidth, parse_bandwidth),
        quantity("latency", LATENCY if latency is None else latency, parse_seconds),
        send_s=None if send is None else quantity("send", send, parse_seconds),
        reduce_s_per_byte=quantity("reduce", REDUCE if reduce is None else reduce, parse_seconds) / 2**20,
        collectives=[collective] if collective else [PARAMETER_SERVER] if servers else list(COLLECTIVES),
        servers=servers or 0,
    )
    return Machines(derived, None)


def refuse_beside_cluster(**options: object) -> None:
    """Raise `InputError` if `--cluster` is given together with what it replaces."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"--cluster and --{name}: give one or the other")


class Interrupted(LegatoError):
    """Ctrl-C ended a command; the message says what is left."""


def quantity(option: str, text: str, parse: Callable[[str], Value]) -> Value:
    """The value of an option's text. Raises `InputError`, which names the option."""
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"--{option}: {error}") from None


def split(text: str) -> list[str]:
    """The names in `a, b`."""
    return [name.strip() for name in text.split(",")]


def keep_apart(reads: Iterable[Path], **writes: Path | None) -> None:
    """Raise `InputError` if an option's file would overwrite one that is read, or another option's."""
    taken = {path.resolve(): "one that is read" for path in reads}
    for option, path in writes.items():
        if path is not None:
            if other := taken.get(path.resolve()):
                raise InputError(f"--{option} {path}: the same file as {other}")
            taken[path.resolve()] = f"--{option}"


def check_installed(library: str, extra: str, purpose: str) -> None:
    """Raise `InputError` before minutes of work if a library that the result needs is not installed."""
    try:
        found = importlib.util.find_spec(library)
    except ValueError:  # a module without a spec
        found = None
    if found is None:
        raise missing_extra(library, extra, purpose)
