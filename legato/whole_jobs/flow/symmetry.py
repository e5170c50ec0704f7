"""Workers, groups and links that are alike: the coarsest equitable partition, by colour refinement.

[Note: symmetry]
In an equitable partition each worker of a class is in groups of the same classes, each group of a class has members of
the same classes and the same number of connections on links of each class, and each link of a class carries the same
number of connections of groups of each class. So if all workers of a class have done the same until some moment, the
flows of a class of groups share links with like flows, have the same max-min fair rate, and go on doing the same: one
of each class, on links that count the connections of all, has the times of the whole network. Whatever differs - a
stage, a failing link, the path that a hash has chosen - is in the first colours or in the edges, and splits what it
touches.

Colours are hashes of 64 bits (1-dimensional Weisfeiler-Leman, with sums over neighbours): that two of a million differ
and have the same colour has a probability of 3e-8.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Edges", "refined"]

Ints = NDArray[np.int64]
Colours = NDArray[np.uint64]


class Edges(NamedTuple):
    """Labelled edges between nodes of two kinds, by their numbers."""

    kinds: tuple[str, str]
    ends: tuple[Ints, Ints]
    label: Ints


def refined(first: dict[str, Ints], edges: list[Edges]) -> dict[str, Ints]:
    """The class of each node, by kind, from 0 on; nodes of a class have the same `first` number."""
    colours = {kind: _mixed(number.astype(np.uint64)) for kind, number in first.items()}
    count = 0
    while True:
        classes = {kind: np.unique(own, return_inverse=True)[1] for kind, own in colours.items()}
        number = sum(int(own.max(initial=-1)) + 1 for own in classes.values())
        if number == count:
            return classes
        count = number
        # From small numbers again, so that a colour is of the partition, not of what the hashes were before.
        colours = {kind: _mixed(own.astype(np.uint64)) for kind, own in classes.items()}
        sums = {kind: own.copy() for kind, own in colours.items()}
        for salt, ((a, b), (at_a, at_b), label) in enumerate(edges):
            mark = _mixed(np.asarray(label * len(edges) + salt).astype(np.uint64))
            np.add.at(sums[a], at_a, _mixed(colours[b][at_b] ^ mark))
            np.add.at(sums[b], at_b, _mixed(colours[a][at_a] ^ mark))
        colours = sums


def _mixed(bits: Colours) -> Colours:
    """The finalizer of SplitMix64."""
    with np.errstate(over="ignore"):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return bits ^ (bits >> np.uint64(31))
