"""All fabrics by their names on the command line: the algorithms of `legato.collectives`, and others in one file each.

`protocol.py` defines what a fabric is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, cast

from legato.collectives import COLLECTIVES
from legato.core.code import blame, installed, load_installed
from legato.core.errors import InputError, unknown_name
from legato.simulator.flow.fabrics.all_reduce import AllReduce
from legato.simulator.flow.fabrics.hierarchical import Hierarchical
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.ring import MulticastRing, WholeRing
from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fabrics.sharp import Sharp
from legato.simulator.flow.network.network import PRICED_AS

__all__ = [
    "BASELINE",
    "FABRICS",
    "Fabric",
    "check_options",
    "fabric",
    "fabric_names",
    "fitting",
    "label",
    "made",
]

#: The group of entry points under which installed packages provide fabrics.
GROUP = "legato.fabrics"

#: The baseline of the papers: one parameter server, and no help from the network.
BASELINE = "parameter-server"

FABRICS: dict[str, Fabric] = {
    BASELINE: Servers(),
    "multicast": Servers(multicast=True),
    "aggregation": Servers(aggregation="store-and-forward"),
    "multicast+aggregation": Servers(multicast=True, aggregation="store-and-forward"),
    "ring": AllReduce(algorithm="ring"),
    "ring-whole": WholeRing(),
    "ring+multicast": MulticastRing(),
    "butterfly": AllReduce(algorithm=PRICED_AS["butterfly"]),
    **{name: AllReduce(algorithm=name) for name in COLLECTIVES},
    "hierarchical": Hierarchical(),
    "sharp": Sharp(),
}


def fabric_names() -> list[str]:
    """Return the names of all fabrics: legato's, and those in installed packages."""
    return [*FABRICS, *installed(GROUP)]


def label(fabric: str | Fabric) -> str:
    """Return the label of a fabric in tables: its name, or the name of its class."""
    return fabric if isinstance(fabric, str) else type(fabric).__name__


def made(found: Any, name: str) -> Fabric:
    """Return `found` if it is a fabric; if it is a class or function, call it to make one. Raises `InputError`."""
    if not isinstance(found, Fabric) or isinstance(found, type):
        with blame(name):
            found = found()
    if not isinstance(found, Fabric):
        raise InputError(f"{name}: no fabric (expected a class or a function that makes a Fabric)")
    return found


def fabric(name: str | Fabric, **options: Any) -> Fabric:
    """Return the fabric with this name, with `options` in place of its defaults. `name` may also be a fabric object.

    Raises `InputError` on an unknown fabric or option (with the nearest names), and on an invalid value.
    """
    usual = _named(name)
    if not options:
        return usual
    known = _fields(usual)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {label(name)}", option, known)
    found: Fabric = dataclasses.replace(cast("Any", usual), **options)
    return found


def fitting(name: str | Fabric, options: Mapping[str, Any]) -> Fabric:
    """Return the fabric with this name; ignore options that it does not have. Raises `InputError` as `fabric` does."""
    known = _options(name)
    return fabric(name, **{key: value for key, value in options.items() if key in known})


def check_options(fabrics: Iterable[str | Fabric], options: Iterable[str]) -> None:
    """Raise `InputError` on an option that none of these fabrics has."""
    fabrics = list(fabrics)
    names = list(dict.fromkeys(map(label, fabrics)))
    unused = set(options).difference(*map(_options, fabrics))
    if unused:
        verb = "has" if len(names) == 1 else "have"
        raise InputError(f"{min(unused)}: {', '.join(names)} {verb} no such option")


def _named(name: str | Fabric) -> Fabric:
    if not isinstance(name, str):
        return name
    if name in FABRICS:
        return FABRICS[name]
    if name in installed(GROUP):
        return made(load_installed(GROUP, name), name)
    raise unknown_name("fabric", name, fabric_names())


def _fields(usual: Fabric) -> list[str]:
    return [field.name for field in dataclasses.fields(usual)] if dataclasses.is_dataclass(usual) else []


def _options(name: str | Fabric) -> set[str]:
    """Return the options of a fabric, except those that would make it a fabric of another name in `FABRICS`."""
    known = set(_fields(_named(name))) - {"multicast", "algorithm"}
    return known if "aggregation" in label(name) else known - {"aggregation"}
