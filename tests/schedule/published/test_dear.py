"""DeAR: its groups, its two pipelines, and what they take."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import clusters, workloads

from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.files import identity
from legato.core.plan import check_plan
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import schedule
from legato.schedule.basics.compose import priorities
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.published.dear import dear
from legato.simulator.collective import iteration_time

THREE = Workload(
    "three",
    tuple(Op(f"f{i}", "forward", 1.0, (i - 1,) if i else ()) for i in range(3))
    + tuple(Op(f"b{i}", "backward", 2.0, (i - 1,)) for i in range(3, 6)),
    (
        Tensor("w3", 10, 3, (2,)),
        Tensor("w2", 3, 4, (1,)),
        Tensor("v2", 2, 4, (1,)),
        Tensor("w1", 5, 5, (0,)),
    ),
)
NETWORK = Cluster(4, {"ring": LinearCost(2.0, 1.0)})


def sent(plan):
    return [(message.kind, [piece.tensor for piece in message.slices]) for message in plan.messages]


def test_reduce_scatter_backward_all_gather_forward():
    plan = dear(THREE, NETWORK, buffer_bytes=6)
    assert plan.forward_overlap
    assert sent(plan) == [
        ("reduce_scatter", ["w3"]),  # 2 to 8
        ("reduce_scatter", ["w2", "v2"]),  # to 11.5
        ("reduce_scatter", ["w1"]),  # to 15
        ("all_gather", ["w1"]),  # to 18.5; f0 to 19.5
        ("all_gather", ["w2", "v2"]),  # to 22; f1 to 23
        ("all_gather", ["w3"]),  # to 28; f2 to 29
    ]
    assert iteration_time(THREE, plan, NETWORK) == 29


def test_a_buffer_holds_less_than_its_size():
    def groups(nbytes):
        return [tensors for kind, tensors in sent(dear(THREE, NETWORK, buffer_bytes=nbytes)) if kind == "all_gather"]

    assert groups(1) == groups(5) == [["w1"], ["w2"], ["v2"], ["w3"]]
    assert groups(8) == [["w1"], ["w2", "v2"], ["w3"]]  # 5 and 3 are not less than 8
    assert groups(9) == [["w1", "w2"], ["v2"], ["w3"]]
    assert groups(21) == groups(25 * 2**20) == [["w1", "w2", "v2", "w3"]]
    assert sent(dear(THREE, NETWORK)) == sent(dear(THREE, NETWORK, buffer_bytes=25 * 2**20))
    with pytest.raises(InputError, match="buffer_bytes: 0"):
        dear(THREE, NETWORK, buffer_bytes=0)


@given(workloads(max_tensors=8), clusters(), st.integers(1, 64))
def test_plans_are_valid_and_above_the_bound(workload, cluster, buffer_bytes):
    plan = dear(workload, cluster, buffer_bytes=buffer_bytes)
    check_plan(plan, workload)
    assert plan.workload_id == identity(workload)
    seconds = iteration_time(workload, plan, cluster)
    assert seconds >= lower_bound(workload, cluster).seconds * (1 - 1e-12)
    half = len(plan.messages) // 2
    first, second = plan.messages[:half], plan.messages[half:]
    assert {m.kind for m in first} == {"reduce_scatter"} and {m.kind for m in second} == {"all_gather"}
    assert all(message.nbytes < buffer_bytes or len(message.slices) == 1 for message in plan.messages)
    place = dict(zip((t.name for t in workload.tensors), priorities(workload), strict=True))
    read = [place[piece.tensor] for message in second for piece in message.slices]
    assert read == sorted(read)
    ready = {t.name: t.ready_after for t in workload.tensors}
    complete = [max(ready[piece.tensor] for piece in message.slices) for message in first]
    assert complete == sorted(complete)


@given(workloads(max_tensors=8), clusters())
def test_in_one_group_the_halves_make_one_all_reduce(workload, cluster):
    whole = msgspec.structs.replace(schedule("single", workload, cluster), forward_overlap=True)
    assert iteration_time(workload, dear(workload, cluster), cluster) == iteration_time(workload, whole, cluster)
