"""All fabrics by their names on the command line: those of `legato.collectives`, and others, one file each.

`protocol.py` defines what a fabric is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from legato.collectives import COLLECTIVES
from legato.core.errors import InputError, unknown_name
from legato.simulator.flow.fabrics.all_reduce import AllReduce
from legato.simulator.flow.fabrics.hierarchical import Hierarchical
from legato.simulator.flow.fabrics.protocol import Fabric
from legato.simulator.flow.fabrics.ring import MulticastRing, WholeRing
from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fabrics.sharp import Sharp
from legato.simulator.flow.network.network import PRICED_AS

__all__ = ["BASELINE", "FABRICS", "Fabric", "check_options", "fabric", "fitting"]

#: The papers' baseline: one parameter server and no help from the network.
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


def fabric(name: str | Fabric, **options: Any) -> Fabric:
    """Return a fabric by its name, with `options` in place of its defaults; a fabric itself is returned as it is.

    Raises `InputError`, with the nearest names, on an unknown fabric or option,
    and on an invalid value.
    """
    if not isinstance(name, str):
        return name
    if name not in FABRICS:
        raise unknown_name("fabric", name, FABRICS)
    usual: Any = FABRICS[name]
    known = [field.name for field in dataclasses.fields(usual)]
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    found: Fabric = dataclasses.replace(usual, **options)
    return found


def fitting(name: str, options: Mapping[str, Any]) -> Fabric:
    """Return a fabric by its name, with those of the options that it has. Raises `InputError` as `fabric` does."""
    known = _options(name)
    return fabric(name, **{key: value for key, value in options.items() if key in known})


def check_options(names: Iterable[str], options: Iterable[str]) -> None:
    """Raise `InputError` on an option that does not exist on any of these fabrics."""
    names = list(dict.fromkeys(names))
    unused = set(options).difference(*map(_options, names))
    if unused:
        verb = "has" if len(names) == 1 else "have"
        raise InputError(f"{min(unused)}: {', '.join(names)} {verb} no such option")


def _options(name: str) -> set[str]:
    """The options that do not turn a fabric into another one of `FABRICS`."""
    if name not in FABRICS:
        raise unknown_name("fabric", name, FABRICS)
    usual: Any = FABRICS[name]
    known = {field.name for field in dataclasses.fields(usual)} - {"multicast", "algorithm"}
    return known if "aggregation" in name else known - {"aggregation"}
