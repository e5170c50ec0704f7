"""The bounds: no plan is faster than any argument proves, small cases attain them, and exact arithmetic proves them."""

import itertools
import math
import random
import runpy
from fractions import Fraction
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.optimum import UNIT, Optimum
from support.sharding import best_in_pairs, best_sharded, layers
from support.strategies import clusters, examples, op_orders, paired_plans, plans, seeds, sharded_plans, some, workloads
from support.updated_chains import best_with_halves, chain, cluster_of

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.basics.sharded import sharded, without_updates
from legato.schedule.bound.arguments import two_sided
from legato.schedule.bound.arguments.compute import Computation
from legato.schedule.bound.arguments.ends import Ends
from legato.schedule.bound.arguments.equal_pairs import EqualPairs
from legato.schedule.bound.arguments.nested import Nested, NestedSets, OfSets
from legato.schedule.bound.arguments.sharded import Sharded
from legato.schedule.bound.arguments.two_sided import DividedHalves, TwoSided
from legato.schedule.bound.lower_bound import ARGUMENTS, Bound, lower_bound, verify_bound
from legato.schedule.bound.plan_kind import PlanKind, cluster_for_bound, kind_of, wider_kinds
from legato.schedule.bound.problem import Problem
from legato.schedule.published import PUBLISHED
from legato.schedule.published.baselines import single
from legato.simulator.collective import iteration_time

layered_net = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "random_nets.py"))["layered_net"]
settings_of_bound = st.sampled_from([("one", "captured"), ("one", "any"), ("unlimited", "captured")])
SENDS = ["halves", "pairs", "all_reduces"]
STEP = {"shard": "optimizer", "step_last": True}


def problem_of(workload, cluster, compute="one", order="captured", sends="halves", **fields):
    return Problem(workload, cluster, compute, PlanKind(order, sends, **fields))


def bound_by(argument, beat, workload, cluster, **fields):
    """The best bound of one argument alone; None if it finds nothing."""
    problem = problem_of(workload, cluster, **fields)
    found = max(argument.find(problem, beat), key=lambda of: of.seconds, default=None)
    return found and Bound(*found)


def refuses(seconds, bound, *arguments, **fields):
    """Exact arithmetic does not prove more than `seconds`, with the tensors of this bound."""
    claimed = seconds * (1 + 1e-6) + 1e-9
    if isinstance(bound.certificate, OfSets):
        bound = replace(bound, certificate=replace(bound.certificate, seconds=claimed))
    with pytest.raises(InputError, match=r"proves only|does not prove"):
        verify_bound(replace(bound, seconds=claimed), *arguments, **fields)


def no_argument_beats(best, *arguments, **fields):
    """No argument proves more than `best`, which a plan takes; what they prove is proved exactly. Their forms."""
    problem, found = problem_of(*arguments, **fields), {}
    for argument in ARGUMENTS if best else ():
        for proved in argument.find(problem, 0.1 * best):
            assert proved.seconds <= best * (1 + 1e-12), proved
            form = form_of(proved.certificate)
            found[form] = max(found.get(form, proved), proved, key=lambda of: of.seconds)
    for proved in found.values():
        bound = Bound(*proved)
        assert verify_bound(bound, *arguments, **fields) >= bound.seconds * (1 - 1e-9)
        refuses(best, bound, *arguments, **fields)
    return set(found)


def form_of(certificate):
    """Which form of which argument it is: those of one end, of both, of an op and of the step are proved apart."""
    if isinstance(certificate, Ends):
        return "one end" if isinstance(certificate.at, str) else "both ends"
    if isinstance(certificate, Sharded):
        return "step" if certificate.op is None else "update"
    return certificate.case


# Plans of small cases, one by one.


def three_units(seed):
    """Two or three layers with gradients of three units in all, and updates."""
    draw = random.Random(seed)
    units = draw.choice([(1, 1), (1, 2), (2, 1), (1, 1, 1)])
    backward, forward, updates = ([float(draw.randint(0, most)) for _ in units] for most in (3, 3, 4))
    return chain(backward, forward, units, updates), units


