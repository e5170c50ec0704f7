"""The bound of nested sets: by hand, exact where it should be, and below every plan of tiny cases with updates."""

import itertools
import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.optimum import UNIT, Optimum
from support.strategies import examples

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule.basics.heads_tails import heads_tails
from legato.schedule.bound.bisection import longest_too_short
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, Certificate, cheapest_line, lower_bound
from legato.schedule.bound.nested import NestedSets, nested
from legato.simulator.collective import iteration_time


def chain(seed, layers=(2, 4), units=3, updates=False):
    """Layers one after another, each with a tensor that is ready after its backward op and read by its forward op."""
    draw = random.Random(seed)
    count = draw.randint(*layers)
    ops = [Op(f"f{k}", "forward", draw.randint(0, 4), (k - 1,) if k else ()) for k in range(count)]
    ops += [Op(f"b{k}", "backward", draw.randint(0, 4), (len(ops) + k - 1,)) for k in range(count)]
    tensors = []
    for k in range(count):
        readers = (count - 1 - k,)
        if updates:
            ops.append(Op(f"u{k}", "optimizer", draw.randint(0, 5), (count + k,)))
            readers += (len(ops) - 1,)
        tensors.append(Tensor(f"t{k}", UNIT * draw.randint(1, units), count + k, readers))
    cluster = Cluster(2, {"c": LinearCost(draw.randint(1, 5), draw.choice([1, 1, 2]) / UNIT)})
    return Workload(f"chain{seed}", tuple(ops), tuple(tensors)), cluster


def bound_of(workload, cluster, sends="all_reduces", beat_s=1e-3):
    line = cheapest_line(cluster, workload.nbytes)
    return nested(workload, heads_tails(workload, "one", "captured"), line, sends, beat_s=beat_s)


@pytest.mark.parametrize("seed", range(12))
def test_for_a_chain_of_layers_it_is_the_optimum(seed):
    """All times are whole and a unit takes one or two seconds, so that messages begin and end between two units."""
    workload, cluster = chain(seed)
    if cluster.cost().beta_s_per_byte * UNIT != 1:
        cluster = Cluster(2, {"c": LinearCost(cluster.cost().alpha_s, 1 / UNIT)})
    best = Optimum(workload, cluster, sends="all_reduces").seconds
    assert max(bound_of(workload, cluster).seconds, workload.compute_s) == pytest.approx(best, rel=1e-6)


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
        used = sorted(set(numbers))
        alike = itertools.pairwise(zip(units, numbers, strict=True))
        if used != list(range(len(used))) or any(a[0] == b[0] and m > n for (a, m), (b, n) in alike):
            continue  # numbers are left out, or the units of a tensor are in another order
        messages = tuple(
            Message(
                tuple(
                    Slice(workload.tensors[t].name, k * UNIT, (k + 1) * UNIT)
                    for (t, k), at in zip(units, numbers, strict=True)
                    if at == number
                )
            )
            for number in used
        )
        for order in orders:
            yield Plan("every", messages, True, op_order=order)


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_with_its_updates_anywhere_is_faster(seed):
    workload, cluster = chain(seed, layers=(2, 2), units=2, updates=True)
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    for sends in ("all_reduces", "pairs", "halves"):
        found = bound_of(workload, cluster, sends)
        assert found.seconds <= best * (1 + 1e-12)


def test_updates_of_what_arrives_last_come_after_it():
    """One message, at 2, arrives at 16; both updates and both forward ops follow. With two, the last arrives at 22."""
    ops = (
        Op("f0", "forward", 1.0), Op("f1", "forward", 1.0, (0,)),
        Op("b1", "backward", 1.0, (1,)), Op("b0", "backward", 1.0, (2,)),
        Op("u1", "optimizer", 3.0, (2,)), Op("u0", "optimizer", 3.0, (3,)),
    )  # fmt: skip
    workload = Workload("two", ops, (Tensor("w1", 16 * 2, 2, (1, 4)), Tensor("w0", 16 * 2, 3, (0, 5))))
    cluster = Cluster(2, {"c": LinearCost(10.0, 1 / 16)})
    assert bound_of(workload, cluster).seconds == pytest.approx(24, rel=1e-6)
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    assert best == 24


