"""Many layouts at once have the seconds and the bytes of one wrapping after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chains import random_chain, random_layouts
from support.strategies import examples

from legato.fsdp.many import Chain, evaluate
from legato.fsdp.rules import run


@given(st.integers(0, 2**32))
@examples(100)
def test_many_layouts_at_once_are_those_of_the_rules(seed):
    units, costs, precision = random_chain(seed)
    chain = Chain(units, costs, precision, node=4)
    layouts = random_layouts(seed, chain)
    for layout, seconds, nbytes in zip(layouts, *evaluate(chain, layouts), strict=True):
        step = run(units, chain.wrapping(layout, "one"), costs, precision)
        assert seconds == pytest.approx(step.seconds, rel=1e-9)
        assert nbytes == step.peak_nbytes


@given(st.integers(0, 2**32))
@examples(100)
def test_what_the_backward_pass_does_not_read_takes_no_longer_and_no_more_memory(seed):
    units, costs, precision = random_chain(seed)
    units = [unit._replace(read_in_backward=k % 3 != seed % 3) for k, unit in enumerate(units)]
    chain = Chain(units, costs, precision, node=4)
    layouts = random_layouts(seed, chain, 4)
    for layout, seconds, nbytes in zip(layouts, *evaluate(chain, layouts), strict=True):
        step = run(units, chain.wrapping(layout, "one"), costs, precision)
        assert step.seconds <= seconds * (1 + 1e-9)
        assert step.peak_nbytes <= nbytes
