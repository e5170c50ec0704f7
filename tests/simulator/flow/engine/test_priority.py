"""Links that serve the highest priority first: against a simulation that looks at everything, every time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rates import disturbances, served
from support.strategies import examples

from legato.simulator.flow.engine.fair import run_fair
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.engine.services import NO_LINK
from legato.simulator.flow.network.disturbances import Profiles

LINKS = 3
#: Eighths, so that sums are exact and ties are many.
eighths = st.integers(0, 12).map(lambda n: n / 8)


@st.composite
def graphs(draw, seconds=eighths):
    """[(link, work_s, delay_s, key, priority, [(earlier service, cut through?)])]"""
    services = []
    for i in range(draw(st.integers(1, 25))):
        befores = draw(st.dictionaries(st.integers(0, i - 1), st.booleans(), max_size=3)) if i else {}
        link, priority = draw(st.integers(NO_LINK, LINKS - 1)), draw(st.integers(-1, 1))
        services.append(
            (link, draw(seconds), draw(seconds), draw(st.integers(0, 2)), priority, sorted(befores.items()))
        )
    return services


def built(services):
    graph = Graph()
    for link, work_s, delay_s, key, _, befores in services:
        (i,) = graph.add((1,), link=link, work_s=work_s, delay_s=delay_s, key=key)
        for before, cut in befores:
            graph.edge(np.array(before), i, cut_through=cut)
    return graph.freeze(LINKS)


def naive(services, disturbed=()):
    """(begin, end) of each: of all that could begin at the earliest moment, the one with the highest priority."""
    begin, end, free = {}, {}, [Fraction(0)] * LINKS

    def ready(i):
        return max(
            [(begin[b] if cut else end[b]) + Fraction(services[b][2]) for b, cut in services[i][5]],
            default=Fraction(0),
        )

    def order(i):
        link, _, _, key, priority, _ = services[i]
        return max(ready(i), free[link]), -priority, ready(i), key, i

    while len(end) < len(services):
        able = [i for i, s in enumerate(services) if i not in end and all(b in end for b, _ in s[5])]
        unlinked = [i for i in able if services[i][0] == NO_LINK]
        i = unlinked[0] if unlinked else min(able, key=order)
        link, work_s, *_, befores = services[i]
        begin[i] = ready(i) if link == NO_LINK else max(ready(i), free[link])
        stop = served(begin[i], Fraction(work_s), [one for one in disturbed if one.number == link])
        if link != NO_LINK:
            free[link] = stop
        tails = [end[b] + Fraction(services[b][2]) for b, cut in befores if cut]
        end[i] = max([stop, *tails])
    return [(begin[i], end[i]) for i in range(len(services))]


def priorities(services):
    return np.array([service[4] for service in services])


@given(graphs())
@examples(200)
def test_the_engine_does_what_the_naive_one_does(services):
    graph = built(services)
    assert run_services(*graph, priority=priorities(services)) == len(services)
    assert list(zip(graph.records["begin_s"], graph.records["end_s"], strict=True)) == naive(services)


@given(graphs(), st.lists(disturbances(), max_size=4))
@examples(200)
def test_it_follows_rates_that_change_exactly(services, disturbed):
    graph = built(services)
    profiles = Profiles.of(disturbed, lambda kind, number: [number])
    found = profiles.of_services(graph.records["link"], [])
    assert run_services(*graph, found, priorities(services)) == len(services)
    assert list(zip(graph.records["begin_s"], graph.records["end_s"], strict=True)) == naive(services, disturbed)


@given(graphs(seconds=st.floats(0.001, 1.0)))
@examples(100)
def test_with_equal_priorities_it_is_first_come_first_served(services):
    """To the last bit, where nothing happens at the same time by chance; what does, may be in another order."""
    found, wanted = built(services), built(services)
    assert run_services(*found, priority=np.zeros(len(services), np.int64)) == run_services(*wanted) == len(services)
    waits = [wanted.records["begin_s"][wanted.records["link"] == link] for link in range(LINKS)]
    if all(len(set(times)) == len(times) for times in waits):
        assert (found.records["begin_s"] == wanted.records["begin_s"]).all()
        assert (found.records["end_s"] == wanted.records["end_s"]).all()


def test_a_circle_never_runs():
    graph = Graph()
    ids = graph.add((3,), work_s=1.0, link=0)
    graph.edge(ids[1:], ids[:-1])
    graph.edge(ids[0], ids[1])
    assert run_services(*graph.freeze(1), priority=np.arange(3)) == 1


def test_what_is_left_is_shared_by_those_with_lower_priorities():
    """Links of 1 byte a second. The urgent flow has 2 bytes for both links; the others, 3 bytes for one of them each,
    and a third one, of the lowest priority, wants the second link, too."""
    services = [(0, 2.0, 0.0, 0, 2, []), (1, 2.0, 0.0, 0, 2, [(0, True)])]
    services += [(0, 3.0, 0.0, 0, 1, []), (1, 3.0, 0.0, 0, 1, []), (1, 1.0, 0.0, 0, 0, [])]
    graph = built(services)
    assert run_fair(graph, np.ones(LINKS), priority=priorities(services)) == 5
    assert list(graph.records["end_s"]) == pytest.approx([2, 2, 5, 5, 6])


@given(graphs())
@examples(60)
def test_with_equal_priorities_shared_fairly_nothing_changes(services):
    services = [(*service[:4], 7, service[5]) for service in services]
    found, wanted = built(services), built(services)
    assert run_fair(found, np.ones(LINKS), priority=priorities(services)) == run_fair(wanted, np.ones(LINKS))
    assert (found.records["end_s"] == wanted.records["end_s"]).all()
