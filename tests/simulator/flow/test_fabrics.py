"""What each fabric sends, and how long it takes: closed forms, conservation, symmetry."""

import math
from dataclasses import replace

import numpy as np
import pytest
from support.flows import ALPHA, BETA, BYTES, CLOSED_FORMS, COMPUTE, MANY, M, hosts_of, job, network

from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import FABRICS, Network, fabric, simulate_flow
from legato.simulator.flow.iterations.run import compile_flow


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("workers", [2, 8, 32])
def test_closed_form(name, workers):
    found = simulate_flow(job(), None, name, network(workers)).iteration_s
    assert found == pytest.approx(CLOSED_FORMS[name](workers), rel=1e-12)


def test_reduction_takes_its_time():
    """MG-WFBP, Table II: what n workers add up to."""
    n, gamma = 8, 3e-9
    with_reduction = network(n, reduce_s_per_byte=gamma)
    for name, added in (("ring", (n - 1) / n), ("halving-doubling", (n - 1) / n), ("butterfly", 3), ("tree", 3)):
        found = simulate_flow(job(), None, name, with_reduction).iteration_s
        assert found == pytest.approx(CLOSED_FORMS[name](n) + gamma * BYTES * added, rel=1e-12), name


def test_hierarchy_is_rings_inside_hosts_and_a_ring_between_them():
    n, group, local = 32, 4, 16e9
    hosts, inside = n // group, M / 16
    free = Network(workers=n, bandwidth_bps=1e9, **hosts_of(group), local_bandwidth_bps=local)
    found = simulate_flow(job(), None, "hierarchical", free)
    expected = COMPUTE + 2 * (group - 1) * inside / group + 2 * (hosts - 1) * M / hosts
    assert found.iteration_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"servers": 4, "placement": "equal", "multicast": True}, COMPUTE + 2 * ALPHA + M + 3 * M / 4 + 8 * M / 4),
        ({"aggregation": "cut-through", "multicast": True}, COMPUTE + 2 * ALPHA + 2 * M),
        ({"distribution": "block"}, COMPUTE + 2 * ALPHA + 9 * M),
    ],
)
def test_servers_by_hand(options, expected):
    """8 workers. With four servers a worker gets M on its own link; all push their quarters in the same order, so that
    the last server waits for three of them before its 8 begin."""
    found = simulate_flow(job(), None, fabric("parameter-server", **options), network(8)).iteration_s
    assert found == pytest.approx(expected, rel=1e-12)


def run_services_of(unrolled):
    from legato.simulator.flow.engine.loop import run_services

    graph = unrolled.graph.freeze(unrolled.topology.num_links)
    assert run_services(*graph) == len(graph.records)
    return graph


@pytest.mark.parametrize("racks", [1, 3])
@pytest.mark.parametrize("workers", [6, 8])
@pytest.mark.parametrize("name", FABRICS)
def test_nothing_is_received_before_it_is_sent_and_no_link_does_two_things_at_once(name, workers, racks):
    net = network(workers, racks=racks, oversubscription=2.0, jitter=0.3, **hosts_of(2, name))
    graph = run_services_of(compile_flow(MANY, None, name, net, iterations=2))
    records = graph.records
    before = np.repeat(np.arange(len(records)), records["count"])
    after, cut = graph.successors >> 1, (graph.successors & 1).astype(bool)
    begin, end, delay = records["begin_s"], records["end_s"], records["delay_s"]
    assert (begin[after[~cut]] >= (end + delay)[before[~cut]]).all()
    assert (begin[after[cut]] >= (begin + delay)[before[cut]]).all()
    assert (end[after[cut]] >= (end + delay)[before[cut]]).all()
    for link in range(graph.num_links):
        mine = records[records["link"] == link]
        mine = mine[np.lexsort((mine["work_s"], mine["begin_s"]))]
        assert (mine["begin_s"][1:] >= (mine["begin_s"] + mine["work_s"])[:-1] - 1e-15).all()


