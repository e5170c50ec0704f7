"""Messages in memory: every slice and count in a place of its own, tensors in one piece where that can be."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from legato.core.layout import buffer_layout, chains, realigned, scattered_tensors, sharded_layout
from legato.core.plan import Message, Slice

SIZES = {"a": 40, "b": 4, "c": 24}


def buffers_of(*messages, multiple=1):
    """The layouts, and the first byte of each buffer, in a memory in which chains lie far from one another."""
    layouts = [buffer_layout(Message(tuple(slices)), SIZES, 4, multiple) for slices in messages]
    begins = {}
    for k, chain in enumerate(chains(layouts)):
        at = 10_000 * k
        for i in chain:
            begins[i] = at
            at += 4 * layouts[i].elements
    return layouts, [begins[i] for i in range(len(layouts))]


def place(layouts, buffers, tensor):
    """Where in memory each slice of a tensor lies, by its first byte in the tensor."""
    return {
        piece.start: buffer + 4 * at
        for layout, buffer in zip(layouts, buffers, strict=True)
        for piece, at in zip(layout.slices, layout.starts, strict=True)
        if piece.tensor == tensor
    }


def test_a_tensor_in_three_messages_is_one_piece_of_memory():
    layouts, buffers = buffers_of(
        [Slice("a", 20, 40), Slice("b", 0, 4)], [Slice("a", 0, 8), Slice("c", 8, 24)], [Slice("a", 8, 20)]
    )
    at = place(layouts, buffers, "a")
    assert at[8] == at[0] + 8 and at[20] == at[0] + 20
    assert [layout.flags for layout in layouts] == [{Slice("b", 0, 4): 6}, {Slice("a", 0, 8): 4}, {}]


def test_two_tensors_that_go_round_in_a_circle_are_cut_once():
    layouts, buffers = buffers_of([Slice("c", 8, 24), Slice("a", 0, 8)], [Slice("a", 8, 40), Slice("c", 0, 8)])
    a, c = place(layouts, buffers, "a"), place(layouts, buffers, "c")
    assert (a[8] == a[0] + 8) + (c[8] == c[0] + 8) == 1


def test_what_is_filled_up_for_the_ranks_is_not_gone_on_with():
    layouts, _ = buffers_of([Slice("a", 0, 20)], [Slice("a", 20, 40)], multiple=4)
    assert [layout.elements for layout in layouts] == [8, 8] and layouts[0].leaves is None


def test_what_is_in_three_messages_with_others_between_is_apart():
    first, middle, last = Slice("a", 0, 8), Slice("a", 8, 20), Slice("a", 20, 40)
    b, c = Slice("b", 0, 4), Slice("c", 0, 24)
    alone = [Message((first, c)), Message((middle,)), Message((last, b))]
    beside = [Message((first,)), Message((middle, b)), Message((last, c))]
    assert scattered_tensors(alone, SIZES, 2) == [] and scattered_tensors(beside, SIZES, 2) == ["a"]


@st.composite
def cut_up(draw):
    """Messages of slices of everything."""
    slices = []
    for tensor, size in SIZES.items():
        cuts = sorted({0, size, *(4 * c for c in draw(st.lists(st.integers(0, size // 4), max_size=4)))})
        slices += [Slice(tensor, a, b) for a, b in itertools.pairwise(cuts)]
    slices = draw(st.permutations(slices))
    ends = sorted({0, len(slices), *draw(st.lists(st.integers(0, len(slices)), max_size=6))})
    return [slices[a:b] for a, b in itertools.pairwise(ends)]


@given(cut_up(), st.sampled_from([1, 2, 3]))
def test_nothing_overlaps(messages, multiple):
    layouts, buffers = buffers_of(*messages, multiple=multiple)
    seen = set()
    for slices, layout, buffer in zip(messages, layouts, buffers, strict=True):
        assert set(layout.slices) == set(slices)
        taken = [
            at + i for piece, at in zip(layout.slices, layout.starts, strict=True) for i in range(piece.nbytes // 4)
        ]
        taken += layout.flags.values()
        assert len(set(taken)) == len(taken) == sum(s.nbytes // 4 + (s.start == 0) for s in slices)
        assert set(layout.flags) == {s for s in slices if s.start == 0}
        where = {buffer + 4 * i for i in range(layout.elements)}
        assert set(taken) <= set(range(layout.elements)) and not where & seen
        seen |= where


@given(cut_up(), st.sampled_from([1, 2, 3]))
def test_apart_is_what_has_a_gap_somewhere(messages, ranks):
    kind = "all_reduce" if ranks == 1 else "reduce_scatter"
    found = scattered_tensors([Message(tuple(slices), kind) for slices in messages], SIZES, ranks)
    layouts, buffers = buffers_of(*messages, multiple=ranks)
    for tensor in SIZES:
        at = place(layouts, buffers, tensor)
        together = all(where - first == at[0] for first, where in at.items())
        assert (tensor in found) == (not together)


@given(st.integers(1, 1000), st.sets(st.integers(1, 999)), st.sampled_from([2, 4, 8]))
def test_realigned_slices_have_everything_once_and_are_cut_at_multiples(elements, cuts, element_size):
    places = [0, *sorted(cut for cut in cuts if cut < elements), elements]
    pieces = [Slice("t", a * element_size, b * element_size) for a, b in itertools.pairwise(places)]
    found = [realigned(piece, elements * element_size, element_size) for piece in pieces]
    kept = [piece for piece in found if piece is not None]
    ends = [0, *(piece.stop for piece in kept)]
    assert [piece.start for piece in kept] == ends[:-1] and ends[-1] == elements * element_size
    assert all(end % (64 * element_size) == 0 for end in ends[:-1])
    moves = [before.start - after.start for before, after in zip(pieces, found, strict=True) if after is not None]
    assert all(0 <= move < 64 * element_size for move in moves)


@given(cut_up(), st.sampled_from([1, 2, 3, 64]))
def test_chunks_have_about_equal_shares_of_everything(messages, ranks):
    messages = [[Slice(s.tensor, 80 * s.start, 80 * s.stop) for s in slices] for slices in messages]
    for slices in messages:
        layout, share = sharded_layout(Message(tuple(slices), "reduce_scatter"), 4, ranks)
        size = sum(s.nbytes for s in slices) // 4
        assert share < -(-size // ranks) + 64 and layout.elements % ranks == 0
        assert all(piece.stop in [s.stop for s in slices] or piece.stop % 256 == 0 for piece in layout.slices)
        chunk = layout.elements // ranks
        data = {}  # element of the buffer -> element of a tensor
        for piece, at in zip(layout.slices, layout.starts, strict=True):
            data |= {at + i: (piece.tensor, piece.start // 4 + i) for i in range(piece.nbytes // 4)}
            assert at // chunk == layout.flags[piece] // chunk == (at + piece.nbytes // 4 - 1) // chunk
        expected = [(s.tensor, i) for s in slices for i in range(s.start // 4, s.stop // 4)]
        assert [data[at] for at in sorted(data)] == expected
        assert all(at % chunk < share for at in data)
        flags = layout.flags.values()
        assert len(set(flags)) == len(layout.slices) and all(share <= at % chunk < chunk - 1 for at in flags)
