"""One of identical workers stands for all, with the times of the full simulation, to the last bit."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flows import BYTES, CLOSED_FORMS, MANY, hosts_of, job, network
from support.strategies import examples, plans, some, workloads

from legato.core.cluster import Cluster
from legato.core.errors import InputError, TooLargeError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.simulator.flow import Network, fabric, simulate_flow
from legato.simulator.flow.iterations.run import Case
from legato.simulator.flow.iterations.unroll import Unrolled
from legato.zoo import workload

MILLION = 2**20
ALONE = ("ring", "ring+multicast", "shuffle", "butterfly", "halving-doubling")


def assert_same(few, full):
    """Every time of every worker that is kept, and every metric, which may also depend on the others."""
    kept = few.ranks
    assert (few.end_s == full.end_s).all() and (few.aggregated_s == full.aggregated_s).all()
    assert (few.received_s == full.received_s[:, kept]).all()
    for half, k in itertools.product(("forward", "backward"), range(few.iterations)):
        for mine, every in zip(few.compute.op_times(half, k), full.compute.op_times(half, k), strict=True):
            assert (mine == every[kept]).all(), half
    for name in ("start_s", "end_s"):
        assert (getattr(few.messages, name) == getattr(full.messages, name)[:, kept]).all(), name
    assert few.timeline(kept.tolist()).spans == full.timeline(kept.tolist()).spans
    metrics = ("iteration_s", "overlap", "utilization")
    if few.compute.backward.ops:
        metrics += ("backward_to_aggregated_s",)
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
    if chosen.simulated(net) > 1:  # not a power of two
        return
    few = simulate_flow(job, plan, chosen, net, iterations=iterations)
    assert few.ranks.tolist() == [0] and few.members.tolist() == [net.workers]
    assert_same(few, simulate_flow(job, plan, chosen, net, iterations=iterations, symmetry=False))


@pytest.mark.parametrize("workers", some([37, 64, 300], [37]))
@pytest.mark.parametrize("name", ALONE)
def test_times_that_are_no_exact_sums(name, workers):
    """Sizes and durations of a model."""
    model = workload("alexnet-v2")
    net = network(workers, reduce_s_per_byte=3e-10)
    few = simulate_flow(model, None, name, net, iterations=1)
    full = simulate_flow(model, None, name, net, iterations=1, symmetry=False)
    assert_same(few, full)


@pytest.mark.parametrize("name", ["ring", "halving-doubling", "butterfly", "shuffle"])
def test_a_million_workers(name):
    found = simulate_flow(job(), None, name, network(MILLION))
    assert found.iteration_s == pytest.approx(CLOSED_FORMS[name](MILLION), rel=1e-8)


def test_workers_that_differ_are_all_simulated():
    slow = network(64, compute_scale=(*[1.0] * 63, 2.0))
    found = simulate_flow(MANY, None, "ring", slow, iterations=1)
    assert found.ranks.tolist() == list(range(64)) and set(found.members.tolist()) == {1}


@contextlib.contextmanager
def nothing_is_done(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("it begins to simulate")

    with monkeypatch.context() as patch:
        patch.setattr(Unrolled, "__init__", refuse)
        yield


@pytest.mark.parametrize(
    "name, options, iterations",
    [
        ("hierarchical", {"message_bytes": 100}, 1),
        ("ring-whole", {}, 100),
        ("parameter-server", {}, 50),
        ("multicast+aggregation", {}, 1000),
        ("ring", {"message_bytes": 2}, 1),
    ],
)
def test_too_much_is_refused_before_anything_is_done(name, options, iterations, monkeypatch):
    with nothing_is_done(monkeypatch), pytest.raises(TooLargeError, match="more than 100,000,000"):
        chosen = fabric(name, **options)
        simulate_flow(MANY, None, chosen, network(MILLION), iterations=iterations)


@pytest.mark.parametrize("name", ["ring", "tree", "parameter-server", "shuffle"])
def test_a_million_workers_that_differ_are_too_many(name, monkeypatch):
    slow = network(MILLION, compute_scale=(*[1.0] * (MILLION - 1), 2.0))
    with nothing_is_done(monkeypatch), pytest.raises(TooLargeError, match="more than 100,000,000"):
        simulate_flow(job([BYTES] * 50), None, name, slow)


def test_every_worker_launches_every_message_also_where_workers_share_transfers(monkeypatch):
    """Eight GPUs on a network card: switches that add up and multicast carry one transfer for all of them."""
    net = network(MILLION, gpus_per_host=8, gpus_per_card=8)
    one = Workload("one", (Op("f", "forward", 0.5), Op("b", "backward", 0.5, (0,))), (Tensor("w", 100, 1, (0,)),))
    plan = Plan("many", tuple(Message((Slice("w", i, i + 1),)) for i in range(100)))
    case = Case([one], plan, fabric("multicast+aggregation"), net, 1, alike=False)
    assert case.services(MILLION) < 50_000_000
    with nothing_is_done(monkeypatch), pytest.raises(TooLargeError, match="more than 100,000,000"):
        case.topology(symmetry=False)


def test_a_result_says_for_whom_its_workers_stand():
    ring = simulate_flow(MANY, None, "ring", network(12))
    assert ring.timeline().members == ((0, 12),)
    with pytest.raises(InputError, match=r"worker 1: not simulated \(expected 0\)"):
        ring.timeline([1])
    servers = simulate_flow(MANY, None, "parameter-server", network(6))
    assert servers.timeline().members == () and servers.ranks.tolist() == list(range(6))
    with pytest.raises(InputError, match=r"expected 0 to 5"):
        servers.timeline([50])
    hierarchical = simulate_flow(MANY, None, "hierarchical", network(12, **hosts_of(4)))
    assert hierarchical.timeline([1, 2]).members == ((1, 3), (2, 3))


def test_a_message_a_worker_is_split_over_more_workers_than_it_has_bytes():
    tiny = Workload("tiny", (Op("f", "forward", 0.5), Op("b", "backward", 0.5, (0,))), (Tensor("w", 3, 1, (0,)),))
    plan = Plan("deep", (Message((Slice("w", 0, 3),), depth=3),))
    few = simulate_flow(tiny, plan, "ring", network(50))
    assert_same(few, simulate_flow(tiny, plan, "ring", network(50), symmetry=False))
