"""Which messages are rounded: the fewest bytes for the time that is reached, found again by trying all choices."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, contentions, examples, plans, workloads

import legato
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice, check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.compare import best, check_bounds, compare
from legato.schedule.search.budget import Budget
from legato.schedule.search.rounding import TOLERANCE, check_rounding, exact_shares, least_rounded, rounded
from legato.simulator.collective import iteration_time
from legato.zoo import workload as model

MODES = ("bf16", "fp16", "all-bf16", "all-fp16")
SLOW = Cluster(2, {"c": LinearCost(0.0, 1.0)})


def layers(backward_s, forward_s, *sizes):
    """One tensor a layer, the last layer first in the backward pass; times are by layer in the order they run."""
    count = len(sizes)
    ops = [Op(f"f{k}", "forward", s, (k - 1,) if k else ()) for k, s in enumerate(forward_s)]
    ops += [Op(f"b{count - 1 - k}", "backward", s, (count + k - 1,)) for k, s in enumerate(backward_s)]
    tensors = (Tensor(f"t{count - 1 - k}", n, count + k, (count - 1 - k,)) for k, n in enumerate(sizes))
    return Workload("layers", tuple(ops), tuple(tensors))


def in_floats(workload):
    """The workload with float32 gradients."""
    return replace(workload, tensors=tuple(replace(t, nbytes=4 * t.nbytes) for t in workload.tensors))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("wire", MODES)
def test_one_exposed_tensor_is_rounded(name, wire):
    """3 s backward, 400 bytes in 400 s or 200, 2 s forward."""
    job = layers([3.0], [2.0], 400)
    plan = schedule(name, job, SLOW, wire=wire)
    assert iteration_time(job, plan, SLOW) == 205 and plan.rounded == 1
    assert {message.wire for message in plan.messages} == {wire.removeprefix("all-")}
    assert iteration_time(job, schedule(name, job, SLOW), SLOW) == 405


@pytest.mark.parametrize("name", SCHEDULERS)
def test_where_communication_is_hidden_the_exact_plan_comes_back(name):
    """t1 hides behind 20,000 s of backward and forward passes, and the 4 s of t0 are less than a thousandth."""
    job = layers([1.0, 20_000.0], [4.0, 20_000.0], 8, 4)
    assert schedule(name, job, SLOW, wire="bf16") == schedule(name, job, SLOW)
    assert schedule(name, job, SLOW, wire="all-bf16").rounded == 1


def test_where_everything_is_exposed_nearly_everything_is_rounded():
    """Half the time for half the bytes: a thousandth of the time pays for two thousandths of them at most."""
    job = layers([1.0] * 6, [1.0] * 6, *[4000] * 6)
    exact, plan = (legato.plan(job, SLOW, wire=wire) for wire in ("none", "bf16"))
    assert plan.rounded > 0.995
    assert iteration_time(job, plan, SLOW) < 0.51 * iteration_time(job, exact, SLOW)


def test_only_the_urgent_tensor_is_rounded():
    """t2 hides behind b1 as it is; t1 has to wait for the end, and the forward pass for it."""
    job = layers([10.0, 800.0], [100.0, 1.0], 800, 400)
    cluster = Cluster(2, {"c": LinearCost(1.0, 1.0)})
    plan = legato.plan(job, cluster, wire="bf16")
    assert iteration_time(job, plan, cluster) <= (10 + 801 + 201 + 101) * (1 + TOLERANCE)
    assert plan.rounded == 400 / 1200
    assert least_rounded(job, cluster, iteration_time(job, plan, cluster)) <= plan.rounded


def test_a_message_is_divided_where_half_of_it_would_do():
    """800 of the first tensor's 1600 bytes fit behind b1 as they are, 800 more in 400 s: 1200 s."""
    job = layers([10.0, 1200.0], [100.0, 1.0], 1600, 400)
    plan = legato.plan(job, SLOW, wire="bf16")
    assert iteration_time(job, plan, SLOW) <= (1210 + 200 + 101) * (1 + TOLERANCE)
    assert 1200 / 2000 - 0.01 < plan.rounded <= 1200 / 2000 + 16 / 2000
    undivided = schedule("fifo", job, SLOW, wire="bf16")
    assert undivided.rounded == 1 and len(undivided.messages) == 2
    check_plan(plan, job)
    assert all(piece.start % 4 == piece.stop % 4 == 0 for message in plan.messages for piece in message.slices)


