"""Hosts with links of their own speed: closed forms, scaling, and max-min fair rates against linear programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flows import ALPHA, BYTES, CLOSED_FORMS, COMPUTE, MANY, M, job, max_min_by_linear_programs, network
from support.strategies import examples

from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice
from legato.simulator.flow import FABRICS, Network, simulate_flow

N = 8


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.5])
def test_a_ring_is_as_slow_as_its_slowest_link(factor):
    """Every chunk of every step passes it, one after another, and the others wait for it."""
    net = Network(workers=N, bandwidth_bps=1e9, link_scale=(*[1.0] * (N - 1), factor))
    found = simulate_flow(job(), None, "ring", net, iterations=1).iteration_s
    assert found == pytest.approx(COMPUTE + 2 * (N - 1) / N * M * factor, rel=1e-12)


@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_a_slow_leaf_of_a_tree(factor):
    """One round of three is slow, up and down."""
    net = network(N, link_scale=(*[1.0] * (N - 1), factor))
    found = simulate_flow(job(), None, "tree", net, iterations=1).iteration_s
    assert found == pytest.approx(COMPUTE + 2 * (3 * ALPHA + (2 + factor) * M), rel=1e-12)


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_a_slow_link_behind_switches_that_help(sharing, factor):
    """In and out of the last worker at its own speed; what the switch has summed goes to the server at full speed."""
    net = network(N, link_scale=(*[1.0] * (N - 1), factor), sharing=sharing)
    found = simulate_flow(job(), None, "multicast+aggregation", net).iteration_s
    assert found == pytest.approx(COMPUTE + 2 * ALPHA + (2 * factor + 1) * M, rel=1e-9)


@pytest.mark.parametrize("times", [0.5, 4.0])
def test_a_faster_link_of_the_server(times):
    """Distribution and aggregation go at the server's pace, but for the M of a worker's own link at either end."""
    net = network(N, server_bandwidth_bps=times * 1e9)
    found = simulate_flow(job(), None, "parameter-server", net).iteration_s
    own, rest = (2 * M, (N - 1) * M / times) if times > 1 else (M / times, N * M / times)
    assert found == pytest.approx(COMPUTE + 2 * ALPHA + own + rest, rel=1e-12)


@pytest.mark.parametrize("name", FABRICS)
def test_all_links_k_times_as_slow_are_a_network_k_times_as_slow(name):
    every = Network(workers=N, bandwidth_bps=1e9, link_scale=(4.0,) * N, server_bandwidth_bps=0.25e9)
    slow = Network(workers=N, bandwidth_bps=0.25e9)
    found = [simulate_flow(MANY, None, name, net, iterations=2).end_s for net in (every, slow)]
    if name == "hierarchical":  # the links inside the hosts are others
        assert found[0] == pytest.approx(found[1])
    else:
        assert (found[0] == found[1]).all()


@pytest.mark.parametrize("name", FABRICS)
def test_a_slower_link_never_helps_a_message_alone(name):
    before = 0.0
    for factor in (1.0, 1.5, 4.0):
        found = simulate_flow(job(), None, name, network(N, link_scale=(*[1.0] * (N - 1), factor)), iterations=1)
        assert found.iteration_s >= before * (1 - 1e-12)
        before = found.iteration_s


def drained(routes, capacity, nbytes):
    """When flows that all begin at 0 end, with rates from linear programs."""
    left, now, ends = dict.fromkeys(range(len(routes)), nbytes), 0.0, {}
    while left:
        moving = list(left)
        rates = max_min_by_linear_programs([routes[f] for f in moving], capacity)
        step = min(left[f] / rate for f, rate in zip(moving, rates, strict=True))
        now += step
        for f, rate in zip(moving, rates, strict=True):
            left[f] -= rate * step
            if left[f] < nbytes * 1e-9:
                ends[f] = now
                del left[f]
    return [ends[f] for f in range(len(routes))]


@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 8.0]), min_size=1, max_size=4), st.sampled_from([0.5, 1.0, 2.0]))
@examples(25)
def test_fair_pushes_and_pulls_are_what_linear_programs_say(slowness, server):
    """All workers push M at once to a server whose link has a speed of its own; then it sends to all at once."""
    n = len(slowness)
    net = Network(
        workers=n, bandwidth_bps=1e9, link_scale=tuple(slowness), server_bandwidth_bps=server * 1e9, sharing="fair"
    )
    push = Message((Slice("w0", 0, BYTES),), kind="push")
    pull = Message((Slice("w0", 0, BYTES),), kind="pull")
    found = simulate_flow(job(forward=0.0), Plan("p", (push, pull), forward_overlap=True), "multicast", net)
    pulled = np.array([max(factor, 1 / server) for factor in slowness]).max() * M
    routes = [{w, n} for w in range(n)]
    # One multicast flow goes as fast as its slowest link, so that all begin to push at the same time.
    pushed = max(drained(routes, [125e6 / factor for factor in slowness] + [server * 125e6], BYTES))
    assert found.iteration_s == pytest.approx(pulled + 0.5 + pushed, rel=1e-6)


def test_planners_see_the_slowest_link():
    net = network(4, link_scale=(1.0, 1.0, 1.0, 2.0), server_bandwidth_bps=0.25e9)
    assert net.cluster("ring").bandwidth_bps == 0.5e9
    assert net.cluster("parameter-server", servers=1).bandwidth_bps == 0.25e9
    assert network(4).cluster("ring").bandwidth_bps == 1e9


@pytest.mark.parametrize(
    "options, words",
    [
        ({"link_scale": (1.0,)}, "link_scale: 1 factors"),
        ({"link_scale": (1.0, float("nan"))}, "link_scale: nan"),
        ({"link_scale": (1.0, 0.0)}, "link_scale: 0"),
        ({"server_bandwidth_bps": 0.0}, "server_bandwidth_bps: 0"),
    ],
)
def test_wrong_speeds(options, words):
    with pytest.raises(InputError, match=words):
        network(2, **options)


def test_closed_forms_know_no_slow_links():
    """The same closed form as everywhere, with factors that say nothing."""
    for name, form in CLOSED_FORMS.items():
        found = simulate_flow(job(), None, name, network(N, link_scale=(1.0,) * N)).iteration_s
        assert found == pytest.approx(form(N), rel=1e-12)