#: Bytes out of and into a worker, of M on n workers.
PER_WORKER = {
    "ring": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    "ring+multicast": lambda n: (1.0, 2 * (n - 1) / n),
    "halving-doubling": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    "butterfly": lambda n: (math.log2(n), math.log2(n)),
    "recursive-doubling": lambda n: (math.log2(n), math.log2(n)),
    "shuffle": lambda n: (2 * (n - 1) / n, 2 * (n - 1) / n),
    "parameter-server": lambda n: (1, 1),
    "multicast": lambda n: (1, 1),
    "aggregation": lambda n: (1, 1),
    "multicast+aggregation": lambda n: (1, 1),
    "sharp": lambda n: (1, 1),
}


@pytest.mark.parametrize("slow", [(), tuple(1 + w / 4 for w in range(8))])
@pytest.mark.parametrize("name", PER_WORKER)
def test_every_byte_is_sent_once(name, slow):
    """On links that are alike, and where each host's has a speed of its own."""
    n = 8
    unrolled = compile_flow(MANY, None, name, network(n, link_scale=slow), iterations=1, symmetry=False)
    graph = run_services_of(unrolled)
    wired = graph.records[graph.records["link"] >= 0]
    nbytes = wired["work_s"] / unrolled.topology.s_per_byte()[wired["link"]]
    bytes_on = np.bincount(wired["link"], weights=nbytes, minlength=graph.num_links)
    out, into = PER_WORKER[name](n)
    assert bytes_on[0 : 2 * n : 2] == pytest.approx([out * MANY.nbytes] * n)
    assert bytes_on[1 : 2 * n : 2] == pytest.approx([into * MANY.nbytes] * n)


def test_a_server_gets_and_sends_as_the_network_helps_it():
    n = 8
    for name, into, out in (
        ("parameter-server", n, n),
        ("multicast", n, 1),
        ("aggregation", 1, n),
        ("multicast+aggregation", 1, 1),
    ):
        graph = run_services_of(compile_flow(MANY, None, name, network(n)))
        on = [graph.records["work_s"][graph.records["link"] == 2 * n + k].sum() / BETA for k in (0, 1)]
        assert on == pytest.approx([out * MANY.nbytes, into * MANY.nbytes]), name


