"""The one pass of the simulator: by hand, and against an event loop that knows nothing of it."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, contentions, examples, op_orders, plans, sharded_plans, workloads

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.layout import scattered_tensors
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.sharded import sharded
from legato.schedule.published.dear import dear
from legato.simulator.collective import LEAST_PACE, iteration_time, simulate

# Two layers. Backward of the second (1 s) and of the first (2 s), an update each (1 s), forward of each (3 s, 4 s).
TWO = Workload(
    "two",
    (
        Op("f1", "forward", 3.0),
        Op("f2", "forward", 4.0, (0,)),
        Op("b2", "backward", 1.0, (1,)),
        Op("b1", "backward", 2.0, (0, 2)),
        Op("u1", "optimizer", 1.0, (3,)),
        Op("u2", "optimizer", 1.0, (2,)),
    ),
    (Tensor("w2", 40, 2, (1, 5)), Tensor("w1", 20, 3, (0, 4))),
)
NETWORK = Cluster(4, {"slow": LinearCost(1.0, 0.25), "free": LinearCost(0.0, 0.0)})


def whole(*names, kind="all_reduce", collective=None):
    sizes = {t.name: t.nbytes for t in TWO.tensors}
    return Message(tuple(Slice(name, 0, sizes[name]) for name in names), kind, collective)


def lanes(timeline):
    spans = {"compute": [], "network": []}
    for span in timeline.spans:
        assert span.worker == 0
        spans[span.lane].append((span.name, span.start_s, span.end_s))
    return spans["compute"], spans["network"]


def test_without_forward_overlap_everything_waits_for_the_last_message():
    timeline = simulate(TWO, Plan("fifo", (whole("w2"), whole("w1"))), NETWORK, lower_bound_s=9.0)
    compute, network = lanes(timeline)
    assert network == [("w2", 1, 12), ("w1", 12, 18)]
    assert compute == [("b2", 0, 1), ("b1", 1, 3), ("u1", 18, 19), ("f1", 19, 22), ("u2", 22, 23), ("f2", 23, 27)]
    assert (timeline.name, timeline.source, timeline.iteration_s, timeline.lower_bound_s) == (
        "fifo",
        "predicted",
        27,
        9,
    )
    assert (timeline.communication_s, timeline.computation_s) == (17, 12)
    assert {s.kind for s in timeline.spans if s.lane == "compute"} == {"forward", "backward", "optimizer"}
    assert {s.kind for s in timeline.spans if s.lane == "network"} == {"message"}


def test_the_last_message_is_unpacked_before_the_forward_pass():
    slow = Cluster(4, NETWORK.collectives, unpack_s_per_byte=0.1)
    fifo = Plan("fifo", (whole("w2"), whole("w1")))
    compute, network = lanes(simulate(TWO, fifo, slow))
    assert network == [("w2", 1, 12), ("w1", 12, 18)]
    assert compute[2] == ("u1", 20, 21)
    assert iteration_time(TWO, fifo, slow) == 29
    in_place = Plan("in place", fifo.messages, forward_overlap=True)
    assert iteration_time(TWO, in_place, slow) == iteration_time(TWO, in_place, NETWORK)


def test_a_gradient_in_pieces_is_put_together_by_the_first_op_that_reads_it():
    slow = Cluster(4, NETWORK.collectives, unpack_s_per_byte=0.1)
    pieces = [Message((Slice("w1", *cut),), collective="free") for cut in ((0, 8), (8, 16), (16, 20))]
    chained = Plan("chained", (whole("w2"), *pieces), forward_overlap=True)
    assert iteration_time(TWO, chained, slow) == iteration_time(TWO, chained, NETWORK)
    with_w2 = Message((Slice("w1", 8, 16), *whole("w2").slices))  # in the middle of what is in no other message
    plan = Plan("scattered", (pieces[0], with_w2, pieces[2]), forward_overlap=True)
    compute, network = lanes(simulate(TWO, plan, slow))
    assert network == [("w1 +1", 3, 16)]
    assert compute[2:] == [("u1", 18, 19), ("f1", 19, 22), ("u2", 22, 23), ("f2", 23, 27)]


def test_with_forward_overlap_an_op_waits_for_what_it_reads():
    plan = Plan("priority", (whole("w1"), whole("w2")), forward_overlap=True)
    compute, network = lanes(simulate(TWO, plan, NETWORK))
    assert network == [("w1", 3, 9), ("w2", 9, 20)]
    assert compute == [("b2", 0, 1), ("b1", 1, 3), ("u1", 9, 10), ("f1", 10, 13), ("u2", 20, 21), ("f2", 21, 25)]


def test_a_message_of_two_waits_for_both():
    compute, network = lanes(simulate(TWO, Plan("single", (whole("w2", "w1"),), forward_overlap=True), NETWORK))
    assert network == [("w2 +1", 3, 19)]
    assert compute[2:] == [("u1", 19, 20), ("f1", 20, 23), ("u2", 23, 24), ("f2", 24, 28)]


def test_an_update_may_run_between_backward_ops():
    plan = Plan("early", (whole("w2", collective="free"), whole("w1")), True, (2, 5, 3, 4, 0, 1))
    compute, network = lanes(simulate(TWO, plan, NETWORK))
    assert compute == [("b2", 0, 1), ("u2", 1, 2), ("b1", 2, 4), ("u1", 10, 11), ("f1", 11, 14), ("f2", 14, 18)]
    assert network == [("w1", 4, 10)]  # the free one takes no time and has no span


def test_unlimited_compute_starts_an_op_as_soon_as_what_it_needs_is_there():
    branches = Workload(
        "branches",
        (
            Op("f", "forward", 2.0),
            Op("x", "backward", 4.0),
            Op("y", "backward", 1.0),
            Op("u", "optimizer", 1.0),
            Op("v", "optimizer", 5.0, (2,)),
        ),
        (Tensor("a", 4, 1, (0, 3)), Tensor("b", 8, 2)),
    )
    plan = Plan("p", (Message((Slice("b", 0, 8),)), Message((Slice("a", 0, 4),))), forward_overlap=True)
    compute, network = lanes(simulate(branches, plan, NETWORK, compute="unlimited"))
    assert network == [("b", 1, 4), ("a", 4, 6)]
    assert sorted(compute) == [("f", 7, 9), ("u", 6, 7), ("v", 1, 6), ("x", 0, 4), ("y", 0, 1)]


def test_the_period_lasts_until_the_last_message_even_if_nothing_reads_it():
    work = Workload("w", (Op("f", "forward", 1.0), Op("b", "backward", 1.0)), (Tensor("t", 8, 1),))
    plan = Plan("p", (Message((Slice("t", 0, 8),)),), forward_overlap=True)
    timeline = simulate(work, plan, NETWORK)
    assert lanes(timeline) == ([("b", 0, 1), ("f", 1, 2)], [("t", 1, 4)]) and timeline.iteration_s == 4


def test_each_half_takes_half():
    halves = (whole("w2", "w1", kind="reduce_scatter"), whole("w1", kind="all_gather"), whole("w2", kind="all_gather"))
    _, network = lanes(simulate(TWO, Plan("halves", halves, forward_overlap=True), NETWORK))
    assert network == [("w2 +1", 3, 11), ("w1", 11, 14), ("w2", 14, 19.5)]


def test_a_part_is_gathered_before_another_one_is_scattered():
    """Its bytes have to be scattered, not those of the rest of the tensor."""
    parts = [
        [Message((Slice("t", start, start + 4),), kind) for start in (0, 4)]
        for kind in ("reduce_scatter", "all_gather")
    ]
    (first, second), (gathered, last) = parts
    work = Workload("w", (Op("b", "backward", 1.0),), (Tensor("t", 8, 0),))
    in_turns = Plan("in turns", (first, gathered, second, last), forward_overlap=True)
    assert (
        simulate(work, in_turns, NETWORK).iteration_s
        == simulate(work, Plan("p", (first, second, gathered, last), True), NETWORK).iteration_s
    )
    both = Message((Slice("t", 0, 8),), "all_gather")
    simulate(work, Plan("joined", (first, second, both), forward_overlap=True), NETWORK)
    with pytest.raises(PlanError, match=r"messages\[1\]: all_gather of 't' before the reduce_scatter of these bytes"):
        simulate(work, Plan("early", (first, both, second), forward_overlap=True), NETWORK)


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (Plan("p", (whole("w2"),)), "'w1': byte 0 is never sent"),
        (Plan("p", (whole("w2", collective="slwo"), whole("w1"))), r"messages\[0\].collective: .* did you mean 'slow'"),
        (
            Plan("p", (whole("w1", "w2", kind="all_gather"), whole("w1", "w2", kind="reduce_scatter"))),
            r"messages\[0\]: all_gather of 'w1' before the reduce_scatter of these bytes",
        ),
        (
            Plan("p", (whole("w2"), whole("w1", kind="pull"), whole("w1", kind="push"))),
            r"messages\[1\]: pull of 'w1' before the push of these bytes",
        ),
        (
            Plan("p", (whole("w1"), whole("w2")), True, (2, 5, 3, 4, 0, 1)),
            r"messages\[0\] waits for 'w1' from op 3 \('b1'\), which op_order puts after op 5 \('u2'\)",
        ),
        (Plan("p", (whole("w2"), whole("w1")), False, (2, 5, 3, 4, 0, 1)), r"messages\[1\] waits for 'w1'"),
        (Plan("p", (whole("w2", "w1"),), True, (3, 2, 5, 4, 0, 1)), "op 3 runs before op 2"),
    ],
)
def test_what_cannot_be_executed_is_an_error(plan, error):
    for run in (simulate, iteration_time):
        with pytest.raises(PlanError, match=error):
            run(TWO, plan, NETWORK)


def test_unlimited_compute_never_waits_for_the_stream():
    plan = Plan("p", (whole("w1"), whole("w2")), True, (2, 5, 3, 4, 0, 1))
    assert iteration_time(TWO, plan, NETWORK, compute="unlimited") == 25


def test_an_unknown_compute_setting():
    with pytest.raises(InputError, match="unknown compute setting 'two'"):
        simulate(TWO, Plan("p", (whole("w2", "w1"),)), NETWORK, compute="two")


def _by_phase(workload):
    return [i for phase in ("backward", "optimizer", "forward") for i in workload.phase_ops(phase)]


def event_loop(workload, plan, cluster, compute):
    """(start of every op, start of every message), or None for a plan that waits for itself: by events in time."""
    ops, order = workload.ops, plan.op_order or workload.iteration_order()
    names = {t.name: t for t in workload.tensors}
    halves = {"all_reduce": 1, "reduce_scatter": 2, "all_gather": 2, "push": 2, "pull": 2}
    shards = plan.shard != "none"
    duration = [op.duration_s / (cluster.workers if shards and op.phase == "optimizer" else 1) for op in workload.ops]
    gather = [0.0] * len(ops)
    sizes = {t.name: t.nbytes for t in workload.tensors}
    exact, light = ([m for m in plan.messages if (m.wire is None) == plain] for plain in (True, False))
    copied = {piece.tensor for m in light for piece in m.slices}
    for name in copied | set(scattered_tensors(exact, sizes, cluster.workers)):
        readers = {i for i in names[name].readers if not shards or ops[i].phase == "forward"}
        if readers:
            first = next(i for i in (order if compute == "one" else _by_phase(workload)) if i in readers)
            gather[first] += cluster.unpack_s_per_byte * names[name].nbytes
    op_start, message_start, running, now = {}, {}, [], 0.0
    done_ops, done_messages = set(), set()

    def arrived(tensor, kinds=tuple(halves)):
        return all(
            m in done_messages
            for m, message in enumerate(plan.messages)
            if message.kind in kinds and tensor.name in {piece.tensor for piece in message.slices}
        )

    def updated(tensor):
        return all(op.phase != "backward" or i in done_ops for i, op in enumerate(ops)) and all(
            u in done_ops for u in tensor.readers if ops[u].phase == "optimizer"
        )

    def op_can_start(i):
        op, read = ops[i], [t for t in workload.tensors if i in t.readers]
        if compute == "one":
            done = [j for j in order if j in done_ops]
            if order[len(done)] != i or len(op_start) != len(done):
                return False
        needed = [d for d in op.deps if op.phase == "forward" or ops[d].phase != "forward"]
        if op.phase == "forward":
            needed += [u for t in read for u in t.readers if ops[u].phase == "optimizer"]
        if not set(needed) <= done_ops or op.phase == "backward":
            return set(needed) <= done_ops
        if shards and op.phase == "optimizer":
            return all(arrived(t, ["reduce_scatter"]) for t in read)
        return all(map(arrived, read)) if plan.forward_overlap else len(done_messages) == len(plan.messages)

    while len(done_ops) < len(ops) or len(done_messages) < len(plan.messages):
        started = False
        for i in range(len(ops)):
            if i not in op_start and op_can_start(i):
                op_start[i], started = now + gather[i], True
                running.append((now + gather[i] + duration[i], "op", i))
                if compute == "one":
                    break
        m = len(message_start)
        if m < len(plan.messages) and m == len(done_messages):
            message = plan.messages[m]
            carried = [names[piece.tensor] for piece in message.slices]
            parameters = shards and message.kind == "all_gather"
            if all(map(updated, carried)) if parameters else all(t.ready_after in done_ops for t in carried):
                message_start[m], started = now, True
                travelling = math.ceil(message.nbytes / (1 if message.wire is None else 2))
                seconds = cluster.cost(message.collective).cost(travelling) / halves[message.kind]
                running.append((now + seconds, "message", m))
        if not started and not running:
            return None
        if not started or min(running)[0] == now:
            running.sort()
            now, what, k = running.pop(0)
            (done_ops if what == "op" else done_messages).add(k)
    return op_start, message_start, now


@examples(150)
@given(st.data(), workloads(), clusters(), st.sampled_from(["one", "unlimited"]), st.booleans())
def test_agrees_with_an_event_loop(data, workload, cluster, compute, reorder):
    plan = data.draw(plans(workload, cluster, op_order=op_orders(workload) if reorder else None))
    if data.draw(st.booleans()):
        formats = st.sampled_from([None, "bf16", "fp16"])
        plan = replace(plan, messages=tuple(replace(m, wire=data.draw(formats)) for m in plan.messages))
    # Backward first never waits for itself.
    agrees_with_the_event_loop(data, workload, plan, cluster, compute, may_wait=reorder and compute == "one")


@examples(300)
@given(st.data(), workloads(), clusters(), st.sampled_from(["one", "unlimited"]), st.booleans())
def test_sharded_plans_agree_with_an_event_loop(data, workload, cluster, compute, reorder):
    cluster = replace(cluster, workers=data.draw(st.sampled_from([1, 2, 4, 8])))  # so that floats are exact
    plan = data.draw(sharded_plans(workload, cluster, op_order=op_orders(workload) if reorder else None))
    if data.draw(st.booleans()):
        plan = sharded(plan, workload, plan.shard)
    agrees_with_the_event_loop(data, workload, plan, cluster, compute)


def agrees_with_the_event_loop(data, workload, plan, cluster, compute, may_wait=True):
    if plan.forward_overlap:
        cluster = replace(cluster, unpack_s_per_byte=data.draw(st.sampled_from([0.0, 0.25])))
    expected = event_loop(workload, plan, cluster, compute)
    if expected is None:
        assert may_wait
        with pytest.raises(PlanError, match="waits for"):
            iteration_time(workload, plan, cluster, compute=compute)
        return
    op_start, message_start, end = expected
    timeline = simulate(workload, plan, cluster, compute=compute)
    assert timeline.iteration_s == iteration_time(workload, plan, cluster, compute=compute) == end
    compute_spans, network_spans = lanes(timeline)
    workers = 1 if plan.shard == "none" else cluster.workers
    takes = [op.duration_s / (workers if op.phase == "optimizer" else 1) for op in workload.ops]
    assert sorted(compute_spans) == sorted(
        (op.name, op_start[i], op_start[i] + takes[i]) for i, op in enumerate(workload.ops) if takes[i]
    )
    assert [start for _, start, _ in network_spans] == [
        message_start[m]
        for m, message in enumerate(plan.messages)
        if cluster.cost(message.collective).cost(message.wire_nbytes)
    ]


def scattered_then_gathered(*names, **fields):
    """A plan of whole tensors: scattered in this order, gathered in the opposite one."""
    halves = [whole(name, kind="reduce_scatter") for name in names]
    halves += [whole(name, kind="all_gather") for name in reversed(names)]
    return Plan("zero", tuple(halves), **{"forward_overlap": True, "shard": "optimizer", **fields})


def test_a_shard_is_updated_between_the_halves():
    """Four workers: an update takes a quarter of its time. w2 takes 5.5 s a half, w1 takes 3."""
    between = (2, 3, 5, 4, 0, 1)
    compute, network = lanes(simulate(TWO, scattered_then_gathered("w2", "w1", op_order=between), NETWORK))
    assert network == [("w2", 1, 6.5), ("w1", 6.5, 9.5), ("w1", 9.75, 12.75), ("w2", 12.75, 18.25)]
    assert compute == [
        ("b2", 0, 1),
        ("b1", 1, 3),
        ("u2", 6.5, 6.75),
        ("u1", 9.5, 9.75),
        ("f1", 12.75, 15.75),
        ("f2", 18.25, 22.25),
    ]
    gradients = scattered_then_gathered("w2", "w1", op_order=between, shard="gradients")
    assert iteration_time(TWO, gradients, NETWORK) == 22.25


def test_an_update_in_its_captured_place_delays_the_parameters():
    """u2 comes after f1, so w2 is gathered after it: w1 from 9.75 to 12.75, f1 and u2 until 16, w2 until 21.5, f2."""
    assert iteration_time(TWO, scattered_then_gathered("w2", "w1"), NETWORK) == 25.5


def test_a_sharded_plan_without_forward_overlap_waits_for_the_last_parameters():
    plan = scattered_then_gathered("w2", "w1", op_order=(2, 3, 5, 4, 0, 1), forward_overlap=False)
    compute, network = lanes(simulate(TWO, plan, replace(NETWORK, unpack_s_per_byte=0.1)))
    assert network[-1] == ("w2", 12.75, 18.25)
    assert compute[2:] == [("u2", 6.5, 6.75), ("u1", 9.5, 9.75), ("f1", 22.25, 25.25), ("f2", 25.25, 29.25)]


def test_sharded_plans_that_wait_for_themselves():
    """w1 is gathered first, but f1 reads it only after u2, whose w2 is gathered before."""
    with pytest.raises(
        PlanError, match=r"messages\[2\] waits for the update of 'w2' by op 5 \('u2'\), which op_order puts after op 0"
    ):
        iteration_time(TWO, scattered_then_gathered("w1", "w2"), NETWORK)
    one_update = replace(TWO, ops=TWO.ops[:5], tensors=(Tensor("w2", 40, 2, (1, 4)), Tensor("w1", 20, 3, (0, 4))))
    apart = [whole(name, kind=kind) for name in ("w2", "w1") for kind in ("reduce_scatter", "all_gather")]
    for compute in ("one", "unlimited"):
        with pytest.raises(
            PlanError, match=r"update of 'w2' by op 4 \('u1'\), which waits for this message or a later"
        ):
            iteration_time(one_update, Plan("p", tuple(apart), True, shard="optimizer"), NETWORK, compute=compute)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_one_layer_by_its_closed_form(workers):
    """backward + half + update / workers + half + forward, where a message of 8 bytes takes 3 s in all."""
    ops = (Op("f", "forward", 5.0), Op("b", "backward", 7.0), Op("u", "optimizer", 4.0))
    layer = Workload("layer", ops, (Tensor("w", 8, 1, (0, 2)),))
    halves = (Message((Slice("w", 0, 8),), "reduce_scatter"), Message((Slice("w", 0, 8),), "all_gather"))
    cluster = Cluster(workers, {"c": LinearCost(1.0, 0.25)})
    for shard, seconds in (("none", 7 + 3 + 4 + 5), ("optimizer", 7 + 3 + 4 / workers + 5)):
        for compute in ("one", "unlimited"):
            plan = Plan("p", halves, forward_overlap=True, shard=shard)
            assert iteration_time(layer, plan, cluster, compute=compute) == seconds


@examples(100)
@given(workloads(optimizer=False), clusters(), st.sampled_from(["one", "unlimited"]))
def test_updates_that_take_no_time_make_no_difference(workload, cluster, compute):
    """What dear sends takes as long as if gradients were gathered, unless these come before the backward pass ends."""
    first = len(workload.ops)
    updates = tuple(Op(f"u{t}", "optimizer", 0.0) for t in range(len(workload.tensors)))
    tensors = tuple(replace(t, readers=(0, *t.readers, first + k)) for k, t in enumerate(workload.tensors))
    workload = replace(workload, ops=workload.ops + updates, tensors=tensors)
    plan = sharded(dear(workload, cluster), workload, "optimizer")
    unsharded = replace(plan, op_order=(), shard="none")
    seconds, expected = (iteration_time(workload, p, cluster, compute=compute) for p in (plan, unsharded))
    assert seconds >= expected
    if max(t.ready_after for t in tensors) == max(workload.phase_ops("backward")) and compute == "one":
        assert seconds == expected


@examples(100)
@given(st.data(), workloads(), clusters())
def test_sharded_plans_under_contention(data, workload, cluster):
    """Without contention both runs agree; with it nothing is faster."""
    plan = data.draw(sharded_plans(workload, cluster))
    try:
        alone = iteration_time(workload, plan, cluster)
    except PlanError:
        assume(False)
    none = LinearCost(0.0, 0.0)
    assert iteration_time(workload, plan, replace(cluster, contention=Contention(none, none))) == pytest.approx(alone)
    contended = replace(cluster, contention=data.draw(contentions))
    assert iteration_time(workload, plan, contended) >= alone * (1 - 1e-9)


def test_a_message_beside_computation_is_slower_and_takes_from_it():
    # w2's 40 bytes: 1 s alone, 1 s more beside computation, of which it takes 1 s, so that both go at half their pace.
    sharing = Cluster(2, {"c": LinearCost(1.0, 0.0)}, contention=Contention(LinearCost(1.0, 0.0), LinearCost(1.0, 0.0)))
    compute, network = lanes(simulate(TWO, Plan("fifo", (whole("w2"), whole("w1"))), sharing))
    assert network == [("w2", 1, 3), ("w1", 4, 5)]
    assert compute[:3] == [("b2", 0, 1), ("b1", 1, 4), ("u1", 5, 6)]


def test_packing_is_part_of_the_op_that_produces_the_gradient():
    none = LinearCost(0.0, 0.0)
    packing = Cluster(4, NETWORK.collectives, contention=Contention(none, none, 0.1))
    compute, network = lanes(simulate(TWO, Plan("fifo", (whole("w2"), whole("w1"))), packing))
    assert compute[:2] == [("b2", 0, 5), ("b1", 5, 9)] and network == [("w2", 5, 16), ("w1", 16, 22)]


def test_what_has_arrived_is_unpacked_beside_what_is_on_its_way():
    fifo = Plan("fifo", (whole("w2"), whole("w1")))
    none = LinearCost(0.0, 0.0)
    free = Cluster(4, NETWORK.collectives, unpack_s_per_byte=0.1, contention=Contention(none, none))
    assert iteration_time(TWO, fifo, free) == pytest.approx(29)  # as without contention: w2 while w1 is sent
    slower = replace(free, contention=Contention(LinearCost(4.0, 0.0), none))
    compute, network = lanes(simulate(TWO, fifo, slower))
    # w2 needs 11 s, and 15 s beside b1, which lasts 2; w1 needs 6, and 10 beside the 4 s in which w2 is unpacked.
    arrives = 3 + 11 * (1 - 2 / 15)
    assert [end for _, _, end in network] == pytest.approx([arrives, arrives + 4 + 6 * (1 - 4 / 10)])
    assert compute[2][1] == pytest.approx(network[-1][2] + 2)


def test_nothing_contends_on_unlimited_streams():
    sharing = replace(NETWORK, contention=Contention(LinearCost(1.0, 1.0), LinearCost(1.0, 1.0), 1.0))
    plan = Plan("p", (whole("w1"), whole("w2")), True)
    assert simulate(TWO, plan, sharing, compute="unlimited") == simulate(TWO, plan, NETWORK, compute="unlimited")


def _replayed(span, other, alone_s, beside_s):
    """The part of a span's work that is done by its end, at one pace alone and at another beside the `other` spans."""
    beside = sum(max(0.0, min(span.end_s, o.end_s) - max(span.start_s, o.start_s)) for o in other)
    return (span.end_s - span.start_s - beside) / alone_s + beside / beside_s


