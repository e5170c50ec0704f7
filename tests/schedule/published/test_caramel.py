"""Caramel as a whole: every part alone and together, and never below the bound."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, examples, workloads

from legato.collectives import DIVIDED
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.caramel import MAX_DEPTH, adaptive_depth, threshold_bytes
from legato.simulator.collective import iteration_time
from legato.simulator.pipelining import pipelined_s

PARTS = ("serialization", "batching", "scheduling", "depth")
OFF = dict.fromkeys(PARTS, False)

# In the shape of Caramel's Figure 1: parameters a, b, c, read in this order; the backward pass may run "y", which
# updates b, before or after the two ops behind c. Its graph itself is not in the paper's text.
TOY = Workload(
    "toy",
    (
        Op("1", "forward", 2.0),
        Op("2", "forward", 2.0, (0,)),
        Op("3", "forward", 2.0, (1,)),
        Op("s", "backward", 1.0, (2,)),
        Op("x1", "backward", 2.0, (3,)),
        Op("x2", "backward", 2.0, (4,)),
        Op("y", "backward", 1.0, (3,)),
        Op("z", "backward", 1.0, (5, 6)),
    ),
    (Tensor("c", 4, 5, (2,)), Tensor("b", 3, 6, (1,)), Tensor("a", 1, 7, (0,))),
)
#: One second a byte.
WIRE = Cluster(2, {"c": LinearCost(0.0, 1.0)})


def names(plan):
    return [[piece.tensor for piece in message.slices] for message in plan.messages]


@pytest.mark.parametrize(
    ("parts", "order", "seconds"),
    [
        # Ready: c at 5, b at 6, a at 7. Sent: c 5 to 9, b to 12, a to 13; then 6 s forward.
        ({}, [["c"], ["b"], ["a"]], 19),
        # Ready: b at 2, c at 6, a at 7. Sent: b 2 to 5, c 6 to 10, a to 11; then 6 s forward.
        ({"serialization": True}, [["b"], ["c"], ["a"]], 17),
        # c fits beside the forward pass; b and a nowhere: b 6 to 9, a to 10, between the passes.
        ({"scheduling": True}, [["b"], ["a"], ["c"]], 16),
        # b fits beside the backward pass, c beside the forward pass; a, ready last and read first, takes its 1 s.
        ({"serialization": True, "scheduling": True}, [["b"], ["a"], ["c"]], 14),
        # While c is on its way, b and a join. That saves nothing here, where startup is free.
        ({"batching": True}, [["c"], ["b", "a"]], 19),
    ],
)
def test_the_parts_of_a_toy_by_hand(parts, order, seconds):
    plan = schedule("caramel", TOY, WIRE, threshold=4.0, **{**OFF, **parts})
    assert names(plan) == order and iteration_time(TOY, plan, WIRE) == seconds
    assert bool(plan.op_order) == ("serialization" in parts)


def test_batching_saves_a_startup_time():
    costly = Cluster(2, {"c": LinearCost(1.0, 1.0)})
    # One by one: c 5 to 10, b to 14, a to 16. Together: c 5 to 10, b and a to 15.
    seconds = [
        iteration_time(TOY, schedule("caramel", TOY, costly, **{**OFF, "batching": batching}, threshold=3.5), costly)
        for batching in (False, True)
    ]
    assert seconds == [22, 21]


def test_a_batch_is_ready_with_its_last_and_due_with_its_first():
    sizes = {"large": 3, "p": 2, "q": 2}  # p and q are a batch, and together the largest
    ops = (Op("f", "forward", 1.0), Op("b0", "backward", 1.0), Op("b1", "backward", 3.0), Op("b2", "backward", 6.0))
    late = Workload("late", ops, tuple(Tensor(t, sizes[t], 2 if t == "q" else 1) for t in sizes))
    # Backward pass: the batch 4 to 8, as q is ready at 4; the large one, ready at 1, before it.
    assert names(schedule("caramel", late, WIRE, threshold=2.0)) == [["large"], ["p", "q"]]
    ops = (*(Op(f"f{seconds}", "forward", seconds) for seconds in (4.0, 3.0, 3.0)), Op("b", "backward", 1.0))
    readers = {"large": (2,), "p": (1,), "q": ()}
    early = Workload("early", ops, tuple(Tensor(t, sizes[t], 3, readers[t]) for t in sizes))
    # Forward pass: the batch 0 to 4, as p is read at 4; the large one, read at 7, after it.
    plan = schedule("caramel", early, WIRE, threshold=2.0)
    assert names(plan) == [["p", "q"], ["large"]] and iteration_time(early, plan, WIRE) == 11


def test_it_can_be_faster_than_any_plan_in_captured_order():
    whole = iteration_time(TOY, schedule("caramel", TOY, WIRE), WIRE)
    assert lower_bound(TOY, WIRE, order="any").seconds == whole == 14 < lower_bound(TOY, WIRE).seconds == 15


thresholds = st.sampled_from([None, 0.0, 2.0, 10.0])
switches = st.fixed_dictionaries({part: st.booleans() for part in PARTS})


@examples(150)
@given(workloads(max_tensors=8), clusters(), switches, thresholds, st.sampled_from(["one", "unlimited"]))
def test_every_part_leaves_its_mark_and_nothing_else(workload, cluster, parts, threshold, compute):
    plan = schedule("caramel", workload, cluster, threshold=threshold, **parts)
    check_plan(plan, workload)
    assert plan.forward_overlap == parts["scheduling"]
    assert parts["serialization"] or not plan.op_order
    assert parts["batching"] or all(len(message.slices) == 1 for message in plan.messages)
    bound = lower_bound(workload, cluster, compute=compute, order="any").seconds
    assert iteration_time(workload, plan, cluster, compute=compute) >= bound * (1 - 1e-12)


@given(workloads(max_tensors=8), clusters())
def test_without_any_part_it_is_fifo(workload, cluster):
    plan, fifo = schedule("caramel", workload, cluster, **OFF), schedule("fifo", workload, cluster)
    assert msgspec.structs.replace(plan, scheduler="fifo") == fifo
    assert iteration_time(workload, plan, cluster) == iteration_time(workload, fifo, cluster)


@given(workloads(max_tensors=8), clusters())
def test_scheduling_reorders_messages_and_leaves_them_whole(workload, cluster):
    packed = schedule("caramel", workload, cluster)
    queue = schedule("caramel", workload, cluster, scheduling=False)
    assert sorted(names(packed)) == sorted(names(queue)) and packed.op_order == queue.op_order


@pytest.mark.parametrize("threshold", [-1.0, float("nan")])
def test_a_threshold_that_makes_no_sense(threshold):
    with pytest.raises(InputError, match=r"threshold: .* bytes \(expected at least 0\)"):
        schedule("caramel", TOY, WIRE, threshold=threshold)


# Adding up takes twice as long as sending.
SLOW_SUMS = Cluster.derive(8, 10e9, 30e-6, reduce_s_per_byte=1.6e-9)


@pytest.mark.parametrize("collective", DIVIDED)
def test_depth_goes_from_1_to_8_with_the_size(collective):
    limit = threshold_bytes(SLOW_SUMS.cost(collective))
    depths = [adaptive_depth(2**k, SLOW_SUMS, collective, limit) for k in range(4, 31)]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] == MAX_DEPTH
    # No chunk is smaller than the threshold, even where that would be cheaper.
    assert [adaptive_depth(2**24, SLOW_SUMS, collective, 2**k) for k in (25, 24, 23)] == [1, 1, 2]


@pytest.mark.parametrize("collective", DIVIDED)
@pytest.mark.parametrize("workers", [2, 8, 64])
@pytest.mark.parametrize("sums", [0.0, 4e-10, 1.6e-9])
def test_adaptive_depth_is_the_fastest_at_every_size(collective, workers, sums):
    """Figure 13."""
    cluster = Cluster.derive(workers, 10e9, 30e-6, send_s=0.0, reduce_s_per_byte=sums)
    limit = threshold_bytes(cluster.cost(collective))
    for nbytes in (2**k for k in range(6, 31)):
        fixed = [
            pipelined_s(collective, workers, nbytes, d, bandwidth_bps=10e9, latency_s=30e-6, reduce_s_per_byte=sums)
            for d in range(1, MAX_DEPTH + 1)
        ]
        adaptive = fixed[adaptive_depth(nbytes, cluster, collective, limit) - 1]
        assert adaptive <= min(fixed) * (1 + 1e-12)


def test_a_plan_has_the_depths():
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))
    work = Workload("two", ops, (Tensor("small", 2**10, 1, (0,)), Tensor("large", 2**30, 1, (0,))))

    def depths(cluster, **options):
        return {m.slices[0].tensor: m.depth for m in schedule("caramel", work, cluster, **options).messages}

    assert depths(SLOW_SUMS, collective="shuffle") == {"small": 1, "large": 8}
    assert depths(SLOW_SUMS, collective="shuffle", depth=False) == {"small": 1, "large": 1}
    assert depths(SLOW_SUMS, collective="tree") == {"small": 1, "large": 1}  # no depth known for it
    assert depths(Cluster.derive(8, 10e9, 30e-6)) == {"small": 1, "large": 1}  # nothing to add up
    measured = Cluster(8, SLOW_SUMS.collectives, reduce_s_per_byte=1.6e-9)
    assert depths(measured, collective="shuffle") == {"small": 1, "large": 1}  # no bandwidth, no latency
