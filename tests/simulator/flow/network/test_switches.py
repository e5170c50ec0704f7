"""Hosts with several GPUs, and switches above them: an oracle, closed forms, bytes on every link, and ECMP's luck."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.flows import (
    BACKWARD,
    BYTES,
    COMPUTE,
    FORWARD,
    MANY,
    M,
    gradient_s,
    job,
    max_min_by_linear_programs,
    network,
)
from support.oracle import Plant, arrivals, hashed
from support.strategies import examples

from legato.core.errors import InputError, TooLargeError
from legato.simulator.flow import FABRICS, Disturbance, Network, fabric, simulate_flow
from legato.simulator.flow.engine.fair import run_fair
from legato.simulator.flow.engine.graph import Graph
from legato.simulator.flow.engine.loop import run_services
from legato.simulator.flow.iterations.run import check_flow, compile_flow
from legato.simulator.flow.network.topology import Topology
from legato.simulator.flow.shared.placement import Placed

#: One byte takes an eighth of a second, so that all sums of the oracle are exact in 64 bits, and many times coincide.
BPS = 64.0


@st.composite
def networks(draw):
    """A network of every kind; the ratios are powers of two, so that its times are exact."""
    kind = draw(st.sampled_from(["leaf-spine", "fat-tree", "rails", "rail-only"]))
    ratios = st.sampled_from([1.0, 2.0, 4.0])
    gpus, per_card, workers = draw(st.sampled_from([(1, 1, 8), (4, 1, 16), (4, 2, 16), (2, 2, 8)]))
    if kind == "fat-tree":
        more = {"ports": draw(st.sampled_from([None, 4, 8])), "core_oversubscription": draw(ratios)}
    elif kind == "leaf-spine":
        racks = draw(st.sampled_from([1, 2, 4]))
        more = {"racks": racks, "spines": draw(st.sampled_from([1, 2, 4])) if racks > 1 else 1}
    else:
        assume(gpus > per_card)
        more = {"spines": 0 if kind == "rail-only" else draw(st.sampled_from([1, 2, 4]))}
    ports = more.get("ports")
    assume(ports is None or ports**3 // 4 >= workers // per_card)
    latency_s = draw(st.sampled_from([0.0, 0.25]))
    return Network(
        workers=workers,
        bandwidth_bps=BPS,
        local_bandwidth_bps=draw(st.sampled_from([BPS, 4 * BPS])),
        server_bandwidth_bps=draw(st.sampled_from([None, BPS / 2])),
        latency_s=latency_s,
        send_s=draw(st.sampled_from([0.0, latency_s / 2])),
        gpus_per_host=gpus,
        gpus_per_card=per_card,
        topology="rails" if kind == "rail-only" else kind,
        oversubscription=draw(ratios),
        balance=draw(st.sampled_from(["ecmp", "spray"])),
        cut_through=draw(st.booleans()),
        seed=draw(st.integers(0, 2**63 - 1)),
        **more,
    )


def built(net, servers):
    return Topology(Graph(), net, net.workers, servers, net.host_shape)


@given(networks(), st.data())
@examples(200)
def test_the_engine_does_what_the_oracle_does(net, data):
    """Random transfers between workers and servers, ready at random times; keys decide between those that are ready."""
    ends, servers = net.workers + 2, 2
    pairs = st.tuples(st.integers(0, ends - 1), st.integers(0, ends - 1))
    chosen = data.draw(st.lists(pairs.filter(lambda p: p[0] != p[1] and min(p) < net.workers), min_size=1, max_size=12))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=len(chosen), max_size=len(chosen)))
    ready_s = data.draw(st.lists(st.integers(0, 8).map(lambda n: n / 4), min_size=len(chosen), max_size=len(chosen)))
    keys = data.draw(st.permutations(range(len(chosen))))
    topology = built(net, servers)
    source, target = np.array(chosen).T
    begins = topology.graph.add((len(chosen),), work_s=np.array(ready_s))
    sent = topology.send(source, target, np.array(sizes, float), [begins], key=np.array(keys))
    services = topology.graph.freeze(topology.num_links)
    assert run_services(*services) == len(services.records)
    transfers = [(*p, n, r, k) for p, n, r, k in zip(chosen, sizes, ready_s, keys, strict=True)]
    assert services.records["end_s"][sent].tolist() == pytest.approx(
        [float(t) for t in arrivals(Plant(net), transfers)], rel=1e-12
    )


@given(networks(), st.data())
@examples(60)
def test_fair_shares_are_what_linear_programs_say(net, data):
    """Transfers that all begin at once: rates on the oracle's routes, at the oracle's speeds."""
    net = replace(net, cut_through=True, latency_s=0.0, send_s=0.0)
    pairs = st.tuples(st.integers(0, net.workers - 1), st.integers(0, net.workers - 1))
    chosen = data.draw(st.lists(pairs.filter(lambda p: p[0] != p[1]), min_size=1, max_size=6, unique=True))
    topology, plant = built(net, 0), Plant(net)
    source, target = np.array(chosen).T
    sent = topology.send(source, target, np.full(len(chosen), 4.0), [], key=np.arange(len(chosen)))
    services = topology.graph.freeze(topology.num_links)
    assert run_fair(services, topology.s_per_byte()) == len(services.records)
    routes = [plant.route(*p) for p in chosen]
    names = sorted({link for route in routes for link in route}, key=str)
    capacity = [float(1 / plant.seconds(link, 1)) for link in names]
    rates = max_min_by_linear_programs([{names.index(link) for link in route} for route in routes], capacity)
    # The first one to end has had its rate all along.
    assert services.records["end_s"][sent].min() == pytest.approx(4 / max(rates), rel=1e-6)


def names_of_links(net, servers, topology):
    """{number of a link: its name, as the oracle has it}, of all links between hosts."""
    plant, names = Plant(net), {}
    everyone = range(net.workers + servers)
    for source in everyone:
        for target in everyone:
            if source != target and min(source, target) < net.workers:
                for flow in ((source, target), (source, source), (target, target)):
                    routes = topology._routes(np.array([source]), np.array([target]), flow)
                    links = [int(routes.first[0]), *np.ravel(routes.between), int(routes.last[0])]
                    links = [int(link) for link in links if link >= 0]
                    named = plant.route(source, target, flow)
                    assert len(links) == len(named)
                    for link, name in zip(links, named, strict=True):
                        assert names.setdefault(link, name) == name
    assert len(set(names.values())) == len(names)
    return names


def bytes_on(net, servers, records, topology):
    """{name of a link, as the oracle has it: the bytes that it carried}, of links that carried any."""
    names, found = names_of_links(net, servers, topology), Counter()
    for link, work_s in zip(records["link"].tolist(), records["work_s"].tolist(), strict=True):
        if link >= 0:
            found[names[link]] += work_s / topology.s_per_byte()[link]
    return found


@given(networks(), st.booleans())
@examples(40)
def test_each_link_of_a_multicast_or_an_aggregation_carries_the_bytes_once(net, up):
    """On the links of the oracle's routes to or from the server, and on no others."""
    net = replace(net, send_s=0.0)
    topology = built(net, 1)
    server, ranks = topology.server(0), topology.ranks
    if up:
        after = topology.graph.add((1, net.workers))
        last = topology.aggregate(ranks, np.array([server]), np.array([8.0]), after, key=[0], cut_through=True)
    else:
        last = topology.multicast(np.array([server]), ranks, np.array([8.0]), [topology.graph.add((1,))], key=[0])
    services = topology.graph.freeze(topology.num_links)
    assert run_services(*services) == len(services.records)
    found = bytes_on(net, 1, services.records, topology)
    plant, root = Plant(net), net.workers
    routes = [plant.route(w, root, (root, root)) if up else plant.route(root, w, (root, root)) for w in ranks.tolist()]
    assert set(found) == {link for route in routes for link in route}
    assert set(found.values()) == {8.0}
    # With no one else on the network, it is as late as the slowest of its routes.
    slowest = max(sum(plant.seconds(link, 8) for link in route) for route in routes)
    assert services.records["end_s"][last].max() <= float(slowest + Fraction(net.latency_s)) + 1e-9


