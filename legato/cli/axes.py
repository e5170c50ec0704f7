"""Options of commands for the axes in `core/axes.py`, and the cluster that these options or a cluster file describe."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from legato.cli.options import ClusterFile, Collective, Group, MachineName, quantity, split
from legato.cli.output import note
from legato.collectives import COLLECTIVES
from legato.core import files
from legato.core.axes import BY_NAME, FABRIC, NETWORK, SERVERS, Axis
from legato.core.cluster import PARAMETER_SERVER, Cluster
from legato.core.errors import InputError
from legato.core.job import Machine
from legato.core.text import count
from legato.core.units import format_bandwidth, format_seconds
from legato.zoo.presets import cluster_of, links_of, machine_named, with_links

if TYPE_CHECKING:
    from legato.simulator.flow import Network

__all__ = [
    "NO_SERVERS",
    "SEVERAL",
    "SEVERAL_TIMES",
    "FabricOptions",
    "Given",
    "Kinds",
    "Machines",
    "NetworkOptions",
    "SweptOptions",
    "axes",
    "note_machine",
    "option",
]

SEVERAL = " Several values are separated by commas."
SEVERAL_TIMES = " Repeat the option for several values; none is the undisturbed network."


#: How many values an option has: one, one for each job (if jobs may differ), or several (in a sweep).
_Values = Literal["one", "each job", "several"]
#: The default number of servers in commands that use servers only if asked to.
NO_SERVERS = {"show_default": "none"}


def option(name: str, **own: Any) -> Any:
    """Return the command-line option for this axis; entries of `own` replace the axis's default, limits or help."""
    axis = BY_NAME[name]
    panel = "Fabric" if axis not in NETWORK else "Switches and failures" if axis.part == "switches" else "Network"
    flags = (f"--{_flag(name)}/--no-{_flag(name)}",) if axis.type is bool else ()
    usual = {"help": axis.help, "metavar": axis.metavar, "min": axis.least, "max": axis.most, "rich_help_panel": panel}
    options: dict[str, Any] = usual | own
    return typer.Option(*flags, **options)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _parameter(axis: Axis, values: _Values = "one", **own: Any) -> Parameter:
    """Return the parameter of a command for this axis."""
    kind, default = axis.type, axis.default
    if axis.in_cluster or axis.shown:  # None tells the command that the option was not typed
        own = {"show_default": axis.shown or str(default)} | own
        default = None
    if values == "several" and axis.column:
        kind = list[str] if axis.repeated else str
        default = f"{default:g}" if isinstance(default, (int, float)) else default
        own["help"] = axis.help + (SEVERAL_TIMES if axis.repeated else SEVERAL)
    elif values == "each job" and axis.each_job:
        kind, own["metavar"] = str, "N,..."
    limits = {} if kind is axis.type else {"min": None, "max": None}
    kind = kind if default is not None else kind | None
    annotation = Annotated[kind, option(axis.name, **limits | own)]
    return Parameter(axis.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_CLUSTER = Parameter("cluster", Parameter.KEYWORD_ONLY, default=None, annotation=ClusterFile)
_MACHINE = Parameter("machine", Parameter.KEYWORD_ONLY, default=None, annotation=MachineName)


@dataclass(frozen=True)
class Given:
    """The options about a network that the user typed: a cluster file, a machine, and the values of axes by name."""

    file: Path | None
    name: str | None
    axes: dict[str, Any]

    @classmethod
    def made(cls, cluster: Path | None = None, machine: str | None = None, **axes: Any) -> Given:
        return cls(cluster, machine, axes)

    def replace(self, **axes: Any) -> Given:
        """Return a copy of the options in which the given axes have the given values."""
        every = (self.axes | axes).items()
        return Given(self.file, self.name, {name: value for name, value in every if value is not None})

    @property
    def files(self) -> list[Path]:
        """Return the files that the options name."""
        name = self.name or ""
        return [*([] if self.file is None else [self.file]), *([Path(name)] if name.endswith(".json") else [])]

    def named(self) -> Machine | None:
        """Return the named machine, if there is one. Raises `InputError` on an unknown name."""
        return None if self.name is None else machine_named(self.name)

    def on(self, usual: Machine) -> Machine:
        """Return the named machine (without a name: `usual`), changed by the typed options for its links."""
        return with_links(self.named() or usual, self.fields())

    def machine(self) -> Machine | None:
        """Return the named machine, changed by the typed options for its links, or None if no machine is named."""
        found = self.named()
        return None if found is None else self.on(found)

    def refuse_beside_file(self) -> None:
        """Raise `InputError` if a cluster file was typed together with an option whose value the file states."""
        typed = [*(["machine"] if self.name else []), *(name for name in self.axes if BY_NAME[name].in_cluster)]
        if self.file is not None and typed:
            raise InputError(f"--cluster and --{typed[0]}: give one or the other")

    def typed(self, *parts: str) -> list[Axis]:
        """Return the axes that were typed and whose `Axis.part` is in `parts`."""
        return [axis for axis in NETWORK if axis.name in self.axes and axis.part in parts]

    def of(self, *parts: str) -> dict[Axis, Any]:
        """Return the value of each axis that was typed and whose `Axis.part` is in `parts`."""
        return {axis: _parsed(axis, self.axes[axis.name]) for axis in self.typed(*parts)}

    def fields(self) -> dict[str, Any]:
        """Return the typed values for links and switches, by field."""
        return {axis.field: value for axis, value in self.of("links", "switches").items()}

    def several_of(self, *parts: str) -> dict[Axis, tuple[Any, ...]]:
        """Return all values, for a sweep, of each axis that was typed and whose `Axis.part` is in `parts`."""
        return {axis: tuple(Given(None, None, self.axes)._values(axis)) for axis in self.typed(*parts)}

    def machines(self, collective: str | None = None) -> Machines:
        """Return the machines that the options describe, with the given collective as the default."""
        self.refuse_beside_file()
        if self.file is not None:
            found = files.read(self.file, Cluster)
            found.cost(collective)  # raises an error that names the known collectives
            return Machines(found, self.file)
        machine = self.machine()
        if machine is not None and not self.axes.get("servers"):
            found = cluster_of(machine, self.value("workers"))
            found.cost(collective)
            return Machines(found, None, machine)
        values = {axis.field: self._value(axis) for axis in NETWORK if axis.in_cluster}
        values["servers"] = self.axes.get("servers") or 0
        known = [collective] if collective else [PARAMETER_SERVER] if values["servers"] else list(COLLECTIVES)
        return Machines(Cluster.derive(**values, collectives=known), None, machine)

    def values(self, cluster: Cluster) -> dict[str, Any]:
        """Return the value of every network axis, by field; if a cluster file was typed, it was read as `cluster`."""
        found = {axis.field: self._value(axis) for axis in NETWORK}
        return found if self.file is None else found | _of_cluster(cluster)

    def several(self) -> dict[str, tuple[Any, ...]]:
        """Return, for a sweep, the list of values of every network axis, by field."""
        self.refuse_beside_file()
        found = {axis.field: tuple(self._values(axis)) for axis in NETWORK}
        if self.file is None:
            return found
        return found | {field: (value,) for field, value in _of_cluster(files.read(self.file, Cluster)).items()}

    def value(self, name: str) -> Any:
        """Return the value of this axis."""
        return self._value(BY_NAME[name])

    def _value(self, axis: Axis) -> Any:
        value = self.axes.get(axis.name)
        return self._reached(axis, None if value is None else _parsed(axis, value))

    def _reached(self, axis: Axis, value: Any) -> Any:
        """Return `value` (or the default), multiplied by the share of this nominal rate that the machine reaches."""
        machine = self.named()
        links = {} if machine is None else links_of(machine)
        stated, share = links.get(axis.field, (axis.usual, 1))
        value = stated if value is None else value
        return value if share == 1 else value * share

    def _values(self, axis: Axis) -> list[Any]:
        value = self.axes.get(axis.name)
        if value is None:
            found = [None]
        elif axis.repeated:
            found = [_parsed(axis, text) for text in value]
        elif not axis.column:
            found = [_parsed(axis, value)]
        elif axis.parse is not None:
            found = _quantities(axis, value)
        else:
            found = (_whole if axis.type is int else _factors)(f"--{_flag(axis.name)}", value)
        return [self._reached(axis, one) for one in found]


def _parsed(axis: Axis, value: Any) -> Any:
    return value if axis.parse is None else quantity(_flag(axis.name), value, axis.parse)


def _of_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return, by field, the values that a cluster file has for axes."""
    from legato.simulator.flow import Network

    network = Network.of(cluster)
    found = {axis.field: getattr(network, axis.field) for axis in NETWORK if axis.in_cluster and axis is not SERVERS}
    return {"servers": cluster.servers or 1} | found


def _whole(option: str, text: str) -> list[int]:
    for name in split(text):
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise InputError(f"{option} {text!r}: {name!r} (expected whole numbers, like 4,8,16)")
    return [int(name) for name in split(text)]


def _factors(option: str, text: str) -> list[float]:
    found = []
    for name in split(text):
        try:
            found.append(float(name))
        except ValueError:
            raise InputError(f"{option} {text!r}: {name!r} (expected numbers, like 1,2.5)") from None
    return found


def _quantities(axis: Axis, text: str) -> list[Any]:
    """Return the values of a list such as `1,10,25Gbit`; a number without a unit has the unit of the next number."""
    unit, found = "", []
    for name in reversed(split(text)):
        own = name.lstrip("0123456789.")
        unit = own or unit
        found.append(_parsed(axis, name if own else name + unit))
    return found[::-1]


def axes(*names: str, cluster: bool = True, values: _Values = "one", **own: dict[str, Any]) -> Group:
    """Return the options for the axes whose `name` or `part` is in `names`, or for all network axes without `names`.

    `own` replaces defaults or limits of the axes that it names. `cluster` adds the option for a cluster file.
    """
    chosen = [axis for axis in NETWORK if not names or axis.name in names or axis.part in names]
    parameters = [_parameter(axis, values, **own.get(axis.name, {})) for axis in chosen]
    machine = [_MACHINE] if any(axis.part == "links" for axis in chosen) else []
    return Group([*([_CLUSTER] if cluster else []), *machine, *parameters], Given.made)


#: All network options of `simulate`, and of `sweep`, where they may have several values.
NetworkOptions = Annotated[Given, axes(values="each job")]
SweptOptions = Annotated[Given, axes(values="several")]


def _fabric_options(**given: Any) -> dict[str, Any]:
    return {BY_NAME[name].field: _parsed(BY_NAME[name], value) for name, value in given.items()}


#: The typed options of fabrics, by field.
FabricOptions = Annotated[dict[str, Any], Group([_parameter(axis) for axis in FABRIC], _fabric_options)]


class Machines(NamedTuple):
    """The cluster that the options describe, and the cluster file or the machine that describes it, if there is one."""

    cluster: Cluster
    file: Path | None
    machine: Machine | None = None

    def describe(self, collective: str | None = None) -> str:
        """Describe the network, for the title of a table of plans."""
        cluster, name = self.cluster, collective or self.cluster.default_collective
        if self.machine is not None:
            return f"{self._workers}, {self.machine.links_in_words}, {name}"
        if self.file is None or cluster.bandwidth_bps is not None:
            link = self._link(cluster.bandwidth_bps, cluster.latency_s, cluster.sending_s)
            return f"{self._prefix}{self._workers}, {link}, {name}"
        return f"{self._prefix}{self._workers}, measured {name} ({cluster.cost(name)})"

    def describe_link(self, network: Network) -> str:
        """Describe the network, for the title of a table of simulations."""
        measured = (
            ""
            if self.file is None or self.cluster.bandwidth_bps is not None
            else f" (as measured: {self.cluster.default_collective})"
        )
        link = f"{self._link(network.bandwidth_bps, network.latency_s, network.sending_s)}{measured}"
        return f"{self._prefix}{', '.join([self._workers, link, *_beyond_one_switch(network)])}"

    def describe_shared(self, network: Network) -> str:
        """Describe the network that jobs share, for the title of a table."""
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
    """Describe in which ways the network is more than hosts with one GPU each and one switch."""
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


@dataclass(frozen=True)
class Kinds:
    """The options that choose which collectives plans may use."""

    collective: Collective = None
    backend: Annotated[
        Literal["any", "gloo", "nccl"] | None,
        typer.Option(
            help="Backend of torch.distributed for which to plan. nccl offers its own ring, and on gloo legato runs "
            "all collectives itself.",
            show_default="any, or all collectives in the cluster file",
        ),
    ] = None

    def machines(self, network: Given) -> Machines:
        """Return the machines, with only the collectives that the backend can run."""
        known = {"workers", *(axis.name for axis in network.typed("links"))}
        if network.name and (others := [name for name in network.axes if name not in known]):
            raise InputError(f"--{_flag(others[0])}: with --machine (expected one of the two)")
        machines = network.machines(self.collective)
        if self.backend is None and (network.file is not None or self.collective is not None):
            return machines
        return machines._replace(cluster=machines.cluster.for_backend(self.backend or "any"))


def note_machine(machine: Machine | None) -> None:
    """Print the links of the machine, if there is one."""
    if machine is not None:
        note(machine.links_in_words)
