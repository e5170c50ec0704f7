"""How messages are split into fragments, and which fragments share bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import TooLargeError
from legato.core.plan import Message, Slice
from legato.simulator.flow.fragments import fragment, overlaps


def split(cuts, message_bytes=None):
    """The fragments of messages that cut tensors of 60 bytes, "x" and "y", at these bytes."""
    edges = [0, *sorted(cuts), 60]
    pieces = [(name, start, stop) for start, stop in itertools.pairwise(edges) for name in "xy"]
    return fragment(enumerate(Message((Slice(*piece),)) for piece in pieces), None, message_bytes)


@given(st.sets(st.integers(1, 59)), st.sets(st.integers(1, 59)), st.integers(1, 70))
def test_fragments_that_share_bytes(first, second, message_bytes):
    first, second = split(first), split(second, message_bytes)
    expected = {
        (i, j)
        for i, mine in enumerate(first.slices)
        for j, yours in enumerate(second.slices)
        if any(a.tensor == b.tensor and a.start < b.stop and b.start < a.stop for a in mine for b in yours)
    }
    assert set(zip(*(side.tolist() for side in overlaps(first, second)), strict=True)) == expected


def test_a_tensor_in_many_fragments():
    """To look at all pairs of these would take hours."""
    many = fragment([(0, Message((Slice("x", 0, 100_000),)))], None, 1)
    first, second = overlaps(many, many)
    assert len(many) == 100_000 and (first == second).all() and len(first) == 100_000


def test_too_many_fragments_are_refused_before_there_are_any(monkeypatch):
    whole = Message((Slice("x", 0, 2**60),))
    with pytest.raises(TooLargeError, match=f"message_bytes: 1 makes {2**60:,} fragments"):
        fragment([(0, whole)], None, 1)
    monkeypatch.setattr("legato.simulator.flow.fragments.MOST_CHUNKS", 10)
    deep = Message(whole.slices, depth=10)
    assert len(fragment([(0, deep)], None, None)) == 10
    with pytest.raises(TooLargeError, match="the depth of messages makes 11 fragments"):
        fragment([(0, deep), (1, whole)], None, None)
