"""Groups, units and costs as traces tell them: predictions from a made trace are those from which it was made."""

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import fsdp_samples
from support.chains import random_chain
from support.strategies import examples

from legato.core.cluster import LinearCost
from legato.core.errors import InputError
from legato.core.wrapping import Group, Wrapping
from legato.fsdp.costs import Costs
from legato.fsdp.rules import run
from legato.fsdp.table import compare_traced
from legato.fsdp.traced import Fit, as_modules, costs_of, traced_units, traced_wrapping
from legato.fsdp.units import Precision, Unit
from legato.ingest.kineto.importer import import_kineto


def traced(folder, units, wrapping, costs, precision):
    """(what the trace of a step tells, the step)."""
    text, step = fsdp_samples.trace(units, wrapping, costs, precision)
    path = folder / "t.json"
    path.write_text(text)
    return import_kineto([path]).sharded, step


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([(1, "each"), (1, "each"), (2, "each"), (3, "last")]))
def test_the_step_is_predicted_as_it_was_made(tmp_path_factory, seed, accumulated):
    units, costs, precision = random_chain(seed, plain=True)  # a trace of frozen modules tells less
    micro_batches, sync = accumulated
    wrapping = fsdp_samples.random_wrapping(seed, units)
    wrapping = msgspec.structs.replace(wrapping, micro_batches=micro_batches, sync=sync)
    assume(wrapping.groups and costs.gather.cost(1) > 0)
    found, step = traced(tmp_path_factory.mktemp("t"), units, wrapping, costs, precision)
    again = traced_units(found)
    same = traced_wrapping(found)
    assert same.sync == sync
    fitted, _ = costs_of(found, waits_known=True)
    predicted = run(again, same, fitted, precision)
    assert predicted.seconds == pytest.approx(step.seconds, rel=1e-6)
    assert [group.modules for group in as_modules(same).groups] == [group.modules for group in wrapping.groups]
    assert sum(unit.gathered for unit in again) == sum(unit.gathered for unit in units)


def layers(count=6, large=8e6):
    return [
        Unit(f"layers.{k}", 1e-3, 2e-3, int(large), int(large), int(large), input_needs_gradient=k > 0, named=k)
        for k in range(count)
    ]


def test_a_list_of_alike_modules_is_divided_and_another_is_one_unit(tmp_path):
    units = [*layers(4), *(unit._replace(path=path) for unit, path in zip(layers(2), "ab", strict=True))]
    units[1] = units[1]._replace(forward_s=3e-3, backward_s=6e-3)
    wrapping = Wrapping("traced", (Group(("layers.0", "layers.1")), Group(("layers.2", "layers.3")), Group(("a", "b"))))
    cost = LinearCost(1e-4, 1e-10)
    found, _ = traced(tmp_path, units, wrapping, Costs(8, cost, cost, cost), Precision())
    again = traced_units(found)
    assert [unit.path for unit in again] == ["layers.0", "layers.1", "layers.2", "layers.3", "a, b"]
    assert [unit.forward_s for unit in again] == pytest.approx([1e-3, 3e-3, 1e-3, 1e-3, 2e-3])
    assert [unit.backward_s for unit in again] == pytest.approx([2e-3, 6e-3, 2e-3, 2e-3, 4e-3])
    assert [unit.gathered for unit in again] == [8_000_000] * 4 + [16_000_000]
    same = traced_wrapping(found)
    assert same.groups[2].modules == ("a, b",) and as_modules(same).groups == wrapping.groups


def test_rows_that_traced_groups_make_needless_are_left_out(tmp_path):
    """Latencies of 1 ms: larger groups win, and rows without a time or with more memory than the traced ones lose."""
    units, cost = layers(12, 1e6), LinearCost(1e-3, 1e-10)
    costs = Costs(8, cost, cost, cost)
    wrapping = Wrapping("as traced", tuple(Group((unit.path,)) for unit in units))
    found = compare_traced(units, costs, Precision(), wrapping, 1e-3, None)
    first, *others = found.rows
    alone_s = run(units, wrapping, costs, Precision()).seconds
    assert first.name == "as traced" and first.seconds == pytest.approx(alone_s + 1e-3)
    assert others and all(row.seconds < first.seconds or row.nbytes < first.nbytes for row in others)
    assert not {"DDP"} & {row.name for row in others} and {row.states for row in found.rows} == {0}
    assert [head for head in found.table("t").heads if "memory" in head] == []


def test_how_good_a_fit_is():
    assert Fit.of("all-gather", [(100, 2.0), (100, 4.0), (300, 5.0)], waits_known=False).cost.cost(
        100
    ) == pytest.approx(2)
    exact = Fit.of("all-gather", [(100, 2.0), (300, 4.0), (100, 2.0)], waits_known=True)
    assert (exact.sizes, exact.cost.alpha_s) == (2, pytest.approx(1.0)) and exact.off < 1e-9
    one = Fit.of("all-gather", [(100, 2.0)], waits_known=True)
    assert one.cost == LinearCost(0.0, 0.02) and "in proportion to the only size" in str(one)
    bent = Fit.of("all-gather", [(100, 1.0), (200, 3.0), (300, 2.0)], waits_known=True)
    assert bent.off > 0.1 and f"off by at most {bent.off:.1%}" in str(bent)
    with pytest.raises(InputError, match="no all-gather whose size is known"):
        Fit.of("all-gather", [(0, 1.0)], waits_known=True)
