"""The costs of a network: measured, or derived from a bandwidth and a latency."""

from __future__ import annotations

import bisect
import html
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from legato.collectives import COLLECTIVES, DIVIDED
from legato.core.errors import InputError, unknown_name
from legato.core.table import Table
from legato.core.text import count, shorten
from legato.core.units import Int64, format_bandwidth, format_bytes, format_seconds

__all__ = [
    "PARAMETER_SERVER",
    "SEND_S",
    "UNDIVIDED",
    "Cluster",
    "Contention",
    "LinearCost",
    "sending_s",
]


#: The largest relative error that counts as an exact fit.
_FITS = 1e-3
#: A line is rejected if its relative error at a measured size is above the first limit. An error above the second limit
#: is reported in `off`.
_CLOSE, _OFF = 0.1, 0.2
_MOST_POINTS = 256
_ROUNDING = 1e-9


class LinearCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of a collective of n bytes, which is `alpha_s + beta_s_per_byte * n` seconds, but at least `floor_s`.

    The floor is the time that a backend works on the hosts for each message. This work goes on during the transfer: it
    determines the time of a small message, but is hidden by the longer transfer of a large one. If a collective has
    several algorithms, no line fits its times. For such a collective, `points` has measured (bytes, seconds), and the
    cost is interpolated between these points. Alpha and beta are then a lower bound on all points, and there is no
    floor. `off` is the largest relative error of the cost at a measured size, or 0 if `following` found an error of at
    most 20%.
    """

    alpha_s: float
    beta_s_per_byte: float
    floor_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    off: float = 0.0

    def __post_init__(self) -> None:
        for field in ("alpha_s", "beta_s_per_byte", "floor_s", "off"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected a finite number, at least 0)")
        if self.points:
            self._check_points()

    def _check_points(self) -> None:
        if not 2 <= len(self.points) <= _MOST_POINTS or self.floor_s:
            raise InputError(f"points: {len(self.points)} (expected 2 to {_MOST_POINTS}, and no floor)")
        if not all(0 < x < math.inf and 0 < y < math.inf for x, y in self.points):
            raise InputError("points: not finite (expected bytes and seconds above 0)")
        pairs = list(itertools.pairwise(self.points))
        if (
            not all(x < later and y <= longer for (x, y), (later, longer) in pairs)
            or pairs[-1][0][1] == pairs[-1][1][1]
        ):
            raise InputError("points: not in order (expected larger messages to take longer)")
        rate, slack = _last_rate(self.points) * (1 + _ROUNDING), 1 - _ROUNDING
        if self.beta_s_per_byte > rate or any(
            (self.alpha_s + self.beta_s_per_byte * x) * slack > y for x, y in self.points
        ):
            raise InputError(
                "points: below the line (expected alpha_s and beta_s_per_byte of a line below all of them)"
            )

    def __str__(self) -> str:
        off = f", off by up to {self.off:.0%} at measured sizes" if self.off > _OFF else ""
        if self.points:
            (least, first_s), (most, last_s) = self.points[0], self.points[-1]
            sizes = f"for {format_bytes(least)} to {format_bytes(most)}, between {len(self.points)} measured sizes"
            return f"{format_seconds(first_s)} to {format_seconds(last_s)} {sizes}{off}"
        floor = f", at least {format_seconds(self.floor_s)}" if self.floor_s else ""
        return f"{format_seconds(self.alpha_s)} + {format_seconds(self.beta_s_per_byte * 2**20)} per MiB{floor}{off}"

    def cost(self, nbytes: float) -> float:
        """Return the seconds that one message of `nbytes` bytes takes."""
        if self.points:
            return float(self.above_floor(nbytes))
        return max(self.floor_s, self.alpha_s + self.beta_s_per_byte * nbytes)

    def above_floor(self, nbytes: float, number: type = float) -> Any:
        """Return the seconds of a message of `nbytes` bytes without the floor, as a number of the type `number`."""
        if not self.points:
            return number(self.alpha_s) + number(self.beta_s_per_byte) * nbytes
        k = min(bisect.bisect_right(self.points, (nbytes, math.inf), 1), len(self.points) - 1)
        points = self.points[0], self.points[k - 1], self.points[k]
        if number is not float:
            points = tuple((number(x), number(y)) for x, y in points)
        (_, least), (x, y), (later, longer) = points
        return max(least, y + (longer - y) / (later - x) * (nbytes - x))

    def times(self, share: float) -> LinearCost:
        """Return the cost with all times multiplied by `share`."""
        points = tuple((x, y * share) for x, y in self.points)
        return LinearCost(self.alpha_s * share, self.beta_s_per_byte * share, self.floor_s * share, points, self.off)

    @property
    def line(self) -> LinearCost:
        """Return the cost unchanged if it has no points, and otherwise the cost that `fit` finds for its points."""
        if not self.points:
            return self
        found = LinearCost.fit(self.points)
        return msgspec.structs.replace(found, off=found._worst(self.points))

    @property
    def startup_s(self) -> float:
        """Return the seconds that the smallest message takes."""
        return self.cost(0.0)

    @classmethod
    def fit(cls, samples: Iterable[tuple[float, float]]) -> LinearCost:
        """Fit a cost to (bytes, seconds) samples by least squares; each square is divided by the sample's seconds.

        With these weights, large sizes determine beta, and small sizes determine alpha and the floor. Large sizes carry
        most bytes of a plan. Unweighted squares would let the largest size determine alpha as well. Squares of relative
        errors would let small messages, whose times scatter, change beta. Alpha and beta are at least 0. The cost gets
        a floor if the floor makes the sum of squares less than half as large. Raises `InputError` if there are fewer
        than two distinct sizes, or if a time is not above 0.
        """
        points = sorted((float(x), float(y)) for x, y in samples)
        if len({x for x, _ in points}) < 2:
            raise InputError("fit: needs samples of at least two sizes")
        if not all(math.isfinite(y) and y > 0 and math.isfinite(x) and x >= 0 for x, y in points):
            raise InputError("fit: every sample needs bytes >= 0 and finite seconds > 0")
        best = cls(*_line(points))
        least = best._squares(points) / 2
        if least < math.fsum(y for _, y in points) * _FITS**2:
            return best
        for k in range(2, len(points) - 1):  # the first k samples lie on the floor
            if points[k][0] == points[-1][0]:
                break
            floor = k / math.fsum(1 / y for _, y in points[:k])
            bent = cls(*_line(points[k:]), floor)
            if (squares := bent._squares(points)) < least:
                best, least = bent, squares
        return best

    @classmethod
    def following(cls, samples: Iterable[tuple[float, float]]) -> LinearCost:
        """Return the result of `fit` if it is within 10% of all samples, and else a cost interpolated between samples.

        If a larger message took less time than a smaller one, both get the mean of their times. Raises `InputError`
        like `fit`.
        """
        points = sorted((float(x), float(y)) for x, y in samples)
        cost = cls.fit(points)
        if cost._worst(points) > _CLOSE:
            blocks: list[list[tuple[float, float]]] = []
            for _, same in itertools.groupby(points, key=lambda point: point[0]):
                blocks.append(list(same))
                while len(blocks) > 1 and _mean(blocks[-2]) >= _mean(blocks[-1]):
                    blocks[-2:] = [blocks[-2] + blocks[-1]]
            ends = [(x, _mean(block)) for block in blocks for x in dict.fromkeys((block[0][0], block[-1][0])) if x > 0]
            ends = ends[: -1 if len(ends) > 1 and ends[-1][1] == ends[-2][1] else None]
            kept = tuple(ends[:: -(-len(ends) // _MOST_POINTS)])
            if len(kept) > 1:
                rate = min(_last_rate(kept), *(y / x for x, y in kept))
                cost = cls(max(0.0, min(y - rate * x for x, y in kept)), rate, points=kept)
        return msgspec.structs.replace(cost, off=off if (off := cost._worst(points)) > _OFF else 0.0)

    def _worst(self, points: Iterable[tuple[float, float]]) -> float:
        """Return the largest relative error of the cost at these measured points."""
        return max(abs(self.cost(x) / y - 1) for x, y in points)

    def _squares(self, points: Iterable[tuple[float, float]]) -> float:
        """Return the sum of squared errors, each divided by the seconds of its sample."""
        return math.fsum((self.cost(x) - y) ** 2 / y for x, y in points)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (alpha, beta) of the straight line that best fits (bytes, seconds) samples of at least two sizes."""
    weight = math.fsum(1 / y for _, y in points)
    level = len(points) / weight
    # subtracted from all sizes, against cancellation between close sizes
    middle = math.fsum(x / y for x, y in points) / weight
    spread = math.fsum((x - middle) ** 2 / y for x, y in points)
    beta = math.fsum(x - middle for x, _ in points) / spread
    alpha = level - beta * middle
    if alpha < 0:
        alpha, beta = 0.0, math.fsum(x for x, _ in points) / math.fsum(x * x / y for x, y in points)
    if beta < 0:
        alpha, beta = level, 0.0
    return alpha, beta