@examples(150)
@given(st.data(), workloads(max_tensors=4).map(in_floats), clusters())
def test_no_other_message_can_be_exact(data, workload, cluster):
    """Of all choices of rounded messages, the chosen one is about as fast as any, and with one less it is not."""
    plan = data.draw(plans(workload, cluster, halves=False))
    assume(len(plan.messages) <= 6)
    chosen = rounded([plan], workload, cluster, "bf16", Budget())
    times = {}
    for light in itertools.product((None, "bf16"), repeat=len(plan.messages)):
        messages = (replace(message, wire=wire) for message, wire in zip(plan.messages, light, strict=True))
        times[light] = iteration_time(workload, replace(plan, messages=tuple(messages)), cluster)
    limit = min(times.values()) * (1 + TOLERANCE)
    mine = tuple(message.wire for message in chosen.messages)
    assert times[mine] <= limit
    for k in range(len(mine)):
        assert mine[k] is None or times[*mine[:k], None, *mine[k + 1 :]] > limit


@examples(60)
@given(st.data(), workloads().map(in_floats), clusters(), st.none() | contentions, st.sampled_from([0.0, 0.25]))
def test_whatever_a_format_costs_the_plan_is_as_fast_as_the_better_extreme(data, workload, cluster, contention, unpack):
    cluster = replace(cluster, contention=contention, unpack_s_per_byte=unpack)
    plan = data.draw(plans(workload, cluster))
    kinds = {"push": "reduce_scatter", "pull": "all_gather"}
    plan = replace(plan, messages=tuple(replace(m, kind=kinds.get(m.kind, m.kind)) for m in plan.messages))
    extremes = [replace(plan, messages=tuple(replace(m, wire=w) for m in plan.messages)) for w in (None, "fp16")]
    chosen = rounded([plan], workload, cluster, "fp16", Budget(), divide=data.draw(st.booleans()))
    check_plan(chosen, workload)
    fastest = min(iteration_time(workload, extreme, cluster) for extreme in extremes)
    assert iteration_time(workload, chosen, cluster) <= fastest * (1 + TOLERANCE)
    wire_of = {}
    for message in chosen.messages:
        if message.kind != "all_reduce":
            assert wire_of.setdefault(frozenset(message.slices), message.wire) == message.wire


@examples(100)
@given(st.data(), workloads(), clusters())
def test_no_plan_of_all_reduces_rounds_less_than_it_must(data, workload, cluster):
    plan = data.draw(plans(workload, cluster, halves=False))
    plan = replace(
        plan, messages=tuple(replace(m, wire=data.draw(st.sampled_from([None, "bf16"]))) for m in plan.messages)
    )
    assert plan.rounded >= least_rounded(workload, cluster, iteration_time(workload, plan, cluster)) - 1e-9


@examples(50)
@given(workloads(), clusters(), st.integers(0, 400))
def test_the_most_exact_bytes_do_not_depend_on_the_order(workload, cluster, limit):
    """As long as there is time to round everything: nothing needs more room than there is."""
    orders = (lambda r, q, b: q), (lambda r, q, b: -r), (lambda r, q, b: b), (lambda r, q, b: -b)
    assume(iteration_time(workload, rounded_single(workload), cluster) <= limit)
    totals = [
        sum(s * t.nbytes for s, t in zip(exact_shares(workload, cluster, limit, order), workload.tensors, strict=True))
        for order in orders
    ]
    assert totals == pytest.approx([totals[0]] * len(orders))


def rounded_single(workload):
    slices = tuple(Slice(t.name, 0, t.nbytes) for t in workload.tensors)
    return Plan("single", (Message(slices, wire="bf16"),))


