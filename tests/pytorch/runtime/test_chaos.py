"""No delay and no look at any moment changes a weight; `chaos.py` does the same for as long as one likes."""

import pytest
from support import chaos

pytestmark = pytest.mark.processes


def test_chaos_changes_nothing_and_the_weights_are_those_of_ddp(two_ranks):
    assert two_ranks.run(chaos.rounds, 0, 6) == [[], []]


def test_chaos_changes_nothing_on_three_ranks(three_ranks):
    assert three_ranks.run(chaos.rounds, 100, 3) == [[], [], []]