def every_plan(workload):
    """All merging, partitioning (between units) and order of all-reduces, with every place of the updates."""
    units = [(t, k) for t, tensor in enumerate(workload.tensors) for k in range(tensor.nbytes // UNIT)]
    forward, backward, updates = (workload.phase_ops(phase) for phase in ("forward", "backward", "optimizer"))
    orders = []
    for order in itertools.permutations([*forward, *updates]):
        place = {op: k for k, op in enumerate(order)}
        read_in_time = (place[u] < place[f] for t in workload.tensors for f, u in itertools.pairwise(t.readers))
        if [op for op in order if op in forward] == forward and all(read_in_time):
            orders.append((*backward, *order))
    for numbers in itertools.product(range(len(units)), repeat=len(units)):
        alike = itertools.pairwise(zip(units, numbers, strict=True))
        if set(numbers) != set(range(max(numbers) + 1)) or any(a[0] == b[0] and m > n for (a, m), (b, n) in alike):
            continue  # numbers are left out, or the units of a tensor are in another order
        groups = [[unit for unit, at in zip(units, numbers, strict=True) if at == k] for k in range(max(numbers) + 1)]
        slices = ((Slice(workload.tensors[t].name, k * UNIT, (k + 1) * UNIT) for t, k in group) for group in groups)
        messages = tuple(Message(tuple(of)) for of in slices)
        for order in orders:
            yield Plan("every", messages, True, op_order=order)


@pytest.mark.parametrize("gradients", [2, 3])
@pytest.mark.parametrize("seed", seeds(16))
def test_all_reduces_with_updates_anywhere(seed, gradients):
    """Gradients of a unit or two, of two layers, of which one may have several gradients, each with an update."""
    draw = random.Random(seed)
    ops = [Op("f0", "forward", draw.randint(0, 3)), Op("f1", "forward", draw.randint(0, 3), (0,))]
    ops += [Op("b1", "backward", draw.randint(0, 3), (1,)), Op("b0", "backward", draw.randint(0, 3), (2,))]
    ops += [Op(f"u{t}", "optimizer", draw.randint(0, 6)) for t in range(gradients)]
    layers = draw.choice([(1, 0, 0), (1, 1, 0)]) if gradients == 3 else (1, 0)
    units = draw.choice([(1, 1, 1), (2, 1, 1), (1, 1, 2)]) if gradients == 3 else draw.choice([(1, 2), (2, 2)])
    of = enumerate(zip(layers, units, strict=True))
    tensors = tuple(Tensor(f"t{t}", UNIT * n, 3 - layer, (layer, 4 + t)) for t, (layer, n) in of)
    workload = Workload("small", tuple(ops), tensors)
    cluster = Cluster(2, {"c": LinearCost(draw.choice([0.5, 1, 3]), draw.choice([1, 2, 5]) / UNIT)})
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    for sends in SENDS:
        assert {"one end", "both ends", "nested"} <= no_argument_beats(best, workload, cluster, sends=sends)


@pytest.mark.parametrize("sends", ["pairs", "halves"])
@pytest.mark.parametrize("seed", seeds(30))
def test_reduce_scatters_and_all_gathers(seed, sends):
    workload, _ = three_units(seed)
    cluster = cluster_of(random.Random(seed).choice([0.25, 1.0, 4.0]), 2.0)
    best = best_with_halves(workload, cluster, sends)
    for order in ("captured", "any"):
        found = no_argument_beats(best, workload, cluster, sends=sends, order=order)
        assert "nested" in found and ("two_sided" in found) == (sends == "pairs")


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("seed", seeds(60))
def test_pairs_on_several_collectives(seed, shard):
    """Each gradient is read by any of the layers, by two, or by none."""
    workload, units = three_units(seed)
    draw, workload = random.Random(seed), without_updates(workload)
    readers = [tuple(sorted(draw.sample(workload.phase_ops("forward"), draw.randint(0, 2)))) for _ in units]
    tensors = [replace(t, readers=of) for t, of in zip(workload.tensors, readers, strict=True)]
    workload = replace(workload, tensors=tuple(tensors))
    costs = [LinearCost(draw.choice([0.5, 1.0, 3.0]), draw.choice([0.0, 1.0, 3.0]) / UNIT) for _ in range(3)]
    cluster, backward = Cluster(2, {f"c{k}": cost for k, cost in enumerate(costs)}), workload.phase_ops("backward")
    from_s = 0.0 if shard == "none" else sum(workload.ops[op].duration_s for op in backward)
    best = best_in_pairs(heads_tails(workload, "one", "captured"), units, cluster, from_s)
    found = no_argument_beats(best, workload, cluster, sends="pairs", shard=shard, step_last=shard != "none")
    assert {"one end", "both ends", "nested", "two_sided"} <= found and ("equal_pairs" in found) == (shard != "none")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", seeds(24, quick=2))
def test_every_sharded_plan(seed, fused):
    """Every grouping, every order of both halves, and every place of the updates, also inside the backward pass."""
    workload, cluster = layers(seed, count=3 if fused or seed % 4 == 0 else 2, fused=fused)
    for step_last in (True, False):
        best, _ = best_sharded(workload, cluster, anywhere=not step_last)
        found = no_argument_beats(best, workload, cluster, shard="optimizer", step_last=step_last)
        assert {"compute", "update", "step", "equal_pairs"} <= found
    best, _ = best_sharded(workload, cluster, anywhere=True, compute="unlimited")
    assert "update" in no_argument_beats(best, workload, cluster, compute="unlimited", shard="gradients")


@pytest.mark.parametrize("seed", seeds(8))
def test_messages_that_cost_nothing_or_only_their_start(seed):
    workload, _ = layers(seed)
    for alpha_s, beta_s in ((0.0, 2.0), (2.0, 0.0)):
        cluster = Cluster(2, {"c": LinearCost(alpha_s, beta_s)})
        best, _ = best_sharded(workload, cluster)
        no_argument_beats(best, workload, cluster, **STEP)
        assert bound_by(EqualPairs, 0.1 * best, workload, cluster, **STEP).seconds >= 0.5 * best


# Random plans.


@pytest.mark.slow
@examples(300)
@given(
    st.data(),
    workloads(),
    clusters(contended=True),
    settings_of_bound,
    st.sampled_from(["plans", "pairs", "shard", "wire"]),
)
def test_no_random_plan_is_faster(data, workload, cluster, setting, kind):
    compute, order = setting
    orders = data.draw(st.sampled_from([None, op_orders(workload, captured=order == "captured")]))
    drawn = {"plans": plans, "pairs": paired_plans, "shard": sharded_plans, "wire": plans}[kind]
    plan = data.draw(drawn(workload, cluster, op_order=orders))
    if kind == "wire":
        wires = st.sampled_from([None, "bf16", "fp16"])
        plan = replace(plan, messages=tuple(replace(m, wire=data.draw(wires)) for m in plan.messages))
    if kind == "shard" and data.draw(st.booleans()):
        plan = sharded(plan, workload, plan.shard)
    try:
        seconds = iteration_time(workload, plan, cluster, compute=compute)
    except PlanError:
        assume(False)
    cluster, fields = cluster_for_bound(plan, cluster), kind_of(plan, workload)._replace(order=order)._asdict()
    no_argument_beats(seconds, workload, cluster, compute=compute, **fields)
    # A part in 10**12 for the one division in the bound, the slope between several collectives.
    assert seconds >= lower_bound(workload, cluster, compute=compute, **fields).seconds * (1 - 1e-12)


@pytest.mark.parametrize("name", some(SCHEDULERS, ["ddp", "dear", "caramel", "legato"]))
@given(workload=workloads(max_tensors=8), cluster=clusters(contended=True), setting=settings_of_bound)
def test_no_scheduler_is_faster(name, workload, cluster, setting):
    compute, order = setting
    plan = schedule(name, workload, cluster)
    seconds = iteration_time(workload, plan, cluster, compute=compute)
    order = "any" if plan.op_order else order
    bound = lower_bound(workload, cluster, compute=compute, order=order, sends=kind_of(plan, workload).sends)
    assert seconds >= bound.seconds * (1 - 1e-12)


def random_pairs(workload, draw):
    """Neighbours in all-reduces and pairs, in ready order, with each all-gather anywhere after its reduce-scatter."""
    tensors, messages = sorted(workload.tensors, key=lambda tensor: tensor.ready_after), []
    borders = sorted(draw.sample(range(1, len(tensors)), min(draw.randint(1, 9), len(tensors) - 1)))
    for start, stop in itertools.pairwise([0, *borders, len(tensors)]):
        slices = tuple(Slice(tensor.name, 0, tensor.nbytes) for tensor in tensors[start:stop])
        messages.append(Message(slices, draw.choice(["all_reduce", "reduce_scatter"])))
    for message in [message for message in messages if message.kind == "reduce_scatter"]:
        place = draw.randint(messages.index(message) + 1, len(messages))
        messages.insert(place, replace(message, kind="all_gather"))
    return Plan("random", tuple(messages), forward_overlap=True)


@pytest.mark.parametrize("latency_s", [1e-5, 3e-4, 1e-3])
@pytest.mark.parametrize("seed", some([1, 3, 5, 7], [1]))
def test_no_plan_of_a_layered_net_is_faster(seed, latency_s):
    workload, cluster = layered_net(seed), Cluster.derive(8, 10e9, latency_s, collectives=["ring"])
    draw, names = random.Random(seed), [*PUBLISHED, "legato"]
    found = [schedule(name, workload, cluster) for name in names]
    of_pairs = [plan for plan in found if PlanKind("captured", "pairs") in wider_kinds(kind_of(plan, workload))]
    of_pairs += [random_pairs(workload, draw) for _ in range(50)]
    no_argument_beats(min(iteration_time(workload, p, cluster) for p in of_pairs), workload, cluster, sends="pairs")
    shards = [sharded(schedule(name, workload, cluster), workload, "gradients") for name in PUBLISHED]
    best = min(iteration_time(workload, plan, cluster) for plan in shards)
    assert "equal_pairs" in no_argument_beats(best, workload, cluster, shard="gradients", step_last=True)


# Where bounds are optima.


@pytest.mark.parametrize("seed", seeds(12))
def test_for_all_reduces_of_a_chain_nested_sets_give_the_optimum(seed):
    """All times are whole and a unit takes a second, so that messages begin and end between two units."""
    draw = random.Random(seed)
    units = [draw.randint(1, 3) for _ in range(draw.randint(2, 4))]
    backward, forward = ([float(draw.randint(0, 4)) for _ in units] for _ in range(2))
    workload = without_updates(chain(backward, forward, units, [0.0] * len(units)))
    cluster = cluster_of(float(draw.randint(1, 5)), 1.0)
    best = Optimum(workload, cluster, sends="all_reduces").seconds
    bound = bound_by(Nested, 1e-3, workload, cluster, sends="all_reduces")
    assert max(bound.seconds, workload.compute_s) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("seed", seeds(12))
def test_for_pairs_of_a_chain_the_optimum(seed, shard):
    """Up to the precision. Whole times, two seconds a unit: halves begin and end between units. With shards, a layer's
    backward pass takes twice as long as its forward pass."""
    draw = random.Random(seed)
    units = draw.choice([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2)])
    forward = [2.0 * draw.randint(0, 3) for _ in units]
    backward = [2 * seconds for seconds in forward] if shard != "none" else [float(draw.randint(0, 4)) for _ in units]
    workload = without_updates(chain(backward, forward, units, [0.0] * len(units)))
    cluster = (
        cluster_of(4.0 * draw.randint(1, 3), 4.0) if shard != "none" else cluster_of(2.0 * draw.randint(1, 3), 2.0)
    )
    if shard == "none":
        best = Optimum(workload, cluster, sends="pairs").seconds
        bound = bound_by(TwoSided, 1e-3, workload, cluster, sends="pairs")
    else:
        best = best_in_pairs(heads_tails(workload, "one", "captured"), units, cluster, sum(backward))
        bound = bound_by(EqualPairs, 0.1, workload, cluster, **STEP)
    assert best * (1 + 1e-12) >= max(bound.seconds, workload.compute_s) >= best * (1 - 2e-3)


@examples(100)
@given(workloads(max_ops=6, max_tensors=8), st.sampled_from(["one", "unlimited"]))
def test_without_startup_time_preemptive_priority_attains_it(workload, compute):
    """PACE's problem: Jackson's schedule, cut as often as it likes, is the optimum, and the bound is its value."""
    if compute == "one":  # where an update runs is then a choice of its own
        workload = without_updates(workload)
    cluster = Cluster(2, {"c": LinearCost(0.0, 1 / 8)})  # durations are eighths: every cut falls between two bytes
    times = heads_tails(workload, compute, "captured")
    sent = [0] * len(workload.tensors)
    messages = []
    for t, start, stop in jackson(times.release_s, [t.nbytes / 8 for t in workload.tensors], times.tail_s):
        end = sent[t] + int((stop - start) * 8)
        messages.append(Message((Slice(workload.tensors[t].name, sent[t], end),)))
        sent[t] = end
    plan = Plan("jackson", tuple(messages), forward_overlap=True)
    seconds = iteration_time(workload, plan, cluster, compute=compute)
    assert seconds == lower_bound(workload, cluster, compute=compute).seconds


@given(workloads(max_ops=6, max_tensors=8, optimizer=False))
def test_p3_with_the_finest_slices_attains_it(workload):
    cluster = Cluster(2, {"c": LinearCost(0.0, 1 / 8)})
    plan = schedule("p3", workload, cluster, slice_bytes=1)
    assert iteration_time(workload, plan, cluster) == lower_bound(workload, cluster).seconds


@given(workloads(max_tensors=1, optimizer=False), clusters(max_collectives=1))
def test_a_single_tensor_attains_it(workload, cluster):
    whole = Message((Slice("t0", 0, workload.tensors[0].nbytes),))
    plan = Plan("whole", (whole,), forward_overlap=True)
    for compute in ("one", "unlimited"):
        bound = lower_bound(workload, cluster, compute=compute)
        assert iteration_time(workload, plan, cluster, compute=compute) == bound.seconds


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_one_sharded_layer_attains_it(workers):
    ops = (Op("f", "forward", 5.0), Op("b", "backward", 7.0), Op("u", "optimizer", 4.0))
    layer = Workload("layer", ops, (Tensor("w", 8, 1, (0, 2)),))
    cluster = Cluster(workers, {"c": LinearCost(1.0, 0.25)})
    for compute in ("one", "unlimited"):
        bound = lower_bound(layer, cluster, compute=compute, shard="gradients")
        assert bound == Bound(15 + 4 / workers, Sharded((0,), 2))
        assert iteration_time(layer, sharded(single(layer, cluster), layer, "gradients"), cluster) == bound.seconds
        assert verify_bound(bound, layer, cluster, compute=compute, shard="gradients") == 15 + Fraction(4, workers)


# By hand.

# Backward: op 3 (1 s), then ops 4 and 5 (2 s, 4 s), which do not need one another. Forward: 0 (3 s), then 1 and 2
# (5 s, 7 s), which do not need one another either. Tensor a is updated by op 6 and read by 0, b is read by 2, c by
# nothing.
DIAMOND = Workload(
    "diamond",
    (
        Op("f0", "forward", 3.0),
        Op("f1", "forward", 5.0, (0,)),
        Op("f2", "forward", 7.0, (0,)),
        Op("b0", "backward", 1.0, (1, 2)),
        Op("b1", "backward", 2.0, (3,)),
        Op("b2", "backward", 4.0, (3,)),
        Op("u", "optimizer", 0.5, (5,)),
    ),
    (Tensor("a", 8, 5, (0, 6)), Tensor("b", 4, 4, (2,)), Tensor("c", 2, 3)),
)


@pytest.mark.parametrize(
    ("compute", "order", "heads", "tails", "compute_s"),
    [
        ("one", "captured", [7, 3, 1], [15.5, 7, 0], 22.5),
        ("one", "any", [5, 3, 1], [15.5, 7, 0], 22.5),
        ("unlimited", "captured", [5, 3, 1], [10.5, 7, 0], 15.5),
    ],
)
def test_heads_and_tails(compute, order, heads, tails, compute_s):
    assert heads_tails(DIAMOND, compute, order) == (heads, tails, compute_s)


def test_a_forward_op_takes_all_behind_it_along_in_captured_order():
    reads_first = replace(DIAMOND, tensors=(Tensor("b", 4, 4, (1,)),))
    assert heads_tails(reads_first, "one", "captured").tail_s == [12]
    assert heads_tails(reads_first, "one", "any").tail_s == [5]


def test_one_end_and_nested_sets():
    # Tensor a alone: ready at 7, 2 + 24 s on the network, 15.5 s after it: 48.5. With b, ready at 3 (12 s more, and
    # half an alpha more, as they cannot both go at 3), and 7 s after: 3 + 39 + 7.
    cluster = Cluster(2, {"c": LinearCost(2.0, 3.0)})
    assert verify_bound(Bound(49.0, Ends((0, 1), "release")), DIAMOND, cluster) == 49
    assert verify_bound(Bound(48.5, Ends((0,), "tail")), DIAMOND, cluster) == Fraction(97, 2)
    # Nested: two halves for a alone need 7 + 2 + 24 + 15.5; with b, one more before and one after them, from 3 on,
    # 3 + 4 + 36 + 7; with c, no half begins earlier, and one more ends later: 3 + 5 + 42.
    bound = lower_bound(DIAMOND, cluster, thorough=False)
    assert bound.seconds == pytest.approx(50, rel=1e-6) and bound.certificate.sets == (1, 2, 3)
    verify_bound(bound, DIAMOND, cluster)


def test_computation_alone_is_a_bound():
    assert lower_bound(DIAMOND, Cluster(1, {"c": LinearCost(0.0, 0.0)})) == Bound(22.5, Computation())


def test_messages_take_time_of_the_processor():
    """8 s of computation, 1 s to pack 8 bytes, 0.5 + 0.5 s of work for the message, which travels for 3 s. On unlimited
    streams, the backward pass takes 7 s, and nothing else counts."""
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 2.0, (0,)), Op("c", "backward", 5.0, (1,)))
    workload = Workload("w", ops, (Tensor("t", 8, 1),))
    contention = Contention(LinearCost(0.0, 0.0), LinearCost(0.5, 0.0625), 0.125)
    cluster = Cluster(2, {"c": LinearCost(1.0, 0.25)}, contention=contention)
    bound = lower_bound(workload, cluster)
    assert bound == Bound(10.0, Computation()) and verify_bound(bound, workload, cluster) == 10
    assert lower_bound(workload, cluster, compute="unlimited") == Bound(7.0, Computation())


