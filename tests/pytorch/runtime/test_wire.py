"""Wire formats: everything in one is what torch's hooks do, and what is not in one is exact."""

import pytest
import torch
from support import matrix_wire, training

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent"])
def test_all_messages_in_a_wire_format_are_what_torchs_hooks_send(two_ranks, model, wire):
    assert two_ranks.run(matrix_wire.as_hook, model, wire) == [0.0, 0.0]


def test_with_gradients_that_are_views(two_ranks):
    assert two_ranks.run(training.lent, matrix_wire.as_hook, "Attention", "bf16") == [0.0, 0.0]


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_halves_round_as_a_whole_message_does(two_ranks, wire):
    assert two_ranks.run(matrix_wire.halves, wire) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_what_is_not_float32_travels_as_it_is(two_ranks, dtype):
    assert two_ranks.run(matrix_wire.exact_dtypes, dtype) == [0.0, 0.0]


def test_error_feedback_loses_no_more_than_one_rounding(two_ranks):
    for rounded, exact in two_ranks.run(matrix_wire.lost, False):
        assert rounded > 10 and exact < 0.1
    for rounded, exact in two_ranks.run(matrix_wire.lost, True):
        assert rounded <= 1.1 and exact < 0.1


@pytest.mark.parametrize("wire", sorted(matrix_wire.ROUNDING))
def test_error_feedback_does_not_make_up_for_overflows(two_ranks, wire):
    for found in two_ranks.run(matrix_wire.after_overflows, wire):
        assert not any(found)


@pytest.mark.parametrize("wire", sorted(matrix_wire.ROUNDING))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_with_error_feedback_sums_lack_no_more_than_a_bound(two_ranks, three_ranks, four_ranks, ranks, wire):
    found = {2: two_ranks, 3: three_ranks, 4: four_ranks}[ranks].run(matrix_wire.missing, wire)
    assert all(0 < lacking <= 1 for ways in found for lacking in ways.values()), found


def test_distribute_takes_a_wire_format(two_ranks):
    assert two_ranks.run(matrix_wire.distributed, "all-fp16", ("bf16",)) == [["fp16"]] * 2
    assert two_ranks.run(matrix_wire.distributed, "bf16", ("bf16",)) == [["bf16"]] * 2
    assert two_ranks.run(matrix_wire.distributed, "none", ("bf16",)) == [["bf16"]] * 2
    assert two_ranks.run(matrix_wire.distributed, "all-bf16", ()) == [["bf16"]] * 2
    for formats in two_ranks.run(matrix_wire.distributed, "bf16", ()):
        assert set(formats) <= {"", "bf16"}


@pytest.mark.parametrize(
    ("wire", "given", "line"),
    [
        ("fp8", ("bf16",), "unknown wire 'fp8'; did you mean 'fp16'? known: none, bf16, fp16, all-bf16, all-fp16"),
        ("fp8", (), "unknown wire 'fp8'; did you mean 'fp16'? known: none, bf16, fp16, all-bf16, all-fp16"),
        (
            "bf16",
            (None,),
            "wire: 'bf16' with a plan that rounds nothing (expected 'none' to carry it out as it is, or ",
        ),
        ("bf16", ("fp16",), "wire: 'bf16' with a plan that has messages in fp16 (expected 'none' to carry it out as"),
    ],
)
def test_an_error_about_a_format_names_what_is_valid(two_ranks, wire, given, line):
    for said in two_ranks.errors(matrix_wire.distributed, wire, given):
        assert f"InputError: {line}" in said
    for valid in ("none", "all-bf16") if given else ():
        assert two_ranks.run(matrix_wire.distributed, valid, given)


@pytest.mark.parametrize("plan", ["auto", "given"])
def test_a_format_and_shards_are_refused_together(two_ranks, plan):
    for said in two_ranks.errors(matrix_wire.sharded, plan):
        assert "InputError: wire: 'all-bf16' with shard 'optimizer' (expected one or the other)" in said
