"""Who holds which bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import InputError
from legato.core.placement import PLACEMENTS, place


def test_round_robin_and_equal_split():
    sizes = [80, 16, 8, 3]
    assert place(sizes, 3) == [[(0, 80, 0)], [(0, 16, 1)], [(0, 8, 2)], [(0, 3, 0)]]
    # 80 bytes cut at multiples of 8; those under 24 whole, to whoever holds least.
    assert place(sizes, 3, "equal") == [[(0, 24, 0), (24, 48, 1), (48, 80, 2)], [(0, 16, 0)], [(0, 8, 1)], [(0, 3, 1)]]


@given(st.lists(st.integers(1, 500), min_size=1), st.integers(1, 6), st.sampled_from(PLACEMENTS))
def test_every_byte_has_one_home(sizes, servers, placement):
    placed = place(sizes, servers, placement)
    for nbytes, pieces in zip(sizes, placed, strict=True):
        assert [a for a, _, _ in pieces] == [0, *(b for _, b, _ in pieces[:-1])] and pieces[-1][1] == nbytes
        assert all(a < b and 0 <= server < servers and a % 8 == 0 for a, b, server in pieces)
    if placement == "equal" and min(sizes) >= 8 * servers:
        held = [sum(b - a for pieces in placed for a, b, s in pieces if s == server) for server in range(servers)]
        assert max(held) - min(held) <= 16 * len(sizes)


def test_refusals():
    with pytest.raises(InputError, match=r"0 parameter servers \(expected at least 1"):
        place([1], 0)
    with pytest.raises(InputError, match="unknown placement 'round robin'; did you mean 'round-robin'"):
        place([1], 1, "round robin")