def test_startup_times_that_cannot_be_shared_count():
    """Gradients far apart: one message waits for the last of them, two cost a second half of alpha at least."""
    ops = (Op("f", "forward", 1.0), Op("b0", "backward", 1.0), Op("b1", "backward", 10.0, (1,)))
    work = Workload("w", ops, (Tensor("x", 100, 1, (0,)), Tensor("y", 1, 2, (0,))))
    cluster = Cluster(2, {"c": LinearCost(4.0, 1.0)})
    bound = lower_bound(work, cluster)
    assert bound == Bound(1 + 101 + 6 + 1, Ends((0, 1), "release"))
    assert iteration_time(work, schedule("merge-optimal", work, cluster), cluster) == bound.seconds + 2


def test_halves_can_beat_every_all_reduce_but_not_the_bound():
    ops = (Op("f", "forward", 0.0), Op("b0", "backward", 0.0), Op("b1", "backward", 4.0, (1,)))
    work = Workload("w", ops, (Tensor("x", 4, 1), Tensor("y", 1, 2)))
    cluster = Cluster(2, {"c": LinearCost(4.0, 1.0)})
    x, y = Slice("x", 0, 4), Slice("y", 0, 1)
    halves = (Message((x,), "reduce_scatter"), Message((y,), "reduce_scatter"), Message((x, y), "all_gather"))
    assert iteration_time(work, schedule("merge-optimal", work, cluster), cluster) == 13
    assert iteration_time(work, Plan("halves", halves), cluster) == lower_bound(work, cluster).seconds == 11