def _mean(points: Sequence[tuple[float, float]]) -> float:
    return math.fsum(y for _, y in points) / len(points)


def _last_rate(points: Sequence[tuple[float, float]]) -> float:
    """Return the seconds per byte between the last two points; this rate also holds beyond the last point."""
    (x, y), (later, longer) = points[-2:]
    return (longer - y) / (later - x)


def _sum(a: LinearCost, b: LinearCost) -> LinearCost:
    """Return the sum of two costs, exact for the smallest message, for large messages, and at measured sizes."""
    sizes = sorted({x for x, _ in (*a.points, *b.points)})
    points = tuple((x, a.cost(x) + b.cost(x)) for x in sizes)
    floor = a.startup_s + b.startup_s if (a.floor_s or b.floor_s) and not points else 0.0
    return LinearCost(a.alpha_s + b.alpha_s, a.beta_s_per_byte + b.beta_s_per_byte, floor, points, max(a.off, b.off))


def _halved(cost: LinearCost) -> LinearCost:
    """Return the cost of messages of which only half the bytes are sent."""
    points = tuple((2 * x, y) for x, y in cost.points)
    return LinearCost(cost.alpha_s, cost.beta_s_per_byte / 2, cost.floor_s, points, cost.off)


def _flat(cost: LinearCost) -> LinearCost:
    """Return a cost that is the same for all sizes: the cost of the smallest message."""
    return LinearCost(cost.startup_s, 0.0)


