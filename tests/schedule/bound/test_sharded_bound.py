"""The bound of sharded plans: no such plan is faster, small cases attain it, and its certificate proves it."""

from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.sharding import best_sharded, layers
from support.strategies import clusters, examples, op_orders, sharded_plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.sharded import sharded
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, Certificate, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.published.baselines import single
from legato.simulator.collective import iteration_time

settings_of_bound = st.sampled_from([("one", "captured"), ("one", "any"), ("unlimited", "captured")])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_sharded_plan_at_all_is_faster(seed, fused):
    """Every grouping, every order of both halves, and every place of the updates, also inside the backward pass."""
    workload, cluster = layers(seed, count=3 if fused or seed % 3 == 0 else 2, fused=fused)
    for compute in ("one", "unlimited"):
        bound = lower_bound(workload, cluster, compute=compute, shard="optimizer")
        best, _ = best_sharded(workload, cluster, anywhere=True, compute=compute)
        assert best >= bound.seconds * (1 - 1e-12)
        verify_bound(bound, workload, cluster, compute=compute, shard="optimizer")
    stepped = lower_bound(workload, cluster, shard="optimizer", step_last=True)
    assert best_sharded(workload, cluster)[0] >= stepped.seconds * (1 - 1e-12)
    verify_bound(stepped, workload, cluster, shard="optimizer", step_last=True)


@pytest.mark.parametrize("workers", [1, 2, 8, 64])
def test_one_layer_attains_it(workers):
    ops = (Op("f", "forward", 5.0), Op("b", "backward", 7.0), Op("u", "optimizer", 4.0))
    layer = Workload("layer", ops, (Tensor("w", 8, 1, (0, 2)),))
    cluster = Cluster(workers, {"c": LinearCost(1.0, 0.25)})
    for compute in ("one", "unlimited"):
        bound = lower_bound(layer, cluster, compute=compute, shard="gradients")
        assert bound == Bound(15 + 4 / workers, Certificate("update", (0,), 7.0, 3 + 4 / workers, 5.0, op=2))
        assert iteration_time(layer, sharded(single(layer, cluster), layer, "gradients"), cluster) == bound.seconds
        assert verify_bound(bound, layer, cluster, compute=compute, shard="gradients") == 15 + Fraction(4, workers)


def test_one_update_for_all_stands_between_all_halves():
    """Backward 1 + 2 s, two tensors of which a half takes 2 s (1 s of it alpha), an update of 2 s, forward 3 + 4 s."""
    ops = [Op("f0", "forward", 3.0), Op("f1", "forward", 4.0), Op("b1", "backward", 1.0), Op("b0", "backward", 2.0)]
    tensors = Tensor("w1", 8, 2, (1, 4)), Tensor("w0", 8, 3, (0, 4))
    workload = Workload("fused", (*ops, Op("u", "optimizer", 8.0)), tensors)
    cluster = Cluster(4, {"c": LinearCost(2.0, 0.25)})
    bound = lower_bound(workload, cluster, shard="optimizer")
    # w1 is scattered until 3, w0 until 5; both are updated until 7; w0 is gathered until 9, w1 beside f0.
    assert bound.certificate.case == "update" and bound.seconds == 9 + 3 + 4
    assert best_sharded(workload, cluster)[0] == 16


def test_parameters_are_gathered_after_the_step():
    """The gradient is ready after 1 s and scattered until 3, but the backward pass goes on until 9."""
    ops = [Op("f", "forward", 4.0), Op("b1", "backward", 1.0), Op("b0", "backward", 8.0), Op("u", "optimizer", 2.0)]
    workload = Workload("long", tuple(ops), (Tensor("w", 8, 1, (0, 3)),))
    cluster = Cluster(2, {"c": LinearCost(2.0, 0.25)})
    bound = lower_bound(workload, cluster, shard="optimizer", step_last=True)
    assert bound == Bound(16.0, Certificate("step", (0,), 9.0, 3.0, 4.0))
    plan = sharded(single(workload, cluster), workload, "optimizer")
    assert kind_of(plan, workload).step_last and iteration_time(workload, plan, cluster) == 16
    assert lower_bound(workload, cluster, shard="optimizer").seconds == 15  # 9 s, 2 s to gather, and 4 s
    early = replace(plan, op_order=(1, 3, 2, 0))
    assert not kind_of(early, workload).step_last and iteration_time(workload, early, cluster) == 18