def test_a_trace_of_one_more_tensor_is_not_taken_for_all_of_its_delay():
    """What cannot be done by m is exactly the first two tensors from the other end; a rounding error makes it more."""
    ops = (Op("f", "forward", 0.25), Op("b0", "backward", 0.375), Op("b1", "backward", 0.0))
    work = Workload("w", ops, (Tensor("x", 1, 2, (0,)), Tensor("y", 1, 1), Tensor("z", 1, 1)))
    cluster = Cluster(2, {"c": LinearCost(0.25, 0.25), "d": LinearCost(0.5, 0.0)})
    x, rest = Slice("x", 0, 1), (Slice("y", 0, 1), Slice("z", 0, 1))
    plan = Plan("swapped", (Message((x,), collective="c"), Message(rest, collective="d")), True, (2, 1, 0))
    assert iteration_time(work, plan, cluster) == 1.0
    assert lower_bound(work, cluster, order="any", sends="all_reduces").seconds <= 1.0


def test_updates_of_what_arrives_last_come_after_it():
    """One message, at 2, arrives at 16; both updates and both forward ops follow. With two, the last arrives at 22."""
    workload, cluster = chain([1.0, 1.0], [1.0, 1.0], [2, 2], [3.0, 3.0]), cluster_of(10.0, 1.0)
    bound = bound_by(Nested, 1e-3, workload, cluster, sends="all_reduces")
    assert bound.seconds == pytest.approx(24, rel=1e-6)
    assert min(iteration_time(workload, plan, cluster) for plan in every_plan(workload)) == 24


