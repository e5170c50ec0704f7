"""Workers, groups and links that are alike: the coarsest equitable partition, by colour refinement.

[Note: symmetry] In an equitable partition, all workers of a class are in groups of the same classes. All groups of a
class have members of the same classes, and the same number of connections on links of each class. All links of a class
carry the same number of connections from groups of each class. Suppose that all workers of a class have done the same
up to some moment. Then all flows of a class of groups share links with the same kinds of flows, so they have the same
max-min fair rate, and the workers continue to do the same. So one worker, group and link of each class are enough to
find the times of the whole network, if all connections on a link are counted. Some nodes differ from others: they have
another stage, a failing link, or a path chosen by a hash. Such differences are in the first colours or in the edges,
and split classes.

Colours are 64-bit hashes (1-dimensional Weisfeiler-Leman, with sums over neighbours). If a million nodes differ, the
probability that any two of these nodes have the same colour is 3e-8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Edges", "refined"]

Ints = NDArray[np.int64]
Colours = NDArray[np.uint64]


class Edges(NamedTuple):
    """Labelled edges between nodes of two kinds, given by the numbers of the nodes."""

    kinds: tuple[str, str]
    ends: tuple[Ints, Ints]
    label: Ints


def refined(first: dict[str, Ints], edges: list[Edges]) -> dict[str, Ints]:
    """Return each node's class (0, 1, ...), by kind of node; nodes with different `first` numbers differ in class."""
    colours = {kind: _mixed(number.astype(np.uint64)) for kind, number in first.items()}
    count = 0
    while True:
        classes = {kind: np.unique(own, return_inverse=True)[1] for kind, own in colours.items()}
        number = sum(int(own.max(initial=-1)) + 1 for own in classes.values())
        if number == count:
            return classes
        count = number
        # Restart from small numbers: colours then depend only on the partition, not on earlier hashes.
        colours = {kind: _mixed(own.astype(np.uint64)) for kind, own in classes.items()}
        sums = {kind: own.copy() for kind, own in colours.items()}
        for salt, ((a, b), (at_a, at_b), label) in enumerate(edges):
            mark = _mixed(np.asarray(label * len(edges) + salt).astype(np.uint64))
            np.add.at(sums[a], at_a, _mixed(colours[b][at_b] ^ mark))
            np.add.at(sums[b], at_b, _mixed(colours[a][at_a] ^ mark))
        colours = sums


def _mixed(bits: Colours) -> Colours:
    """Apply the finalizer of SplitMix64."""
    with np.errstate(over="ignore"):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))
