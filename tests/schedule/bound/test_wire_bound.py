"""The bound for plans with messages in wire formats: no such plan is faster, and its certificate proves it."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, examples, op_orders, plans, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError, PlanError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.simulator.collective import iteration_time

ONE = Workload("one", (Op("f", "forward", 2.0), Op("b", "backward", 3.0, (0,))), (Tensor("t", 8, 1, (0,)),))


@pytest.mark.parametrize(("wire", "seconds"), [(False, 3 + 10 + 2), (True, 3 + 6 + 2)])
def test_one_message(wire, seconds):
    """2 + 8 seconds for 8 bytes, 2 + 4 for four; backward before it and forward after it."""
    cluster = Cluster(2, {"c": LinearCost(2.0, 1.0)})
    bound = lower_bound(ONE, cluster, sends="all_reduces", wire=wire)
    assert bound.seconds == seconds
    assert verify_bound(bound, ONE, cluster, sends="all_reduces", wire=wire) == seconds
    if wire:
        with pytest.raises(InputError, match="its certificate proves only"):
            verify_bound(replace(bound, seconds=15.0), ONE, cluster, sends="all_reduces", wire=True)


settings_of_bound = st.sampled_from(
    [(compute, order) for compute in ("one", "unlimited") for order in ("captured", "any")]
)


@examples(100)
@given(
    st.data(), workloads(max_ops=6, max_tensors=6), clusters(contended=True), settings_of_bound, st.sampled_from([0, 1])
)
def test_no_plan_is_faster_whatever_is_rounded(data, workload, cluster, setting, unpack_s):
    compute, order = setting
    cluster = replace(cluster, unpack_s_per_byte=float(unpack_s))
    plan = data.draw(plans(workload, cluster, op_order=op_orders(workload, captured=order == "captured")))
    messages = tuple(replace(m, wire=data.draw(st.sampled_from([None, "bf16", "fp16"]))) for m in plan.messages)
    plan = replace(plan, messages=messages)
    kind = kind_of(plan, workload)
    assert kind.wire == any(m.wire for m in messages) >= (plan.rounded > 0)
    try:
        seconds = iteration_time(workload, plan, cluster, compute=compute)
    except PlanError:
        assume(False)
    fields = {"compute": compute, "order": order, "sends": kind.sends, "wire": True}
    bound = lower_bound(workload, cluster, **fields)
    assert seconds >= bound.seconds * (1 - 1e-12)
    assert bound.seconds <= float(verify_bound(bound, workload, cluster, **fields)) * (1 + 1e-12)
    assert bound.seconds <= lower_bound(workload, cluster, **fields | {"wire": False}).seconds * (1 + 1e-9)


def test_a_bound_for_exact_plans_is_not_one_for_rounded_ones():
    cluster = Cluster(2, {"c": LinearCost(2.0, 1.0)})
    exact = lower_bound(ONE, cluster)
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(Bound(exact.seconds, exact.certificate), ONE, cluster, wire=True)
