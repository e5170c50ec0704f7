"""Plans with all messages in a wire format."""

import pytest
from hypothesis import given
from msgspec.structs import replace
from support.strategies import clusters, examples, workloads

import legato
from legato.core.cluster import Cluster, LinearCost
from legato.core.errors import InputError
from legato.core.plan import Message, Plan, Slice
from legato.core.workload import Op, Tensor, Workload
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.wire import check_wire
from legato.schedule.compare import check_bounds, compare
from legato.simulator.collective import iteration_time

SLOW = Cluster(2, {"c": LinearCost(0.0, 1.0)})


def layer(nbytes):
    """3 s backward, then 2 s forward."""
    ops = (Op("f", "forward", 2.0), Op("b", "backward", 3.0, (0,)))
    return Workload("layer", ops, (Tensor("t", nbytes, 1, (0,)),))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_every_scheduler_rounds_all_messages(name, wire):
    """400 bytes take 400 s, or 200 s."""
    job = layer(400)
    plan = schedule(name, job, SLOW, wire=wire)
    assert iteration_time(job, plan, SLOW) == 205 and {message.wire for message in plan.messages} == {wire}
    assert iteration_time(job, schedule(name, job, SLOW), SLOW) == 405


def in_floats(workload):
    """The workload with float32 gradients."""
    return replace(workload, tensors=tuple(replace(t, nbytes=4 * t.nbytes) for t in workload.tensors))


@examples(8)
@given(workloads(max_ops=4, max_tensors=4).map(in_floats), clusters(contended=True))
def test_legato_is_the_fastest_and_above_the_bound(workload, cluster):
    found = compare(workload, cluster, wire="bf16")
    check_bounds(found, workload, cluster)
    own = next(c for c in found if c.plan.scheduler == "legato")
    for candidate in found:
        assert candidate.plan.wires == ["bf16"] and candidate.iteration_s >= candidate.bound.seconds * (1 - 1e-9)
        assert not candidate.runnable or own.iteration_s <= candidate.iteration_s


def test_exact_and_rounded_plans_have_bounds_of_their_own():
    job, whole = layer(400), (Slice("t", 0, 400),)
    plans = [Plan("exact", (Message(whole),)), Plan("rounded", (Message(whole, wire="bf16"),))]
    found = compare(job, SLOW, plans)
    check_bounds(found, job, SLOW)
    assert [candidate.bound.seconds for candidate in found] == [405, 205]


def test_messages_have_their_limit():
    plan = legato.plan(layer(4000), SLOW, wire="bf16", max_message_bytes=1024)
    assert max(message.nbytes for message in plan.messages) <= 1024 and plan.wires == ["bf16"]


def test_the_cheapest_collective_is_that_for_the_bytes_that_travel():
    """24 bytes take 34 s by `bulk` and 36 by `quick`; 12 bytes 22 and 18."""
    cluster, job = Cluster(2, {"bulk": LinearCost(10.0, 1.0), "quick": LinearCost(0.0, 1.5)}), layer(24)
    assert legato.plan(job, cluster).messages[0].collective == "bulk"
    plan = legato.plan(job, cluster, wire="bf16")
    assert [m.collective for m in plan.messages] == ["quick"] and iteration_time(job, plan, cluster) == 3 + 18 + 2


def test_what_is_refused():
    job, odd = layer(8), layer(6)
    with pytest.raises(InputError, match=r"unknown wire 'bf61'.*did you mean 'bf16'"):
        legato.plan(job, SLOW, wire="bf61")
    for name in ("legato", "ddp"):
        with pytest.raises(InputError, match=r"wire: 'bf16' with shard 'optimizer' \(expected one or the other"):
            schedule(name, job, SLOW, wire="bf16", shard="optimizer")
        with pytest.raises(InputError, match=r"wire: 'fp16', but tensor 't' has 6 bytes \(expected float32"):
            schedule(name, odd, SLOW, wire="fp16")
    with pytest.raises(InputError, match=r"wire: 'bf16' with parameter servers \(expected none"):
        schedule("tac", job, SLOW, wire="bf16")
    with pytest.raises(InputError, match=r"wire: 'bf16' with parameter servers"):
        compare(job, Cluster.derive(2, 1e9, 1e-5, servers=1), wire="bf16")
    with pytest.raises(InputError, match="unknown option of ddp 'wires'"):
        schedule("ddp", job, SLOW, wires="bf16")
    check_wire("none", odd.tensors, servers=True, shard="optimizer")