@examples(150)
@given(st.data(), workloads(), clusters(contended=True))
def test_what_contends_has_done_its_work(data, workload, cluster):
    """Every span is as long as its work needs at the two paces, and nothing that could go on waits."""
    plan = data.draw(plans(workload, cluster, halves=False))
    timeline = simulate(workload, plan, cluster)
    contention = cluster.contention or Contention(LinearCost(0.0, 0.0), LinearCost(0.0, 0.0))
    ops = [s for s in timeline.spans if s.lane == "compute"]
    messages = [s for s in timeline.spans if s.lane == "network"]
    costs = [(cluster.cost(m.collective).cost(m.nbytes), contention.delay.cost(m.nbytes)) for m in plan.messages]
    assume(all(alone_s > 0 or delay_s == 0 for alone_s, delay_s in costs))  # else it has a span beside an op only
    paces = []
    for message, span in zip(_taking_time(plan.messages, cluster), messages, strict=True):
        alone_s = cluster.cost(message.collective).cost(message.nbytes)
        beside_s = alone_s + contention.delay.cost(message.nbytes)
        assert _replayed(span, ops, alone_s or 1e-12, beside_s) == pytest.approx(1)
        paces.append((span, max(LEAST_PACE, 1 - contention.overhead.cost(message.nbytes) / beside_s)))
    packed = {op.name: op.duration_s for op in workload.ops}
    for tensor in workload.tensors:
        packed[workload.ops[tensor.ready_after].name] += tensor.nbytes * contention.pack_s_per_byte
    for op in ops:
        beside = [(max(0.0, min(op.end_s, s.end_s) - max(op.start_s, s.start_s)), pace) for s, pace in paces]
        done_s = op.end_s - op.start_s - sum(seconds * (1 - pace) for seconds, pace in beside)
        assert done_s == pytest.approx(packed[op.name], abs=1e-9)
    if cluster.contention is None:
        none = LinearCost(0.0, 0.0)
        zero = simulate(workload, plan, replace(cluster, contention=Contention(none, none)))
        assert zero.iteration_s == pytest.approx(timeline.iteration_s)
    else:
        assert timeline.iteration_s >= iteration_time(workload, plan, replace(cluster, contention=None)) * (1 - 1e-9)


def _taking_time(messages, cluster):
    return [m for m in messages if cluster.cost(m.collective).cost(m.nbytes) > 0]


@given(st.data())
def test_a_wire_format_halves_the_bytes_that_cost(data):
    workload, cluster = data.draw(workloads()), data.draw(clusters())
    plan = data.draw(plans(workload, cluster))
    cluster = replace(cluster, unpack_s_per_byte=0.0, contention=None)
    twice = replace(workload, tensors=tuple(replace(t, nbytes=2 * t.nbytes) for t in workload.tensors))
    messages = (
        replace(m, slices=tuple(Slice(s.tensor, 2 * s.start, 2 * s.stop) for s in m.slices), wire="bf16")
        for m in plan.messages
    )
    rounded = replace(plan, messages=tuple(messages))
    assert iteration_time(twice, rounded, cluster) == iteration_time(workload, plan, cluster)
