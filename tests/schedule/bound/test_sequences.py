"""The bound that follows all sequences of messages: what it proves, and that two ways to follow them agree."""

import itertools
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.heads_tails import Detours, heads_tails
from legato.schedule.bound.check import verify_bound
from legato.schedule.bound.lower_bound import Bound, lower_bound
from legato.schedule.bound.plan_kind import kind_of
from legato.schedule.bound.release_times import AnyOrderReleaseTimes, FixedReleaseTimes
from legato.simulator.collective import iteration_time
from legato.zoo import workload as model

LAYERS = 6


def layered(nbytes=100, update_s=1.0):
    """A chain of layers; backward, each has an op that goes on and one that makes its gradient."""
    ops = [Op(f"f{k}", "forward", 1.0, (k - 1,) if k else ()) for k in range(LAYERS)]
    tensors = []
    for k in reversed(range(LAYERS)):
        before = (len(ops) - 2,) if tensors else ()
        ops.append(Op(f"b{k}", "backward", 1.0, before))
        ops.append(Op(f"w{k}", "backward", update_s, (len(ops) - 1,)))
        tensors.append(Tensor(f"{k}", nbytes, len(ops) - 1, (k,)))
    return Workload("layers", tuple(ops), tuple(tensors))


@pytest.mark.parametrize(("order", "sends"), [("any", "halves"), ("any", "pairs"), ("any", "all_reduces")])
def test_it_proves_more_where_messages_are_dear(order, sends):
    work, cluster = layered(), Cluster(2, {"c": LinearCost(2.0, 0.02)})
    quick = lower_bound(work, cluster, order=order, sends=sends, thorough=False)
    bound = lower_bound(work, cluster, order=order, sends=sends)
    assert bound.certificate.case == "sequences" and bound.seconds > quick.seconds * 1.005
    assert verify_bound(bound, work, cluster, order=order, sends=sends) >= bound.seconds * (1 - 1e-12)
    ours = schedule("legato", work, cluster, any_order=order == "any")
    if sends in ("halves", kind_of(ours, work).sends):
        assert bound.seconds <= iteration_time(work, ours, cluster)


def test_cheap_messages_are_not_followed():
    cluster = Cluster(2, {"c": LinearCost(0.02, 0.02)})
    assert lower_bound(layered(), cluster) == lower_bound(layered(), cluster, thorough=False)


@pytest.mark.parametrize("sends", ["halves", "pairs", "all_reduces"])
def test_of_a_real_model(sends):
    cluster = Cluster.derive(512, 25e9, 30e-6, collectives=["ring"])
    work = model("bert-base")
    bound = lower_bound(work, cluster, order="any", sends=sends)
    assert bound.certificate.case == "sequences"
    verify_bound(bound, work, cluster, order="any", sends=sends)


def test_what_the_search_finds_possible_the_checker_does():
    """A claim of a little more than what is proven is refused, with the same levels: the two agree to a part in 300."""
    rng, compared = random.Random(0), 0
    while compared < 12:
        work = layered(nbytes=rng.randint(2, 1000), update_s=rng.choice([0.0, 0.5, 1.0, 3.0]))
        cluster = Cluster(2, {"c": LinearCost(rng.uniform(0.5, 4.0), rng.uniform(0.1, 3.0) / work.tensors[0].nbytes)})
        where = {"order": rng.choice(["captured", "any"]), "sends": rng.choice(["halves", "pairs", "all_reduces"])}
        bound = lower_bound(work, cluster, **where)
        if bound.certificate.case == "sequences":
            compared += 1
            verify_bound(bound, work, cluster, **where)
            more = 0.003 * bound.seconds
            claims = msgspec.structs.replace(bound.certificate, network_s=bound.certificate.network_s + more)
            with pytest.raises(InputError, match="bound: a sequence of messages may take"):
                verify_bound(Bound(bound.seconds + more, claims), work, cluster, **where)


def test_more_bytes_than_floats_can_count_are_left_to_the_other_arguments():
    work, cluster = layered(nbytes=2**60), Cluster(2, {"c": LinearCost(2.0, 0.0)})
    assert lower_bound(work, cluster) == lower_bound(work, cluster, thorough=False)


WORK, DEAR = layered(), Cluster(2, {"c": LinearCost(2.0, 0.02)})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda c: {"levels": ((0, 1, 500), (0, 500))}, "levels of bytes"),
        (lambda c: {"levels": ((0, 1, 500), (0, 1, 499))}, "levels of bytes"),
        (lambda c: {"levels": ((0, 1, 3, 3, 500), (0, 1, 500))}, "levels of bytes"),
        (lambda c: {"levels": ((), ())}, "levels of bytes"),
        (lambda c: {"tensors": c.tensors[::-1]}, "expected falling tails"),
        (lambda c: {"before_s": 0.0, "network_s": 0.0, "after_s": 0.0}, "a sequence of messages may take 0.0 s"),
    ],
)
def test_certificates_that_prove_nothing(change, error):
    bound = lower_bound(WORK, DEAR, order="any")
    certificate = msgspec.structs.replace(bound.certificate, **change(bound.certificate))
    with pytest.raises(InputError, match=error):
        verify_bound(Bound(bound.seconds, certificate), WORK, DEAR, order="any")


def test_all_reduces_have_one_kind_of_level():
    bound = lower_bound(WORK, DEAR, order="any", sends="all_reduces")
    levels = (bound.certificate.levels[0], (0, 1, 500))
    certificate = msgspec.structs.replace(bound.certificate, levels=levels)
    with pytest.raises(InputError, match="at different levels"):
        verify_bound(Bound(bound.seconds, certificate), WORK, DEAR, order="any", sends="all_reduces")


@given(st.data(), workloads(max_ops=6, max_tensors=6))
def test_what_can_be_computed_against_all_sets_of_gradients(data, workload):
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    detours = Detours(workload, 0.0)
    everything = range(len(nbytes))
    required = data.draw(st.sets(st.sampled_from(list(everything)), max_size=2))
    amounts = np.arange(sum(nbytes) + 1)
    found = AnyOrderReleaseTimes(detours, nbytes).least_s(sorted(required), amounts)
    best = np.full(len(amounts), np.inf)
    for size in range(len(nbytes) + 1):
        for chosen in itertools.combinations(everything, size):
            if required <= set(chosen):
                ops = 0
                for t in chosen:
                    ops |= detours.needs[t]
                made = sum(nbytes[t] for t in everything if not detours.needs[t] & ~ops)
                best[: made + 1] = np.minimum(best[: made + 1], detours.weigh.of(ops))
    assert (found <= best * (1 + 1e-12)).all()
    own = sum(nbytes[t] for t in required)
    assert found[own] == pytest.approx(best[own])  # what is required alone


@given(workloads(max_tensors=6))
def test_gradients_in_turn(workload):
    nbytes = [tensor.nbytes for tensor in workload.tensors]
    head = heads_tails(workload, "one", "captured").release_s
    amounts = np.arange(sum(nbytes) + 2)
    found = FixedReleaseTimes(head, nbytes).part_s(range(len(nbytes)), amounts)
    for amount, seconds in zip(amounts, found, strict=True):
        enough = [h for h in [0.0, *head] if sum(n for n, at in zip(nbytes, head, strict=True) if at <= h) >= amount]
        assert seconds == (min(enough) if amount and enough else 0.0 if not amount else np.inf)
