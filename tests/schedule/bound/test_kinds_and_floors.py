"""Bounds of wider kinds of plans hold for narrower ones, and messages that cost a floor count as much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import examples, plans, workloads

from legato.core.cluster import Cluster, Contention, LinearCost
from legato.core.errors import InputError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.bound.plan_kind import PlanKind, kind_of, wider_kinds
from legato.simulator.collective import iteration_time

eighths = st.integers(0, 64).map(lambda k: k / 8)
costs = st.builds(LinearCost, eighths, st.integers(0, 16).map(lambda k: k / 16), st.just(0.0) | eighths)
clusters = st.lists(costs, min_size=1, max_size=3).map(lambda of: Cluster(3, {f"c{k}": c for k, c in enumerate(of)}))
contended = st.builds(Contention, costs, costs, eighths)


@given(workloads(), clusters, st.none() | contended, st.data())
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
    assert bound.seconds == 7.0 and bound.certificate.at_floors
    assert verify_bound(bound, job, cluster, sends="all_reduces") == 7
    cheaper = replace(cluster, collectives={"c": LinearCost(0.0, 0.125, 3.5)})
    with pytest.raises(InputError, match=r"its certificate proves only 6.5 s"):
        verify_bound(bound, job, cheaper, sends="all_reduces")
    honest = replace(bound, certificate=replace(bound.certificate, at_floors=False))
    with pytest.raises(InputError, match="its certificate proves only"):
        verify_bound(honest, job, cluster, sends="all_reduces")


shards = st.sampled_from(["none", "none", "optimizer"])


@given(workloads(), clusters, st.sampled_from(["captured", "any"]), shards, st.booleans(), st.booleans())
@examples(60)
def test_a_narrower_kind_of_plan_has_no_lower_bound(job, cluster, order, shard, step_last, wire):
    for sends in ("all_reduces", "pairs") if shard == "none" else ("pairs",):
        kind = PlanKind(order, sends, shard, step_last and shard != "none", wire)
        bound = lower_bound(job, cluster, **kind._asdict())
        verify_bound(bound, job, cluster, **kind._asdict())
        for wide in wider_kinds(kind):
            assert lower_bound(job, cluster, **wide._asdict()).seconds <= bound.seconds * (1 + 1e-12)


def test_wider_kinds():
    assert wider_kinds(PlanKind("any", "halves", wire=True)) == [PlanKind("any", "halves", wire=True)]
    assert wider_kinds(PlanKind("captured", "pairs")) == [
        PlanKind(order, sends, wire=wire)
        for order in ("captured", "any")
        for sends in ("pairs", "halves")
        for wire in (False, True)
    ]
    sharded = PlanKind("any", "pairs", "optimizer", step_last=True, wire=True)
    assert wider_kinds(sharded) == [sharded, sharded._replace(step_last=False)]


def test_a_certificate_for_plans_of_another_kind_proves_nothing():
    job = Workload("one", (Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,))), (Tensor("w", 8, 1, (0,)),))
    cluster = Cluster(2, {"c": LinearCost(1.0, 0.0)})
    bound = lower_bound(job, cluster, sends="all_reduces")
    for kind, holds in ((PlanKind("captured", "halves"), True), (PlanKind("captured", "all_reduces"), False)):
        other = replace(bound, certificate=replace(bound.certificate, kind=kind))
        if holds:
            assert verify_bound(other, job, cluster, sends="pairs") == 3
            continue
        with pytest.raises(InputError, match=r"certificate: for PlanKind.*expected one that has all of"):
            verify_bound(other, job, cluster, sends="pairs")
