"""ByteScheduler: its contrived example, its window, and P3 as the smallest one."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.files import identity
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.compose import priorities, release_times
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.bytescheduler import bytescheduler
from legato.simulator.collective import iteration_time

#: Three layers, two time units each forward and backward, with tensors of 3, 6 and 3 units; a unit is a byte here.
CONTRIVED = Workload(
    "contrived",
    tuple(Op(f"f{i}", "forward", 2.0, (i - 1,) if i else ()) for i in range(3))
    + tuple(Op(f"b{2 - i}", "backward", 2.0, (2 + i,)) for i in range(3)),
    (Tensor("t2", 3, 3, (2,)), Tensor("t1", 6, 4, (1,)), Tensor("t0", 3, 5, (0,))),
)
UNIT_A_SECOND = Cluster(2, {"c": LinearCost(0.0, 1.0)})


def sent(plan):
    return [(piece.tensor, piece.start, piece.stop) for message in plan.messages for piece in message.slices]


def duplex(workload, plan):
    """Seconds of an iteration with a parameter server: messages are pushed and pulled, a unit a second each way.

    A pull follows its own push; what goes up does not hinder what comes down. The simulator by formulas
    has one network for both, so this one lives here.
    """
    ready = dict(zip((t.name for t in workload.tensors), release_times(workload), strict=True))
    up = down = now = 0.0
    there = {}
    for message in plan.messages:
        (piece,) = message.slices
        up = max(up, ready[piece.tensor]) + piece.nbytes
        down = max(down, up) + piece.nbytes
        there[piece.tensor] = down
    for i in workload.iteration_order():
        needs = [there[t.name] for t in workload.tensors if i in t.readers]
        now = max([now, *needs]) + workload.ops[i].duration_s
    return now


def test_the_contrived_example_takes_26_in_ready_order_and_18_by_priority():
    assert duplex(CONTRIVED, schedule("fifo", CONTRIVED, UNIT_A_SECOND)) == 26
    plan = bytescheduler(CONTRIVED, UNIT_A_SECOND, partition_bytes=1, credit_bytes=1)
    assert duplex(CONTRIVED, plan) == 18
    order = [tensor for tensor, _, _ in sent(plan)]
    assert order == ["t2"] * 2 + ["t1"] * 2 + ["t0"] * 3 + ["t1"] * 4 + ["t2"]


def test_the_urgent_waits_for_what_is_in_the_window():
    # By 6, when t0 is ready, 4 units have arrived; as many more are handed over as there is credit, less the one that
    # returns just then. With credit for all, only cutting is left, and the duplex network that it fills.
    taken = []
    for credit in (1, 2, 3, 4, 12):
        plan = bytescheduler(CONTRIVED, UNIT_A_SECOND, partition_bytes=1, credit_bytes=credit)
        names = [tensor for tensor, _, _ in sent(plan)]
        taken.append((names.index("t0"), duplex(CONTRIVED, plan)))
    assert taken == [(4, 18), (5, 19), (6, 19), (7, 19), (9, 21)]


def test_a_partition_leaves_while_any_credit_is_left():
    # Credit 4, partitions of 3: two are under way (the second one in debt), the third waits for both.
    plan = bytescheduler(CONTRIVED, UNIT_A_SECOND, partition_bytes=3, credit_bytes=4)
    assert sent(plan) == [("t2", 0, 3), ("t1", 0, 3), ("t1", 3, 6), ("t0", 0, 3)]


@pytest.mark.parametrize("option", ["partition_bytes", "credit_bytes"])
def test_sizes_that_make_no_sense(option):
    with pytest.raises(InputError, match=f"{option}: 0"):
        bytescheduler(CONTRIVED, UNIT_A_SECOND, **{option: 0})


sizes = st.integers(1, 40)


@given(workloads(max_tensors=8), clusters(), sizes, sizes)
def test_plans_are_valid_and_above_the_bound(workload, cluster, partition, credit):
    plan = bytescheduler(workload, cluster, partition_bytes=partition, credit_bytes=credit)
    check_plan(plan, workload)
    assert plan.forward_overlap and max(message.nbytes for message in plan.messages) <= partition
    assert plan.workload_id == identity(workload)
    seconds = iteration_time(workload, plan, cluster)
    assert seconds >= lower_bound(workload, cluster).seconds * (1 - 1e-12)


@given(workloads(max_tensors=8), clusters(), sizes)
def test_with_credit_for_one_partition_it_is_p3(workload, cluster, partition):
    plan = bytescheduler(workload, cluster, partition_bytes=partition, credit_bytes=1)
    assert plan.messages == schedule("p3", workload, cluster, slice_bytes=partition).messages


@given(workloads(max_tensors=8), clusters(), sizes)
def test_with_endless_credit_only_what_comes_together_is_sorted(workload, cluster, partition):
    plan = bytescheduler(workload, cluster, partition_bytes=partition, credit_bytes=2**40)
    ready, place, index = (
        release_times(workload),
        priorities(workload),
        {t.name: k for k, t in enumerate(workload.tensors)},
    )
    keys = [(ready[index[name]], place[index[name]], index[name], start) for name, start, _ in sent(plan)]
    assert keys == sorted(keys)
    assert len(keys) == sum(math.ceil(t.nbytes / partition) for t in workload.tensors)


def test_the_defaults_are_those_documented_for_all_reduce():
    tensors = (Tensor("a", 200_000_000, 3, (2,)), Tensor("b", 40_000_000, 4, (0,)))
    work = msgspec.structs.replace(CONTRIVED, tensors=tensors)
    cluster = Cluster(2, {"c": LinearCost(0.0, 1 / 4_000_000)})  # a partition takes 8 s
    order = [tensor for tensor, _, _ in sent(bytescheduler(work, cluster))]
    # At 2, two of a's partitions use up the credit; at 10 the next one may leave: b has come, and is urgent.
    assert order == ["a"] * 2 + ["b"] * 2 + ["a"] * 5
