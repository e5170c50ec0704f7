"""Checkpoints of sharded optimizers: every rank saves its shards, and anybody can load them."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support import matrix_checkpoint as cases
from support import training
from support.matrix_sharded import Mixed
from support.ranks import Ranks
from support.strategies import examples
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import legato
from legato.pytorch.runtime.sharding.checkpoint import LocalShards, boxes
from legato.pytorch.runtime.sharding.shards import ELEMENTWISE


@examples(40)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_range_of_elements_is_few_boxes(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, start, stop))
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.cat(parts).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_a_tensor_of_shards_shows_nothing_else():
    tensor = LocalShards((2, 3), torch.float32, "cpu", [(0, 2)], [torch.ones(2)])
    assert tensor.shape == (2, 3) and "ranges=[(0, 2)]" in repr(tensor)
    with pytest.raises(legato.InputError, match="only this rank's shards of the tensor are here"):
        tensor + 1


@pytest.fixture(scope="module")
def solo():
    ranks = Ranks(1)
    yield ranks
    ranks.close()


NAMES = ["adam", "adamw", "momentum", "sgd", "adagrad", "nadam", "asgd"]


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_as_if_it_had_not_been_interrupted(two_ranks, name, tmp_path):
    path = str(tmp_path / "checkpoint")
    two_ranks.run(training.sharded, "optimizer", cases.save, path, name)
    for trains_before in (False, True):
        resumed = cases.resume, path, name, "legato", None, False, trains_before
        assert two_ranks.run(training.sharded, "gradients", *resumed) == [0.0, 0.0]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["adam", "momentum", "adagrad"])
def test_other_numbers_of_ranks_load_it(two_ranks, solo, three_ranks, name, tmp_path):
    path = str(tmp_path / "checkpoint")
    two_ranks.run(training.sharded, "gradients", cases.save, path, name, "legato", 0)
    assert solo.run(training.sharded, "optimizer", cases.resume, path, name, "legato", 0) == [0.0]
    assert three_ranks.run(training.sharded, "optimizer", cases.resume, path, name, "legato", 0) == [0.0] * 3


@pytest.mark.processes
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum"])
def test_from_sharded_to_unsharded_and_back(two_ranks, name, tmp_path):
    first, second, third = (str(tmp_path / kind) for kind in ("sharded", "ddp", "legato"))
    two_ranks.run(training.sharded, "optimizer", cases.save, first, name)
    assert two_ranks.run(cases.resume, first, name, "ddp") == [0.0, 0.0]
    assert two_ranks.run(cases.resume, first, name, "legato") == [0.0, 0.0]
    for path, kind in ((second, "ddp"), (third, "legato")):
        two_ranks.run(cases.save, path, name, kind)
        loaded = two_ranks.run(training.sharded, "optimizer", cases.resume, path, name, "legato", None, True)
        assert loaded == [0.0, 0.0]


@pytest.mark.processes
def test_several_optimizers_of_a_compiled_model(two_ranks, tmp_path):
    assert two_ranks.run(training.sharded, "optimizer", cases.several, str(tmp_path / "checkpoint")) == [True, True]


@pytest.mark.processes
def test_a_checkpoint_in_the_background_is_of_the_moment_at_which_it_was_begun(two_ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    two_ranks.run(training.sharded, "optimizer", cases.save, path, "adam", "legato", None, "async_save")
    assert two_ranks.run(training.sharded, "optimizer", cases.resume, path, "adam") == [0.0, 0.0]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_it_by_its_own_means(two_ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    two_ranks.run(training.sharded, "optimizer", cases.save, path, "adam", "legato", None, "save", Mixed)
    model = Mixed()
    parameters = list(model.parameters())
    optimizer = cases.MAKE["adam"]([{"params": parameters[:3]}, {"params": parameters[3:]}])
    torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state)
    expected = torch.load(f"{path}.pt")["before"]["optimizer"]
    assert cases.same(optimizer.state_dict(), expected) and expected["state"]


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(kind.__name__ for kind in ELEMENTWISE))
def test_torch_goes_on_with_parameters_that_had_got_no_gradient(two_ranks, name, tmp_path):
    path = str(tmp_path / "checkpoint")
    found = two_ranks.run(training.sharded, "optimizer", cases.torch_goes_on, path, name)
    assert found == [[0.0, 0.0]] * 2


@pytest.mark.processes
def test_no_rank_has_more_than_its_shards_in_memory(two_ranks, tmp_path):
    found = two_ranks.run(training.sharded, "optimizer", cases.largest, str(tmp_path / "checkpoint"))
    assert sum(shard for shard, _, _ in found) == 6400
    most = max(shard for shard, _, _ in found)
    assert all(0 < saving <= most and 0 < loading <= most for _, saving, loading in found)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("entry", "Missing key in checkpoint state_dict: optimizer.state."),
        ("part of the state", "the checkpoint has 'exp_avg' of its state, and no 'max_exp_avg_sq'"),
        ("settings", "with the checkpoint's settings, the optimizer keeps 'momentum_buffer', and with its own it does"),
        ("shape", "Size mismatch between saved torch.Size([4, 3, 130]) and current: torch.Size([4, 3, 131]) for"),
        ("groups", "group 0 of the optimizer: 2 parameters, ['scale'] ...; in the checkpoint 3 parameters, ['scale']"),
        ("others", "optimizer: it has parameters that are not the model's, and have no name in a checkpoint"),
        ("later", "its state 'second' is not there after a first step, and could not be loaded; save"),
    ],
)
def test_what_cannot_be_loaded_or_saved_is_said_on_every_rank(two_ranks, what, line, tmp_path):
    for told in two_ranks.run(training.sharded, "optimizer", cases.said, what, str(tmp_path / "checkpoint")):
        assert line in told
