"""Groups that the planner finds, beside all that there are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chains import random_chain, random_layouts
from support.strategies import examples

from legato.fsdp.many import KEEP, NODE, RESHARD, Chain, Layout, evaluate
from legato.fsdp.planner import by_unit, every, fastest


def all_layouts(chain):
    states = (RESHARD, KEEP, NODE) if chain.node else (RESHARD, KEEP)
    for count in range(len(chain.starts)):
        for cuts in itertools.combinations(chain.starts[1:], count):
            for chosen in itertools.product(states, repeat=count + 1):
                for depths in itertools.product((0, 2, 3), (0, 2, 3), (1, 2)):
                    yield Layout((0, *cuts), chosen, *depths)


@pytest.mark.parametrize("node", [None, 4])
def test_plans_are_near_the_best_of_all_layouts_of_small_chains(node):
    gaps = []
    for seed in range(20):
        units, costs, precision = random_chain(seed, most=4, plain=True)
        chain = Chain(units, costs, precision, node)
        seconds, nbytes = evaluate(chain, every_one := list(all_layouts(chain)))
        assert len(every_one) == len(seconds)
        (block,) = evaluate(chain, [by_unit(chain)])[1]
        limits = [block, 1.5 * block]
        for limit, layout in zip(limits, fastest(chain, limits), strict=True):
            (found,), (held,) = evaluate(chain, [layout])
            assert held <= limit
            gaps.append(found / seconds[nbytes <= limit].min() - 1)
    assert max(gaps) < 0.1
    assert sorted(gaps)[int(0.9 * len(gaps))] < 0.01


@given(st.integers(0, 2**32))
@examples(20)
def test_more_memory_is_never_slower_and_a_plan_is_never_slower_than_one_group_a_unit(seed):
    units, costs, precision = random_chain(seed, most=12)
    chain = Chain(units, costs, precision, node=4)
    (seconds,), (nbytes,) = evaluate(chain, [by_unit(chain)])
    plans = fastest(chain, [nbytes, 1.3 * nbytes, 2 * nbytes])
    times, held = evaluate(chain, plans)
    assert [seconds, *times] == sorted([seconds, *times], reverse=True)
    assert all(held <= [nbytes, 1.3 * nbytes, 2 * nbytes])


def test_a_limit_that_nothing_fits_has_no_plan():
    units, costs, precision = random_chain(3, plain=True)
    chain = Chain(units, costs, precision)
    assert fastest(chain, [1.0]) == [None]


def test_regular_groups():
    units, costs, precision = random_chain(0, plain=True)
    chain = Chain(units * 3, costs, precision)  # the same names twice do not matter here
    layout = every(chain, 2, kept=2)
    assert layout.begins == tuple(chain.starts[::2])
    assert layout.states[-2:] == (KEEP, KEEP)
    assert set(layout.states[:-2]) == {RESHARD}
    assert random_layouts(1, chain, 1)[0].begins[0] == 0
