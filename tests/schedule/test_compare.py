"""All schedulers side by side, and which one is recommended."""

import pytest
from hypothesis import given
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.compare import best, better_buckets, compare

OPS = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))


@given(workloads(), clusters())
def test_rows_are_complete_and_above_the_bound(workload, cluster):
    found = compare(workload, cluster)
    assert [c.plan.scheduler for c in found] == list(SCHEDULERS)
    for candidate in found:
        assert candidate.iteration_s >= candidate.bound.seconds * (1 - 1e-9)
        assert candidate.row()["num_messages"] == len(candidate.plan.messages)
    runnable = [c for c in found if c.runnable]
    assert best(found).runnable and {c.plan.scheduler for c in found} - {"caramel"} <= {
        c.plan.scheduler for c in runnable
    }
    assert best(found).iteration_s <= min(c.iteration_s for c in runnable) * 1.005


def test_as_fast_with_fewer_messages_is_better():
    """Ten tiny tensors that are ready together: one message or ten cost the same within half a per cent."""
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))
    workload = Workload("tiny", ops, tuple(Tensor(f"t{i}", 100, 1, (0,)) for i in range(10)))
    cluster = Cluster.derive(2, 1e9, 1e-9)
    assert len(best(compare(workload, cluster)).plan.messages) == 1


def test_of_plans_that_are_as_fast_ddp_s_own_is_taken():
    """All messages hide behind computation; one message of everything is as fast, and the worst on a slower network."""
    ops = (Op("f", "forward", 1.0), *(Op(f"b{i}", "backward", 1.0, (i,)) for i in range(9)))
    workload = Workload("hidden", ops, tuple(Tensor(f"t{i}", 2**24, i + 1, (0,)) for i in range(9)))
    found = compare(workload, Cluster.derive(2, 100e9, 1e-6))
    chosen = best(found)
    assert chosen.plan.scheduler == "ddp" and len(chosen.plan.messages) > 1
    assert min(len(c.plan.messages) for c in found if c.iteration_s <= chosen.iteration_s * 1.005) == 1
    assert best([c for c in found if c.plan.scheduler != "ddp"]).plan.scheduler == "single"


def test_buckets_are_worth_setting_only_where_they_are_faster():
    plan = schedule("fifo", Workload("w", OPS, (Tensor("t", 2**20, 1, (0,)),)), Cluster.derive(2, 1e9, 1e-6))
    assert better_buckets(1.01, 1.0, plan) == [1.0]
    assert better_buckets(1.004, 1.0, plan) == better_buckets(0.9, 1.0, plan) == []


def test_progress_and_names():
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))
    workload = Workload("one", ops, (Tensor("t", 100, 1, (0,)),))
    seen = []
    found = compare(workload, Cluster.derive(2, 1e9, 1e-6), ["single", "ddp"], progress=lambda *a: seen.append(a))
    assert [c.plan.scheduler for c in found] == ["single", "ddp"] and seen == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match="unknown scheduler 'duble'"):
        compare(workload, Cluster.derive(2, 1e9, 1e-6), ["duble"])
