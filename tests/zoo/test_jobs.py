"""`legato.job`: names and numbers to a job, and what is wrong with them."""

import re

import pytest

import legato
from legato.core.errors import InputError
from legato.core.job import LanguageModel
from legato.zoo.presets import MACHINES, framework_named

MODEL = LanguageModel(8, 1024, 16, 8, 64, 4096, 32_000, 2048)


def test_what_is_not_said_follows_from_the_rest():
    assert legato.job(MODEL, gpus=64, tensor=4, pipeline=2).mesh.data == 8
    assert legato.job(MODEL).mesh.workers == 1 and legato.job(MODEL).name == "llm"
    assert legato.job(MODEL, pipeline=2, microbatches=4, schedule="interleaved").chunks == 2
    assert legato.job(MODEL, overlap=()).framework.hidden == ()
    assert legato.job(MODEL, layers=[5, 3], pipeline=2).split == (5, 3)


def test_names_stand_for_what_they_name():
    framework, machine = framework_named("torchtitan"), MACHINES["b200"]
    named = legato.job("llama-3-8b", framework="torchtitan", machine="b200")
    model = named.model
    assert legato.job(model, name="llama-3-8b", framework=framework, machine=machine) == named


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "llama-3-9b"}, "unknown language model 'llama-3-9b'; did you mean 'llama-3-8b'"),
        ({"machine": "h10"}, "unknown machine 'h10'; did you mean 'h100'"),
        ({"framework": "megatron"}, "unknown preset 'megatron'; did you mean 'megatron-core'"),
        ({"gpus": 100, "tensor": 8}, "gpus: 100 (expected 96: tensor 8 x context 1 x pipeline 1 x data 12)"),
        ({"gpus": 0}, "gpus: 0 (expected 1: "),
        ({"overlap": ["tensr"]}, "overlap: 'tensr' (expected tensor, tensor:forward"),
        ({"pipeline": 0, "gpus": 8}, "pipeline: 0 (expected 1 to 1,048,576)"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks: 2 (expected 1"),
    ],
)
def test_wrong_input_is_one_line(given, said):
    with pytest.raises(InputError, match=re.escape(said)):
        legato.job(**{"model": MODEL} | given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": 0}, "gpus: 0 (expected at least 1)"),
        ({"memory_nbytes": 2**20}, "layouts fits in 1 MiB (the nearest, "),
        ({"gpus": 11, "batch": 3}, "gpus: 11 for a batch of 3 sequences"),
    ],
)
def test_layouts_that_cannot_be(given, said):
    with pytest.raises(InputError, match=re.escape(said)):
        legato.layouts(MODEL, **{"gpus": 8, "batch": 8} | given)