@pytest.mark.parametrize("workers", [4, 16, 32])
@pytest.mark.parametrize("name", FABRICS)
def test_one_worker_stands_for_all(name, workers):
    """Bit for bit: what is simulated with symmetry is what every worker does without."""
    net = network(workers, **hosts_of(4, name))
    found = [simulate_flow(MANY, None, name, net, iterations=2, symmetry=symmetry) for symmetry in (True, False)]
    few, all_of_them = found
    assert (few.end_s == all_of_them.end_s).all() and (few.aggregated_s == all_of_them.aggregated_s).all()
    repeated = np.tile(few.received_s, (1, workers // few.received_s.shape[1], 1))
    assert (repeated == all_of_them.received_s).all()


def some_workers(n, seed=0):
    """MANY with other times on every worker."""
    rng = np.random.default_rng(seed)
    return [
        Workload("job", tuple(Op(o.name, o.phase, o.duration_s * f, o.deps) for o in MANY.ops), MANY.tensors)
        for f in rng.uniform(0.5, 2, n)
    ]


RELABELLED = {
    "ring": lambda w, n: (w + 3) % n,
    "ring+multicast": lambda w, n: (w + 3) % n,
    "shuffle": lambda w, n: (w + 3) % n,
    "butterfly": lambda w, n: w ^ 5,
    "halving-doubling": lambda w, n: w ^ 5,
    "multicast": lambda w, n: (3 * w + 1) % n,
    "multicast+aggregation": lambda w, n: (3 * w + 1) % n,
    "hierarchical": lambda w, n: (w + 4) % n,
}


@pytest.mark.parametrize("name", RELABELLED)
def test_relabelling_workers_changes_nothing(name):
    """Along the fabric's own symmetry: a ring may be turned, a switch does not care at all."""
    n = 8
    workers = some_workers(n)
    net = network(n, **hosts_of(4, name))
    one = simulate_flow(workers, None, name, net, iterations=1)
    other = simulate_flow([workers[RELABELLED[name](w, n)] for w in range(n)], None, name, net, iterations=1)
    assert other.end_s == pytest.approx(one.end_s, rel=1e-12)
    moved = [RELABELLED[name](w, n) for w in range(n)]
    assert other.received_s[0] == pytest.approx(one.received_s[0][moved], rel=1e-12)


@pytest.mark.parametrize("name", FABRICS)
def test_computing_k_times_as_fast_is_a_network_k_times_as_slow(name):
    """Seconds of a k-th, by all: the same system."""
    k = 3.5
    slow_net = Network(workers=8, bandwidth_bps=1e8, local_bandwidth_bps=1e9)
    fast_net = Network(workers=8, bandwidth_bps=1e8 * k, local_bandwidth_bps=1e9 * k)
    slow = simulate_flow(MANY, None, name, slow_net)
    faster = Workload("job", tuple(Op(o.name, o.phase, o.duration_s / k, o.deps) for o in MANY.ops), MANY.tensors)
    fast = simulate_flow(faster, None, name, fast_net)
    assert fast.end_s * k == pytest.approx(slow.end_s, rel=1e-12)
    scaled = simulate_flow(MANY, None, name, replace(fast_net, compute_scale=(1 / k,) * 8))
    assert scaled.end_s == pytest.approx(fast.end_s, rel=1e-12)


@pytest.mark.parametrize("name", FABRICS)
def test_fair_sharing_is_never_better_for_one_message_alone(name):
    """One message, everybody in step: a fair share of the link ends when first come, first served ends, or later."""
    fifo, fair = (
        simulate_flow(job(), None, name, network(8, sharing=sharing, **hosts_of(4, name))).iteration_s
        for sharing in ("fifo", "fair")
    )
    assert fair >= fifo * (1 - 1e-9)
    if name in ("ring", "halving-doubling", "butterfly", "ring-whole", "multicast+aggregation"):
        assert fair == pytest.approx(fifo, rel=1e-9)  # nobody shares a link with anybody


def test_an_oversubscribed_rack_holds_up_what_leaves_it():
    """8 workers in 2 racks, 4:1: in each half of a shuffle, half of 4 workers' M leaves a rack, as fast as a link."""
    flat = simulate_flow(job(), None, "shuffle", network(8)).iteration_s
    free = simulate_flow(job(), None, "shuffle", network(8, racks=2)).iteration_s
    tight = simulate_flow(job(), None, "shuffle", network(8, racks=2, oversubscription=4.0)).iteration_s
    assert free == pytest.approx(flat, rel=1e-2)
    assert tight - COMPUTE == pytest.approx(2 * (4 * 4 / 8) * M, rel=0.15) and tight > free


def test_multicast_and_aggregation_cross_a_rack_once():
    """4 hosts a rack at 4:1: an uplink is as fast as a host's link. One copy, or one sum, passes as if alone."""
    nets = (network(8), network(8, racks=2, oversubscription=4.0))
    flat, racks = (simulate_flow(job(), None, "multicast+aggregation", net).iteration_s for net in nets)
    assert racks - flat == pytest.approx(2 * M)  # the sum is stored and forwarded twice more: up, and down
    one_each = simulate_flow(job(), None, "multicast", network(8, racks=8)).iteration_s
    assert one_each == pytest.approx(CLOSED_FORMS["multicast"](8), rel=1e-9)


def test_store_and_forward_switches_cost_a_transfer_more():
    fast, slow = (simulate_flow(job(), None, "tree", network(2, cut_through=c)).iteration_s for c in (True, False))
    assert slow - fast == pytest.approx(2 * M)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fabric("rings"), "did you mean 'ring'"),
        (lambda: fabric("ring", server=2), "option of ring"),
        (lambda: fabric("parameter-server", servers=0), "servers: 0"),
        (lambda: fabric("parameter-server", placement="random"), "placement"),
        (lambda: fabric("ring", in_flight=0), "in_flight"),
        (lambda: fabric("ring", algorithm="trees"), "algorithm 'trees'; did you mean 'tree'"),
        (lambda: Network(workers=0, bandwidth_bps=1e9), "workers: 0"),
        (lambda: Network(workers=2, bandwidth_bps=math.nan), "bandwidth_bps"),
        (lambda: Network(workers=2, bandwidth_bps=1e9, racks=3), "racks: 3"),
        (lambda: Network(workers=2, bandwidth_bps=1e9, compute_scale=(1.0,)), "compute_scale"),
        (lambda: network(9, gpus_per_host=8), "gpus_per_host: 8 .expected a divisor of the 9 workers"),
        (lambda: simulate_flow([job()], None, "ring", network(2)), "1 workload for 2 workers"),
        (lambda: simulate_flow([job(), MANY], None, "ring", network(2)), "worker 1"),
        (lambda: simulate_flow(job(), None, "ring", network(2), iterations=0), "iterations: 0"),
        (lambda: simulate_flow(job(), None, fabric("multicast", servers=2, placement={"w0": 5}), network(2)), "w0"),
        (
            lambda: simulate_flow(
                job(),
                Plan("p", tuple(Message((Slice("w0", 0, BYTES),), kind=k, server=3) for k in ("push", "pull"))),
                "multicast",
                network(2),
            ),
            "server: 3",
        ),
    ],
)
def test_wrong_input_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def all_reduce_s(name, nbytes=4 * 10**9, message_bytes=None, **options):
    """One message alone, through the flow simulator."""
    job = Workload("m", (Op("f", "forward", 0.0), Op("b", "backward", 0.0, (0,))), (Tensor("w", nbytes, 1, (0,)),))
    one = fabric(name, message_bytes=message_bytes, in_flight=None)
    return simulate_flow(job, None, one, Network(**options), iterations=1).iteration_s


