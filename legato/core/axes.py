"""The axes of a network and of a fabric, in one table: what can be chosen about them, and how it is called everywhere.

An axis is an option of `legato simulate` and of `legato sweep`, a value of a sweep's cells, and, if it has a
`column`, an axis of sweeps: several values, a column of their tables, and an axis of their plots. To add one, add
it here, and to what the simulator reads: a field of `Network`, or of a fabric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from legato.core.errors import InputError
from legato.core.units import format_bandwidth, format_seconds, parse_bandwidth, parse_bytes, parse_seconds

__all__ = ["BY_NAME", "FABRIC", "NETWORK", "SERVERS", "SWEPT", "Axis"]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What can be chosen about a network or a fabric.

    `name` is that of the option, `field` that of the simulator's (by default the same). The option's values have
    this `type`; or they are texts that `parse` reads, which raises `InputError`. `default` is given as a user would
    type it, and `shown` in words. An axis `in_cluster` is also described by a cluster file.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    shown: str = ""
    field: str = ""
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    in_cluster: bool = False
    #: Jobs that share a network may have a value each.
    each_job: bool = False
    #: The head of its column. Only with one, a sweep takes several values.
    column: str = ""
    #: Several values are given one by one, as commas are part of a value.
    repeated: bool = False
    #: A value as text.
    write: Callable[[Any], str] = str
    #: What a title says of it, with the value in the place of {}, and a plural in that of {s}; by default nothing.
    words: str = ""
    #: What stands along the axis of a plot; by default the column's head.
    title: str = ""
    #: Whether more of it should make iterations faster, slower (False), or neither.
    more_is_better: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)
        object.__setattr__(self, "title", self.title or self.column)

    @property
    def usual(self) -> Any:
        """The value of the default."""
        return self.default if self.parse is None or self.default is None else self.parse(self.default)

    def say(self, text: str) -> str:
        """The value that is written as `text`, in words."""
        return self.words.format(text, s="" if text == "1" else "s")


def _in_flight(text: str) -> int | None:
    if text == "any":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise InputError(f"{text!r} (expected a whole number, at least 1, or any)")
    return int(text)


def _ratio(value: float) -> str:
    return f"{value:g}:1"


def _factor(value: float) -> str:
    return f"{value:g}x"


#: Options of the network, in the order of `--help`; rows of a sweep have their columns in this order, too.
NETWORK = (
    Axis(
        name="workers",
        help="Number of workers.",
        type=int,
        default=8,
        most=2**20,
        in_cluster=True,
        each_job=True,
        column="workers",
        words="{} worker{s}",
    ),
    Axis(
        name="servers",
        help="Number of parameter servers.",
        type=int,
        default=1,
        shown="1, on fabrics with servers",
        least=1,
        most=2**16,
        in_cluster=True,
        column="servers",
        write=lambda value: str(value or ""),
        more_is_better=True,
    ),
    Axis(
        name="bandwidth",
        help="Bandwidth of each worker's link, such as 10Gbit.",
        default="10Gbit",
        field="bandwidth_bps",
        parse=parse_bandwidth,
        in_cluster=True,
        column="link",
        write=format_bandwidth,
        words="{}",
        title="link bandwidth",
        more_is_better=True,
    ),
    Axis(
        name="latency",
        help="Latency from one worker to another, such as 30us.",
        default="30us",
        field="latency_s",
        parse=parse_seconds,
        in_cluster=True,
        column="latency",
        write=format_seconds,
        words="latency {}",
        more_is_better=False,
    ),
    Axis(
        name="send",
        help="Part of the latency for which a send keeps its sender busy, such as 2us.",
        shown="5us, or the latency if that is less",
        field="send_s",
        parse=parse_seconds,
        in_cluster=True,
    ),
    Axis(
        name="gpus_per_host",
        help="Number of workers (GPUs) in each host; they are numbered host by host.",
        type=int,
        default=1,
        column="GPUs per host",
        words="{} GPU{s} per host",
    ),
    Axis(
        name="gpus_per_card",
        help="Number of GPUs of a host that share a network card.",
        type=int,
        default=1,
        words="{} GPU{s} per card",
    ),
    Axis(
        name="local_bandwidth",
        help="Bandwidth of a GPU's link inside its host, to each of the other GPUs.",
        default="100Gbit",
        field="local_bandwidth_bps",
        parse=parse_bandwidth,
        write=format_bandwidth,
        words="{} inside hosts",
    ),
    Axis(
        name="topology",
        help="How switches connect the hosts: racks below spines (one rack is one switch), a fat tree, or rails "
        "(card i of every host is on leaf i).",
        type=Literal["leaf-spine", "fat-tree", "rails"],
        default="leaf-spine",
        words="{}",
    ),
    Axis(
        name="racks",
        help="Number of racks that hold the hosts, with a leaf switch each.",
        type=int,
        default=1,
        column="racks",
        words="{} rack{s}",
    ),
    Axis(
        name="spines",
        help="Number of spine switches above the leaves; with 0, transfers between rails go through the hosts.",
        type=int,
        default=1,
        column="spines",
        words="{} spine{s}",
    ),
    Axis(
        name="ports",
        help="Number of ports of each switch of a fat tree.",
        type=int,
        shown="the fewest that have room",
        words="{} port{s}",
    ),
    Axis(
        name="oversubscription",
        help="Oversubscription of the links from a leaf to the spines; 4 means 4:1.",
        type=float,
        default=1.0,
        column="oversubscription",
        write=_ratio,
        words="oversubscription {}",
        more_is_better=False,
    ),
    Axis(
        name="core_oversubscription",
        help="Oversubscription of the links from a pod of a fat tree to the cores; 2 means 2:1.",
        type=float,
        default=1.0,
        write=_ratio,
        words="core oversubscription {}",
    ),
    Axis(
        name="balance",
        help="How flows use the paths between leaves: each has one, chosen by a hash, or its packets take all equally.",
        type=Literal["ecmp", "spray"],
        default="ecmp",
        words="{}",
    ),
    Axis(
        name="sharing",
        help="How transfers share a link: one after another, or fairly (max-min; for small cases).",
        type=Literal["fifo", "fair"],
        default="fifo",
        words="{} sharing",
    ),
    Axis(
        name="server_bandwidth",
        help="Bandwidth of each server's link.",
        shown="the workers' bandwidth",
        field="server_bandwidth_bps",
        parse=parse_bandwidth,
        write=format_bandwidth,
        words="{} to servers",
    ),
    Axis(
        name="reduce",
        help="Time to add up one MiB of gradients, such as 50us.",
        default="0",
        field="reduce_s_per_byte",
        parse=lambda text: parse_seconds(text) / 2**20,
        in_cluster=True,
        write=lambda value: format_seconds(value * 2**20),
        words="reduction {} per MiB",
    ),
    Axis(
        name="slow",
        help="Slowdown factor of the last worker's computation.",
        type=float,
        default=1.0,
        column="slow",
        write=_factor,
        words="slow {}",
        title="slowdown of the last worker",
        more_is_better=False,
    ),
    Axis(
        name="slow_link",
        help="Slowdown factor of the last worker's link.",
        type=float,
        default=1.0,
        column="slow link",
        write=_factor,
        words="slow link {}",
        title="slowdown of the last worker's link",
        more_is_better=False,
    ),
    Axis(
        name="jitter",
        help="Jitter of computation: sigma of a lognormal factor.",
        type=float,
        default=0.0,
        column="jitter",
        write=lambda value: f"{value:g}",
        words="jitter {}",
    ),
    Axis(
        name="seed",
        help="Seed of all that is drawn at random, and of the paths that ECMP chooses.",
        type=int,
        default=0,
    ),
    Axis(
        name="disturb",
        help="Make a link, server, uplink (of a leaf to its spines), spine or compute (a worker's computation) slower "
        "for a while, such as link:7:4:10ms:30ms; with the factor fails it stands still. Without TO, until the end.",
        default="none",
        shown="none",
        parse=str.strip,
        metavar="KIND:NUMBER:FACTOR:FROM:TO,...",
        column="disturbed",
        repeated=True,
        words="disturbed {}",
    ),
)

#: Options of fabrics; each goes to those that have it, and what is not given is as the fabric has it.
FABRIC = (
    Axis(
        name="placement",
        help="Placement of tensors on servers: in turn, or split equally.",
        type=Literal["round-robin", "equal"],
        shown="round-robin",
    ),
    Axis(
        name="distribution",
        help="Order in which a server sends: each parameter to all workers, or all parameters to one worker.",
        type=Literal["round-robin", "block"],
        shown="round-robin",
    ),
    Axis(
        name="barrier",
        help="Whether servers wait for all gradients of an iteration before they send parameters.",
        type=bool,
        shown="barrier",
    ),
    Axis(
        name="aggregation",
        help="How switches that aggregate forward.",
        type=Literal["store-and-forward", "cut-through"],
        shown="store-and-forward",
    ),
    Axis(
        name="message_bytes",
        help="Partition messages into pieces of this size, such as 4MiB.",
        shown="whole messages",
        parse=parse_bytes,
    ),
    Axis(
        name="in_flight",
        help="Number of messages at once on fabrics without servers, or any, for all that are ready.",
        shown="1, as planned and run",
        parse=_in_flight,
        metavar="INTEGER",
    ),
)

BY_NAME = {axis.name: axis for axis in (*NETWORK, *FABRIC)}
#: The axes of sweeps.
SWEPT = tuple(axis for axis in NETWORK if axis.column)
#: The only one that is an axis of some fabrics only: its value is 0 in the cells of others.
SERVERS = BY_NAME["servers"]