#: Kinds of all-reduce that cannot be sent in halves, because no worker has the whole sum of its part halfway. The last
#: three are fabrics of the flow simulator.
UNDIVIDED = (*(name for name in COLLECTIVES if name not in DIVIDED), "butterfly", "ring-whole", "ring+multicast")

#: The backends of torch for which a plan can be made. A plan for `any` runs on all backends.
BACKENDS = ("any", "gloo", "nccl")


def carries_out(backend: str, collective: str) -> bool:
    """Return whether plans with this collective can run on a backend of torch.

    `ring` runs on all backends, which may use any algorithm for it. The collective named after a backend runs on this
    backend, and all of `COLLECTIVES` run over gloo, because legato itself carries them out.
    """
    return collective in ("ring", backend) or (backend == "gloo" and collective in COLLECTIVES)


#: The name of the cost of a push and a pull through a cluster's servers.
PARAMETER_SERVER = "parameter-server"

#: The assumed seconds for which a send keeps its sender busy, if this time was not measured. The time is a part of the
#: latency, so it is never more than the latency.
SEND_S = 5e-6


def sending_s(send_s: float | None, latency_s: float) -> float:
    """Return the seconds for which a send keeps its sender busy.

    If `send_s` is None, return `SEND_S`, or the latency if that is less. Raises `InputError` if `send_s` is more than
    the latency.
    """
    if send_s is None:
        return min(SEND_S, latency_s)
    if not 0 <= send_s <= latency_s:
        latency = format_seconds(latency_s)
        raise InputError(f"send_s: {send_s} (expected 0 to the latency, {latency}, of which it is a part)")
    return send_s