def test_switches_add_up_at_the_rate_of_the_cards():
    """By hand: 3/4 M in each of two rings inside hosts of four, and M/4 once over each card, each way at once."""
    links = {"local_bandwidth_bps": 8e11, "bandwidth_bps": 8e10, "cut_through": True, "latency_s": 0.0}
    for hosts in (2, 4, 8):
        found = all_reduce_s("sharp", workers=4 * hosts, gpus_per_host=4, **links)
        assert found == pytest.approx(4e9 * 8 * (2 * 3 / 4 / 8e11 + 1 / 4 / 8e10))


def test_links_between_racks_carry_a_sum_once_however_many_hosts_there_are():
    """At 8:1, a rack of n hosts has links as fast as n / 8 cards above it."""
    more = {"racks": 2, "balance": "spray", "cut_through": True, "latency_s": 0.0, "bandwidth_bps": 8e10}
    for workers in (16, 32):
        once = 4e9 * 8 / 8e10
        above = 8 / (workers / 2)
        assert all_reduce_s("sharp", workers=workers, oversubscription=8.0, **more) == pytest.approx(
            once * max(1, above)
        )


#: NCCL on DGX A100, eight cards of 200 Gbit/s a host (about 20 GB/s each), by its authors: github.com/NVIDIA/nccl,
#: issue 320 with SHARP (80 GB/s of gradients with four cards; 160 with eight, of which NVLink leaves 110), issue 812
#: without it (192 GB/s x n / 2(n - 1)).
PUBLISHED = [
    ("sharp", 4, 1e16, None, 80.0),
    ("sharp", 8, 1e16, None, 160.0),
    ("sharp", 8, 8 * 230e9, 2**24, 110.0),
    ("hierarchical", 8, 1e16, None, 192 * 32 / 62),
]


@pytest.mark.parametrize(("name", "cards", "local_bps", "message_bytes", "published"), PUBLISHED)
def test_published_numbers_with_switches_that_add_up_and_without(name, cards, local_bps, message_bytes, published):
    hosts = {"workers": 32, "gpus_per_host": 8, "gpus_per_card": 8 // cards, "local_bandwidth_bps": local_bps}
    links = {"bandwidth_bps": 8 * 20e9, "latency_s": 5e-6, "cut_through": True}
    found = 4 * 2**30 / all_reduce_s(name, 4 * 2**30, message_bytes, **hosts, **links) / 1e9
    assert found == pytest.approx(published, rel=0.1)
