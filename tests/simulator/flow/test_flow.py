"""Whole iterations: the paper's toy, the planners' simulator, and what staggering, barriers and stragglers do."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.flows import gradient_s, hosts_of, staggering_s
from support.flows import job as job_of
from support.nets import chain
from support.strategies import examples, plans, workloads

from legato.collectives import COLLECTIVES
from legato.core.cluster import UNDIVIDED, Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.sharded import sharded
from legato.simulator.collective import simulate
from legato.simulator.flow import FABRICS, Network, fabric, plain_plan, simulate_flow
from legato.simulator.flow.pricing import cluster_for


def toy(forward_s=0.0, nbytes=3):
    """Three ops that take 3 s each backward, and three tensors that take 3 s each to send at a byte a second."""
    ops = [Op(f"f{i}", "forward", forward_s * (i == 2)) for i in range(3)] + [
        Op(f"b{i}", "backward", 3.0) for i in range(3)
    ]
    tensors = [Tensor(f"w{2 - i}", nbytes, 3 + i, (2 - i,)) for i in range(3)]
    return Workload("toy", tuple(ops), tuple(tensors))


TWO = Network(workers=2, bandwidth_bps=8.0)


@pytest.mark.parametrize(
    "aggregation, late_s, expected_s",
    [(None, 0, 21), ("cut-through", 0, 12), (None, 3, 21), ("cut-through", 3, 15), ("store-and-forward", 0, 15)],
)
def test_the_toy_of_figure_2(aggregation, late_s, expected_s):
    """Network Operator Edition, 8.1.1: aggregating takes 21 s, and 12 s with in-network aggregation; staggered, 21 s
    and 15 s. Multicast starts both workers at once; then one computes longer before it goes backward."""
    late = toy(forward_s=late_s)
    chosen = fabric("multicast", aggregation=aggregation)
    found = simulate_flow([toy(), late], None, chosen, TWO)
    assert staggering_s(found) == pytest.approx(late_s)
    assert found.backward_to_aggregated_s == pytest.approx(expected_s, rel=1e-12)


def test_distribution_in_turn_staggers_the_toy_by_itself():
    """The second worker gets the last parameter 3 s after the first one does: Fig. 2 without anybody's help."""
    found = simulate_flow(toy(), None, fabric("parameter-server", aggregation="cut-through"), TWO)
    assert staggering_s(found) == pytest.approx(3.0) and found.backward_to_aggregated_s == pytest.approx(15.0)


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_workload_may_be_a_backward_pass_only(overlap, sharing):
    """Gradients after 3 s and 6 s, each 4 s on a ring of two: until 11 s, at both fidelities; all fabrics take it."""
    ops = (Op("b1", "backward", 3.0), Op("b0", "backward", 3.0))
    job = Workload("backward", ops, (Tensor("w1", 4, 0), Tensor("w0", 4, 1)))
    messages = tuple(Message((Slice(tensor.name, 0, 4),)) for tensor in job.tensors)
    plan, network = Plan("plain", messages, overlap), dataclasses.replace(TWO, sharing=sharing)
    assert simulate(job, plan, Cluster.derive(2, 8.0, 0.0, collectives=["ring"])).iteration_s == 11
    assert simulate_flow(job, plan, "ring", network).iteration_s == pytest.approx(11, rel=1e-12)
    for name in FABRICS:
        assert simulate_flow(job, plan, name, network).iteration_s >= 6 * (1 - 1e-12)


@st.composite
def planned(draw, halves):
    job = draw(workloads())
    cluster = Cluster.derive(4, 8.0, draw(st.integers(0, 8)) / 4, collectives=["ring"])
    plan = draw(plans(job, cluster, halves=halves))
    return job, plan, cluster.latency_s


@pytest.mark.parametrize("name", COLLECTIVES)
@given(data=st.data())
@examples(60)
def test_messages_take_what_planners_are_told(name, data):
    """Any cut, merge, order and kind of messages, on identical workers, at a byte a second."""
    job, plan, latency_s = data.draw(planned(halves=name not in UNDIVIDED))
    send_s = data.draw(st.sampled_from([None, 0.0, latency_s / 2, latency_s]))
    workers = data.draw(st.sampled_from([1, 2, 4, 8] + [3, 5, 6, 7, 12] * (name in ("ring", "shuffle"))))
    reduce = data.draw(st.sampled_from([0.0, 0.5])) if workers & (workers - 1) == 0 else 0.0
    network = Network(workers=workers, bandwidth_bps=8.0, latency_s=latency_s, send_s=send_s, reduce_s_per_byte=reduce)
    plan = _on(plan, name)
    expected = simulate(job, plan, cluster_for(name, fabric(name), network)).iteration_s
    found = simulate_flow(job, plan, name, network)
    assert found.iteration_s == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("workers", [*range(2, 18), 24, 31, 48])