@examples(8)
@given(workloads(max_ops=4, max_tensors=4).map(in_floats), clusters(contended=True))
def test_legato_is_the_fastest_and_above_the_bound(workload, cluster):
    found = compare(workload, cluster, wire="bf16")
    check_bounds(found, workload, cluster)
    own = next(c for c in found if c.plan.scheduler == "legato")
    for candidate in found:
        assert candidate.kind.wire and candidate.columns["rounded"] == candidate.plan.rounded
        assert candidate.iteration_s >= candidate.bound.seconds * (1 - 1e-9)
        if candidate.runnable:
            assert own.iteration_s <= candidate.iteration_s * (1 + 2 * TOLERANCE)
        assert candidate.plan.cluster_id == own.plan.cluster_id == legato.identity(cluster)
    chosen = best(found)
    as_fast = [c for c in found if c.runnable and c.iteration_s <= chosen.iteration_s / 1.005]
    assert all(c.plan.rounded >= chosen.plan.rounded - 0.005 for c in as_fast)


@pytest.mark.slow
def test_a_real_model():
    """ResNet-50 on 10 Gbit/s can be as fast as its computation; it takes a third of the bytes, and no plan less than a
    quarter. DDP's buckets have to be rounded nearly all.
    """
    job, cluster = model("resnet-v1-50"), Cluster.derive(4, 1e10, 5e-5)
    plan = legato.plan(job, cluster, wire="bf16")
    assert legato.plan(job, cluster, wire="bf16") == plan
    check_plan(plan, job)
    seconds = iteration_time(job, plan, cluster)
    everything = iteration_time(job, legato.plan(job, cluster, wire="all-bf16"), cluster)
    assert seconds <= everything * (1 + TOLERANCE) and everything < 0.9 * iteration_time(
        job, legato.plan(job, cluster), cluster
    )
    assert 0.25 < least_rounded(job, cluster, seconds) <= plan.rounded < 0.4
    assert schedule("ddp", job, cluster, wire="bf16").rounded > 0.8


def test_messages_have_their_limit():
    job = layers([1.0] * 3, [1.0] * 3, 4000, 8000, 2000)
    plan = legato.plan(job, SLOW, wire="bf16", max_message_bytes=1024)
    assert max(message.nbytes for message in plan.messages) <= 1024 and plan.rounded > 0.9


def test_the_cheapest_collective_is_that_for_the_bytes_that_travel():
    """24 bytes take 34 s by `bulk` and 36 by `quick`; 12 bytes 22 and 18."""
    cluster = Cluster(2, {"bulk": LinearCost(10.0, 1.0), "quick": LinearCost(0.0, 1.5)})
    exact = Workload("x", layers([3.0], [2.0], 40).ops, (Tensor("t", 24, 1, (0,)),))
    assert legato.plan(exact, cluster).messages[0].collective == "bulk"
    plan = legato.plan(exact, cluster, wire="bf16")
    assert [m.collective for m in plan.messages] == ["quick"] and iteration_time(exact, plan, cluster) == 3 + 18 + 2


def test_what_is_refused():
    job = layers([1.0], [1.0], 8)
    with pytest.raises(InputError, match=r"unknown wire 'bf61'.*did you mean 'bf16'"):
        legato.plan(job, SLOW, wire="bf61")
    for name in ("legato", "ddp"):
        with pytest.raises(InputError, match=r"wire: 'bf16' with shard 'optimizer' \(expected one or the other"):
            schedule(name, job, SLOW, wire="bf16", shard="optimizer")
        odd = replace(job, tensors=(replace(job.tensors[0], nbytes=6),))
        with pytest.raises(InputError, match=r"wire: 'all-fp16', but tensor 't0' has 6 bytes \(expected float32"):
            schedule(name, odd, SLOW, wire="all-fp16")
    with pytest.raises(InputError, match=r"wire: 'bf16' with parameter servers \(expected none"):
        schedule("tac", job, SLOW, wire="bf16")
    with pytest.raises(InputError, match=r"wire: 'bf16' with parameter servers"):
        compare(job, Cluster.derive(2, 1e9, 1e-5, servers=1), wire="bf16")
    with pytest.raises(InputError, match="unknown option of ddp 'wires'"):
        schedule("ddp", job, SLOW, wires="bf16")
    check_rounding("none", odd, servers=True, shard="optimizer")
