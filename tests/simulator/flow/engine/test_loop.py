"""The engines against slower ones that are written differently."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.flows import max_min_by_linear_programs
from support.strategies import examples

from legato.simulator.flow.engine.fair import fair_rates, run_fair
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.engine.services import NO_LINK

LINKS = 3
#: Eighths, so that sums are exact and ties are many.
eighths = st.integers(0, 12).map(lambda n: n / 8)


@st.composite
def graphs(draw):
    """[(link, work_s, delay_s, key, [(earlier service, cut through?)])]"""
    services = []
    for i in range(draw(st.integers(1, 25))):
        befores = draw(st.dictionaries(st.integers(0, i - 1), st.booleans(), max_size=3)) if i else {}
        link = draw(st.integers(NO_LINK, LINKS - 1))
        services.append((link, draw(eighths), draw(eighths), draw(st.integers(0, 2)), sorted(befores.items())))
    return services


def built(services):
    graph = Graph()
    for link, work_s, delay_s, key, befores in services:
        (i,) = graph.add((1,), link=link, work_s=work_s, delay_s=delay_s, key=key)
        for before, cut in befores:
            graph.edge(np.array(before), i, cut_through=cut)
    return graph.freeze(LINKS)


def naive(services):
    """(begin, end) of each, by looking at everything, every time."""
    begin, end, free = {}, {}, [Fraction(0)] * LINKS

    def ready(i):
        return (
            max(
                (begin[b] if cut else end[b]) + Fraction(services[b][2])
                for b, cut in [*services[i][4], (None, 0)]
                if b is not None
            )
            if services[i][4]
            else Fraction(0)
        )

    while len(end) < len(services):
        able = [i for i, s in enumerate(services) if i not in end and all(b in end for b, _ in s[4])]
        unlinked = [i for i in able if services[i][0] == NO_LINK]
        i = unlinked[0] if unlinked else min(able, key=lambda i: (ready(i), services[i][3], i))
        link, work_s, _, _, befores = services[i]
        begin[i] = ready(i) if link == NO_LINK else max(ready(i), free[link])
        if link != NO_LINK:
            free[link] = begin[i] + Fraction(work_s)
        tails = [end[b] + Fraction(services[b][2]) for b, cut in befores if cut]
        end[i] = max([begin[i] + Fraction(work_s), *tails])
    return [(begin[i], end[i]) for i in range(len(services))]


@given(graphs())
@example([(NO_LINK, 0.0, 0.0, 1, []), (0, 0.0, 0.0, 0, []), (0, 1 / 8, 0.0, 0, [(0, False)]), (0, 0.0, 0.0, 0, [])])
@examples(150)
def test_the_engine_does_what_the_naive_one_does(services):
    graph = built(services)
    assert run_services(*graph) == len(services)
    found = list(zip(graph.records["begin_s"], graph.records["end_s"], strict=True))
    assert found == naive(services)


def test_a_circle_never_runs():
    graph = Graph()
    ids = graph.add((3,), work_s=1.0)
    graph.edge(ids[1:], ids[:-1])
    graph.edge(ids[0], ids[1])
    assert run_services(*graph.freeze(0)) == 1


@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=4, max_size=4),
)
@examples(60)
def test_fair_rates_are_max_min_fair(routes, capacity):
    first = np.cumsum([0, *map(len, routes)])
    links = np.array([link for route in routes for link in sorted(route)])
    found = fair_rates(links, first, np.array(capacity, dtype=float), np.empty(0, np.int64))
    assert found == pytest.approx(max_min_by_linear_programs(routes, capacity), rel=1e-6)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6),
    st.lists(st.integers(1, 8), min_size=4, max_size=4),
)
@examples(60)
def test_weighted_rates_are_max_min_fair(routes, capacity):
    first = np.cumsum([0, *(len(set(route)) for route in routes)])
    links = np.array([link for route in routes for link in sorted(set(route))])
    weight = np.array([route.count(link) for route in routes for link in sorted(set(route))])
    found = fair_rates(links, first, np.array(capacity, dtype=float), weight)
    assert found == pytest.approx(max_min_by_linear_programs(routes, capacity), rel=1e-6)


def test_a_flow_that_takes_a_link_three_times():
    """Links of 1 byte a second. The flow of 2 bytes takes 3/4 of the first link, so it moves at 1/4 until 4, when the
    other one, of 1 byte, has ended; then its last byte at 1/3."""
    graph = built([(0, 2.0, 0, 0, []), (1, 2.0, 0, 0, [(0, True)]), (0, 1.0, 0, 0, [])])
    assert run_fair(graph, np.ones(LINKS), weight=np.array([3, 2, 1])) == 3
    assert list(graph.records["end_s"]) == pytest.approx([7, 7, 4])


def test_two_flows_share_a_link_and_the_one_left_takes_it_all():
    """Links of 1 byte a second. 6 bytes at 0 and 2 bytes at 1: halves from 1 on, so the second ends at 5, the first,
    with 3 left then, at 8."""
    graph = built([(0, 6.0, 0, 0, []), (NO_LINK, 1.0, 0, 0, []), (0, 2.0, 0, 0, [(1, False)])])
    assert run_fair(graph, np.ones(LINKS)) == 3
    assert list(graph.records["end_s"]) == pytest.approx([8, 1, 5])


@given(graphs())
@examples(50)
def test_shared_fairly_no_link_carries_more_than_it_can(services):
    """A cut-through group is one flow; alone on its links, every order of service is the fair one."""
    graph = built([(i if i < LINKS else NO_LINK, *rest) for i, (_, *rest) in enumerate(services)])
    alone = built([(i if i < LINKS else NO_LINK, *rest) for i, (_, *rest) in enumerate(services)])
    if any(cut for _, _, _, _, befores in services for _, cut in befores):
        return  # groups of services of different lengths move together only under fair sharing
    assert run_fair(graph, np.ones(LINKS)) == run_services(*alone) == len(services)
    assert graph.records["end_s"] == pytest.approx(alone.records["end_s"])
