"""A table of the axes of networks and fabrics: all properties that a user can choose, with their names.

Each axis is an option of `legato simulate` and `legato sweep`. In a sweep, each simulation has one value of each axis.
A sweep can vary an axis that has a `column`, which is its heading in tables; plots can then show this axis too. To add
an axis, add a row to this table, and a field to `Network` or to a fabric, from which the simulator reads the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from legato.core.errors import InputError
from legato.core.quantities import parse_bandwidth, parse_seconds
from legato.core.units import format_bandwidth, format_seconds

__all__ = ["BY_NAME", "FABRIC", "NETWORK", "SERVERS", "SWEPT", "Axis"]


@dataclass(frozen=True)
class Axis:
    """A property of a network or a fabric that a user can choose."""

    name: str  # the name of the option
    help: str
    type: Any = str  # the type of values; `parse` converts texts to other values, and raises `InputError`
    default: Any = None  # the default value, as a user would type it
    _: KW_ONLY
    shown: str = ""  # the default value, in words
    field: str = ""  # the field of the simulator's `Network` or fabric, and of rows; by default the name
    parse: Callable[[str], Any] | None = None
    metavar: str = ""  # by default a word for the type
    least: int | None = None
    most: int | None = None
    in_cluster: bool = False  # whether a cluster file also has this value
    # what the axis describes: a machine's links, or the switches and disturbances of the network
    part: Literal["", "links", "switches"] = ""
    each_job: bool = False  # whether jobs that share a network may have different values
    column: str = ""  # the heading of its column; a sweep can vary an axis only if it has a column
    repeated: bool = False  # whether each value needs its own option, because values contain commas
    write: Callable[[Any], str] = str
    words: str = ""  # the words for titles: {} becomes the value, and {s} a plural; by default none
    title: str = ""  # the label of a plot's axis; by default the heading of the column

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.field or self.name)
        object.__setattr__(self, "title", self.title or self.column)
        object.__setattr__(self, "metavar", self.metavar or {int: "N", float: "X", str: "TEXT"}.get(self.type, "NAME"))

    @property
    def usual(self) -> Any:
        """Return the parsed default."""
        return self.default if self.parse is None or self.default is None else self.parse(self.default)

    def say(self, text: str) -> str:
        """Return the words with which titles name a value of the axis; `text` is the value as a user would type it."""
        return self.words.format(text, s="" if text == "1" else "s")


def _in_flight(text: str) -> int | None:
    if text == "any":
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) >= 1):
        raise InputError(f"{text!r} (expected a whole number, at least 1, or any)")
    return int(text)


def _ratio(value: float) -> str:
    return f"{value:g}:1"


# fmt: off
#: Options of the network, in the order of `--help`. The columns of a sweep have the same order.
NETWORK = (
    Axis("workers", "Number of workers.", int, 8, most=2**20,
         in_cluster=True, each_job=True, column="workers", words="{} worker{s}"),
    Axis("servers", "Number of parameter servers.", int, 1, shown="1 on fabrics with servers", least=1, most=2**16,
         in_cluster=True, column="servers", write=lambda value: str(value or "")),
    Axis("bandwidth", "Bandwidth of each worker's link, such as 10Gbit.", str, "10Gbit",
         field="bandwidth_bps", parse=parse_bandwidth, in_cluster=True,
         column="link", write=format_bandwidth, words="{}", title="link bandwidth", part="links"),
    Axis("latency", "Latency from one worker to another, such as 30us.", str, "30us",
         field="latency_s", parse=parse_seconds, in_cluster=True,
         column="latency", write=format_seconds, words="latency {}", part="links"),
    Axis("send", "Part of the latency during which the sender is busy.",
         shown="5us, at most the latency", field="send_s", parse=parse_seconds, in_cluster=True),
    Axis("gpus_per_host", "Workers (GPUs) in each host; they are numbered host by host.", int, 1,
         column="GPUs per host", words="{} GPU{s} per host", part="links"),
    Axis("gpus_per_card", "Number of GPUs in a host that share a network card.", int, 1, words="{} GPU{s} per card"),
    Axis("local_bandwidth", "Bandwidth of each GPU's link inside its host.", str, "100Gbit",
         field="local_bandwidth_bps", parse=parse_bandwidth, column="link inside hosts", write=format_bandwidth,
         words="{} inside hosts", title="bandwidth inside hosts", part="links"),
    Axis("topology", "How switches connect the hosts: leaf-spine (racks below spines; a single rack is one switch), "
         "fat-tree, or rails (card i of every host connects to leaf i).",
         Literal["leaf-spine", "fat-tree", "rails"], "leaf-spine", words="{}", part="switches"),
    Axis("racks", "Number of racks of hosts; each rack has a leaf switch.", int, 1,
         column="racks", words="{} rack{s}", part="switches"),
    Axis("spines", "Number of spine switches above the leaves; with 0 (only rails), hosts forward traffic between "
         "rails.", int, 1, column="spines", words="{} spine{s}", part="switches"),
    Axis("ports", "Number of ports of each switch in a fat tree.", int,
         shown="the fewest that suffice", words="{} port{s}", part="switches"),
    Axis("oversubscription", "Oversubscription between a leaf and the spines; 4 means 4:1.", float, 1.0,
         column="oversubscription", write=_ratio, words="oversubscription {}", part="switches"),
    Axis("core_oversubscription",
         "Oversubscription between a pod of a fat tree and the cores.", float, 1.0,
         write=_ratio, words="core oversubscription {}", part="switches"),
    Axis("balance", "Paths between leaves: ecmp (a hash picks one for each flow) or spray (packets use all paths).",
         Literal["ecmp", "spray"], "ecmp", words="{}", part="switches"),
    Axis("sharing", "How transfers share a link: fifo, or fair (max-min; only for small simulations).",
         Literal["fifo", "fair"], "fifo", words="{} sharing"),
    Axis("server_bandwidth", "Bandwidth of each server's link.", shown="the workers' bandwidth",
         field="server_bandwidth_bps", parse=parse_bandwidth, write=format_bandwidth, words="{} to servers"),
    Axis("reduce", "Time to add up one MiB of gradients, such as 50us.", str, "0",
         field="reduce_s_per_byte", parse=lambda text: parse_seconds(text) / 2**20, in_cluster=True,
         write=lambda value: format_seconds(value * 2**20), words="reduction {} per MiB"),
    Axis("jitter", "Jitter of computation: sigma of each worker's lognormal slowdown.", float, 0.0,
         column="jitter", write=lambda value: f"{value:g}", words="jitter {}"),
    Axis("seed", "Random seed, also for ECMP's choice of paths.", int, 0, part="switches"),
    Axis("disturb", "Slow something down by FACTOR, or let it fail, from FROM to TO: KIND:NUMBER:FACTOR:FROM:TO,..., "
         "such as link:7:4:10ms:30ms. KIND is link, server, uplink (of a leaf), spine, or compute (of a worker). "
         "Without TO, it stays slow until the end.",
         str, "none", shown="none", parse=str.strip, metavar="WHAT",
         column="disturbed", repeated=True, words="disturbed {}", part="switches"),
)

#: Options of fabrics. Each fabric uses the options that match its fields. Fields without an option keep the fabric's
#: default.
FABRIC = (
    Axis("placement", "How tensors are placed on servers: round-robin, or equal (each split evenly over all servers).",
         Literal["round-robin", "equal"], shown="round-robin"),
    Axis("distribution", "Order in which a server sends: round-robin (one parameter to all workers, then the next) or "
         "block (all parameters to one worker, then to the next).", Literal["round-robin", "block"],
         shown="round-robin"),
    Axis("barrier", "Whether servers wait for all gradients before they send parameters.", bool,
         shown="barrier"),
    Axis("in_flight", "Most messages in flight at once on fabrics without servers, or any for no limit.",
         shown="1, as planned and run", parse=_in_flight, metavar="N"),
)
# fmt: on

BY_NAME = {axis.name: axis for axis in (*NETWORK, *FABRIC)}
#: The axes of sweeps.
SWEPT = tuple(axis for axis in NETWORK if axis.column)
#: The only axis of sweeps that belongs to fabrics. The value of this axis is 0 in cells whose fabric has no servers.
SERVERS = BY_NAME["servers"]
