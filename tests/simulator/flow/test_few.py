"""Identical workers: few are simulated, and all times are those of the full simulation, to the last bit."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flows import ALPHA, BYTES, CLOSED_FORMS, MANY, hosts_of, job, network
from support.strategies import examples, plans, workloads

from legato.core.cluster import Cluster
from legato.core.errors import InputError, TooLargeError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import Network, fabric, plain_plan, simulate_flow
from legato.simulator.flow.case import Case
from legato.simulator.flow.classes import TreeClasses
from legato.simulator.flow.few import simulate_classes, simulate_few
from legato.simulator.flow.unroll import Unrolled
from legato.zoo import workload

MILLION = 2**20
ALONE = ("ring", "ring+multicast", "shuffle", "butterfly", "halving-doubling")
SERVERS = ("parameter-server", "multicast", "aggregation", "multicast+aggregation")


def case(job, plan, chosen, net, iterations=1):
    return Case([job], plain_plan(job, chosen) if plan is None else plan, chosen, net, iterations, True)


def assert_same(few, full):
    """Every time of every worker that is kept, and every metric, which may also depend on the others."""
    kept = few.ranks
    assert (few.end_s == full.end_s).all() and (few.aggregated_s == full.aggregated_s).all()
    for name in ("gradient_s", "received_s"):
        assert (getattr(few, name) == getattr(full, name)[:, kept]).all(), name
    for name in ("forward_start_s", "forward_end_s", "backward_start_s", "backward_end_s"):
        if few.compute.forward.ops and few.compute.backward.ops:
            assert (getattr(few, name) == getattr(full, name)[:, kept]).all(), name
    for name in ("start_s", "end_s"):
        assert (getattr(few.messages, name) == getattr(full.messages, name)[:, kept]).all(), name
    assert few.timeline(kept.tolist()).spans == full.timeline(kept.tolist()).spans
    metrics = ("iteration_s", "aggregation_s", "distribution_s", "overlap", "utilization")
    if few.compute.backward.ops:
        metrics += ("staggering_s", "straggler_effect", "backward_to_aggregated_s")
    for name in metrics:
        assert getattr(few, name) == getattr(full, name), name


@st.composite
def settings_of(draw, most_workers):
    """A job, a plan and a network, whose times are exact sums of eighths, so that many of them coincide."""
    job = draw(workloads())
    plan = draw(st.none() | plans(job, Cluster.derive(4, 8.0, 0.25, collectives=["ring"])))
    latency_s = draw(st.integers(0, 8)) / 4
    net = Network(
        workers=draw(st.integers(1, most_workers)),
        bandwidth_bps=draw(st.sampled_from([8.0, 2.0])),
        latency_s=latency_s,
        send_s=min(latency_s, draw(st.sampled_from([0.0, 0.25, 2.0]))),
        server_bandwidth_bps=draw(st.sampled_from([None, 4.0, 32.0])),
        cut_through=draw(st.booleans()),
        reduce_s_per_byte=draw(st.sampled_from([0.0, 0.5])),
    )
    return job, plan, net, draw(st.integers(1, 3))


@pytest.mark.parametrize("name", ALONE)
@given(st.data())
@examples(25)
def test_one_worker_stands_for_all(name, data):
    job, plan, net, iterations = data.draw(settings_of(9))
    options = data.draw(st.sampled_from([{}, {"in_flight": None}, {"in_flight": 2}, {"message_bytes": 3}]))
    chosen = fabric(name, **options)
    few = simulate_few(case(job, plan, chosen, net, iterations))
    if few is None:
        assert chosen.simulated(net) > 1  # not a power of two
        return
    assert few.ranks.tolist() == [0] and few.members.tolist() == [net.workers]
    assert_same(few, simulate_flow(job, plan, chosen, net, iterations=iterations, symmetry=False))


@given(st.data())
@examples(60)
def test_a_class_of_a_tree_has_one_worker_that_stands_for_it(data):
    job, plan, net, iterations = data.draw(settings_of(40))
    options = data.draw(st.sampled_from([{}, {"in_flight": None}, {"message_bytes": 3}]))
    chosen = fabric("tree", **options)
    few = simulate_classes(case(job, plan, chosen, net, iterations), TreeClasses(net.workers), math.inf)
    assert few.members.sum() == net.workers and len(set(few.ranks.tolist())) == len(few.ranks)
    assert_same(few, simulate_flow(job, plan, chosen, net, iterations=iterations, symmetry=False))


PLACED = [{}, {"servers": 3}, {"servers": 2, "placement": "equal"}]


@pytest.mark.parametrize("name", SERVERS)
@given(st.data())
@examples(40)
def test_each_worker_does_what_the_one_before_it_has_done(name, data):
    job, plan, net, iterations = data.draw(settings_of(7))
    options = data.draw(st.sampled_from(PLACED)) | data.draw(st.sampled_from([{}, {"message_bytes": 2}]))
    options["distribution"] = data.draw(st.sampled_from(["round-robin", "block"]))
    options["barrier"] = data.draw(st.booleans())
    if "aggregation" in name:
        options["aggregation"] = data.draw(st.sampled_from(["store-and-forward", "cut-through"]))
    chosen = fabric(name, **options)
    few = simulate_few(case(job, plan, chosen, net, iterations))
    if few is None:  # an iteration begins before another has ended
        assert iterations > 1 and (not chosen.barrier or not all(tensor.readers for tensor in job.tensors))
        return
    assert_same(few, simulate_flow(job, plan, chosen, net, iterations=iterations, symmetry=False))


@pytest.mark.parametrize("workers", [37, 64, 300])
@pytest.mark.parametrize("name", [*ALONE, *SERVERS, "tree"])
def test_times_that_are_no_exact_sums(name, workers):
    """Sizes and durations of a model, more workers than are kept, and than a block has."""
    model = workload("alexnet-v2")
    net = network(workers, reduce_s_per_byte=3e-10)
    few = simulate_flow(model, None, name, net, iterations=1, keep_transfers=False)
    full = simulate_flow(model, None, name, net, iterations=1, symmetry=False, keep_transfers=False)
    if name != "tree":
        assert_same(few, full)
    assert few.end_s == pytest.approx(full.end_s, rel=1e-13)
    assert few.received_s == pytest.approx(full.received_s[:, few.ranks], rel=1e-12)
    if name == "parameter-server":
        assert len(few.ranks) < workers and len(few.timeline().spans) < len(full.timeline().spans)


@pytest.mark.parametrize("latency_s", [0.0, 1e-6, ALPHA])
@pytest.mark.parametrize("workers", [256, 300])
def test_a_tree_has_few_classes(workers, latency_s):
    """Also where sums pass gradients on the way: many messages, most of them small against the latency."""
    tree = fabric("tree", in_flight=None)
    net = Network(workers=workers, bandwidth_bps=1e9, latency_s=latency_s, send_s=0.0, reduce_s_per_byte=1e-9)
    few = simulate_classes(case(MANY, None, tree, net, 2), TreeClasses(workers), math.inf)
    full = simulate_flow(MANY, None, tree, net, iterations=2, symmetry=False)
    assert len(few.ranks) < workers and few.members.sum() == workers
    assert few.end_s == pytest.approx(full.end_s, rel=1e-12)
    assert few.received_s == pytest.approx(full.received_s[:, few.ranks], rel=1e-12)
    for rank, members in zip(few.ranks, few.members, strict=True):
        same = (np.abs(full.received_s - full.received_s[:, [rank]]) <= 1e-12 * full.end_s[-1]).all(axis=(0, 2))
        assert same.sum() >= members


@pytest.mark.parametrize("name", ["ring", "tree", "halving-doubling", "butterfly", "shuffle", *SERVERS])
def test_a_million_workers(name):
    found = simulate_flow(job(), None, name, network(MILLION), keep_transfers=False)
    assert found.iteration_s == pytest.approx(CLOSED_FORMS[name](MILLION), rel=1e-8)


def test_workers_that_differ_are_all_simulated():
    slow = network(300, compute_scale=(*[1.0] * 299, 2.0))
    for name in ("ring", "tree", "parameter-server"):
        assert simulate_few(Case([MANY], plain_plan(MANY, name), fabric(name), slow, 1, slow.uniform)) is None
    found = simulate_flow(MANY, None, "tree", slow, iterations=1, keep_transfers=False)
    assert found.ranks.tolist() == list(range(300)) and set(found.members.tolist()) == {1}


def test_what_nothing_reads_may_be_launched_in_two_iterations_at_once():
    """No op waits and none takes time: the engine takes messages in the plan's order, of both iterations."""
    ops = (Op("f", "forward", 0.0), Op("b", "backward", 0.0, (0,)))
    unread = Workload("unread", ops, (Tensor("v", 1, 1, ()), Tensor("w", 1, 1, ())))
    chosen = fabric("aggregation", barrier=False, aggregation="store-and-forward")
    net = Network(workers=1, bandwidth_bps=8.0)
    assert simulate_few(case(unread, None, chosen, net, 2)) is None