def test_the_innermost_set_may_take_several_messages():
    """The gradients of one layer, one after another: the first is updated while the second travels."""
    ops = (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)), *(Op(u, "optimizer", 4.0) for u in "uv"))
    workload = Workload("one", ops, (Tensor("a", 16, 1, (0, 2)), Tensor("b", 16, 1, (0, 3))))
    cluster = Cluster(2, {"c": LinearCost(1.0, 5 / 16)})
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    assert best == 1 + 6 + 6 + 4 + 1
    for sends in SENDS:
        assert "nested" in no_argument_beats(best, workload, cluster, sends=sends)


#: The second layer's gradient is ready at 2 and read 2 s before the end, the first one's at 6 and 3 s before. Each
#: takes 3 s to scatter and 3 s to gather; both together take 4 s and 4 s.
TWO = without_updates(chain([4.0, 2.0], [1.0, 2.0], [1, 1], [0.0, 0.0]))
SLOW = cluster_of(4.0, 2.0)


def test_halves_on_two_sides():
    """The first layer's gradient, alone, is scattered by 9. Both halves of the other one end before this by 8, and
    3 + 3 + 3 s follow; or one is on each side, and 3 + 3 + 2 s follow 9; or both come after it, later still. Together
    they take 6 + 8 + 3. So 17 is the least. Nested sets count 6 + 6 + 3, and two messages in 2 + 12 + 2."""
    assert bound_by(Nested, 1.0, TWO, SLOW, sends="pairs").seconds == pytest.approx(16, rel=1e-6)
    bound = lower_bound(TWO, SLOW, sends="pairs")
    assert isinstance(bound.certificate, TwoSided) and bound.seconds == pytest.approx(17, rel=1e-3)
    assert verify_bound(bound, TWO, SLOW, sends="pairs") >= bound.seconds * (1 - 1e-9)
    assert iteration_time(TWO, schedule("legato", TWO, SLOW), SLOW) == 17


def test_as_many_bytes_are_gathered_as_scattered():
    """The second layer's gradient is ready at 2 and read 3 s before the end, the first one's at 8 and 4 s before.

    In two messages, they are scattered from 2 to 5 and from 8 to 11, and gathered until 14 and 17, with 4 and 3 s
    to follow. Together, they are scattered until 12 and gathered until 16, and 4 s follow. So 20 is the least. Without
    shards, the second layer's could be gathered by 8, and 18 would do."""
    workload = chain([6.0, 2.0], [1.0, 3.0], [1, 1], [0.0, 0.0])
    bound = lower_bound(workload, SLOW, **STEP)
    assert isinstance(bound.certificate, EqualPairs) and bound.seconds == pytest.approx(20, rel=1e-3)
    assert verify_bound(bound, workload, SLOW, **STEP) >= bound.seconds * (1 - 1e-9)
    plan = schedule("legato", workload, SLOW, shard="optimizer")
    assert best_sharded(workload, SLOW)[0] == iteration_time(workload, plan, SLOW) == 20
    assert iteration_time(workload, schedule("legato", workload, SLOW), SLOW) == 18


def sharded_case(backward, forward, update_s, tensors):
    ops = [Op(f"f{k}", "forward", seconds) for k, seconds in enumerate(forward)]
    ops += [Op(f"b{k}", "backward", seconds) for k, seconds in enumerate(backward)]
    return Workload("sharded", (*ops, Op("u", "optimizer", update_s)), tensors)


#: Backward 1 + 2 s, two tensors of which a half takes 2 s (1 s of it alpha), an update of 2 s, forward 3 + 4 s.
FUSED = sharded_case([1.0, 2.0], [3.0, 4.0], 8.0, (Tensor("w1", 8, 2, (1, 4)), Tensor("w0", 8, 3, (0, 4))))


def test_one_update_for_all_stands_between_all_halves():
    cluster = Cluster(4, {"c": LinearCost(2.0, 0.25)})
    bound = lower_bound(FUSED, cluster, shard="optimizer")
    # w1 is scattered until 3, w0 until 5; both are updated until 7; w0 is gathered until 9, w1 beside f0.
    assert bound.certificate == Sharded((0, 1), 4) and bound.seconds == 9 + 3 + 4
    assert best_sharded(FUSED, cluster)[0] == 16


def test_parameters_are_gathered_after_the_step():
    """The gradient is ready after 1 s and scattered until 3, but the backward pass goes on until 9."""
    workload = sharded_case([1.0, 8.0], [4.0], 2.0, (Tensor("w", 8, 1, (0, 3)),))
    cluster = Cluster(2, {"c": LinearCost(2.0, 0.25)})
    assert lower_bound(workload, cluster, **STEP) == Bound(16.0, Sharded((0,)))
    plan = sharded(single(workload, cluster), workload, "optimizer")
    assert kind_of(plan, workload).step_last and iteration_time(workload, plan, cluster) == 16
    assert lower_bound(workload, cluster, shard="optimizer").seconds == 15  # 9 s, 2 s to gather, and 4 s
    early = replace(plan, op_order=(1, 3, 2, 0))
    assert not kind_of(early, workload).step_last and iteration_time(workload, early, cluster) == 18


