"""What messages of given sizes take, by hand."""

import pytest

from legato.schedule.search.fill import fill


@pytest.mark.parametrize(
    ("first_come", "expected"),
    [
        (0, [[(2, 0, 64), (1, 0, 32)], [(1, 32, 32), (0, 0, 32)], [(0, 32, 32)]]),
        (1, [[(0, 0, 64), (1, 0, 32)], [(2, 0, 64)], [(1, 32, 32)]]),
        (2, [[(0, 0, 64), (1, 0, 32)], [(1, 32, 32), (2, 0, 32)], [(2, 32, 32)]]),
    ],
)
def test_the_first_messages_take_what_is_ready_first_and_the_others_what_is_urgent(first_come, expected):
    """The third tensor is the most urgent one, and becomes ready with the second."""
    found = fill([96, 64, 32], [0.0, 1.0, 1.0], [0.0, 1.0, 9.0], [64, 64, 64], float, first_come=first_come)
    assert found.messages == expected