def test_what_nothing_reads_may_arrive_in_the_next_iteration():
    """Without a barrier no op waits for it, so that iterations meet on a link: the engine has to simulate them."""
    ops = (Op("f", "forward", 1.0), Op("b0", "backward", 1.0, (0,)), Op("b1", "backward", 1.0, (1,)))
    unread = Workload("unread", ops, (Tensor("w", 1, 2, (0,)), Tensor("never read", 1000, 1, ())))
    chosen, net = fabric("parameter-server", barrier=False, servers=2), Network(workers=3, bandwidth_bps=8.0)
    assert simulate_few(case(unread, None, chosen, net, 3)) is None
    found = simulate_flow(unread, None, chosen, net, iterations=3, keep_transfers=False)
    assert found.end_s.tolist() == simulate_flow(unread, None, chosen, net, iterations=3, symmetry=False).end_s.tolist()


@contextlib.contextmanager
def nothing_is_done(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("it begins to simulate")

    with monkeypatch.context() as patch:
        patch.setattr(Unrolled, "__init__", refuse)
        yield


@pytest.mark.parametrize(
    "name, options, iterations, words",
    [
        ("hierarchical", {"message_bytes": 100}, 1, "more than 100,000,000"),
        ("ring-whole", {}, 100, "more than 100,000,000"),
        ("parameter-server", {"message_bytes": 20}, 1, "more than 400,000,000 pushes"),
        ("multicast", {}, 1000, "more than 4,000,000,000 transfers"),
        ("ring", {"message_bytes": 2}, 1, "more than 4,000,000,000 transfers"),
    ],
)
def test_too_much_is_refused_before_anything_is_done(name, options, iterations, words, monkeypatch):
    with nothing_is_done(monkeypatch), pytest.raises(TooLargeError, match=words):
        chosen = fabric(name, **options)
        simulate_flow(MANY, None, chosen, network(MILLION), iterations=iterations, keep_transfers=False)


@pytest.mark.parametrize("name", ["ring", "tree", "parameter-server", "shuffle"])
def test_a_million_workers_that_differ_are_too_many(name, monkeypatch):
    slow = network(MILLION, compute_scale=(*[1.0] * (MILLION - 1), 2.0))
    with nothing_is_done(monkeypatch), pytest.raises(TooLargeError, match="more than 100,000,000"):
        simulate_flow(job([BYTES] * 50), None, name, slow, keep_transfers=False)


def test_a_tree_of_too_many_classes_is_all_workers_or_refused(monkeypatch):
    """Whichever can be simulated: some more workers than classes, or neither of a million."""
    net = Network(workers=300, bandwidth_bps=1e9, latency_s=1e-6, reduce_s_per_byte=1e-9)
    assert simulate_classes(case(MANY, None, fabric("tree"), net), TreeClasses(300), patience=0) is None
    monkeypatch.setattr("legato.simulator.flow.few._MOST_OF_CLASSES", 1000)
    monkeypatch.setattr(Case, "fits", False)
    with pytest.raises(TooLargeError, match="do different things"):
        simulate_classes(case(MANY, None, fabric("tree"), net), TreeClasses(300), patience=0)


def test_a_result_says_for_whom_its_workers_stand():
    ring = simulate_flow(MANY, None, "ring", network(12), keep_transfers=False)
    assert ring.timeline().members == ((0, 12),)
    with pytest.raises(InputError, match=r"worker 1: not simulated \(expected 0\)"):
        ring.timeline([1])
    servers = simulate_flow(MANY, None, "parameter-server", network(100), keep_transfers=False)
    assert servers.timeline().members == () and {*range(32), 99} == set(servers.ranks.tolist())
    with pytest.raises(InputError, match=r"expected 0 to 31 or 99"):
        servers.timeline([50])
    hierarchical = simulate_flow(MANY, None, "hierarchical", network(12, **hosts_of(4)))
    assert hierarchical.timeline([1, 2]).members == ((1, 3), (2, 3))


def test_a_message_a_worker_is_split_over_more_workers_than_it_has_bytes():
    tiny = Workload("tiny", (Op("f", "forward", 0.5), Op("b", "backward", 0.5, (0,))), (Tensor("w", 3, 1, (0,)),))
    plan = Plan("deep", (Message((Slice("w", 0, 3),), depth=3),))
    few = simulate_flow(tiny, plan, "ring", network(50), keep_transfers=False)
    assert_same(few, simulate_flow(tiny, plan, "ring", network(50), symmetry=False))
