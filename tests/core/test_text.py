"""Numbers as text."""

import pytest

from legato.core.text import count, percent


@pytest.mark.parametrize(
    ("share", "text", "signed"),
    [
        (0.031, "3.1%", "+3.1%"),
        (-0.031, "-3.1%", "-3.1%"),
        (0.0, "0.0%", "0.0%"),
        (-0.0, "0.0%", "0.0%"),
        (-0.0004, "0.0%", "0.0%"),
        (0.0004, "0.0%", "0.0%"),
        (0.0006, "0.1%", "+0.1%"),
        (0.9994, "99.9%", "+99.9%"),
        (0.9996, "100%", "+100%"),
        (-1.234, "-123%", "-123%"),
        (12345.0, "1,234,500%", "+1,234,500%"),
        (float("inf"), "inf%", "+inf%"),
    ],
)
def test_percent(share, text, signed):
    assert percent(share) == text
    assert percent(share, signed=True) == signed


def test_percent_with_other_decimals():
    assert [percent(-0.004, 0), percent(0.00004, 2, signed=True), percent(0.00123, 2)] == ["0%", "0.00%", "0.12%"]


def test_count():
    assert [count(n, "rank") for n in (0, 1, 2000)] == ["0 ranks", "1 rank", "2,000 ranks"]