def _parameter_server(
    workers: int, servers: int, latency: float, byte: float, reduce: float, send: float
) -> tuple[float, float]:
    # A worker's link carries every byte once in each direction; a server's link carries its bytes once per worker.
    each = max(1.0, workers / servers)
    return 2 * latency + send * (each - 1), 2 * byte * each + reduce * (workers - 1) / servers


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time that messages and computation take from each other if one processor does both.

    If workers compute all the time while a message of n bytes is in flight, the message takes `delay.cost(n)` seconds
    longer, and computation loses `overhead.cost(n)` seconds of the processor. (LogP has such an overhead o per message,
    and LogGPO per byte.) If workers compute during only a part of the message's time, delay and overhead shrink in
    proportion. `pack_s_per_byte` is the time that the worker spends on copying a byte of a gradient into its message.
    """

    delay: LinearCost
    overhead: LinearCost
    pack_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.pack_s_per_byte) and self.pack_s_per_byte >= 0):
            raise InputError(f"pack_s_per_byte: {self.pack_s_per_byte} (expected a finite number, at least 0)")

    def __str__(self) -> str:
        return f"during computation: a message takes {self.delay} longer, and {self.overhead} from computation"


class Cluster(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="legato.cluster/1",
):
    """The machines of a data-parallel job, and the costs of messages on their network.

    `collectives` maps the name of each collective to its cost on these workers; the first one is the default.
    `bandwidth_bps` (bits per second in one direction of a worker's link) and `latency_s` (seconds for one hop) are the
    values from which the costs were derived. `bandwidth_bps` and `latency_s` are None if the costs were measured.
    `send_s` (seconds) is the part of the latency for which a send keeps its sender busy: messages that a worker sends
    together start `send_s` apart. If `send_s` is None, it was not measured, and `SEND_S` is assumed.
    `reduce_s_per_byte` is the time to add one byte of one gradient to another. `depths` has the measured costs of
    collectives that are pipelined in chunks, by the name of the collective and the number of chunks (at least 2).
    `unpack_s_per_byte` is the time to copy a byte of an averaged gradient from its message into the gradient that the
    optimizer reads. `contention` is None if computation and messages do not slow each other down, for example because a
    network card sends the messages.
    """

    workers: Int64
    collectives: dict[str, LinearCost]
    servers: Int64 = 0
    bandwidth_bps: float | None = None
    latency_s: float | None = None
    reduce_s_per_byte: float = 0.0
    depths: dict[str, dict[int, LinearCost]] = {}
    unpack_s_per_byte: float = 0.0
    contention: Contention | None = None
    send_s: float | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InputError(f"workers: {self.workers} (expected at least 1)")
        if self.servers < 0:
            raise InputError(f"servers: {self.servers} (expected at least 0)")
        if not self.collectives:
            raise InputError("collectives: none given (expected at least one)")
        if self.bandwidth_bps is not None and not (math.isfinite(self.bandwidth_bps) and self.bandwidth_bps > 0):
            raise InputError(f"bandwidth_bps: {self.bandwidth_bps} (expected a finite number above 0)")
        for field in ("latency_s", "reduce_s_per_byte", "unpack_s_per_byte", "send_s"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"{field}: {value} (expected a finite number, at least 0)")
        for name, measured in self.depths.items():
            if name not in self.collectives:
                raise unknown_name("collective in depths", name, self.collectives)
            if any(depth < 2 for depth in measured):
                raise InputError(f"depths: {name} in {min(measured)} chunks (expected at least 2)")

    @classmethod
    def derive(
        cls,
        workers: int,
        bandwidth_bps: float,
        latency_s: float,
        *,
        send_s: float | None = None,
        reduce_s_per_byte: float = 0.0,
        collectives: Iterable[str] = tuple(COLLECTIVES),
        servers: int = 0,
    ) -> Cluster:
        """Return a cluster with costs derived from a bandwidth and a latency.

        The rounds of each collective determine its cost (`legato.collectives`).

        `send_s` is the part of the latency for which a send keeps its sender busy; if it is None, `SEND_S` is assumed,
        or the latency if that is less.

        The first of `collectives` is the default. If there are servers, `collectives` can include `PARAMETER_SERVER`,
        whose cost assumes many messages, spread evenly over the servers. Raises `InputError` on an unknown collective
        or a number out of range.
        """
        if not (isinstance(workers, int) and workers >= 1):
            raise InputError(f"workers: {workers} (expected at least 1)")
        if not (math.isfinite(bandwidth_bps) and bandwidth_bps > 0):
            raise InputError(f"bandwidth_bps: {bandwidth_bps} (expected a finite number above 0)")
        costs, send_s = {}, sending_s(send_s, latency_s)
        for name in collectives:
            terms = latency_s, 8 / bandwidth_bps, reduce_s_per_byte, send_s
            if name == PARAMETER_SERVER and servers > 0:
                costs[name] = LinearCost(*_parameter_server(workers, servers, *terms))
                continue
            if name not in COLLECTIVES:
                raise unknown_name("collective", name, [*COLLECTIVES, *[PARAMETER_SERVER] * (servers > 0)])
            costs[name] = LinearCost(*COLLECTIVES[name].cost(workers, *terms))
        return cls(
            workers=workers,
            collectives=costs,
            servers=servers,
            bandwidth_bps=bandwidth_bps,
            latency_s=latency_s,
            reduce_s_per_byte=reduce_s_per_byte,
            send_s=send_s,
        )

    def __str__(self) -> str:
        """Return text: a line about the machines, and a line with the cost of each collective, the default first."""
        servers = f", {count(self.servers, 'server')}" if self.servers else ""
        speed = "" if self.bandwidth_bps is None else f", {format_bandwidth(self.bandwidth_bps)} per link"
        latency = "" if self.latency_s is None else f", latency {format_seconds(self.latency_s)}"
        latency += f", {format_seconds(self.send_s)} a send" if self.send_s else ""
        rows = [(f"  {shorten(name)}", str(cost)) for name, cost in self.collectives.items()]
        rows += [
            (f"  {shorten(name)}, depth {depth}", str(cost))
            for name, measured in self.depths.items()
            for depth, cost in measured.items()
        ]
        heading = f"{count(self.workers, 'worker')}{servers}{speed}{latency}"
        beside = [] if self.contention is None else [f"  {self.contention}"]
        return "\n".join([heading, str(Table.of("", {"  collective": None, "cost of a message": None}, rows)), *beside])

    def _repr_html_(self) -> str:
        """Return the cluster's text as HTML for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    @property
    def default_collective(self) -> str:
        return next(iter(self.collectives))

    def cost(self, collective: str | None = None, depth: int = 1) -> LinearCost:
        """Return the cost of the collective with this name, or of the default collective.

        For a depth above 1, return the cost at the greatest measured depth up to `depth`. If no depth was measured,
        return the cost at depth 1; `legato.simulator.pipelining` then computes the effect of the depth. Raises
        `InputError` on a collective that the cluster lacks.
        """
        name = self.default_collective if collective is None else collective
        if name not in self.collectives:
            raise unknown_name("collective", name, self.collectives)
        measured = self.depths.get(name, {})
        return measured.get(max((d for d in measured if d <= depth), default=1), self.collectives[name])

    @property
    def sending_s(self) -> float:
        """Return `send_s`, or the assumed value if `send_s` is None."""
        return sending_s(None, self.latency_s or 0.0) if self.send_s is None else self.send_s

    @property
    def in_halves(self) -> list[str]:
        """Return the names of the collectives that can be sent in two halves."""
        return [name for name in self.collectives if name not in UNDIVIDED]

    def reduction_s_per_byte(self, collective: str) -> float:
        """Return the seconds per byte for adding up gradients in an all-reduce, or 0 if its cost is not derived."""
        if collective not in COLLECTIVES or collective in self.depths or self.bandwidth_bps is None:
            return 0.0
        return COLLECTIVES[collective].cost(self.workers, 0.0, 0.0, self.reduce_s_per_byte, 0.0)[1]

    def while_computing(self) -> Cluster:
        """Return the cluster without contention, on which every message always takes as long as during computation."""
        if self.contention is None:
            return self
        delay = self.contention.delay
        return msgspec.structs.replace(
            self,
            collectives={name: _sum(cost, delay) for name, cost in self.collectives.items()},
            depths={name: {d: _sum(cost, delay) for d, cost in costs.items()} for name, costs in self.depths.items()},
            contention=None,
        )

    def in_wire_format(self) -> Cluster:
        """Return the cluster on which all messages are sent in a wire format, in half the bytes.

        Packing and unpacking cost the same as without a wire format, since they handle all elements.
        """
        beside = self.contention
        if beside is not None:
            beside = msgspec.structs.replace(beside, delay=_halved(beside.delay), overhead=_halved(beside.overhead))
        return msgspec.structs.replace(
            self,
            collectives={name: _halved(cost) for name, cost in self.collectives.items()},
            depths={name: {d: _halved(cost) for d, cost in costs.items()} for name, costs in self.depths.items()},
            bandwidth_bps=None if self.bandwidth_bps is None else 2 * self.bandwidth_bps,
            reduce_s_per_byte=self.reduce_s_per_byte / 2,
            contention=beside,
        )

    def for_backend(self, backend: str) -> Cluster:
        """Return the cluster with only the collectives that run on a backend. Parameter servers run on any backend.

        Raises `InputError` if no collective is left, or on an unknown backend.
        """
        if backend not in BACKENDS:
            raise unknown_name("backend", backend, BACKENDS)
        kept = {
            name: cost
            for name, cost in self.collectives.items()
            if name == PARAMETER_SERVER or carries_out(backend, name)
        }
        if not kept:
            expected = "ring" if backend == "any" else f"ring or {backend}"
            raise InputError(f"backend {backend}: the cluster has {', '.join(self.collectives)} (expected {expected})")
        return msgspec.structs.replace(
            self, collectives=kept, depths={name: costs for name, costs in self.depths.items() if name in kept}
        )

    @property
    def has_floors(self) -> bool:
        """Return whether some cost has a floor, so that the smallest message takes longer than alpha."""
        measured = (cost for costs in self.depths.values() for cost in costs.values())
        beside = [] if self.contention is None else [self.contention.delay, self.contention.overhead]
        return any(
            cost.startup_s > cost.alpha_s * (1 + _FITS) for cost in (*self.collectives.values(), *measured, *beside)
        )

    def at_floors(self) -> Cluster:
        """Return the cluster on which every message, whatever its size, takes only as long as the smallest message."""
        beside = self.contention
        if beside is not None:
            beside = msgspec.structs.replace(beside, delay=_flat(beside.delay), overhead=_flat(beside.overhead))
        return msgspec.structs.replace(
            self,
            collectives={name: _flat(cost) for name, cost in self.collectives.items()},
            depths={name: {d: _flat(cost) for d, cost in costs.items()} for name, costs in self.depths.items()},
            bandwidth_bps=None,
            contention=beside,
        )

    def least_costs(self) -> list[LinearCost]:
        """Return costs without floors; no message takes less time than the cheapest of these costs says.

        This holds for every collective and depth. Pipelining in chunks can hide only the reduction, and all-gathers
        reduce nothing. So each derived collective that can be pipelined also has a cost without reduction here.
        """
        costs = [*self.collectives.values(), *(cost for measured in self.depths.values() for cost in measured.values())]
        if self.bandwidth_bps is not None and self.latency_s is not None and self.reduce_s_per_byte > 0:
            terms = self.latency_s, 8 / self.bandwidth_bps, 0.0, self.sending_s
            hidden = (name for name in DIVIDED if name in self.collectives and name not in self.depths)
            costs += [LinearCost(*COLLECTIVES[name].cost(self.workers, *terms)) for name in hidden]
        return [LinearCost(cost.alpha_s, cost.beta_s_per_byte, points=cost.points) for cost in costs]
