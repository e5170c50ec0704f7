"""The lower bound: nothing simulates faster, it is attained where it can be, and its certificate proves it."""

from fractions import Fraction

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.strategies import clusters, examples, op_orders, paired_plans, plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.basics.jackson import jackson
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, Certificate, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.simulator.collective import iteration_time

settings_of_bound = st.sampled_from([("one", "captured"), ("one", "any"), ("unlimited", "captured")])
SENDS = ["halves", "pairs", "all_reduces"]

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
def test_heads_and_tails_by_hand(compute, order, heads, tails, compute_s):
    assert heads_tails(DIAMOND, compute, order) == (heads, tails, compute_s)


def test_a_forward_op_takes_all_behind_it_along_in_captured_order():
    reads_first = msgspec.structs.replace(DIAMOND, tensors=(Tensor("b", 4, 4, (1,)),))
    assert heads_tails(reads_first, "one", "captured").tail_s == [12]
    assert heads_tails(reads_first, "one", "any").tail_s == [5]


def test_a_bound_by_hand():
    # Tensor a alone: ready at 7, 2 + 24 s on the network, 15.5 s after it: 48.5. With b, ready at 3 (12 s more, and
    # half an alpha more, as they cannot both go at 3), and 7 s after: 3 + 39 + 7.
    cluster = Cluster(2, {"c": LinearCost(2.0, 3.0)})
    both = Bound(49.0, Certificate("release", (0, 1), 3.0, 39.0, 7.0))
    assert verify_bound(both, DIAMOND, cluster) == 49
    alone = Bound(48.5, Certificate("tail", (0,), 7.0, 26.0, 15.5))
    assert verify_bound(alone, DIAMOND, cluster) == Fraction(97, 2)
    # Nested: two halves for a alone need 7 + 2 + 24 + 15.5; with b, one more before and one after them, from 3 on,
    # 3 + 4 + 36 + 7; with c, no half begins earlier, and one more ends later: 3 + 5 + 42.
    bound = lower_bound(DIAMOND, cluster, thorough=False)
    assert bound.seconds == pytest.approx(50, rel=1e-6) and bound.certificate.sets == (1, 2, 3)
    verify_bound(bound, DIAMOND, cluster)


def test_computation_alone_is_a_bound():
    bound = lower_bound(DIAMOND, Cluster(1, {"c": LinearCost(0.0, 0.0)}))
    assert bound == Bound(22.5, Certificate("compute", (), 22.5, 0.0, 0.0))


def test_startup_times_that_cannot_be_shared_count():
    """Gradients far apart: one message waits for the last of them, two cost a second half of alpha at least."""
    ops = (Op("f", "forward", 1.0), Op("b0", "backward", 1.0), Op("b1", "backward", 10.0, (1,)))
    work = Workload("w", ops, (Tensor("x", 100, 1, (0,)), Tensor("y", 1, 2, (0,))))
    cluster = Cluster(2, {"c": LinearCost(4.0, 1.0)})
    bound = lower_bound(work, cluster)
    assert bound == Bound(1 + 101 + 6 + 1, Certificate("release", (0, 1), 1.0, 107.0, 1.0))
    assert iteration_time(work, schedule("merge-optimal", work, cluster), cluster) == bound.seconds + 2


def test_halves_can_beat_every_all_reduce_but_not_the_bound():
    ops = (Op("f", "forward", 0.0), Op("b0", "backward", 0.0), Op("b1", "backward", 4.0, (1,)))
    work = Workload("w", ops, (Tensor("x", 4, 1), Tensor("y", 1, 2)))
    cluster = Cluster(2, {"c": LinearCost(4.0, 1.0)})
    x, y = Slice("x", 0, 4), Slice("y", 0, 1)
    halves = (Message((x,), "reduce_scatter"), Message((y,), "reduce_scatter"), Message((x, y), "all_gather"))
    assert iteration_time(work, schedule("merge-optimal", work, cluster), cluster) == 13
    assert iteration_time(work, Plan("halves", halves), cluster) == lower_bound(work, cluster).seconds == 11


def test_unknown_settings():
    cluster = Cluster(2, {"c": LinearCost(1.0, 1.0)})
    with pytest.raises(InputError, match="unknown order 'capture'; did you mean 'captured'"):
        lower_bound(DIAMOND, cluster, order="capture")
    with pytest.raises(InputError, match="unknown compute setting 'two'"):
        lower_bound(DIAMOND, cluster, compute="two")
    with pytest.raises(InputError, match="unknown sends 'pair'; did you mean 'pairs'"):
        lower_bound(DIAMOND, cluster, sends="pair")
    with pytest.raises(InputError, match="unknown sends 'pair'; did you mean 'pairs'"):
        verify_bound(lower_bound(DIAMOND, cluster), DIAMOND, cluster, sends="pair")


@examples(200)
@given(st.data(), workloads(), clusters(contended=True), settings_of_bound, st.booleans())
def test_no_plan_is_faster(data, workload, cluster, setting, reorder):
    compute, order = setting
    orders = op_orders(workload, captured=order == "captured") if reorder else None
    drawn = data.draw(st.sampled_from([plans, paired_plans]))
    plan = data.draw(drawn(workload, cluster, op_order=orders))
    try:
        seconds = iteration_time(workload, plan, cluster, compute=compute)
    except PlanError:
        assume(False)
    sends = kind_of(plan, workload).sends
    # A part in 10**12 for the one division in the bound, the slope between several collectives.
    bound = lower_bound(workload, cluster, compute=compute, order=order, sends=sends)
    assert seconds >= bound.seconds * (1 - 1e-12)


