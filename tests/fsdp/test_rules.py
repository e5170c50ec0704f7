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
    st.integers(0, 2**32), st.sampled_from([(1, "each"), (1, "each"), (2, "each"), (3, "last"), (2, "gathered-once")])
)
def test_a_program_takes_what_the_rules_say(seed, accumulated):
    """Those of whole jobs run it. Gathers inside hosts may begin earlier there."""
    units, costs, precision = random_chain(seed)
    micro_batches, sync = accumulated
    wrapping = msgspec.structs.replace(random_wrapping(seed, units), micro_batches=micro_batches, sync=sync)
    program = program_of(units, wrapping, costs, precision, per_host=4, update_s=0.125)
    seconds = [
        (
            costs.scatter
            if one.operation == "reduce_scatter"
            else costs.gather_in_host
            if len(one.groups) > 1
            else costs.gather
        ).cost(one.nbytes)
        for one in program.communications
    ]
    expected_s = run(units, wrapping, costs, precision).seconds + 0.125
    found_s = traced.run(program, seconds).seconds
    inside = any(len(one.groups) > 1 for one in program.communications)
    assert found_s <= expected_s * (1 + 1e-9) and (inside or found_s == pytest.approx(expected_s, rel=1e-9))


def test_replicas_are_no_program():
    with pytest.raises(InputError, match="replicas: 2 as a program"):
        program_of(blocks(2), by_block(2, replicas=2), Costs(8, FREE, FREE, FREE, FREE), Precision(2, 2, 4), per_host=1)


def test_more_workers_leave_gathers_inside_their_hosts():
    units, costs = blocks(3), Costs(8, FREE, FREE, FREE)
    wrapping = Wrapping("host", tuple(Group((unit.path,), 4) for unit in units))
    program = traced.repeated(program_of(units, wrapping, costs, Precision(2, 2, 4), per_host=4), 16)
    sizes = {(one.kind, len(one.groups), len(one.groups[0])) for one in program.communications}
    assert sizes == {("data", 1, 16), ("host", 4, 4)}