@pytest.mark.parametrize("name", ["halving-doubling", "recursive-doubling", "tree"])
def test_what_planners_are_told_of_workers_that_are_no_power_of_two(name, workers):
    """Within 2%, or two latencies."""
    network = Network(workers=workers, bandwidth_bps=8e9, latency_s=30e-6)
    cost = cluster_for(name, fabric(name), network).cost()
    for nbytes in (100, 10_000, 30_000, 10**6, 10**8):
        job = layered(layers=1, nbytes=nbytes, forward_s=0.0, backward_s=0.0)
        seconds = simulate_flow(job, None, name, network).iteration_s
        assert cost.cost(nbytes) == pytest.approx(seconds, rel=0.02, abs=61e-6)


@pytest.mark.parametrize(("alpha_s", "latency_s", "send_s"), [(3.2e-4, 1e-4, 1e-5), (2.8e-5, 2e-6, 2e-6)])
def test_a_measured_shuffle_is_explained_with_its_sends(alpha_s, latency_s, send_s):
    """Eight workers, and 10 us a send as measured, or as much as the startup time leaves."""
    measured = Cluster(8, {"shuffle": LinearCost(alpha_s, 2e-9)}, send_s=1e-5)
    network = Network.of(measured)
    assert (network.latency_s, network.send_s) == pytest.approx((latency_s, send_s))
    cost = network.cluster("shuffle").cost()
    assert (cost.alpha_s, cost.beta_s_per_byte) == pytest.approx((alpha_s, 2e-9))


