"""The engines against slower ones that are written differently."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine import LINKS, Service, built, graphs, naive, times
from support.flows import max_min_by_linear_programs
from support.strategies import examples

from legato.simulator.flow.engine.fair import fair_rates, run_fair
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.engine.services import NO_LINK


@given(graphs())
@example([Service(NO_LINK, 0.0, key=1), Service(0, 0.0), Service(0, 1 / 8, befores=((0, False),)), Service(0, 0.0)])
@examples(150)
def test_the_engine_does_what_the_naive_one_does(services):
    graph = built(services)
    assert run_services(*graph) == len(services)
    assert times(graph) == naive(services)


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
    graph = built([Service(0, 2.0), Service(1, 2.0, befores=((0, True),)), Service(0, 1.0)])
    assert run_fair(graph, np.ones(LINKS), weight=np.array([3, 2, 1])) == 3
    assert list(graph.records["end_s"]) == pytest.approx([7, 7, 4])


def test_two_flows_share_a_link_and_the_one_left_takes_it_all():
    """Links of 1 byte a second. 6 bytes at 0 and 2 bytes at 1: halves from 1 on, so the second ends at 5, the first,
    with 3 left then, at 8."""
    graph = built([Service(0, 6.0), Service(NO_LINK, 1.0), Service(0, 2.0, befores=((1, False),))])
    assert run_fair(graph, np.ones(LINKS)) == 3
    assert list(graph.records["end_s"]) == pytest.approx([8, 1, 5])


@given(graphs())
@examples(50)
def test_shared_fairly_no_link_carries_more_than_it_can(services):
    """A cut-through group is one flow; alone on its links, every order of service is the fair one."""
    services = [one._replace(link=i if i < LINKS else NO_LINK) for i, one in enumerate(services)]
    graph, alone = built(services), built(services)
    if any(cut for one in services for _, cut in one.befores):
        return  # groups of services of different lengths move together only under fair sharing
    assert run_fair(graph, np.ones(LINKS)) == run_services(*alone) == len(services)
    assert graph.records["end_s"] == pytest.approx(alone.records["end_s"])