def test_the_innermost_set_may_take_several_messages():
    """The gradients of one layer, one after another: the first is updated while the second travels."""
    ops = (
        Op("f", "forward", 1.0), Op("b", "backward", 1.0, (0,)), Op("ua", "optimizer", 4.0), Op("ub", "optimizer", 4.0)
    )  # fmt: skip
    workload = Workload("one", ops, (Tensor("a", 16, 1, (0, 2)), Tensor("b", 16, 1, (0, 3))))
    cluster = Cluster(2, {"c": LinearCost(1.0, 5 / 16)})
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    assert best == 1 + 6 + 6 + 4 + 1
    for sends in ("all_reduces", "pairs", "halves"):
        assert bound_of(workload, cluster, sends).seconds <= best * (1 + 1e-12)
        assert lower_bound(workload, cluster, sends=sends).seconds <= best * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_is_faster_where_a_layer_has_several_gradients(seed):
    """Three gradients of a unit or two, of two layers, each with an update."""
    draw = random.Random(seed)
    ops = [Op("f0", "forward", draw.randint(0, 3)), Op("f1", "forward", draw.randint(0, 3), (0,))]
    ops += [Op("b1", "backward", draw.randint(0, 3), (1,)), Op("b0", "backward", draw.randint(0, 3), (2,))]
    ops += [Op(f"u{t}", "optimizer", draw.randint(0, 6)) for t in range(3)]
    layers = draw.choice([(1, 0, 0), (1, 1, 0)])
    units = draw.choice([(1, 1, 1), (2, 1, 1), (1, 1, 2)])
    tensors = tuple(
        Tensor(f"t{t}", UNIT * n, 3 - layer, (layer, 4 + t))
        for t, (layer, n) in enumerate(zip(layers, units, strict=True))
    )
    workload = Workload("three", tuple(ops), tensors)
    cluster = Cluster(2, {"c": LinearCost(draw.choice([0.5, 1, 3]), draw.choice([1, 2, 5]) / UNIT)})
    best = min(iteration_time(workload, plan, cluster) for plan in every_plan(workload))
    for sends in ("all_reduces", "pairs", "halves"):
        bound = lower_bound(workload, cluster, sends=sends)
        assert bound.seconds <= best * (1 + 1e-12)
        verify_bound(bound, workload, cluster, sends=sends)


def least_by_hand(sets):
    """The least, over all ways to begin and end the ranges, of the latest time that a set proves."""
    least = math.inf
    for ways in itertools.product(((0, 0), (1, 0), (0, 1), (1, 1)), repeat=len(sets.release_s) - 1):
        i = j = 0
        count, latest = 1, 0.0
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
@given(st.integers(1, 5), st.integers(0, 2**32 - 1), st.sampled_from([1, 2]))
def test_the_table_finds_the_best_way_to_begin_and_end(count, seed, both):
    rng = np.random.default_rng(seed)
    release, tail, forward = (np.sort(rng.integers(0, 20, count).astype(float))[::-1] for _ in range(3))
    work = np.sort(rng.integers(1, 20, count).astype(float))
    updates, innermost = (work + np.sort(rng.integers(0, 9, (count, count)), axis=1) for _ in range(2))
    sets = NestedSets(
        release, tail, forward, work, updates, innermost, work + rng.integers(0, 9, count), 2.0, 1.0, both
    )
    assert longest_too_short(sets, 1e-3, step=1e-3, exact=1e-7) == pytest.approx(least_by_hand(sets), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: {"sets": ()}, "rising numbers up to 2"),
        (lambda c: {"sets": (2, 2)}, "rising numbers up to 2"),
        (lambda c: {"sets": (0, 2)}, "rising numbers up to 2"),
        (lambda c: {"sets": (1,)}, "rising numbers up to 2"),
        (lambda c: {"network_s": c.network_s * 1.001}, "messages with nested sets may take"),
        (lambda c: {"before_s": 0.0, "network_s": 0.0, "after_s": 0.0}, "may take 0.0 s"),
    ],
)
def test_certificates_that_prove_nothing(change, error):
    workload, cluster = chain(3, layers=(2, 2), updates=True)
    found = bound_of(workload, cluster)
    parts = Certificate("nested", found.tensors, 0.0, found.seconds, 0.0, sets=found.sets)
    assert verify_bound(Bound(found.seconds, parts), workload, cluster, sends="all_reduces") == found.seconds
    certificate = msgspec.structs.replace(parts, **change(parts))
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(found.seconds, certificate), workload, cluster, sends="all_reduces")


def test_without_thorough_it_tries_fewer_sets_and_proves_no_more():
    workload, cluster = chain(5, layers=(60, 60), units=9)
    quick, thorough = (lower_bound(workload, cluster, thorough=thorough) for thorough in (False, True))
    assert quick.seconds <= thorough.seconds * (1 + 1e-12)
    assert len(quick.certificate.sets) <= 32
