"""All-reduce algorithms, one file each. `rounds.py` defines the type of an algorithm.

An algorithm in `COLLECTIVES` can state its cost on a `Cluster`, run over gloo, and be a fabric of the flow simulator.
"""

from legato.collectives.doubling import HALVING_DOUBLING, RECURSIVE_DOUBLING
from legato.collectives.ring import RING
from legato.collectives.rounds import Algorithm
from legato.collectives.shuffle import SHUFFLE
from legato.collectives.tree import TREE

__all__ = ["COLLECTIVES", "DIVIDED", "RING", "SHUFFLE"]

COLLECTIVES: dict[str, Algorithm] = {
    "ring": RING,
    "halving-doubling": HALVING_DOUBLING,
    "recursive-doubling": RECURSIVE_DOUBLING,
    "tree": TREE,
    "shuffle": SHUFFLE,
}

#: Algorithms that can be sent in halves. The cost of all other algorithms does not depend on the depth.
DIVIDED = tuple(name for name, algorithm in COLLECTIVES.items() if algorithm.halves)
