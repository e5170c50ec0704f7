"""No delay and no look at any moment changes a weight; `chaos.py` does the same for as long as one likes."""

import pytest
from support import chaos
from support.ranks import on_ranks

pytestmark = pytest.mark.slow


@on_ranks(2)
def test_chaos_changes_nothing_and_the_weights_are_those_of_ddp():
    assert chaos.rounds(0, 6) == []


@on_ranks(3)
def test_chaos_changes_nothing_on_three_ranks():
    assert chaos.rounds(100, 3) == []
