"""Identical workers: simulate few of them, with all times those of the full simulation.

How, depends on the fabric: one worker stands for all (`alone.py`), or one stands
for each class (`classes.py`), or each does what the one before it has done
(`staggered.py`).
"""

from __future__ import annotations

from legato.core.errors import TooLargeError
from legato.simulator.flow.alone import Alone
from legato.simulator.flow.case import Case
from legato.simulator.flow.classes import ROUNDING, Merged, TreeClasses
from legato.simulator.flow.fabrics.doubling import Butterfly, HalvingDoubling
from legato.simulator.flow.fabrics.ring import Ring
from legato.simulator.flow.fabrics.servers import Servers
from legato.simulator.flow.fabrics.shuffle import Shuffle
from legato.simulator.flow.fabrics.tree import Tree
from legato.simulator.flow.fragments import REDUCING
from legato.simulator.flow.graph import Graph
from legato.simulator.flow.result import FlowResult
from legato.simulator.flow.topology import Topology

__all__ = ["check_few", "simulate_classes", "simulate_few"]

#: Fabrics in which all transfers are those that `Alone` knows, if one worker stands for all.
_ALONE = (Ring, Shuffle, Butterfly, HalvingDoubling)
#: Services and ops of one worker of each class, up to which classes are split if not all workers can be simulated.
_MOST_OF_CLASSES = 8_000_000
#: A thousand million services take some ten seconds.
_MOST_SERVICES = 4_000_000_000
#: When a push begins takes 8 bytes.
_MOST_PUSHES = 400_000_000


def simulate_few(case: Case) -> FlowResult | None:
    """Simulate a symmetric case, or return None if it takes the full simulation; transfers are not kept.

    Raises `TooLargeError` if it takes too many transfers.
    """
    if not check_few(case):
        return None
    fabric, network = case.fabric, case.network
    if isinstance(fabric, Servers):
        from legato.simulator.flow.staggered import simulate_staggered

        return simulate_staggered(case.unroll(Topology(Graph(), network, 1, fabric.servers)))
    if isinstance(fabric, Tree):
        return simulate_classes(case, TreeClasses(network.workers), patience=case.services(network.workers) / 2)
    return case.simulate(Alone(Graph(), network))


def check_few(case: Case) -> bool:
    """Whether few workers can stand for all. Raises `TooLargeError` if that takes too many transfers all the same."""
    fabric, workers = case.fabric, case.network.workers
    # A fabric that is derived from one of these may send differently.
    if not case.symmetric or type(fabric) not in (Servers, Tree, *_ALONE):
        return False
    if isinstance(fabric, Tree):
        return 2 * len(TreeClasses(workers)) <= workers
    if isinstance(fabric, Servers):
        if fabric.aggregation is None and not fabric.multicast:
            _check("pushes", case.num_fragments(REDUCING) * fabric.shards * workers, _MOST_PUSHES)
        _check("transfers", case.services(workers), _MOST_SERVICES)
        return True
    if fabric.simulated(case.network) > 1:
        return False
    _check("transfers", case.services(1), _MOST_SERVICES)
    return True


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        raise TooLargeError(f"more than {most:,} {what} to simulate (fewer workers?)")


def simulate_classes(case: Case, classes: TreeClasses, patience: float) -> FlowResult | None:
    """Simulate a tree with one worker for each class.

    None if all workers can be simulated, and the classes take more than `patience` services, or the order on a link
    depends on rounding. Raises `TooLargeError` if too many workers do different things.
    """
    from legato.simulator.flow.ties import depends_on_rounding

    fits, spent = case.fits, 0
    while True:
        topology = Merged(Graph(), case.network, classes)
        unrolled, services = case.run(topology)
        spent += len(services.records)
        if not classes.split(topology.sends(services.records)):
            break
        if fits and spent > patience:
            return None
        if not fits:
            each = len(services.records) // topology.size + len(case.workloads[0].ops)
            _check("transfers and ops of workers that do different things", each * len(classes), _MOST_OF_CLASSES)
    result = FlowResult.of(unrolled, services.records, keep_transfers=False)
    rounding_s = ROUNDING * float(result.end_s[-1])
    if fits and depends_on_rounding(services, topology.rounded(services.records), rounding_s):
        return None
    return result