def test_what_is_not_scattered_before_the_step_is_scattered_after_it():
    """Backward passes until 2; two gradients of 1 + 4 s a half, and forward ops that read them in the other order."""
    tensors = Tensor("w1", 8, 2, (1, 4)), Tensor("w0", 8, 3, (0, 4))
    workload, cluster = sharded_case([1.0, 1.0], [0.5, 1.0], 0.0, tensors), Cluster(2, {"c": LinearCost(2.0, 1.0)})
    bound = lower_bound(workload, cluster, **STEP)
    # Scattered together from 2 until 11, as one after the other from 1; gathered for 1 + 8 s more, and 1 s for f1.
    assert bound.seconds >= 11 + 9 + 1
    verify_bound(bound, workload, cluster, **STEP)


# Exact arithmetic.


@cache
def times_by_definition(workload, compute, order):
    """Release times and tails in fractions, and what a worker computes alone."""
    phase, duration = [op.phase for op in workload.ops], [Fraction(op.duration_s) for op in workload.ops]
    before = [[d for d in op.deps if op.phase == "forward" or phase[d] != "forward"] for op in workload.ops]
    for tensor in workload.tensors:
        for reader in (r for r in tensor.readers if phase[r] == "forward"):
            before[reader] += [u for u in tensor.readers if phase[u] == "optimizer"]
    after = [[i for i, of in enumerate(before) if op in of] for op in range(len(before))]

    def reached(ops, neighbours):
        return set(ops).union(*(reached(neighbours[op], neighbours) for op in ops))

    def path(op, neighbours):
        return duration[op] + max((path(n, neighbours) for n in neighbours[op]), default=0)

    release, tail = [], []
    for tensor in workload.tensors:
        producer, later = tensor.ready_after, reached(tensor.readers, after)
        if compute == "unlimited":
            release.append(path(producer, before))
            tail.append(max((path(r, after) for r in tensor.readers), default=0))
            continue
        earlier = reached([producer], before)
        if order == "captured":
            earlier = {i for i in range(producer + 1) if phase[i] == "backward"}
            first = min((i for i in later if phase[i] == "forward"), default=math.inf)
            later = later | {i for i in range(len(phase)) if phase[i] == "forward" and i >= first}
        release.append(sum(duration[i] for i in earlier))
        tail.append(sum(duration[i] for i in later))
    return release, tail


def exact_one_end(certificate, workload, cluster, compute, order, sends):
    """What a certificate of one end proves, in fractions, by the recurrence of `merge_optimal.py` as it is written."""
    near, far = times_by_definition(workload, compute, order)[:: 1 if certificate.at == "release" else -1]
    inward = sorted(certificate.tensors, key=near.__getitem__)
    upto = [*itertools.accumulate((workload.tensors[t].nbytes for t in inward), initial=0)]
    costs = [(Fraction(c.alpha_s), Fraction(c.beta_s_per_byte)) for c in cluster.least_costs()]
    alpha = min(a for a, _ in costs)
    beta = (min(a + b * upto[-1] for a, b in costs) - alpha) / upto[-1]
    first, finish = alpha / 2 if sends == "halves" else alpha, [Fraction(0)]
    for j, t in enumerate(inward, start=1):
        finish.append(min(max(finish[i], near[t]) + first + beta * (upto[j] - upto[i]) for i in range(j)))
    return finish[-1] + alpha - first + min(far[t] for t in inward)


@examples(150)
@given(
    st.data(),
    workloads(max_ops=6, max_tensors=8),
    clusters(contended=True, linear=True),
    settings_of_bound,
    st.sampled_from(SENDS),
)
def test_whole_parts_prove_what_fractions_prove(data, workload, cluster, setting, sends):
    end = data.draw(st.sampled_from(["release", "tail"]))
    tensors = data.draw(st.lists(st.sampled_from(range(len(workload.tensors))), min_size=1, unique=True))
    certificate, fields = Ends(tuple(tensors), end), dict(zip(("compute", "order"), setting, strict=True))
    exact = exact_one_end(certificate, workload, cluster, *setting, sends)
    proved = verify_bound(Bound(0.0, certificate), workload, cluster, sends=sends, **fields)
    assert exact * (1 - Fraction(1, 10**12)) <= proved <= exact


@given(
    workloads(max_ops=6, max_tensors=8), clusters(contended=True), settings_of_bound, st.sampled_from([*SENDS, "shard"])
)
def test_the_certificate_proves_the_bound(workload, cluster, setting, sends):
    compute, order = setting
    fields = {"compute": compute, "order": order} | (STEP if sends == "shard" else {"sends": sends})
    bound = lower_bound(workload, cluster, **fields)
    proved = verify_bound(bound, workload, cluster, **fields)
    assert bound.seconds * (1 - 1e-12) <= float(proved)
    if form_of(bound.certificate) != "both ends":  # which is rounded down where it would jump
        assert float(proved) == pytest.approx(bound.seconds, rel=1e-12)
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(replace(bound, seconds=float(proved) * 1.001 + 1e-6), workload, cluster, **fields)
    assert verify_bound(replace(bound, seconds=0.0), workload, cluster, **fields) == proved
    assert msgspec.json.decode(msgspec.json.encode(bound), type=Bound) == bound


def least_by_hand(sets):
    """The least, over all ways to begin and end the ranges, of the latest time that a set proves."""
    least = math.inf
    for ways in itertools.product(((0, 0), (1, 0), (0, 1), (1, 1)), repeat=len(sets.release_s) - 1):
        i = j = 0
        count, latest = 1, 0
        for t, (begins, ends) in enumerate([(0, 0), *ways]):
            count += min(begins + ends, sets.both_ends)
            i, j = t if begins else i, t if ends else j
            updated = sets.updates_s[i, t] if j else sets.innermost_s[i, t]
            if i == j == 0:
                updated = min(sets.alone_s[t], sets.message_s + updated)
            after = max(sets.work_s[t] + sets.tail_s[j], sets.forward_s[j] + updated)
            latest = max(latest, sets.once_s + sets.release_s[i] + count * sets.message_s + after)
        least = min(least, latest)
    return least


