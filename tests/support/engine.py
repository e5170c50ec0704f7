"""Services, and when they run: a naive engine that looks at all of them every time, in fractions."""

from fractions import Fraction
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.services import NO_LINK
from support.rates import served

LINKS = 3
#: Eighths, so that sums are exact and ties are many.
eighths = st.integers(0, 12).map(lambda n: n / 8)
NONE = st.just(0)


class Service(NamedTuple):
    """A service; `befores` are those that it waits for: (which, whether it cuts through)."""

    link: int
    work_s: float
    delay_s: float = 0.0
    key: int = 0
    befores: tuple[tuple[int, bool], ...] = ()
    priority: int = 0


@st.composite
def graphs(draw, seconds=eighths, priorities=NONE):
    """Up to 25 services, each of which waits for earlier ones."""
    services = []
    for i in range(draw(st.integers(1, 25))):
        befores = draw(st.dictionaries(st.integers(0, i - 1), st.booleans(), max_size=3)) if i else {}
        link, key = draw(st.integers(NO_LINK, LINKS - 1)), draw(st.integers(0, 2))
        services.append(
            Service(link, draw(seconds), draw(seconds), key, tuple(sorted(befores.items())), draw(priorities))
        )
    return services


def built(services):
    graph = Graph()
    for link, work_s, delay_s, key, befores, _ in services:
        (i,) = graph.add((1,), link=link, work_s=work_s, delay_s=delay_s, key=key)
        for before, cut in befores:
            graph.edge(np.array(before), i, cut_through=cut)
    return graph.freeze(LINKS)


def priorities_of(services):
    return np.array([service.priority for service in services])


def times(graph):
    """(begin, end) of each service that has run."""
    return list(zip(graph.records["begin_s"], graph.records["end_s"], strict=True))


def naive(services, on_links=(), computing=(), prioritized=False):
    """(begin, end) of each: first come, first served, or of all that could begin earliest, the one that goes first.

    Disturbances are those `on_links`, and of what is `computing`: of all services on no link.
    """
    begin, end, free = {}, {}, [Fraction(0)] * LINKS

    def ready(i):
        return max(
            [(begin[b] if cut else end[b]) + Fraction(services[b].delay_s) for b, cut in services[i].befores],
            default=Fraction(0),
        )

    def in_turn(i):
        return ready(i), services[i].key, i

    def by_priority(i):
        return max(ready(i), free[services[i].link]), -services[i].priority, ready(i), services[i].key, i

    while len(end) < len(services):
        able = [i for i, s in enumerate(services) if i not in end and all(b in end for b, _ in s.befores)]
        unlinked = [i for i in able if services[i].link == NO_LINK]
        i = unlinked[0] if unlinked else min(able, key=by_priority if prioritized else in_turn)
        one = services[i]
        begin[i] = ready(i) if one.link == NO_LINK else max(ready(i), free[one.link])
        these = computing if one.link == NO_LINK else [d for d in on_links if d.number == one.link]
        stop = served(begin[i], Fraction(one.work_s), these)
        if one.link != NO_LINK:
            free[one.link] = stop
        tails = [end[b] + Fraction(services[b].delay_s) for b, cut in one.befores if cut]
        end[i] = max([stop, *tails])
    return [(begin[i], end[i]) for i in range(len(services))]
