"""All schedulers side by side, and which one is recommended."""

import pytest
from hypothesis import given
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster
from legato.core.errors import TooLargeError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.compare import best, better_buckets, compare

OPS = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)))


@given(workloads(), clusters(contended=True))
def test_rows_are_complete_and_above_the_bound(workload, cluster):
    found = compare(workload, cluster)
    assert [c.plan.scheduler for c in found] == list(SCHEDULERS)
    assert [line.split()[0] for line in str(found).splitlines()] == ["scheduler", *SCHEDULERS]
    for candidate in found:
        assert candidate.iteration_s >= candidate.bound.seconds * (1 - 1e-9)
        assert candidate.columns["num_messages"] == len(candidate.plan.messages)
    runnable = [c for c in found if c.runnable]
    assert best(found).runnable and {c.plan.scheduler for c in found} - {"caramel"} <= {
        c.plan.scheduler for c in runnable
    }
    assert best(found).iteration_s <= min(c.iteration_s for c in runnable) * 1.005


def test_as_fast_with_fewer_messages_is_better():
    """Ten tiny tensors that are ready together: one message or ten cost the same within half a per cent."""
    workload = Workload("tiny", OPS, tuple(Tensor(f"t{i}", 100, 1, (0,)) for i in range(10)))
    cluster = Cluster.derive(2, 1e9, 1e-9)
    assert len(best(compare(workload, cluster)).plan.messages) == 1


def test_who_cannot_plan_so_many_bytes_is_left_out_unless_named():
    """A tensor of 2^50 bytes has 2^28 slices of 4 MiB."""
    workload, cluster = Workload("vast", OPS, (Tensor("t", 2**50, 1, (0,)),)), Cluster.derive(2, 1e9, 1e-6)
    left_out = {}
    found = compare(workload, cluster, left_out=left_out.__setitem__)
    assert [c.plan.scheduler for c in found] == [name for name in SCHEDULERS if name not in left_out]
    assert left_out.keys() == {"p3", "bytescheduler"} and "legato" in SCHEDULERS
    assert str(left_out["p3"]) == "slice_bytes: 4,194,304 makes 268,435,456 messages (expected at most 1,000,000)"
    with pytest.raises(TooLargeError, match="partition_bytes: 32,000,000 makes 35,184,373 messages"):
        compare(workload, cluster, ["fifo", "bytescheduler"])


def test_a_workload_that_is_too_large_for_all_is_refused(monkeypatch):
    monkeypatch.setattr("legato.core.plan.MOST_CHUNKS", 3)
    workload = Workload("two", OPS, tuple(Tensor(f"t{i}", 8, 1, (0,)) for i in range(2)))
    with pytest.raises(TooLargeError, match="messages: 4 messages of 4 chunks in all"):  # a push and a pull for each
        compare(workload, Cluster.derive(2, 1e9, 1e-6, servers=1, collectives=["parameter-server"]))


def test_bounds_have_a_limit(monkeypatch):
    monkeypatch.setattr("legato.schedule.basics.heads_tails._MOST_OPS", 1)
    workload = Workload("two", OPS, (Tensor("t", 8, 1, (0,)),))
    for bounded in (compare, lower_bound):
        with pytest.raises(TooLargeError, match=r"ops: 2 .expected at most 1 to plan for"):
            bounded(workload, Cluster.derive(2, 1e9, 1e-6))


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
    workload = Workload("one", OPS, (Tensor("t", 100, 1, (0,)),))
    seen = []
    found = compare(workload, Cluster.derive(2, 1e9, 1e-6), ["single", "ddp"], progress=lambda *a: seen.append(a))
    assert [c.plan.scheduler for c in found] == ["single", "ddp"] and seen == [(1, 2), (2, 2)]
    with pytest.raises(ValueError, match="unknown scheduler 'duble'"):
        compare(workload, Cluster.derive(2, 1e9, 1e-6), ["duble"])