@examples(60)
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1, 2]), st.sampled_from([float, np.int64]))
def test_the_table_of_nested_sets_finds_the_best_way_to_begin_and_end(count, seed, both, dtype):
    rng = np.random.default_rng(seed)
    release, tail, forward = (np.sort(rng.integers(0, 20, count).astype(dtype))[::-1] for _ in range(3))
    work = np.sort(rng.integers(1, 20, count).astype(dtype))
    updates, innermost = (work + np.sort(rng.integers(0, 9, (count, count)), axis=1) for _ in range(2))
    alone = work + rng.integers(0, 9, count)
    sets = NestedSets(release, tail, forward, work, updates, innermost, alone, 2, 1, both)
    least = least_by_hand(sets)
    assert sets.fits(least) and not sets.fits(least - (1 if dtype is np.int64 else 1e-6))


def test_too_few_states_prove_nothing(monkeypatch):
    """What can no longer be followed counts as possible, and is not proved."""
    bound = bound_by(TwoSided, 1e-3, TWO, SLOW, sends="pairs")
    problem = problem_of(TWO, SLOW, sends="pairs")
    sets = TwoSided.chain(problem).sets(np.array(bound.certificate.tensors), np.array(bound.certificate.sets))
    assert [DividedHalves(sets, problem.half, 10**6).fits(seconds) for seconds in (16.9, 17.1)] == [False, True]
    for states in (0, 1, 2, 5, 10, 20, 50):
        few = DividedHalves(sets, problem.half, states)
        assert few.fits(16.9) == (few.left <= 0)
        assert few.fits(17.1)
    assert DividedHalves(sets, problem.half, 1).fits(16.9)
    monkeypatch.setattr(two_sided, "_STATES", 1)
    with pytest.raises(InputError, match="'two_sided' does not prove that an iteration takes"):
        verify_bound(bound, TWO, SLOW, sends="pairs")


def test_without_numba(monkeypatch):
    bound = lower_bound(TWO, SLOW, sends="pairs")
    monkeypatch.setattr(two_sided, "_can_compile", lambda: False)
    assert lower_bound(TWO, SLOW, sends="pairs") == Bound(16.0, Ends((0, 1), "release"))
    with pytest.raises(InputError, match=r"case 'two_sided' needs numba: pip install 'legato\[flow\]'"):
        verify_bound(bound, TWO, SLOW, sends="pairs")


def test_without_thorough_it_tries_fewer_sets_and_proves_no_more():
    draw = random.Random(5)
    backward, forward = ([float(draw.randint(0, 4)) for _ in range(60)] for _ in range(2))
    units = [draw.randint(1, 9) for _ in range(60)]
    workload, cluster = chain(backward, forward, units, [0.0] * 60), cluster_of(3.0, 1.0)
    quick, thorough = (lower_bound(workload, cluster, thorough=thorough) for thorough in (False, True))
    assert quick.seconds <= thorough.seconds * (1 + 1e-12) and len(quick.certificate.sets) <= 32


# Certificates that prove nothing.


@pytest.mark.parametrize("case", [Nested, TwoSided, EqualPairs])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"sets": ()}, "rising numbers up to 2"),
        ({"sets": (2, 2)}, "rising numbers up to 2"),
        ({"sets": (0, 2)}, "rising numbers up to 2"),
        ({"sets": (1,)}, "rising numbers up to 2"),
        ({"tensors": (1, 1)}, "expected different indices below 2"),
        ({"tensors": (1, 0)}, "does not prove that an iteration takes"),
        ({"sets": (2,)}, "does not prove that an iteration takes"),
        *(({"seconds": seconds}, "does not prove") for seconds in (20.3, 0.0, -1.0, 1e300, math.inf, math.nan)),
    ],
)
def test_sets_that_prove_nothing(case, change, error):
    workload = chain([6.0, 2.0], [1.0, 3.0], [1, 1], [0.0, 0.0])
    fields = STEP if case is EqualPairs else {"sends": "pairs"}
    bound = bound_by(case, 1e-3, workload, SLOW, **fields)
    assert verify_bound(bound, workload, SLOW, **fields) >= bound.seconds * (1 - 1e-9)
    with pytest.raises(InputError, match=error):
        verify_bound(replace(bound, certificate=replace(bound.certificate, **change)), workload, SLOW, **fields)


@pytest.mark.parametrize(
    ("certificate", "fields", "error"),
    [
        (Ends((0, 0), "release"), {}, r"tensors \(0, 0\) \(expected different indices below 2"),
        (Ends((2,), "tail"), {}, "expected different indices below 2"),
        (Ends((-1,), "release"), {}, "expected different indices below 2"),
        (Ends((), "release"), {}, "at least one"),
        (Ends((0, 1), math.nan), {}, "at nan"),
        (Ends((0, 1), -1.0), {}, "at -1.0"),
        (Sharded((0,), 4), {}, r"case 'sharded' \(expected a shard, and one stream or an op"),
        (Sharded((0,), 3), {"shard": "optimizer"}, r"op 3 .expected an optimizer op that reads the tensors"),
        (Sharded((0,)), {}, r"case 'sharded' \(expected a shard, and one stream"),
        (Sharded((0,)), {"shard": "optimizer", "compute": "unlimited"}, "expected a shard, and one stream"),
        (EqualPairs((0, 1), (2,), 1.0), {"sends": "pairs"}, r"case 'equal_pairs' \(expected a shard, and one stream"),
        (TwoSided((0, 1), (2,), 1.0), {}, "case 'two_sided' for halves"),
        (Computation(), {"shard": "all"}, "unknown shard 'all'"),
        (Computation(), {"sends": "pair"}, "unknown sends 'pair'; did you mean 'pairs'"),
    ],
)
def test_certificates_that_make_no_sense(certificate, fields, error):
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(1.0, certificate), FUSED, Cluster(2, {"c": LinearCost(1.0, 1.0)}), **fields)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"order": "capture"}, "unknown order 'capture'; did you mean 'captured'"),
        ({"compute": "two"}, "unknown compute setting 'two'"),
        ({"sends": "pair"}, "unknown sends 'pair'; did you mean 'pairs'"),
        ({"shard": "optimiser"}, "unknown shard 'optimiser'"),
        ({"sends": "all_reduces", "shard": "optimizer"}, "sends: 'all_reduces' with shard 'optimizer'"),
    ],
)
def test_unknown_settings(fields, error):
    with pytest.raises(InputError, match=error):
        lower_bound(DIAMOND, SLOW, **fields)


