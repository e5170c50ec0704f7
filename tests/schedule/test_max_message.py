"""A limit of messages: every scheduler keeps to it as far as it can, and nothing changes where it does not matter."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, costs, examples, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, TooLargeError
from legato.core.plan import Message, Slice, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.compose import is_runnable
from legato.schedule.basics.joined import divided
from legato.schedule.compare import MOST_BUCKET_BYTES, compare, stock_buckets
from legato.schedule.published.ddp import bucket_caps
from legato.schedule.published.merge_optimal import merge_neighbours
from legato.simulator.collective import iteration_time

#: These partition tensors; the others send a larger tensor alone.
PARTITIONING = ("p3", "bytescheduler", "pace", "legato")

limits = st.integers(16, 300)


def sized(workload):
    """The workload with tensors of 16 to 256 bytes."""
    return replace(workload, tensors=tuple(replace(t, nbytes=16 * t.nbytes) for t in workload.tensors))


@pytest.mark.parametrize("name", SCHEDULERS)
@given(workload=workloads().map(sized), cluster=clusters(contended=True), most=limits)
def test_messages_keep_to_the_limit(name, workload, cluster, most):
    plan = schedule(name, workload, cluster, max_message_bytes=most)
    check_plan(plan, workload)
    for message in plan.messages:
        assert message.nbytes <= most or (len(message.slices) == 1 and name not in PARTITIONING)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
@given(workload=workloads(), cluster=clusters())
def test_a_limit_above_all_messages_changes_nothing(name, workload, cluster):
    plan = schedule(name, workload, cluster)
    most = max(16, *(message.nbytes for message in plan.messages), workload.nbytes)
    assert schedule(name, workload, cluster, max_message_bytes=most) == plan


@examples(60)
@given(workloads().map(sized), clusters(), limits)
def test_legato_is_not_slower_than_others_that_keep_to_the_limit(workload, cluster, most):
    ours = iteration_time(workload, schedule("legato", workload, cluster, rounds=20, max_message_bytes=most), cluster)
    for name in set(SCHEDULERS) - {"legato"}:
        other = schedule(name, workload, cluster, max_message_bytes=most)
        if is_runnable(other, workload) and all(message.nbytes <= most for message in other.messages):
            assert ours <= iteration_time(workload, other, cluster) * (1 + 1e-12), name


gradients = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=8)


@examples(150)
@given(gradients, costs, st.integers(1, 30) | st.just(math.inf), st.sampled_from([0.0, 3.0]), st.sampled_from([0, 99]))
def test_merge_optimal_is_the_best_within_the_limit(rows, cost, most, floor_s, few):
    cost = LinearCost(cost.alpha_s, cost.beta_s_per_byte, floor_s)
    ready = [float(seconds) for seconds in itertools.accumulate(seconds for seconds, _ in rows)]
    nbytes = [size for _, size in rows]
    finishes = []
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):
        edges = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), len(rows)]
        groups = list(itertools.pairwise(edges))
        if all(b == a + 1 or sum(nbytes[a:b]) <= most for a, b in groups):
            finishes.append(finish(ready, nbytes, cost, groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("legato.schedule.published.merge_optimal._FEW", few)
        best, found = merge_neighbours(ready, nbytes, cost, most)
    assert best == min(finishes) == finish(ready, nbytes, cost, found)
    assert all(b == a + 1 or sum(nbytes[a:b]) <= most for a, b in found)


def finish(ready, nbytes, cost, groups):
    now = 0.0
    for a, b in groups:
        now = max(now, ready[b - 1]) + cost.cost(sum(nbytes[a:b]))
    return now


@given(workloads().map(sized), clusters(max_collectives=1), limits)
def test_stock_ddp_forms_the_buckets_of_a_limited_plan(workload, cluster, most):
    for name in ("ddp", "merge-optimal"):
        plan = schedule(name, workload, cluster, max_message_bytes=most)
        stock = schedule("ddp", workload, cluster, bucket_cap_mb_list=bucket_caps(plan))
        assert [m.slices for m in stock.messages] == [m.slices for m in plan.messages]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(16, 250))
def test_dividing_keeps_all_bytes_in_their_order(sizes, most):
    whole = Message(tuple(Slice(f"t{t}", 0, size) for t, size in enumerate(sizes)))
    parts = divided([whole], most)
    assert all(part.nbytes <= most for part in parts)
    assert all(part.nbytes > most - 16 for part in parts[:-1])
    sent = [(piece.tensor, byte) for part in parts for piece in part.slices for byte in range(piece.start, piece.stop)]
    assert sent == [(f"t{t}", byte) for t, size in enumerate(sizes) for byte in range(size)]
    assert all(piece.start % 16 == 0 for part in parts for piece in part.slices)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_limit_below_sixteen_bytes_is_refused(name):
    workload = Workload("w", (Op("b", "backward", 1.0),), (Tensor("t", 64, 0),))
    with pytest.raises(InputError, match=r"max_message_bytes: 15 .expected at least 16"):
        schedule(name, workload, Cluster.derive(2, 1e9, 1e-6), max_message_bytes=15)


@pytest.mark.parametrize("name", PARTITIONING)
def test_a_limit_that_makes_too_many_messages_is_refused(name):
    workload = Workload("w", (Op("b", "backward", 1.0),), (Tensor("t", 2**30, 0),))
    with pytest.raises(TooLargeError, match="max_message_bytes: 1,008 makes 1,06"):
        schedule(name, workload, Cluster.derive(2, 1e9, 1e-6), max_message_bytes=1008)


def test_messages_to_servers_have_no_limit():
    workload = Workload("w", (Op("b", "backward", 1.0),), (Tensor("t", 64, 0),))
    cluster = Cluster.derive(2, 1e9, 1e-6, servers=1, collectives=["parameter-server"])
    with pytest.raises(InputError, match="max_message_bytes: given with parameter servers"):
        compare(workload, cluster, max_message_bytes=64)


def test_stock_ddp_is_never_asked_for_a_huge_bucket():
    """Startup times so long that everything should go in one message of 16 GiB."""
    ops = tuple(Op(f"b{i}", "backward", 1e-3, (i - 1,) if i else ()) for i in range(64))
    workload = Workload("huge", ops, tuple(Tensor(f"t{i}", 2**28, i) for i in range(64)))
    cluster = Cluster.derive(64, 100e9, 1.0)
    (merged,) = compare(workload, cluster, ["merge-optimal"])
    assert max(bucket_caps(merged.plan)) > 1024
    plan, seconds = stock_buckets(merged, workload, cluster)
    assert max(bucket_caps(plan)) <= MOST_BUCKET_BYTES / 2**20 == 1024
    assert seconds == iteration_time(workload, plan, cluster)
    (limited,) = compare(workload, cluster, ["merge-optimal"], max_message_bytes=2**29)
    assert stock_buckets(limited, workload, cluster) == (limited.plan, limited.iteration_s)