def test_what_is_not_scattered_before_the_step_is_scattered_after_it():
    """Backward passes until 2; two gradients of 1 + 4 s a half, and forward ops that read them in the other order."""
    ops = [Op("f0", "forward", 0.5), Op("f1", "forward", 1.0), Op("b1", "backward", 1.0), Op("b0", "backward", 1.0)]
    tensors = Tensor("w1", 8, 2, (1, 5)), Tensor("w0", 8, 3, (0, 4))
    workload = Workload("two", (*ops, Op("u0", "optimizer", 0.0), Op("u1", "optimizer", 0.0)), tensors)
    cluster = Cluster(2, {"c": LinearCost(2.0, 1.0)})
    bound = lower_bound(workload, cluster, shard="optimizer", step_last=True)
    # Scattered together from 2 until 11, as one after the other from 1; gathered for 1 + 8 s more, and 1 s for f1.
    assert bound.seconds >= 11 + 9 + 1
    verify_bound(bound, workload, cluster, shard="optimizer", step_last=True)


@examples(200)
@given(st.data(), workloads(), clusters(contended=True), settings_of_bound, st.booleans())
def test_no_plan_is_faster(data, workload, cluster, setting, reorder):
    compute, order = setting
    orders = op_orders(workload, captured=order == "captured") if reorder else None
    plan = data.draw(sharded_plans(workload, cluster, op_order=orders))
    if data.draw(st.booleans()):
        plan = sharded(plan, workload, plan.shard)
    kind = kind_of(plan, workload)
    assert order == "any" or kind[:3] == ("captured", "pairs", plan.shard)
    try:
        seconds = iteration_time(workload, plan, cluster, compute=compute)
    except PlanError:
        assume(False)
    step_last = kind.step_last
    bound = lower_bound(workload, cluster, compute=compute, order=order, shard=plan.shard, step_last=step_last)
    assert seconds >= bound.seconds * (1 - 1e-12)


@examples(50)
@given(workloads(max_ops=6, max_tensors=8), clusters(contended=True), settings_of_bound, st.booleans())
def test_the_certificate_proves_the_bound(workload, cluster, setting, step_last):
    compute, order = setting
    fields = {"compute": compute, "order": order, "shard": "optimizer", "step_last": step_last}
    bound = lower_bound(workload, cluster, **fields)
    proved = verify_bound(bound, workload, cluster, **fields)
    certificate = bound.certificate
    assert bound.seconds <= float(proved) * (1 + 1e-12)
    parts = certificate.before_s + certificate.network_s + certificate.after_s
    assert parts == pytest.approx(bound.seconds) and min(parts, certificate.network_s) >= 0
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(Bound(float(proved) * 1.001 + 1e-6, certificate), workload, cluster, **fields)


@pytest.mark.parametrize(
    ("certificate", "shard", "error"),
    [
        (Certificate("update", (0, 1), 0, 0, 0, op=4), "none", "case 'update' without a shard"),
        (Certificate("update", (0, 1), 0, 0, 0, op=3), "optimizer", r"op 3 .expected an optimizer op"),
        (Certificate("update", (0, 1), 0, 0, 0), "optimizer", r"op -1 .expected an optimizer op"),
        (Certificate("update", (0,), 0, 0, 0, op=4), "gradients", r"tensors \(0,\) .expected all that op 4 reads"),
        (Certificate("step", (0,), 0, 0, 0), "none", "case 'step' without a shard"),
        (Certificate("compute", (), 0, 0, 0), "all", "unknown shard 'all'"),
    ],
)
def test_a_certificate_that_makes_no_sense(certificate, shard, error):
    ops = [Op("f0", "forward", 3.0), Op("f1", "forward", 4.0), Op("b1", "backward", 1.0), Op("b0", "backward", 2.0)]
    tensors = Tensor("w1", 8, 2, (1, 4)), Tensor("w0", 8, 3, (0, 4))
    workload = Workload("fused", (*ops, Op("u", "optimizer", 8.0)), tensors)
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(1.0, certificate), workload, Cluster(2, {"c": LinearCost(1.0, 1.0)}), shard=shard)


def test_with_unlimited_streams_nobody_knows_when_the_backward_pass_ends():
    workload, cluster = layers(0)
    with pytest.raises(InputError, match="case 'step' with unlimited streams"):
        bound = Bound(1.0, Certificate("step", (0,), 0, 0, 0))
        verify_bound(bound, workload, cluster, shard="optimizer", compute="unlimited")


def test_all_reduces_are_not_sharded():
    workload, cluster = layers(0)
    for prove in (lower_bound, lambda *args, **fields: verify_bound(lower_bound(*args), *args, **fields)):
        with pytest.raises(InputError, match="sends: 'all_reduces' with shard 'optimizer'"):
            prove(workload, cluster, sends="all_reduces", shard="optimizer")
    with pytest.raises(InputError, match="unknown shard 'optimiser'"):
        lower_bound(workload, cluster, shard="optimiser")
