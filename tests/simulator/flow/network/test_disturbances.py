"""Links and workers that are slower for a while: an independent simulation in fractions, and closed forms."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine import LINKS, Service, built, graphs, naive, times
from support.flows import ALPHA, BACKWARD, BYTES, COMPUTE, FORWARD, MANY, M, gradient_s, hosts_of, job, network
from support.rates import disturbances, eighths, served
from support.strategies import examples

from legato.core.errors import InputError
from legato.simulator.flow import FABRICS, Disturbance, Network, simulate_flow
from legato.simulator.flow.engine.fair import run_fair
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.engine.services import NO_LINK
from legato.simulator.flow.network.disturbances import Profile, Profiles


@given(graphs(), st.lists(disturbances(), max_size=4), st.lists(disturbances("compute"), max_size=3))
@examples(200)
def test_the_engine_follows_rates_that_change_exactly(services, on_links, computing):
    graph = built(services)
    profiles = Profiles.of([*on_links, *(replace(d, number=0) for d in computing)], lambda kind, number: [number])
    ids = np.flatnonzero(graph.records["link"] == NO_LINK)[:, None]
    found = profiles.of_services(graph.records["link"], [(ids, np.zeros(1, np.int64))])
    assert run_services(*graph, found) == len(services)
    assert times(graph) == naive(services, on_links, computing)


@given(st.lists(disturbances(), max_size=4), st.lists(st.tuples(eighths, eighths), min_size=1, max_size=6))
@example([Disturbance(kind="compute", number=0, factor=math.inf, start_s=1.0, end_s=2.0)], [(1.0, 0.0), (1.0, 1.0)])
@examples(100)
def test_the_times_of_ops_are_those_of_the_engine(these, work):
    begin, work = (np.array(column) for column in zip(*work, strict=True))
    found = Profile.of(these).end_s(begin, work)
    assert list(found) == [served(Fraction(b), Fraction(w), these) for b, w in zip(begin, work, strict=True)]


@given(graphs(), st.lists(disturbances(), max_size=3))
@examples(60)
def test_alone_on_its_link_a_transfer_that_shares_fairly_takes_as_long_as_in_turn(services, these):
    """One service a link, none cut through: there is nothing to share."""
    services = [
        one._replace(link=i if i < LINKS else NO_LINK, befores=tuple((b, False) for b, _ in one.befores))
        for i, one in enumerate(services)
    ]
    fair, fifo = built(services), built(services)
    profiles = Profiles.of(these, lambda kind, number: [number])
    found = profiles.of_services(fair.records["link"], [])
    assert run_fair(fair, np.ones(LINKS), found, profiles.changes()) == len(services)
    assert run_services(*fifo, found) == len(services)
    assert fair.records["end_s"] == pytest.approx(fifo.records["end_s"])


def test_two_flows_share_a_link_that_fails_for_a_while():
    """6 and 2 bytes at 0 on a link of 1 byte a second that fails from 2 to 5 and is halved from 6 to 8: halves make 1
    byte each until 2, the second ends with half a byte more until 6, and half of that in the half rate ends it at 8;
    then the first has 6 - 1 - 0.5 - 0.5 = 4 left."""
    graph = built([Service(0, 6.0), Service(0, 2.0)])
    these = [
        Disturbance(kind="link", number=0, factor=math.inf, start_s=2.0, end_s=5.0),
        Disturbance(kind="link", number=0, factor=2.0, start_s=6.0, end_s=8.0),
    ]
    profiles = Profiles.of(these, lambda kind, number: [number])
    run_fair(graph, np.ones(LINKS), profiles.of_services(graph.records["link"], []), profiles.changes())
    assert list(graph.records["end_s"]) == pytest.approx([12.0, 8.0])


SHARING = ["fifo", "fair"]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", FABRICS)
def test_a_factor_of_one_changes_nothing(name, sharing):
    quiet = network(4, sharing=sharing, **hosts_of(2, name))
    kinds = ["link", "compute"] + ["server"] * bool(FABRICS[name].servers)
    ones = tuple(Disturbance(kind=kind, number=0, factor=1.0, start_s=1e-5, end_s=1e-4) for kind in kinds)
    found = simulate_flow(MANY, None, name, replace(quiet, disturbances=ones), iterations=2)
    wanted = simulate_flow(MANY, None, name, quiet, iterations=2)
    assert (found.end_s == wanted.end_s).all() and (found.received_s == wanted.received_s).all()


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("kind, field", [("link", "link_scale"), ("compute", "compute_scale")])
def test_slower_all_the_time_is_slower(name, sharing, kind, field):
    """A factor that is a power of two rounds nothing."""
    quiet = network(4, sharing=sharing, **hosts_of(2, name))
    always = replace(quiet, disturbances=(Disturbance(kind=kind, number=2, factor=4.0),))
    found = simulate_flow(MANY, None, name, always, iterations=2)
    last = 4.0 if kind == "link" and quiet.gpus_per_card > 1 else 1.0  # on the same card
    wanted = simulate_flow(MANY, None, name, replace(quiet, **{field: (1.0, 1.0, 4.0, last)}), iterations=2)
    assert (found.end_s == wanted.end_s).all() and (gradient_s(found) == gradient_s(wanted)).all()
    assert found.utilization == pytest.approx(wanted.utilization)


def test_a_server_and_an_uplink_that_are_slow():
    """A server whose link is 8 times as slow all the time; and racks whose uplinks are."""
    slow = replace(network(4), disturbances=(Disturbance(kind="server", number=0, factor=8.0),))
    wanted = replace(network(4), server_bandwidth_bps=1e9 / 8)
    found = [simulate_flow(MANY, None, "parameter-server", net).iteration_s for net in (slow, wanted)]
    assert found[0] == found[1]
    both = tuple(Disturbance(kind="uplink", number=rack, factor=8.0) for rack in (0, 1))
    slow = replace(network(4, racks=2), disturbances=both)
    found = [
        simulate_flow(MANY, None, "ring", net, iterations=1).iteration_s
        for net in (slow, network(4, racks=2, oversubscription=8))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("at, passed", [(0.1, 0.0), (BACKWARD + M / 4, 1.0), (COMPUTE + 3 * M, 0.0)])
def test_a_link_that_fails_for_a_while_delays_what_is_on_it(sharing, at, passed):
    """A ring of two carries M/2 twice after the backward pass: a failure of 5 ms delays it if it falls into this."""
    for worker in (0, 1):
        failure = Disturbance(kind="link", number=worker, factor=math.inf, start_s=at, end_s=at + 5e-3)
        net = network(2, sharing=sharing, disturbances=(failure,))
        found = simulate_flow(job(), None, "ring", net)
        assert found.iterations == 1
        assert found.iteration_s == pytest.approx(COMPUTE + 2 * ALPHA + M + passed * 5e-3, rel=1e-9)


def test_a_straggler_that_comes_and_goes():
    """Half speed from 0.1 s to 0.3 s, in the backward pass, costs 0.1 s; its gradient and its spans say so too."""
    net = network(2, disturbances=(Disturbance(kind="compute", number=0, factor=2.0, start_s=0.1, end_s=0.3),))
    found = simulate_flow(job((BYTES, BYTES)), None, "ring", net)
    assert gradient_s(found)[0] == pytest.approx(np.array([[0.35, 0.6], [0.25, 0.5]]))
    assert found.computation_s == pytest.approx(COMPUTE + 0.1)
    spans = [span for span in found.timeline([0]).spans if span.kind == "backward"]
    assert [t for span in spans for t in (span.start_s, span.end_s)] == pytest.approx([0.0, 0.35, 0.35, 0.6])
    assert found.end_s[0] == pytest.approx(0.6 + M + 2 * ALPHA + FORWARD)


@given(st.lists(disturbances(), max_size=3), st.lists(disturbances("compute"), max_size=2), st.sampled_from(SHARING))
@examples(30)
def test_disturbances_never_help_a_message_alone(on_links, computing, sharing):
    """With one message there is nothing that could overtake."""
    these = tuple(
        replace(d, start_s=d.start_s / 2, end_s=d.end_s / 2) for d in (*on_links, *computing)
    )  # an iteration of a bit more than a second
    quiet = network(2, sharing=sharing)
    disturbed = replace(quiet, disturbances=these)
    before = simulate_flow(job(), None, "tree", quiet, iterations=1).iteration_s
    after = simulate_flow(job(), None, "tree", disturbed, iterations=1).iteration_s
    assert before * (1 - 1e-9) <= after


@pytest.mark.parametrize(
    "values, words",
    [
        ({"kind": "switch"}, "disturbance"),
        ({"number": -1}, "link: -1"),
        ({"factor": 0.5}, "factor: 0.5"),
        ({"factor": math.nan}, "factor: nan"),
        ({"factor": math.inf}, "works again"),
        ({"start_s": -1.0}, "-1.0 to inf"),
        ({"start_s": 2.0, "end_s": 2.0}, "2.0 to 2.0"),
        ({"end_s": math.nan}, "0.0 to nan"),
    ],
)
def test_impossible_disturbances_are_refused(values, words):
    with pytest.raises(InputError, match=words):
        Disturbance(**({"kind": "link", "number": 0, "factor": 2.0} | values))


def test_what_is_not_there_cannot_be_disturbed():
    for kind, number, words in (("link", 4, "0 to 3"), ("compute", 4, "0 to 3"), ("uplink", 0, "there is no uplink")):
        with pytest.raises(InputError, match=f"{kind}: {number} .*{words}"):
            network(4, disturbances=(Disturbance(kind=kind, number=number, factor=2.0),))
    one = Disturbance(kind="server", number=1, factor=2.0)
    for fabric in ("ring", "parameter-server"):
        with pytest.raises(InputError, match="server: 1"):
            simulate_flow(job(), None, fabric, network(4, disturbances=(one,)))
    with pytest.raises(InputError, match="10,001 disturbances"):
        Network(workers=2, bandwidth_bps=1e9, disturbances=(replace(one, kind="link"),) * 10_001)