@given(networks(), st.data())
@examples(60)
def test_the_transfers_of_a_job_take_the_routes_of_its_hosts(net, data):
    """Wherever its workers are, and with servers of its own behind those of another job."""
    hosts = data.draw(st.permutations(range(net.workers)))[: data.draw(st.integers(2, net.workers))]
    other, own, seed = 2, 1, data.draw(st.integers(0, 2**40))
    topology = Placed(Graph(), net, hosts, servers=own, first_server=other, all_servers=other + own, seed=seed)
    place = [*hosts, net.workers + other]
    ends = st.integers(0, len(hosts))
    chosen = data.draw(st.lists(st.tuples(ends, ends).filter(lambda p: p[0] != p[1]), min_size=1, max_size=8))
    source, target = np.array(chosen).T
    sent = topology.send(source, target, np.full(len(chosen), 4.0), [], key=np.arange(len(chosen)))
    services = topology.graph.freeze(topology.num_links)
    assert run_services(*services) == len(services.records)
    transfers = [(place[a], place[b], 4, 0.0, key) for key, (a, b) in enumerate(chosen)]
    assert services.records["end_s"][sent].tolist() == pytest.approx(
        [float(t) for t in arrivals(Plant(replace(net, seed=seed)), transfers)], rel=1e-12
    )


