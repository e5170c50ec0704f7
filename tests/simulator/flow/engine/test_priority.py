"""Links that serve the highest priority first: against a simulation that looks at everything, every time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine import LINKS, Service, built, graphs, naive, priorities_of, times
from support.rates import disturbances
from support.strategies import examples

from legato.simulator.flow.engine.fair import run_fair
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.network.disturbances import Profiles

levels = st.integers(-1, 1)


@given(graphs(priorities=levels))
@examples(200)
def test_the_engine_does_what_the_naive_one_does(services):
    graph = built(services)
    assert run_services(*graph, priority=priorities_of(services)) == len(services)
    assert times(graph) == naive(services, prioritized=True)


@given(graphs(priorities=levels), st.lists(disturbances(), max_size=4))
@examples(200)
def test_it_follows_rates_that_change_exactly(services, disturbed):
    graph = built(services)
    profiles = Profiles.of(disturbed, lambda kind, number: [number])
    found = profiles.of_services(graph.records["link"], [])
    assert run_services(*graph, found, priorities_of(services)) == len(services)
    assert times(graph) == naive(services, disturbed, prioritized=True)


@given(graphs(st.floats(0.001, 1.0), levels))
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
    services = [Service(0, 2.0, priority=2), Service(1, 2.0, befores=((0, True),), priority=2)]
    services += [Service(0, 3.0, priority=1), Service(1, 3.0, priority=1), Service(1, 1.0)]
    graph = built(services)
    assert run_fair(graph, np.ones(LINKS), priority=priorities_of(services)) == 5
    assert list(graph.records["end_s"]) == pytest.approx([2, 2, 5, 5, 6])


@given(graphs(priorities=levels))
@examples(60)
def test_with_equal_priorities_shared_fairly_nothing_changes(services):
    services = [service._replace(priority=7) for service in services]
    found, wanted = built(services), built(services)
    assert run_fair(found, np.ones(LINKS), priority=priorities_of(services)) == run_fair(wanted, np.ones(LINKS))
    assert (found.records["end_s"] == wanted.records["end_s"]).all()