@pytest.mark.parametrize("name", SCHEDULERS)
@given(workload=workloads(max_tensors=8), cluster=clusters(contended=True), setting=settings_of_bound)
def test_no_scheduler_is_faster(name, workload, cluster, setting):
    compute, order = setting
    plan = schedule(name, workload, cluster)
    seconds = iteration_time(workload, plan, cluster, compute=compute)
    order = "any" if plan.op_order else order
    bound = lower_bound(workload, cluster, compute=compute, order=order, sends=kind_of(plan, workload).sends)
    assert seconds >= bound.seconds * (1 - 1e-12)


@given(workloads(max_ops=6, max_tensors=8), clusters(contended=True), settings_of_bound, st.sampled_from(SENDS))
def test_the_certificate_proves_the_bound(workload, cluster, setting, sends):
    compute, order = setting
    bound = lower_bound(workload, cluster, compute=compute, order=order, sends=sends)
    proved = verify_bound(bound, workload, cluster, compute=compute, order=order, sends=sends)
    certificate = bound.certificate
    assert bound.seconds <= float(proved) * (1 + 1e-12)
    if certificate.case != "both":  # which is rounded down where it would jump
        assert float(proved) == pytest.approx(bound.seconds, rel=1e-12)
    parts = certificate.before_s + certificate.network_s + certificate.after_s
    assert parts == pytest.approx(bound.seconds) and min(parts, certificate.network_s) >= 0
    too_much = Bound(float(proved) * 1.001 + 1e-6, certificate)
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(too_much, workload, cluster, compute=compute, order=order, sends=sends)
    claims_less = Bound(0.0, certificate)
    at_least = float(verify_bound(claims_less, workload, cluster, compute=compute, order=order, sends=sends))
    assert at_least == float(proved)


@pytest.mark.parametrize(
    ("certificate", "error"),
    [
        (Certificate("release", (0, 0), 0, 0, 0), r"tensors \(0, 0\) \(expected different indices below 3"),
        (Certificate("tail", (3,), 0, 0, 0), "expected different indices below 3"),
        (Certificate("release", (-1,), 0, 0, 0), "expected different indices below 3"),
        (Certificate("release", (), 0, 0, 0), "case 'release' with 0 tensors"),
        (Certificate("compute", (1,), 0, 0, 0), "case 'compute' with 1 tensors"),
    ],
)
def test_a_certificate_that_makes_no_sense(certificate, error):
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(1.0, certificate), DIAMOND, Cluster(2, {"c": LinearCost(1.0, 1.0)}))


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
    assert (
        iteration_time(workload, plan, cluster, compute=compute)
        == lower_bound(workload, cluster, compute=compute).seconds
    )


@given(workloads(max_ops=6, max_tensors=8, optimizer=False))
def test_p3_with_the_finest_slices_attains_it(workload):
    cluster = Cluster(2, {"c": LinearCost(0.0, 1 / 8)})
    plan = schedule("p3", workload, cluster, slice_bytes=1)
    assert iteration_time(workload, plan, cluster) == lower_bound(workload, cluster).seconds


def test_p3_converges_to_it():
    ops = [Op(f"f{i}", "forward", 4.0, (i - 1,) if i else ()) for i in range(4)]
    ops += [Op(f"b{i}", "backward", 8.0, (i - 1,)) for i in range(4, 8)]
    work = Workload("w", tuple(ops), tuple(Tensor(f"t{k}", 1024, 4 + k, (3 - k,)) for k in range(4)))
    cluster = Cluster(2, {"c": LinearCost(0.0, 3 / 256)})
    bound = lower_bound(work, cluster).seconds
    seconds = [
        iteration_time(work, schedule("p3", work, cluster, slice_bytes=2**k), cluster) for k in range(10, -1, -1)
    ]
    assert seconds[0] > 1.05 * bound and seconds[-1] <= 1.001 * bound
    assert all(late >= bound for late in seconds)


@given(workloads(max_tensors=1, optimizer=False), clusters(max_collectives=1))
def test_a_single_tensor_attains_it(workload, cluster):
    whole = Message((Slice("t0", 0, workload.tensors[0].nbytes),))
    plan = Plan("whole", (whole,), forward_overlap=True)
    for compute in ("one", "unlimited"):
        bound = lower_bound(workload, cluster, compute=compute)
        assert iteration_time(workload, plan, cluster, compute=compute) == bound.seconds


def without_updates(workload):
    keep = [i for i, op in enumerate(workload.ops) if op.phase != "optimizer"]  # they stand last
    tensors = (msgspec.structs.replace(t, readers=tuple(r for r in t.readers if r in keep)) for t in workload.tensors)
    return msgspec.structs.replace(workload, ops=workload.ops[: len(keep)], tensors=tuple(tensors))


def test_a_trace_of_one_more_tensor_is_not_taken_for_all_of_its_delay():
    """What cannot be done by m is exactly the first two tensors from the other end; a rounding error makes it more."""
    ops = (Op("f", "forward", 0.25), Op("b0", "backward", 0.375), Op("b1", "backward", 0.0))
    tensors = (Tensor("x", 1, 2, (0,)), Tensor("y", 1, 1), Tensor("z", 1, 1))
    work = Workload("w", ops, tensors)
    cluster = Cluster(2, {"c": LinearCost(0.25, 0.25), "d": LinearCost(0.5, 0.0)})
    x, rest = Slice("x", 0, 1), (Slice("y", 0, 1), Slice("z", 0, 1))
    plan = Plan("swapped", (Message((x,), collective="c"), Message(rest, collective="d")), True, (2, 1, 0))
    assert iteration_time(work, plan, cluster) == 1.0
    assert lower_bound(work, cluster, order="any", sends="all_reduces").seconds <= 1.0
