"""The choice of the cheapest collective and depth for the bytes of a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import msgspec

from legato.core.cluster import Cluster, LinearCost
from legato.core.plan import Kind, Message
from legato.schedule.basics.joined import divided
from legato.schedule.published.caramel import MAX_DEPTH
from legato.simulator.pipelining import message_s

__all__ = ["CheapestCollective", "Collectives"]


class CheapestCollective(NamedTuple):
    """The collectives and depths that a message can use, the cost of each, and the most bytes of a message."""

    choices: tuple[tuple[str, int], ...]
    costs: tuple[LinearCost, ...]
    most: float = math.inf

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a message with the cheapest choice.

        A message above `most` bytes is sent as messages of `most` bytes, and one smaller message if bytes are left.
        """
        if self.most < math.inf:
            full, rest = divmod(nbytes, self.most)
            return full * self._least(self.most) + (self._least(rest) if rest > 0 else 0.0)
        return self._least(nbytes)

    def _least(self, nbytes: float) -> float:
        return min([cost.cost(nbytes) for cost in self.costs])

    def choose(self, nbytes: int) -> tuple[str, int]:
        """Return the cheapest collective and depth for a message."""
        seconds = [cost.cost(nbytes) for cost in self.costs]
        return self.choices[seconds.index(min(seconds))]


class Collectives:
    """The collectives that messages on a cluster can use, and how long a message takes with the cheapest one."""

    def __init__(self, cluster: Cluster, names: Sequence[str], most: float) -> None:
        """Let messages of up to `most` bytes use the collectives `names`."""
        self.cluster, self.names, self.most = cluster, names, most
        # Whether the cost of chunks comes from a formula instead of a measurement.
        self._priced_by_depth = cluster.reduce_s_per_byte > 0 and not cluster.depths
        ways = [(name, depth) for name in names for depth in (1, *cluster.depths.get(name, ()))]
        costs = [cluster.cost(*way) for way in ways]
        terms = [(cost.alpha_s, cost.beta_s_per_byte, cost.floor_s) for cost in costs]

        def beaten(k: int) -> bool:
            """Return whether another choice of collective and depth is at least as cheap as choice k at every size."""
            return any(
                not costs[i].points
                and not costs[k].points
                and all(x <= y for x, y in zip(other, terms[k], strict=True))
                and (other, i) < (terms[k], k)  # among equal ways, keep the first
                for i, other in enumerate(terms)
            )

        kept = [way for k, way in enumerate(ways) if self._priced_by_depth or not beaten(k)]
        self.lines = CheapestCollective(tuple(kept), tuple(cluster.cost(*way) for way in kept), most)
        self.half_s = cache(self._half_s)

    @cached_property
    def halved(self) -> Collectives | None:
        """Return the collectives that can be sent in halves, if there are any."""
        kept = [name for name in self.names if name in self.cluster.in_halves]
        return self if len(kept) == len(self.names) else Collectives(self.cluster, kept, self.most) if kept else None

    def way(self, nbytes: int, kind: Kind = "all_reduce") -> tuple[str, int]:
        """Return the cheapest collective and depth for a message; the cost of chunks may be measured or a formula."""
        if kind != "all_reduce" and self.halved is not None and self.halved is not self:
            return self.halved.way(nbytes)
        if not self._priced_by_depth:
            return self.lines.choose(nbytes)
        ways = ((name, depth) for name, _ in self.lines.choices for depth in range(1, MAX_DEPTH + 1))
        return min(ways, key=lambda way: (message_s(self.cluster, way[0], way[1], nbytes), way[1]))

    def _half_s(self, nbytes: int) -> float:
        """Return half of the seconds of a message, which is the mean of its reduce-scatter and its all-gather."""
        lines = (self.halved or self).lines
        if nbytes > self.most:
            return lines.seconds(nbytes) / 2
        return message_s(self.cluster, *self.way(nbytes, "reduce_scatter"), nbytes) / 2

    def fit(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield the messages with their cheapest collectives and depths, after dividing those that are too large."""
        for message in divided(messages, self.most):
            name, depth = self.way(message.nbytes, message.kind)
            yield msgspec.structs.replace(message, collective=name, depth=depth)
