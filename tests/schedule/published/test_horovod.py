"""Horovod: its cycles, one tick after another, and its fusion threshold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nets import in_turn
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.files import identity
from legato.core.plan import check_plan
from legato.schedule import schedule
from legato.schedule.basics.compose import ready_order, release_times
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.horovod import horovod
from legato.simulator.collective import iteration_time

MS, MIB = 1e-3, 2**20
NETWORK = Cluster(2, {"ring": LinearCost(1e-3, 1e-9)})


def groups(plan):
    return [[int(piece.tensor[1:]) for piece in message.slices] for message in plan.messages]


def test_what_a_tick_sees_goes_together_up_to_the_threshold():
    # Ready at 0.25, 0.75, 1, 1.5, 1.75, 4.25 and 4.5 ms.
    times = [0.25, 0.5, 0.25, 0.5, 0.25, 2.5, 0.25]
    work = in_turn([ms * MS for ms in times], [10] * len(times))
    plan = horovod(work, NETWORK)
    assert groups(plan) == [[0, 1, 2], [3, 4], [5, 6]] and not plan.forward_overlap
    assert groups(horovod(work, NETWORK, cycle_time_s=5 * MS)) == [[0, 1, 2, 3, 4, 5, 6]]
    assert groups(horovod(work, NETWORK, fusion_threshold_bytes=20)) == [[0, 1], [2], [3, 4], [5, 6]]
    assert groups(horovod(work, NETWORK, fusion_threshold_bytes=19)) == [[k] for k in range(7)]


def test_the_defaults_are_those_of_version_0_21():
    work = in_turn([0.1 * MS] * 4 + [MS], [100 * MIB, 28 * MIB, 200 * MIB, 1, 1])
    assert groups(horovod(work, NETWORK)) == [[0, 1], [2], [3], [4]]
    older = horovod(work, NETWORK, fusion_threshold_bytes=64 * MIB, cycle_time_s=5 * MS)
    assert groups(older) == [[0], [1], [2], [3, 4]]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-10, float("inf"), float("nan")])
def test_cycles_that_make_no_sense(seconds):
    with pytest.raises(InputError, match="cycle_time_s"):
        horovod(in_turn([MS], [1]), NETWORK, cycle_time_s=seconds)


def test_a_threshold_that_makes_no_sense():
    with pytest.raises(InputError, match="fusion_threshold_bytes: -1"):
        horovod(in_turn([MS], [1]), NETWORK, fusion_threshold_bytes=-1)


def cycles(workload, threshold, cycle_s):
    """Tick by tick, as the background thread does it."""
    ready, waiting = release_times(workload), ready_order(workload)
    tick, messages = 0, []
    while waiting:
        seen = [t for t in waiting if ready[t] <= tick * cycle_s]
        waiting = waiting[len(seen) :]
        while seen:
            message = [seen.pop(0)]
            while seen and sum(workload.tensors[t].nbytes for t in [*message, seen[0]]) <= threshold:
                message.append(seen.pop(0))
            messages.append(message)
        tick += 1
    return messages


cycle_times = st.sampled_from([0.125, 0.5, 3.0, 1000.0])


@given(workloads(max_tensors=8), clusters(), st.integers(0, 64), cycle_times)
def test_plans_are_those_of_the_cycles_and_above_the_bound(workload, cluster, threshold, cycle_s):
    plan = horovod(workload, cluster, fusion_threshold_bytes=threshold, cycle_time_s=cycle_s)
    check_plan(plan, workload)
    assert plan.workload_id == identity(workload)
    assert groups(plan) == cycles(workload, threshold, cycle_s)
    seconds = iteration_time(workload, plan, cluster)
    assert seconds >= lower_bound(workload, cluster).seconds * (1 - 1e-12)


@given(workloads(max_tensors=8), clusters(max_collectives=1), st.integers(0, 64), cycle_times)
def test_between_a_message_a_tensor_and_the_best_merging(workload, cluster, threshold, cycle_s):
    plan = horovod(workload, cluster, fusion_threshold_bytes=threshold, cycle_time_s=cycle_s)
    assert iteration_time(workload, schedule("merge-optimal", workload, cluster), cluster) <= iteration_time(
        workload, plan, cluster
    )
    off = horovod(workload, cluster, fusion_threshold_bytes=0, cycle_time_s=cycle_s)
    assert off.messages == schedule("fifo", workload, cluster).messages