@given(networks())
@examples(60)
def test_what_a_disturbance_of_a_switch_disturbs(net):
    """All links of a leaf to its spines, or all of a spine; each of those between switches belongs to one of each."""
    topology, switches = built(net, 2), net.switches
    names = names_of_links(net, 2, topology)
    above = {name for name in names.values() if name[0] in ("up", "down", "to core", "from core")}
    per_pod = {"fat-tree": switches.num_ports // 2}.get(net.topology, switches.num_leaves)
    by_leaf, by_spine = [], []
    for leaf in range(switches.num_leaves):
        found = {names[link] for link in topology.links_of("uplink", leaf) if link in names}
        assert found == {name for name in above if name[0] in ("up", "down") and name[1] == leaf}
        by_leaf += topology.links_of("uplink", leaf)
    for number in range(switches.num_spines):
        pod, spine = divmod(number, switches.num_spines // max(1, switches.num_leaves // max(1, per_pod)))
        found = {names[link] for link in topology.links_of("spine", number) if link in names}
        assert found == {
            name
            for name in above
            if name[2] == spine and (name[1] // per_pod if name[0] in ("up", "down") else name[1]) == pod
        }
        by_spine += topology.links_of("spine", number)
    first = 4 * (net.workers + 2)
    assert sorted(by_spine) == list(range(first, topology.num_links))
    assert len(set(by_leaf)) == len(by_leaf) and set(by_leaf) <= set(by_spine)


SWITCHED = {
    "leaf-spine": {"racks": 4, "spines": 2},
    "fat-tree": {"topology": "fat-tree", "core_oversubscription": 2.0},
    "rails": {"topology": "rails", "gpus_per_host": 4},
    "rail-only": {"topology": "rails", "gpus_per_host": 4, "spines": 0},
    "shared cards": {"gpus_per_host": 4, "gpus_per_card": 2, "racks": 2, "spines": 3, "balance": "spray"},
}


@pytest.mark.parametrize("kind", SWITCHED)
@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_every_fabric_runs_on_every_topology(kind, name, sharing):
    """Nothing is summed before its gradient is there, on any worker, and a network without limits is not slower."""
    net = network(16, **SWITCHED[kind], sharing=sharing)
    found = simulate_flow(MANY, None, name, net, iterations=2)
    assert (found.aggregated_s >= gradient_s(found).max(axis=1)).all() and (np.diff(found.end_s) > 0).all()
    free = replace(net, bandwidth_bps=1e15, local_bandwidth_bps=1e15)
    assert simulate_flow(MANY, None, name, free, iterations=2).end_s[-1] < found.end_s[-1]


@pytest.mark.parametrize("racks, spines", [(2, 1), (4, 1)])
@pytest.mark.parametrize("name", FABRICS)
def test_one_spine_leaves_no_choice(name, racks, spines):
    nets = [
        network(8, racks=racks, spines=spines, balance=balance, oversubscription=4.0) for balance in ("ecmp", "spray")
    ]
    ecmp, spray = (simulate_flow(MANY, None, name, net, iterations=1).end_s for net in nets)
    assert (ecmp == spray).all()


def two_flows(net, pairs=((0, 4), (1, 5))):
    """When the last of two transfers of BYTES between pairs of workers arrives, on an otherwise idle network."""
    topology = built(net, 0)
    source, target = np.array(pairs).T
    sent = topology.send(source, target, np.full(len(pairs), float(BYTES)), [], key=np.arange(len(pairs)))
    services = topology.graph.freeze(topology.num_links)
    run_services(*services)
    return services.records["end_s"][sent].max()


@given(st.integers(2, 12), st.integers(2, 12), st.integers(1, 3), st.sampled_from([(1, 1), (4, 1), (4, 2)]))
def test_a_rack_sends_up_what_its_own_cards_can_send(hosts, racks, spines, shape):
    """Also where the racks do not divide the hosts: they differ by one host then."""
    assume(racks <= hosts)
    gpus, per_card = shape
    net = Network(
        workers=hosts * gpus, bandwidth_bps=BPS, gpus_per_host=gpus, gpus_per_card=per_card, racks=racks, spines=spines,
        oversubscription=2.0,
    )  # fmt: skip
    speeds = 1 / net.switches.s_per_byte(8 / BPS).reshape(racks, spines, 2)
    leaf = net.switches.leaf_of_worker(range(0, net.workers, per_card)).tolist()
    for rack, one in enumerate(speeds):
        assert one.sum(axis=0) == pytest.approx([leaf.count(rack) * BPS / 8 / 2] * 2)


@pytest.mark.parametrize("racks", [2, 3, 5, 7])
@pytest.mark.parametrize("name", ["ring", "shuffle", "halving-doubling"])
def test_racks_that_are_not_oversubscribed_are_like_one_switch(name, racks):
    """If packets take all paths and share them fairly, however many hosts each of the racks has."""
    plain = Network(workers=8, bandwidth_bps=1e9, sharing="fair")
    found = simulate_flow(MANY, None, name, replace(plain, racks=racks, spines=2, balance="spray"))
    assert found.iteration_s == pytest.approx(simulate_flow(MANY, None, name, plain).iteration_s, rel=1e-9)


def test_two_flows_that_collide_take_twice_as_long():
    """Racks of 4 and 4 spines at 1:1: a link between leaf and spine is as fast as a host's."""
    net = Network(workers=8, bandwidth_bps=1e9, racks=2, spines=4)
    found = {seed: two_flows(replace(net, seed=seed)) for seed in range(64)}
    for seed, seconds in found.items():
        collide = hashed(seed, 0, 4) % 4 == hashed(seed, 1, 5) % 4
        assert seconds == pytest.approx(2 * M if collide else M, rel=1e-12)
    assert len(set(np.round(list(found.values()), 9))) == 2
    assert two_flows(replace(net, balance="spray")) == pytest.approx(M + M / 4, rel=1e-12)  # the 2nd waits for the 1st


def test_a_spine_that_fails_delays_the_flows_that_take_it():
    """A tree of two racks: M goes from 1 to 0 and back, over links with a quarter of a host's speed, by two paths."""
    failure = Disturbance(kind="spine", number=2, factor=math.inf, start_s=0.0, end_s=2.0)
    seen = set()
    for seed in range(24):
        net = Network(
            workers=2, bandwidth_bps=1e9, racks=2, spines=4, seed=seed, disturbances=(failure,), sharing="fair"
        )
        up, down = (hashed(seed, *ends) % 4 == 2 for ends in ((1, 0), (0, 1)))
        expected = 2 + 8 * M if up else 2 + 4 * M if down else BACKWARD + 8 * M
        assert simulate_flow(job(), None, "tree", net).iteration_s == pytest.approx(expected + FORWARD, rel=1e-9)
        seen.add((up, down))
    assert len(seen) >= 3
    with pytest.raises(InputError, match="spine: 2 with sprayed packets"):
        replace(net, balance="spray")
    for more, words in (({"racks": 2}, "spine: 2 .expected 0 to 0"), ({}, "there is no spine")):
        with pytest.raises(InputError, match=words):
            network(4, disturbances=(failure,), **more)


@pytest.mark.parametrize("flows, spines", [(2, 4), (4, 8), (8, 8)])
def test_collisions_are_as_frequent_as_birthdays(flows, spines):
    """The probability that no two of n flows have the same one of S spines is S! / ((S - n)! S^n)."""
    tries, source = 4000, np.arange(flows)
    none = math.perm(spines, flows) / spines**flows
    apart = 0
    for seed in range(tries):
        choice = Network(workers=16, bandwidth_bps=1e9, racks=2, spines=spines, seed=seed).switches.choice(
            source, 8 + source
        )
        apart += len(set(choice.tolist())) == flows
    assert abs(apart / tries - none) < 5 * math.sqrt(none * (1 - none) / tries)


@pytest.mark.parametrize("ports, flows", [(4, 2), (8, 4)])
def test_collisions_in_a_fat_tree(ports, flows):
    """Flows from one leaf to another pod collide on their way to the spines like birthdays among k / 2."""
    half, tries = ports // 2, 3000
    none = math.perm(half, flows) / half**flows
    net = Network(workers=ports**3 // 4, bandwidth_bps=1e9, topology="fat-tree")
    source = np.arange(flows)
    target = source + half * half
    assert (net.switches.leaf_of_worker(source) == 0).all() and net.switches.num_ports == ports
    apart = 0
    for seed in range(tries):
        switches = replace(net, seed=seed).switches
        path = switches.path(0, switches.leaf_of_worker(target), switches.choice(source, target))
        assert path.shape == (flows, 4) and (path >= 0).all()
        apart += len(set(path[:, 0].tolist())) == flows
    assert abs(apart / tries - none) < 5 * math.sqrt(none * (1 - none) / tries)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("topology", ["leaf-spine", "fat-tree"])
def test_an_all_to_all_between_leaves_takes_the_oversubscription_times_as_long(topology, ratio):
    """16 hosts send M to one host of every other leaf: a leaf's links up carry all that its hosts send."""
    more = {"racks": 8, "spines": 1} if topology == "leaf-spine" else {"topology": "fat-tree"}
    net = Network(workers=16, bandwidth_bps=1e9, oversubscription=ratio, balance="spray", sharing="fair", **more)
    pairs = [(w, (w + 2 * step) % 16) for step in range(1, 8) for w in range(16)]
    topology_of = built(net, 0)
    source, target = np.array(pairs).T
    sent = topology_of.send(source, target, np.full(len(pairs), float(BYTES)), [], key=np.arange(len(pairs)))
    services = topology_of.graph.freeze(topology_of.num_links)
    run_fair(services, topology_of.s_per_byte())
    assert services.records["end_s"][sent].max() == pytest.approx(7 * M * ratio, rel=1e-9)


def traffic(name, net, **options):
    """{name of a link: how many times it carries a message's bytes} in an iteration of one message."""
    unrolled = compile_flow(job(), None, fabric(name, **options), net, iterations=1, symmetry=False)
    graph = unrolled.graph.freeze(unrolled.topology.num_links)
    assert run_services(*graph) == len(graph.records)
    carried = bytes_on(net, unrolled.topology.servers, graph.records, unrolled.topology)
    return {link: nbytes / BYTES for link, nbytes in carried.items()}


def test_a_ring_over_hosts_uses_the_last_card_to_send_and_the_first_to_receive():
    """Workers are numbered host by host, so that one of a host's four transfers leaves it."""
    n, gpus = 16, 4
    found = traffic("ring", Network(workers=n, bandwidth_bps=1e9, gpus_per_host=gpus))
    each = pytest.approx(2 * (n - 1) / n)
    assert {link: times for link, times in found.items() if link[0] == "out"} == {
        ("out", w): each for w in (3, 7, 11, 15)
    }
    assert {link: times for link, times in found.items() if link[0] == "in"} == {("in", w): each for w in (0, 4, 8, 12)}
    assert {link[1] for link in found if link[0] == "from"} == {w for w in range(n) if w % gpus != 3}


@pytest.mark.parametrize("spines", [0, 1])
def test_hierarchical_stays_on_its_rails(spines):
    """(g-1)/g inside the host, each way and half; (H-1)/H of a g-th on every card; nothing above the leaves."""
    n, gpus = 16, 4
    hosts = n // gpus
    found = traffic(
        "hierarchical", Network(workers=n, bandwidth_bps=1e9, gpus_per_host=gpus, topology="rails", spines=spines)
    )
    on_cards, inside = 2 * (hosts - 1) / hosts / gpus, 2 * (gpus - 1) / gpus
    expected = {(kind, w): on_cards for kind in ("out", "in") for w in range(n)}
    expected |= {(kind, w): inside for kind in ("from", "to") for w in range(n)}
    assert found == pytest.approx(expected)


def test_between_rails_over_the_spine_or_through_the_host():
    """A ring's transfer from the last GPU of a host to the first of the next changes rails."""
    n, gpus = 8, 4
    rails = Network(workers=n, bandwidth_bps=1e9, gpus_per_host=gpus, topology="rails")
    each = pytest.approx(2 * (n - 1) / n)
    over, through = (traffic("ring", replace(rails, spines=spines)) for spines in (1, 0))
    assert over["up", 3, 0] == 2 * each.expected and over["down", 0, 0] == 2 * each.expected
    assert over["out", 3] == each and ("out", 0) not in over
    assert through["out", 0] == each and ("out", 3) not in through and through["from", 3] == each
    assert not any(link[0] in ("up", "down") for link in through)


def test_what_rails_are_worth():
    """Each part of a hierarchical all-reduce has a card of its own: g times as fast between hosts as on one card."""
    n, gpus, local = 32, 8, 1e12
    hosts = n // gpus
    inside = 2 * (gpus - 1) / gpus * BYTES * 8 / local
    for per_card in (1, 2, 8):
        net = Network(
            workers=n, bandwidth_bps=1e9, gpus_per_host=gpus, gpus_per_card=per_card, local_bandwidth_bps=local
        )
        found = simulate_flow(job(), None, "hierarchical", net).iteration_s
        assert found == pytest.approx(COMPUTE + inside + 2 * (hosts - 1) / hosts * M * per_card / gpus, rel=1e-12)


@pytest.mark.parametrize("topology", ["leaf-spine", "fat-tree"])
def test_aggregation_and_multicast_send_each_byte_once_over_each_link(topology):
    more = {"racks": 4, "spines": 2} if topology == "leaf-spine" else {"topology": "fat-tree"}
    found = traffic("multicast+aggregation", Network(workers=16, bandwidth_bps=1e9, **more))
    assert list(found.values()) == pytest.approx([1.0] * len(found))
    leaves = 4 if topology == "leaf-spine" else 8
    counts = Counter(link[0] for link in found)
    assert counts["out"] == counts["in"] == 17
    # Up from all leaves but the server's, and down into its leaf; and the other way with the multicast.
    assert counts["up"] == counts["down"] == leaves
    if topology == "fat-tree":
        assert counts["to core"] == counts["from core"] == 4


@pytest.mark.parametrize("net", [{}, {"topology": "rails"}, {"topology": "rails", "spines": 0}, {"gpus_per_card": 2}])
def test_one_host_stands_for_all(net):
    """Bit for bit, behind one switch and on rails, between which a hierarchical fabric sends nothing."""
    net = network(24, gpus_per_host=4, **net)
    few, every = (
        simulate_flow(MANY, None, "hierarchical", net, iterations=2, symmetry=symmetry) for symmetry in (True, False)
    )
    assert few.received_s.shape[1] == 4 and every.received_s.shape[1] == 24
    assert (np.tile(few.received_s, (1, 6, 1)) == every.received_s).all() and (few.end_s == every.end_s).all()


@pytest.mark.parametrize("kind", SWITCHED)
@pytest.mark.parametrize("name", FABRICS)
def test_no_worker_stands_for_others_on_other_networks(kind, name):
    net = network(16, **SWITCHED[kind])
    few = simulate_flow(MANY, None, name, net)
    every = simulate_flow(MANY, None, name, net, symmetry=False)
    assert (few.end_s == every.end_s).all()
    on_rails = name == "hierarchical" and net.topology == "rails"
    assert few.members.tolist() == ([4] * 4 if on_rails else [1] * 16)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 5))
@examples(30)
def test_hosts_of_the_hierarchical_fabric_stand_in_one_rack(racks, each, seed):
    """Where the network says nothing of hosts; then their inner links are their own."""
    net = Network(workers=racks * each * 2, bandwidth_bps=1e9, racks=racks, oversubscription=8.0, seed=seed)
    shape = FABRICS["hierarchical"].host_shape(net)
    assert (2 * each) % shape.gpus == 0 and shape.gpus == shape.gpus_per_card == math.gcd(8, 2 * each)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"topology": "torus"}, "topology: 'torus'|unknown topology"),
        ({"balance": "luck"}, "balance"),
        ({"gpus_per_host": 3}, "gpus_per_host: 3 .expected a divisor of the 16"),
        ({"gpus_per_host": 4, "gpus_per_card": 3}, "gpus_per_card: 3 .expected a divisor of the 4 GPUs"),
        ({"gpus_per_host": 8, "racks": 3}, "racks: 3 .expected 1 to the 2 hosts"),
        ({"local_bandwidth_bps": 0.0}, "local_bandwidth_bps: 0"),
        ({"spines": 2}, "spines: 2 above one rack"),
        ({"spines": 0, "racks": 2}, "spines: 0 .expected 1"),
        ({"topology": "fat-tree", "spines": 2}, "spines: 2 in topology fat-tree"),
        ({"topology": "fat-tree", "racks": 2}, "racks: 2 in topology fat-tree"),
        ({"topology": "fat-tree", "ports": 2}, "ports: 2 .expected an even number, 4 to"),
        ({"topology": "fat-tree", "ports": 5}, "ports: 5"),
        ({"ports": 4}, "ports: 4 in topology leaf-spine"),
        ({"racks": 2, "core_oversubscription": 2.0}, "core_oversubscription: 2.0 in topology leaf-spine"),
        ({"topology": "fat-tree", "core_oversubscription": 0.5}, "core_oversubscription: 0.5"),
        ({"topology": "rails", "gpus_per_host": 4, "gpus_per_card": 4}, "several cards a host"),
        ({"gpus_per_host": 2, "gpus_per_card": 2, "link_scale": (*[1.0] * 15, 2.0)}, "several factors on one card"),
    ],
)
def test_what_does_not_go_together_is_named(options, words):
    with pytest.raises(InputError, match=words):
        network(16, **options)


def test_too_many_links_or_transfers_are_refused_before_anything_is_done():
    with pytest.raises(TooLargeError, match="links between switches"):
        Network(workers=2**20, bandwidth_bps=1e9, racks=2**18, spines=2**10)
    wide = Network(workers=2**20, bandwidth_bps=1e9, racks=2**10, spines=2**4)
    for name in ("ring", "shuffle", "parameter-server", "multicast+aggregation", "tree"):
        with pytest.raises(TooLargeError, match="more than 100,000,000"):
            check_flow(job([BYTES] * 100), None, name, wide)
    assert Network(workers=2**20, bandwidth_bps=1e9, topology="fat-tree").switches.num_ports == 162
