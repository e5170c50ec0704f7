"""Disturbances: links and workers that are slower, or stand still, during a part of a simulation.

[Note: profiles] A *profile* is a step function of time: the factor by which a link or a worker is slower. Work of
`work_s` seconds that begins at b ends when the integral of 1 / factor from b on reaches `work_s`. Both engines follow
profiles from step to step, so no time is rounded. With a factor of 1, all times equal the times in an undisturbed
simulation to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from legato.core.errors import InputError, unknown_name
from legato.core.quantities import parse_seconds
from legato.simulator.flow.engine.services import NO_PROFILES, ServiceProfiles

__all__ = [
    "DISTURBED",
    "UNDISTURBED",
    "Disturbance",
    "Profile",
    "Profiles",
    "check_numbers",
    "parse_disturbances",
]

#: The kinds of things that can be disturbed: a worker's link, a server's link, the links of a leaf to its spines, a
#: spine, or a worker's computation.
DISTURBED = ("link", "server", "uplink", "spine", "compute")
#: The text that means no disturbances.
UNDISTURBED = "none"
#: The most disturbances. If links are shared fairly, all rates are computed again at every change of a link.
_MOST_DISTURBANCES = 10_000
_LARGEST_FACTOR = 1e6

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """A slowdown of one link or worker by `factor` from `start_s` to `end_s`; a factor of `math.inf` is a standstill.

    `kind` says what is slow: "link" (both directions of a worker's link), "server" (a server's link), "uplink" (all
    links between a leaf and its spines), "spine" (all links of a spine) or "compute" (a worker's computation). `number`
    is the number of the worker, server, leaf or spine; spines of a fat tree are numbered pod by pod. `start_s` and
    `end_s` count from the start of the simulation. The factors of several disturbances of the same link or worker are
    multiplied. Raises `InputError` on a value out of range.
    """

    kind: Literal["link", "server", "uplink", "spine", "compute"]
    number: int
    factor: float
    start_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if self.kind not in DISTURBED:
            raise unknown_name("disturbance", self.kind, DISTURBED)
        if self.number < 0:
            raise InputError(f"{self.kind}: {self.number} (expected a number of at least 0)")
        if not (1 <= self.factor <= _LARGEST_FACTOR or self.factor == math.inf):
            raise InputError(f"factor: {self.factor} (expected 1 to {_LARGEST_FACTOR:.0e}, or inf)")
        if not 0 <= self.start_s < self.end_s:
            raise InputError(f"{self.start_s} to {self.end_s} (expected 0 <= start_s < end_s)")
        if self.factor == self.end_s == math.inf:
            raise InputError(
                f"end_s: {self.end_s} (expected the moment at which {self.kind} {self.number} works again)"
            )


def parse_disturbances(text: str) -> tuple[Disturbance, ...]:
    """Parse disturbances from `KIND:NUMBER:FACTOR:FROM:TO,...`, such as `link:7:4:10ms:30ms`, or `none`.

    With the factor `fails`, the link or worker stands still. Without TO, the disturbance lasts until the end. Raises
    `InputError`.
    """
    found = []
    for part in [] if text.strip() == UNDISTURBED else text.split(","):
        try:
            kind, number, factor, start, *end = part.strip().split(":")
            (until,) = end or [""]
            values: dict[str, Any] = {"number": int(number), "factor": math.inf if factor == "fails" else float(factor)}
        except ValueError:
            raise InputError(f"disturb: {part.strip()!r} (expected something like link:7:4:10ms:30ms)") from None
        try:
            values |= {"start_s": parse_seconds(start), "end_s": parse_seconds(until) if until else math.inf}
            found.append(Disturbance(kind=cast(Any, kind), **values))
        except InputError as error:
            raise InputError(f"disturb: {part.strip()!r}: {error}") from None
    return tuple(found)


class Profile(NamedTuple):
    """A factor over time: `factor[k]` holds from `start_s[k]` until `start_s[k + 1]`; the last factor holds forever."""

    start_s: tuple[float, ...]
    factor: tuple[float, ...]

    @classmethod
    def of(cls, disturbances: Iterable[Disturbance]) -> Profile:
        """Return the profile of a link or a worker with these disturbances."""
        start_s: list[float] = []
        factors: list[float] = []
        disturbances = list(disturbances)
        moments = {0.0, *(t for one in disturbances for t in (one.start_s, one.end_s) if t < math.inf)}
        for moment in sorted(moments):
            factor = math.prod(one.factor for one in disturbances if one.start_s <= moment < one.end_s)
            if not factors or factor != factors[-1]:
                start_s.append(moment)
                factors.append(factor)
        return cls(tuple(start_s), tuple(factors))

    def end_s(self, begin_s: Times, work_s: Times) -> Times:
        """Return the ends of work that begins at `begin_s` and would take `work_s` undisturbed (arrays of one shape).

        Times are added in the same order as in `loop.served`, so both functions round alike.
        """
        at, left, ended = begin_s.copy(), work_s.copy(), np.full(begin_s.shape, np.nan)
        for k, factor in enumerate(self.factor):
            until = self.start_s[k + 1] if k + 1 < len(self.factor) else math.inf
            here = np.isnan(ended) & (at < until)
            done = here & (left <= (until - at) / factor)
            ended[done] = at[done] + (left[done] * factor if factor < math.inf else 0.0)
            going = here & ~done
            left[going] -= (until - at[going]) / factor
            at[going] = until
        return ended


@dataclass(frozen=True)
class Profiles:
    """The profiles of links, and of the computation of workers, by number in the network."""

    links: dict[int, Profile]
    compute: dict[int, Profile]

    @classmethod
    def of(cls, disturbances: Iterable[Disturbance], links_of: Callable[[str, int], Iterable[int]]) -> Profiles:
        """Return a profile for each disturbed link and worker. `links_of(kind, number)` returns the disturbed links."""
        links: dict[int, list[Disturbance]] = {}
        compute: dict[int, list[Disturbance]] = {}
        for one in disturbances:
            if one.factor == 1:
                continue
            if one.kind == "compute":
                compute.setdefault(one.number, []).append(one)
            else:
                for link in links_of(one.kind, one.number):
                    links.setdefault(link, []).append(one)
        return cls(*({number: Profile.of(these) for number, these in by.items()} for by in (links, compute)))

    def __bool__(self) -> bool:
        return bool(self.links or self.compute)

    def of_services(
        self, link: NDArray[np.int32], computing: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]]
    ) -> ServiceProfiles:
        """Return the profiles of services.

        `link` has the link of each service. Each pair in `computing` has two arrays: the ids of the services that
        compute, by [segment, rank], and the worker of each rank.
        """
        if not self:
            return NO_PROFILES
        profile_of = np.full(len(link), -1, np.int32)
        every = [*self.links.values(), *self.compute.values()]
        for p, number in enumerate(self.links):
            profile_of[link == number] = p
        for p, number in enumerate(self.compute, len(self.links)):
            for ids, workers in computing:
                profile_of[ids[:, workers == number]] = p
        first = np.cumsum([0, *(len(one.factor) for one in every)])
        start_s, factor = (np.array([x for one in every for x in one[part]]) for part in (0, 1))
        return ServiceProfiles(profile_of, first, start_s, factor)

    def changes(self) -> list[tuple[float, int, float]]:
        """Return (seconds, link, factor) of every change of a link, in order of time."""
        return sorted(
            (start, link, factor)
            for link, one in self.links.items()
            for start, factor in zip(one.start_s, one.factor, strict=True)
        )


def check_numbers(disturbances: Sequence[Disturbance], there: Mapping[str, int]) -> None:
    """Raise `InputError` on too many disturbances, or on one whose number is not below `there[kind]`."""
    if len(disturbances) > _MOST_DISTURBANCES:
        raise InputError(f"{len(disturbances):,} disturbances (expected at most {_MOST_DISTURBANCES:,})")
    for one in disturbances:
        if one.kind in there and one.number >= (count := there[one.kind]):
            expected = f"expected 0 to {count - 1}" if count else f"there is no {one.kind}"
            raise InputError(f"{one.kind}: {one.number} ({expected})")
