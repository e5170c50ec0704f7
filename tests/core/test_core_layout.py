"""Messages in memory: every slice and count in a place of its own, tensors in one piece where that can be."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import Message, Slice
from legato.pytorch.layout import allocate, lay_out

SIZES = {"a": 40, "b": 4, "c": 24}


def buffers_of(*messages, multiple=1):
    layouts = [lay_out(Message(tuple(slices)), SIZES, 4, multiple) for slices in messages]
    return layouts, allocate(layouts, [(torch.float32, torch.device("cpu"))] * len(layouts))


def place(layouts, buffers, tensor):
    """Where in memory each slice of a tensor lies, by its first byte in the tensor."""
    return {
        piece.start: buffer.data_ptr() + 4 * at
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
    assert [layout.flags for layout in layouts] == [{"b": 6}, {"a": 4}, {}]


def test_two_tensors_that_go_round_in_a_circle_are_cut_once():
    layouts, buffers = buffers_of([Slice("c", 8, 24), Slice("a", 0, 8)], [Slice("a", 8, 40), Slice("c", 0, 8)])
    a, c = place(layouts, buffers, "a"), place(layouts, buffers, "c")
    assert (a[8] == a[0] + 8) + (c[8] == c[0] + 8) == 1


def test_what_is_filled_up_for_the_ranks_is_not_gone_on_with():
    layouts, _ = buffers_of([Slice("a", 0, 20)], [Slice("a", 20, 40)], multiple=4)
    assert [layout.elements for layout in layouts] == [8, 8] and layouts[0].leaves is None


@given(st.data())
def test_nothing_overlaps(data):
    slices = []
    for tensor, size in SIZES.items():
        cuts = sorted({0, size, *(4 * c for c in data.draw(st.lists(st.integers(0, size // 4), max_size=4)))})
        slices += [Slice(tensor, a, b) for a, b in itertools.pairwise(cuts)]
    slices = data.draw(st.permutations(slices))
    ends = sorted({0, len(slices), *data.draw(st.lists(st.integers(0, len(slices)), max_size=6))})
    messages = [slices[a:b] for a, b in itertools.pairwise(ends)]
    layouts, buffers = buffers_of(*messages, multiple=data.draw(st.sampled_from([1, 2, 3])))
    seen = set()
    for slices, layout, buffer in zip(messages, layouts, buffers, strict=True):
        assert set(layout.slices) == set(slices) and buffer.numel() == layout.elements
        taken = [
            at + i for piece, at in zip(layout.slices, layout.starts, strict=True) for i in range(piece.nbytes // 4)
        ]
        taken += layout.flags.values()
        assert len(set(taken)) == len(taken) == sum(s.nbytes // 4 + (s.start == 0) for s in slices)
        assert set(layout.flags) == {s.tensor for s in slices if s.start == 0}
        where = {buffer.data_ptr() + 4 * i for i in range(buffer.numel())}
        assert set(taken) <= set(range(buffer.numel())) and not where & seen
        seen |= where
