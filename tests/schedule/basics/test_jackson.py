"""Jackson's preemptive schedule: by hand, a schedule at all, and as good as the best set says."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import examples

from legato.schedule.basics.jackson import jackson

jobs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(0, 12)), max_size=7)


def value(pieces, tail):
    return max((stop + tail[job] for job, _, stop in pieces), default=0)


def test_by_hand():
    #         0 waits      1 overtakes it at 2    2 is last though there early    3 comes after a gap
    release, processing, tail = [0, 2, 0, 20], [5, 1, 3, 2], [4, 9, 1, 0]
    assert jackson(release, processing, tail) == [(0, 0, 2), (1, 2, 3), (0, 3, 6), (2, 6, 9), (3, 20, 22)]
    assert jackson([], [], []) == []


def test_an_arrival_of_less_urgency_does_not_cut():
    assert jackson([0, 1], [3, 1], [5, 5]) == [(0, 0, 3), (1, 3, 4)]


def test_needs_sequences_of_one_length():
    with pytest.raises(ValueError, match="shorter"):
        jackson([0, 1], [1], [1, 1])


@examples(150)
@given(jobs)
def test_is_a_schedule_and_its_value_is_that_of_the_best_set(rows):
    release, processing, tail = ([row[k] for row in rows] for k in range(3))
    pieces = jackson(release, processing, tail)
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(pieces))  # one after another
    assert all(start >= release[job] for job, start, _ in pieces)
    for job, seconds in enumerate(processing):
        assert sum(stop - start for other, start, stop in pieces if other == job) == seconds
    # No schedule is better than any set's min r + sum p + min q, and this one is as good as the largest.
    sets = (s for size in range(1, len(rows) + 1) for s in itertools.combinations(range(len(rows)), size))
    best = max(
        (min(release[i] for i in s) + sum(processing[i] for i in s) + min(tail[i] for i in s) for s in sets),
        default=0,
    )
    assert value(pieces, tail) == best
