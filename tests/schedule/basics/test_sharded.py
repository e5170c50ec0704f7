"""Plans of all-reduces, sharded: which messages they send, and when the updates run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, op_orders, plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.sharded import sharded

#: Three layers, each with an update of its own; the gradient of the last one is ready first.
LAYERS = Workload(
    "layers",
    (
        *(Op(f"f{k}", "forward", 1.0, (k - 1,) if k else ()) for k in range(3)),
        *(Op(f"b{k}", "backward", 1.0, (4 - k,)) for k in (2, 1, 0)),
        *(Op(f"u{k}", "optimizer", 1.0) for k in range(3)),
    ),
    tuple(Tensor(f"w{k}", 8, 5 - k, (k, 6 + k)) for k in (2, 1, 0)),
)


def whole(*layers):
    return Message(tuple(Slice(f"w{k}", 0, 8) for k in layers), collective="ring")


def test_first_scatter_in_the_plans_order_then_gather_in_forward_order():
    found = sharded(Plan("mine", (whole(2), whole(1, 0)), workload_id="w"), LAYERS, "gradients")
    assert [(m.kind, m.tensors, m.collective) for m in found.messages] == [
        ("reduce_scatter", ["w2"], "ring"),
        ("reduce_scatter", ["w1", "w0"], "ring"),
        ("all_gather", ["w1", "w0"], "ring"),
        ("all_gather", ["w2"], "ring"),
    ]
    assert (found.scheduler, found.workload_id) == ("mine", "w")
    assert found.shard == "gradients" and found.forward_overlap
    # The last layer is updated first, then the others, of which the forward pass reads the first one first.
    assert [LAYERS.ops[i].name for i in found.op_order] == ["b2", "b1", "b0", "u2", "u0", "u1", "f0", "f1", "f2"]


def test_no_shard_changes_nothing():
    plan = Plan("mine", (whole(0, 1, 2),))
    assert sharded(plan, LAYERS, "none") is plan


def test_what_cannot_be_sharded():
    with pytest.raises(InputError, match="unknown shard 'optimiser'"):
        sharded(Plan("mine", (whole(0, 1, 2),)), LAYERS, "optimiser")
    pushed = tuple(Message(whole(0, 1, 2).slices, kind) for kind in ("push", "pull"))
    with pytest.raises(InputError, match=r"shard: 'optimizer' with parameter servers \(expected none"):
        sharded(Plan("mine", pushed), LAYERS, "optimizer")


@given(st.data(), workloads(), clusters(), st.sampled_from(["optimizer", "gradients"]))
def test_a_sharded_plan_is_valid_and_keeps_the_groups(data, workload, cluster, shard):
    plan = data.draw(plans(workload, cluster, halves=False, op_order=st.just(()) | op_orders(workload)))
    found = sharded(plan, workload, shard)
    check_plan(found, workload)
    assert [m.slices for m in found.messages if m.kind == "reduce_scatter"] == [m.slices for m in plan.messages]
    assert len(found.messages) == 2 * len(plan.messages)
    old, new = (
        [op for op in p.op_order or workload.iteration_order() if workload.ops[op].phase != "optimizer"]
        for p in (plan, found)
    )
    assert new == [op for op in old if workload.ops[op].phase == "backward"] + [
        op for op in old if workload.ops[op].phase == "forward"
    ]
    assert sharded(found, workload, shard) == found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedulers_plan_can_be_sharded(name):
    cluster = Cluster(4, {"ring": LinearCost(0.5, 0.125)})
    check_plan(sharded(schedule(name, LAYERS, cluster), LAYERS, "optimizer"), LAYERS)
