"""Every scheduler: its plans are valid, say what they are for, and stand in the order that theory gives them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, workloads

from legato import zoo
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.files import identity
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.simulator.collective import iteration_time

OPS = tuple(Op(f"f{i}", "forward", 1.0, (i - 1,) if i else ()) for i in range(3)) + tuple(
    Op(f"b{i}", "backward", 2.0, (i - 1,)) for i in range(3, 6)
)
#: Three layers; the gradients come every 2 s, those of the last layer first. Nothing reads the last tensor.
THREE = Workload(
    "three",
    OPS,
    (
        Tensor("w3", 10, 3, (2,)),
        Tensor("w2", 3, 4, (1,)),
        Tensor("v2", 2, 4, (1,)),
        Tensor("w1", 5, 5, (0,)),
        Tensor("unread", 1, 3),
    ),
)
NETWORK = Cluster(4, {"ring": LinearCost(1.0, 0.5), "tree": LinearCost(3.0, 0.25)})


def sent(plan):
    return [[(p.tensor, p.start, p.stop) for p in message.slices] for message in plan.messages]


def names(plan):
    return [[p.tensor for p in message.slices] for message in plan.messages]


def test_the_registry_has_the_names_of_the_plans():
    assert {name: schedule(name, THREE, NETWORK).scheduler for name in SCHEDULERS} == {n: n for n in SCHEDULERS}
    assert set(SCHEDULERS) >= {"fifo", "single", "ddp", "mg-wfbp", "merge-optimal", "p3"}


@pytest.mark.parametrize("name", SCHEDULERS)
@given(workload=workloads(), cluster=clusters(contended=True), data=st.data())
def test_plans_are_valid_and_say_what_they_are_for(name, workload, cluster, data):
    collective = data.draw(st.none() | st.sampled_from(list(cluster.collectives)))
    plan = schedule(name, workload, cluster, collective=collective)
    check_plan(plan, workload)
    assert plan.workload_id == identity(workload)
    used = {message.collective for message in plan.messages}
    if name == "legato" and collective is None:  # the cheapest for each message
        assert used <= set(cluster.collectives)
    else:
        assert used == {collective or "c0"}


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(InputError, match="unknown scheduler 'mgwfbp'; did you mean 'mg-wfbp'"):
        schedule("mgwfbp", THREE, NETWORK)
    with pytest.raises(InputError, match="unknown option of p3 'slice_byte'; did you mean 'slice_bytes'"):
        schedule("p3", THREE, NETWORK, slice_byte=3)
    for name in SCHEDULERS:
        with pytest.raises(InputError, match="unknown collective 'rings'; did you mean 'ring'"):
            schedule(name, THREE, NETWORK, collective="rings")


def test_fifo_is_a_message_a_tensor_in_ready_order():
    plan = schedule("fifo", THREE, NETWORK)
    assert names(plan) == [["w3"], ["unread"], ["w2"], ["v2"], ["w1"]] and not plan.forward_overlap


def test_single_is_one_message():
    assert names(schedule("single", THREE, NETWORK)) == [["w3", "unread", "w2", "v2", "w1"]]


def test_p3_lets_the_urgent_overtake():
    # Ready at 2: w3 and unread; at 4: w2 and v2; at 6: w1. A slice of 4 bytes takes 3 s.
    plan = schedule("p3", THREE, NETWORK, slice_bytes=4)
    assert plan.forward_overlap
    assert sent(plan) == [
        [("w3", 0, 4)],  # from 2 to 5; nothing else is read at all
        [("w2", 0, 3)],  # from 5: more urgent than the rest of w3
        [("w1", 0, 4)],  # from 7.5
        [("w1", 4, 5)],
        [("v2", 0, 2)],
        [("w3", 4, 8)],
        [("w3", 8, 10)],
        [("unread", 0, 1)],
    ]
    assert len(schedule("p3", THREE, NETWORK).messages) == 5  # 4 MiB a slice
    with pytest.raises(InputError, match="slice_bytes: 0"):
        schedule("p3", THREE, NETWORK, slice_bytes=0)


@pytest.mark.parametrize("name", ["fifo", "single", "mg-wfbp", "merge-optimal", "dear", "p3", "bytescheduler"])
@given(workload=workloads(max_tensors=8), cluster=clusters(max_collectives=1))
def test_plans_do_not_depend_on_the_unit_of_time(name, workload, cluster):
    """A thousandth of all times, to the last bit."""
    ops = tuple(replace(op, duration_s=op.duration_s / 1024) for op in workload.ops)
    (cost,) = cluster.collectives.values()
    quick = replace(cluster, collectives={"c0": cost.times(1 / 1024)})
    options = {"p3": {"slice_bytes": 4}, "bytescheduler": {"partition_bytes": 4, "credit_bytes": 4}}.get(name, {})
    plan = schedule(name, workload, cluster, **options)
    assert schedule(name, replace(workload, ops=ops), quick, **options).messages == plan.messages


@given(workloads(max_tensors=8), clusters(max_collectives=1))
def test_what_theory_says_about_plans_without_forward_overlap(workload, cluster):
    seconds = {name: iteration_time(workload, schedule(name, workload, cluster), cluster) for name in SCHEDULERS}
    assert seconds["merge-optimal"] <= seconds["mg-wfbp"] <= seconds["fifo"]
    assert seconds["merge-optimal"] <= min(seconds["single"], seconds["ddp"])


@pytest.mark.parametrize(
    ("name", "options", "carrier"),
    [
        ("ddp", {}, "ddp"),
        ("ddp", {"wire": "bf16"}, "legato"),
        ("ddp", {"shard": "optimizer"}, "legato"),
        ("legato", {}, "legato"),
    ],
)
def test_who_carries_out_a_plan(name, options, carrier):
    cluster = Cluster.derive(4, 10e9, 30e-6)
    assert schedule(name, zoo.workload("alexnet-v2"), cluster, **options).carrier == carrier
