"""Closed forms of FSDP2's rules."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chains import random_chain
from support.fsdp_samples import random_wrapping
from support.strategies import examples

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.rules import program_of, run
from legato.fsdp.units import Precision, Unit
from legato.whole_jobs import traced
from legato.whole_jobs.flow.step import network_of, simulate_program
from legato.zoo.presets import machine_named

SIZE = 1000
FREE = LinearCost(0.0, 0.0)


def blocks(count, *, forward_s=1.0, gathered=SIZE):
    """Equal blocks in bf16 whose gradients are reduced in float32."""
    return [
        Unit(f"u{k}", forward_s, 2 * forward_s, gathered, 2 * gathered, gathered, True, k > 0, named=k)
        for k in range(count)
    ]


def by_block(count, **options):
    return Wrapping("by block", tuple(Group((f"u{k}",)) for k in range(count)), **options)


def test_equal_blocks_take_five_times_a_block_in_memory():
    """Parameters, the next ones, gradients, and twice as many bytes that are being reduced."""
    costs = Costs(10**6, FREE, FREE, FREE)
    assert run(blocks(12), by_block(12), costs, Precision(2, 2, 4)).peak_nbytes == 5 * SIZE


def test_a_network_that_is_never_waited_for():
    step = run(blocks(6), by_block(6), Costs(8, FREE, FREE, FREE), Precision(2, 2, 4))
    assert step.seconds == 6 * 3.0


def test_a_slow_network_is_never_idle():
    """Every gather of both passes and every reduction, one after the other, once the computation takes no time."""
    gather, scatter = LinearCost(2.0, 0.0), LinearCost(3.0, 0.0)
    step = run(blocks(5, forward_s=0.0), by_block(5), Costs(8, gather, gather, scatter), Precision(2, 2, 4))
    assert step.seconds == 5 * (2.0 + 2.0 + 3.0)


def test_what_is_kept_is_gathered_once():
    kept = Wrapping("kept", tuple(Group((f"u{k}",), False) for k in range(5)))
    gather, scatter = LinearCost(2.0, 0.0), LinearCost(3.0, 0.0)
    step = run(blocks(5, forward_s=0.0), kept, Costs(8, gather, gather, scatter), Precision(2, 2, 4))
    assert step.seconds == 5 * (2.0 + 3.0)
    assert sum(kind == "gather" for kind, _ in step.order()) == 5


def test_a_host_that_is_late_delays_the_step():
    late = run(blocks(5, forward_s=0.0), by_block(5), Costs(8, FREE, FREE, FREE, host_s=4.0), Precision(2, 2, 4))
    assert late.seconds == pytest.approx(5 * 4.0, rel=0.1)


def test_replicas_reduce_beside_the_other_collectives():
    scatter, everywhere = LinearCost(1.0, 0.0), LinearCost(5.0, 0.0)
    costs = Costs(8, FREE, FREE, scatter, everywhere)
    wrapping = by_block(4, replicas=2, micro_batches=2, sync="all-reduce-last")
    step = run(blocks(4, forward_s=0.0), wrapping, costs, Precision(2, 2, 4))
    assert [piece.kind for piece in step.pieces].count("all_reduce") == 4
    assert step.seconds == 4 * 1.0 + 1.0 + 4 * 5.0


def test_accumulated_gradients_are_whole_and_reduced_once():
    wrapping = by_block(4, micro_batches=3, sync="last")
    step = run(blocks(4), wrapping, Costs(10**6, FREE, FREE, FREE), Precision(2, 2, 4))
    assert sum(kind == "reduce_scatter" for kind, _ in step.order()) == 4
    assert step.peak_nbytes >= 4 * 2 * SIZE


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((Group(("u9",)),), "'u9' .expected a module"),
        ((Group(("u1", "u2")),), "'u1'"),
    ],
)
def test_a_wrapping_for_another_model_is_refused(groups, said):
    units = blocks(2) if groups[0].modules == ("u9",) else blocks(1)
    with pytest.raises(InputError, match=said):
        run(units, Wrapping("x", groups), Costs(8, FREE, FREE, FREE), Precision())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Group(()),
        lambda: Group(("a",), 1),
        lambda: Wrapping("x", (Group(("a",)), Group(("a", "b")))),
        lambda: Wrapping("x", (), forward_prefetch=-1),
        lambda: Wrapping("x", (), replicas=0),
    ],
)
def test_impossible_wrappings_are_refused(make):
    with pytest.raises(InputError):
        make()


@examples(200)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, "each"), (1, "each"), (2, "each"), (3, "last"), (2, "gathered-once"), (2, "all-reduce-last")]),
    st.sampled_from([1, 1, 2]),
)
def test_a_program_takes_what_the_rules_say(seed, accumulated, replicas):
    """The clock of whole jobs runs both; a program has groups of workers where the rules have names of lines."""
    units, costs, precision = random_chain(seed)
    micro_batches, sync = accumulated
    costs = msgspec.structs.replace(costs, all_reduce=LinearCost(0.125, 1e-3) if replicas > 1 else None)
    options = {"micro_batches": micro_batches, "sync": sync, "replicas": replicas}
    wrapping = msgspec.structs.replace(random_wrapping(seed, units), **options)
    program = program_of(units, wrapping, costs, precision, per_host=4, update_s=0.125)
    priced = {
        "reduce_scatter": costs.scatter,
        "all_reduce": costs.all_reduce,
        "host": costs.gather_in_host,
        "all_gather": costs.gather,
    }
    seconds = [
        priced[one.kind if one.kind == "host" else one.operation].cost(one.nbytes) for one in program.communications
    ]
    assert sum(len(lane.workers) for lane in program.lanes) == 8 * replicas
    expected_s = run(units, wrapping, costs, precision).seconds + 0.125
    assert traced.run(program, seconds).seconds == pytest.approx(expected_s, rel=1e-9)


@pytest.mark.parametrize(("workers", "replicas"), [(8, 1), (8, 2), (16, 4), (16, 2)])
def test_a_program_takes_as_long_on_links_that_nothing_shares(workers, replicas):
    """Hosts of four GPUs. Sharded over a host, a GPU sums gradients over its own card, which nothing else uses;
    sharded over two hosts, reduce-scatters share the cards with the sums."""
    machine = msgspec.structs.replace(machine_named("h100"), gpus_per_host=4)
    units, wrapping = blocks(5, forward_s=1e-3, gathered=2**28), by_block(5, replicas=replicas)
    costs = Costs.of_machine(machine, workers, replicas=replicas)
    program = program_of(units, wrapping, costs, Precision(2, 2, 4), per_host=4)
    predicted = run(units, wrapping, costs, Precision(2, 2, 4)).seconds
    linked = simulate_program(program, machine, network_of(machine, workers)).seconds
    assert traced.predict(program, machine).seconds == pytest.approx(predicted, rel=1e-9)
    assert (
        linked > predicted if 4 * replicas < workers and replicas > 1 else linked == pytest.approx(predicted, rel=1e-9)
    )


def test_more_replicas_sum_the_same_shards():
    costs = Costs(4, FREE, FREE, FREE, FREE)
    made = program_of(blocks(2), by_block(2, replicas=2), costs, Precision(2, 2, 4), per_host=4)
    sizes = {
        (one.kind, one.operation, len(one.groups), len(one.groups[0]))
        for one in traced.repeated(made, 24).communications
    }
    shards = {("shard", operation, 6, 4) for operation in ("all_gather", "reduce_scatter")}
    assert sizes == shards | {("data", "all_reduce", 4, 6)}


def test_more_workers_leave_gathers_inside_their_hosts():
    units, costs = blocks(3), Costs(8, FREE, FREE, FREE)
    wrapping = Wrapping("host", tuple(Group((unit.path,), 4) for unit in units))
    program = traced.repeated(program_of(units, wrapping, costs, Precision(2, 2, 4), per_host=4), 16)
    sizes = {(one.kind, len(one.groups), len(one.groups[0])) for one in program.communications}
    assert sizes == {("data", 1, 16), ("host", 4, 4)}