OTHERS = {
    "ring-whole": {},
    "ring+multicast": {},
    "hierarchical": {},
    "halving-doubling": {"racks": 4, "oversubscription": 4.0},
    "ring": {"link_scale": (1.0,) * 7 + (3.0,)},
    "shuffle": {"gpus_per_host": 4, "gpus_per_card": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_no_formula_prices_is_simulated(name):
    """Six messages of very different sizes, one after another, within 1% of what each takes alone."""
    network = Network(workers=8, bandwidth_bps=1e9, latency_s=30e-6, **OTHERS[name])
    sizes = (300, 5_000_000, 70_000, 40_960, 1100, 900_000)
    cluster = cluster_for(name, fabric(name), network)
    seconds = simulate_flow(job_of(sizes, forward=0.0, backward=0.0), None, name, network).iteration_s
    assert sum(map(cluster.cost().cost, sizes)) == pytest.approx(seconds, rel=0.01)


def _on(plan, collective):
    """The same plan with all messages on one collective."""
    messages = [Message(m.slices, kind=m.kind, collective=collective) for m in plan.messages]
    return Plan(plan.scheduler, tuple(messages), plan.forward_overlap, plan.op_order)


@pytest.mark.parametrize("name", FABRICS)
@given(data=st.data())
@examples(15)
def test_any_plan_runs_on_any_fabric(name, data):
    """Every byte is summed after its gradient is there on all workers, and received after it is summed."""
    job, plan, latency_s = data.draw(planned(halves=True))
    options = data.draw(st.sampled_from(OPTIONS[bool(FABRICS[name].servers)]))
    jitter = data.draw(st.sampled_from([0.0, 0.5]))
    network = Network(workers=4, bandwidth_bps=8.0, latency_s=latency_s, jitter=jitter, **hosts_of(2, name))
    found = simulate_flow(job, plan, fabric(name, **options), network, iterations=2)
    assert (found.aggregated_s >= gradient_s(found).max(axis=1)).all()
    if found.servers:
        assert (found.received_s[1:] >= found.aggregated_s[:-1, None, :]).all()
    else:
        assert (found.received_s >= gradient_s(found).max(axis=1, keepdims=True)).all()
    assert (np.diff(found.end_s) > -1e-12).all()


OPTIONS = {
    True: [
        {},
        {"servers": 3},
        {"servers": 2, "placement": "equal"},
        {"distribution": "block"},
        {"barrier": False},
        {"message_bytes": 2},
    ],
    False: [{}, {"in_flight": 2}, {"message_bytes": 3}],
}


def layered(layers=6, nbytes=1000, forward_s=6.0, backward_s=12.0):
    return chain([backward_s / layers] * layers, [forward_s / layers] * layers, [nbytes] * layers)


KILOBYTE_A_SECOND = 8000.0


def test_multicast_ends_staggering_and_incast_follows():
    net = Network(workers=8, bandwidth_bps=KILOBYTE_A_SECOND)
    plain, multicast = (simulate_flow(layered(), None, name, net) for name in ("parameter-server", "multicast"))
    # Worker 7 gets the last parameter when worker 0 has had it for 7 sends, and runs one forward op more.
    assert staggering_s(plain) == pytest.approx(7.0) and staggering_s(multicast) == 0
    assert multicast.iteration_s < plain.iteration_s


def test_block_distribution_staggers_most():
    net = Network(workers=8, bandwidth_bps=KILOBYTE_A_SECOND)
    in_turn, block = (
        simulate_flow(layered(), None, fabric("parameter-server", distribution=d), net)
        for d in ("round-robin", "block")
    )
    assert staggering_s(block) == pytest.approx(7 * 6.0) and staggering_s(in_turn) == pytest.approx(7.0)


def test_without_the_barrier_aggregation_and_distribution_overlap():
    """The last layer's gradient comes first, so its parameter goes out while the first layer's is still computed."""
    job = layered(nbytes=3000)
    net = Network(workers=8, bandwidth_bps=KILOBYTE_A_SECOND)
    with_barrier, without = (
        simulate_flow(job, None, fabric("multicast+aggregation", barrier=barrier), net, iterations=3)
        for barrier in (True, False)
    )
    assert without.iteration_s < with_barrier.iteration_s
    first = [tensor.name for tensor in job.tensors].index("t0")
    two_periods = without.aggregated_s[2, first] - without.aggregated_s[0, first]
    assert two_periods == pytest.approx(2 * without.iteration_s, rel=1e-6)


def test_with_a_barrier_every_iteration_is_the_same():
    net = Network(workers=5, bandwidth_bps=KILOBYTE_A_SECOND)
    found = simulate_flow(layered(), None, "parameter-server", net, iterations=3)
    assert np.diff(found.end_s) == pytest.approx([found.end_s[0]] * 2)


def test_one_slow_worker_holds_up_all():
    slow = Network(workers=4, bandwidth_bps=KILOBYTE_A_SECOND, compute_scale=(1, 1, 1, 2))
    found = simulate_flow(layered(), None, "ring", slow, iterations=1)
    assert found.utilization == pytest.approx(18.0 / found.iteration_s)
    assert found.received_s.min() >= 4.0 and found.received_s.max() >= 24.0
    assert found.compute.op_times("backward", 0)[1][:, -1].tolist() == pytest.approx([12, 12, 12, 24])


def test_jitter_comes_from_the_seed():
    nets = [Network(workers=4, bandwidth_bps=1e6, jitter=0.2, seed=seed) for seed in (1, 1, 2)]
    one, again, other = (simulate_flow(layered(), None, "ring", net).iteration_s for net in nets)
    assert one == again != other


def test_a_seed_has_63_bits():
    assert simulate_flow(layered(), None, "ring", Network(workers=2, bandwidth_bps=1e6, jitter=0.2, seed=2**63 - 1))
    for seed in (-1, 2**63):
        with pytest.raises(InputError, match=f"seed: {seed}"):
            Network(workers=2, bandwidth_bps=1e6, seed=seed)


def test_the_order_of_pulls_is_the_plans():
    """TicTac: parameters in the order in which the forward pass reads them, or the worst one."""
    job, net = layered(), Network(workers=1, bandwidth_bps=KILOBYTE_A_SECOND)
    good = plain_plan(job, "parameter-server")
    pulls = [m for m in good.messages if m.kind == "pull"]
    bad = Plan("bad", (*(m for m in good.messages if m.kind == "push"), *reversed(pulls)), forward_overlap=True)
    in_order, against = (simulate_flow(job, plan, "parameter-server", net) for plan in (good, bad))
    # Forward ends a layer after the last parameter; against the order it only begins then. Backward and the last push.
    assert in_order.iteration_s == pytest.approx(6 + 1 + 12 + 1)
    assert against.iteration_s == pytest.approx(6 + 6 + 12 + 1)


def test_messages_in_pieces_keep_servers_and_links_busy():
    """A ring of whole parameters gains from pieces; so does store-and-forward aggregation (9.2)."""
    job = layered(layers=1, nbytes=6000)
    for name in ("ring-whole", "multicast+aggregation"):
        net = Network(workers=6, bandwidth_bps=KILOBYTE_A_SECOND)
        whole, pieces = (simulate_flow(job, None, fabric(name, message_bytes=b), net).iteration_s for b in (None, 1000))
        assert pieces < whole


def test_a_depth_is_as_many_pieces():
    job, net = layered(layers=1, nbytes=6000), Network(workers=4, bandwidth_bps=KILOBYTE_A_SECOND, cut_through=False)
    deep = Plan("deep", (Message((Slice("t0", 0, 6000),), depth=6),))
    assert simulate_flow(job, deep, "tree", net).iteration_s == pytest.approx(
        simulate_flow(job, None, fabric("tree", message_bytes=1000), net).iteration_s
    )


def test_placement_can_be_given():
    """All on one of two servers is one server; spread, both links work."""
    job, net = layered(), Network(workers=8, bandwidth_bps=KILOBYTE_A_SECOND)
    one = simulate_flow(job, None, "multicast", net).iteration_s
    lump = dict.fromkeys([tensor.name for tensor in job.tensors], 1)
    assert simulate_flow(job, None, fabric("multicast", servers=2, placement=lump), net).iteration_s == one
    assert simulate_flow(job, None, fabric("multicast", servers=2), net).iteration_s < one


def test_a_plan_that_waits_for_itself_is_refused():
    job = layered(layers=2)
    whole = [(Slice(t.name, 0, t.nbytes),) for t in job.tensors]
    circle = Plan("circle", tuple(Message(s, kind=k) for k in ("all_gather", "reduce_scatter") for s in whole))
    with pytest.raises(PlanError, match="waits for itself"):
        simulate_flow(job, circle, "ring", Network(workers=2, bandwidth_bps=1e6))


def test_a_sharded_plan_is_refused():
    job = layered(layers=2)
    plan = sharded(plain_plan(job, "ring"), job, "optimizer")
    with pytest.raises(InputError, match=r"shard: 'optimizer' transfer by transfer \(expected a plan without shards"):
        simulate_flow(job, plan, "ring", Network(workers=2, bandwidth_bps=1e6))


def test_a_plan_with_wire_formats_is_refused():
    job = layered(layers=2)
    plan = plain_plan(job, "ring")
    plan = replace(plan, messages=(*plan.messages[:-1], replace(plan.messages[-1], wire="bf16")))
    with pytest.raises(InputError, match=r"wire: a plan with wire formats transfer by transfer \(expected none"):
        simulate_flow(job, plan, "ring", Network(workers=2, bandwidth_bps=1e6))


def test_the_timeline_has_the_results_metrics():
    for name in FABRICS:
        net = Network(workers=4, bandwidth_bps=KILOBYTE_A_SECOND, latency_s=0.01, **hosts_of(2, name))
        found = simulate_flow(layered(), None, name, net, symmetry=False)
        timeline = found.timeline()
        assert {span.worker for span in timeline.spans} == {0, 1, 2, 3}
        assert timeline.iteration_s == found.iteration_s
        assert timeline.computation_s == pytest.approx(found.computation_s)
        assert timeline.overlap == pytest.approx(found.overlap, abs=1e-9), name
        assert timeline.utilization == pytest.approx(found.utilization)


@pytest.mark.parametrize("name", ["ring", "tree", "halving-doubling"])
def test_sums_go_out_when_they_are_complete(name):
    """In a timeline, too, where the two halves of a message are a span each."""
    found = simulate_flow(layered(), None, name, Network(workers=4, bandwidth_bps=KILOBYTE_A_SECOND), iterations=1)
    spans = [span for span in found.timeline([0]).spans if span.kind == "message"]
    assert [span.name for span in spans] == [f"t{i // 2}" for i in reversed(range(12))]
    for reduced, distributed in zip(spans[::2], spans[1::2], strict=True):
        assert distributed.start_s == pytest.approx(reduced.end_s)


def test_overlap_is_a_share_where_iterations_overlap_each_other():
    """Without a barrier, a slow worker's messages are in flight for longer than an iteration takes."""
    scale = (*[1.0] * 7, 2.0)
    net = Network(workers=8, bandwidth_bps=100 * KILOBYTE_A_SECOND, jitter=0.5, compute_scale=scale, seed=3)
    free = fabric("multicast+aggregation", barrier=False)
    found = simulate_flow(layered(), None, free, net, iterations=4)
    assert 0 <= found.overlap <= 1


def test_jitter_lets_no_worker_compute_for_more_than_its_time():
    """Metrics are of one and the same iteration, where the last one takes longer or shorter than the mean."""
    for seed, name in enumerate(name for name, one in FABRICS.items() if not one.servers):
        for workers in (1, 4):
            hosts = hosts_of(workers, name)
            net = Network(workers=workers, bandwidth_bps=KILOBYTE_A_SECOND, jitter=0.5, seed=seed, **hosts)
            found = simulate_flow(layered(), None, name, net)
            assert found.utilization <= 1 + 1e-9 and found.overlap <= 1 + 1e-9, name
            assert found.utilization == pytest.approx(1) or workers > 1
            timeline = found.timeline([0])
            assert timeline.utilization == pytest.approx(found.utilization), name
            assert timeline.overlap == pytest.approx(found.overlap, abs=1e-9), name
    only = Workload("backward", (Op("b", "backward", 2.0),), (Tensor("w", 1000, 0),))
    found = simulate_flow(only, None, "ring", Network(workers=4, bandwidth_bps=1e6, jitter=0.5))
    assert 0 < found.utilization <= 1 + 1e-9
    alike = simulate_flow(layered(), None, "ring", Network(workers=4, bandwidth_bps=1e6), iterations=5)
    assert alike.last_s == alike.iteration_s == alike.timeline().iteration_s