# Floors, wire formats, and wider kinds of plans.

eighths = st.integers(0, 64).map(lambda k: k / 8)
costs = st.builds(LinearCost, eighths, st.integers(0, 16).map(lambda k: k / 16), st.just(0.0) | eighths)
floored = st.lists(costs, min_size=1, max_size=3).map(lambda of: Cluster(3, {f"c{k}": c for k, c in enumerate(of)}))
contended = st.builds(Contention, costs, costs, eighths)


@pytest.mark.slow
@given(workloads(), floored, st.none() | contended, st.data())
@examples(150)
def test_no_plan_beats_a_bound_with_floors(job, cluster, contention, data):
    """Of random plans and those of all schedulers, whatever their messages cost; and every certificate proves it."""
    cluster = replace(cluster, contention=contention)
    found = data.draw(st.lists(plans(job, cluster, halves=True), min_size=1, max_size=3))
    found += [schedule(name, job, cluster) for name in ("fifo", "single", "pace", "dear")]
    for plan in found:
        kind = kind_of(plan, job)
        bound = lower_bound(job, cluster, **kind._asdict())
        assert iteration_time(job, plan, cluster) >= bound.seconds * (1 - 1e-9)
        verify_bound(bound, job, cluster, **kind._asdict())


def test_each_message_takes_at_least_the_floor():
    """Gradients at 1 s and at 2 s, of 8 bytes each, at 1/8 s a byte, read at once: 2 + 4 + 1 s in one message, 1 + 4 +
    4 in two. A straight line gives 2 + 2 + 1 s."""
    ops = [Op("f0", "forward", 0.5), Op("f1", "forward", 0.5, (0,))]
    ops += [Op("b1", "backward", 1.0, (1,)), Op("b0", "backward", 1.0, (2,))]
    job = Workload("two", tuple(ops), (Tensor("w1", 8, 2, (0,)), Tensor("w0", 8, 3, (0,))))
    cluster = Cluster(2, {"c": LinearCost(0.0, 0.125, 4.0)})
    assert min(iteration_time(job, schedule(name, job, cluster), cluster) for name in SCHEDULERS) == 7.0
    bound = lower_bound(job, cluster, sends="all_reduces")
    assert bound.seconds == 7.0 and bound.at_floors
    assert verify_bound(bound, job, cluster, sends="all_reduces") == 7
    cheaper = replace(cluster, collectives={"c": LinearCost(0.0, 0.125, 3.5)})
    with pytest.raises(InputError, match=r"its certificate proves only 6.5 s"):
        verify_bound(bound, job, cheaper, sends="all_reduces")
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(replace(bound, at_floors=False), job, cluster, sends="all_reduces")


shards = st.sampled_from(["none", "none", "optimizer"])


@pytest.mark.slow
@given(workloads(), floored, st.sampled_from(["captured", "any"]), shards, st.booleans())
@examples(60)
def test_a_narrower_kind_of_plan_has_no_lower_bound(job, cluster, order, shard, step_last):
    for sends in ("all_reduces", "pairs") if shard == "none" else ("pairs",):
        kind = PlanKind(order, sends, shard, step_last and shard != "none")
        bound = lower_bound(job, cluster, **kind._asdict())
        verify_bound(bound, job, cluster, **kind._asdict())
        for wide in wider_kinds(kind):
            # Up to the precision of a bisection that begins elsewhere.
            assert lower_bound(job, cluster, **wide._asdict()).seconds <= bound.seconds * (1 + 1e-6)


def test_a_wider_kind_of_plan_may_have_the_larger_bound():
    """Only if it is looked at: where the bound is thorough. Then the certificate is for that kind."""
    job, cluster = layered_net(284), Cluster.derive(8, 10e9, 3e-3, collectives=["ring"])
    quick, bound = (lower_bound(job, cluster, sends="pairs", thorough=thorough) for thorough in (False, True))
    any_order = lower_bound(job, cluster, sends="pairs", order="any")
    assert quick.kind is None and bound == replace(any_order, kind=PlanKind("any", "pairs"))
    assert bound.seconds > quick.seconds * 1.005
    assert verify_bound(bound, job, cluster, sends="pairs") >= bound.seconds * (1 - 1e-9)


def test_wider_kinds():
    assert wider_kinds(PlanKind("any", "halves")) == [PlanKind("any", "halves")]
    assert wider_kinds(PlanKind("captured", "pairs")) == [
        PlanKind(order, sends) for order in ("captured", "any") for sends in ("pairs", "halves")
    ]
    step = PlanKind("any", "pairs", "optimizer", step_last=True)
    assert wider_kinds(step) == [step, step._replace(step_last=False)]


ONE = Workload("one", (Op("f", "forward", 2.0), Op("b", "backward", 3.0, (0,))), (Tensor("t", 8, 1, (0,)),))
LINE = Cluster(2, {"c": LinearCost(2.0, 1.0)})


def test_a_bound_for_plans_of_another_kind_proves_nothing():
    bound = lower_bound(ONE, LINE, sends="all_reduces")
    assert verify_bound(replace(bound, kind=PlanKind("captured", "halves")), ONE, LINE, sends="pairs") == 15
    with pytest.raises(InputError, match=r"bound: for PlanKind.*expected one that has all of"):
        verify_bound(replace(bound, kind=PlanKind("captured", "all_reduces")), ONE, LINE, sends="pairs")


def test_a_message_in_a_wire_format():
    """2 + 8 seconds for 8 bytes, 2 + 4 for four; backward before it and forward after it."""
    light = LINE.in_wire_format()
    for cluster, seconds in ((LINE, 3 + 10 + 2), (light, 3 + 6 + 2)):
        bound = lower_bound(ONE, cluster, sends="all_reduces")
        assert bound.seconds == seconds
        assert verify_bound(bound, ONE, cluster, sends="all_reduces") == seconds
    exact = lower_bound(ONE, LINE, sends="all_reduces")
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(exact, ONE, light, sends="all_reduces")
