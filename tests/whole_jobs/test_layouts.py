"""The search for layouts, against predicting all of them."""

import pytest
from msgspec.structs import replace

from legato.core.job import LanguageModel
from legato.whole_jobs.layouts import jobs, layouts
from legato.whole_jobs.memory import static
from legato.whole_jobs.step import floor_s, predict
from legato.zoo.presets import framework_named, machine_named

MODEL = LanguageModel(8, 1024, 16, 8, 64, 4096, 32_000, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["megatron-core", "torchtitan", "megatron-2021"])
def test_the_search_finds_what_all_predictions_find(preset):
    framework, machine = framework_named(preset), machine_named("h100")
    steps = [predict(job) for job in jobs("small", MODEL, framework, machine, 16, 32)]
    for step in steps:
        assert floor_s(step.job) <= step.seconds * (1 + 1e-12)
        assert static(step.job) <= step.memory.total * (1 + 1e-12)
    limit = round(sorted(step.memory.total for step in steps)[len(steps) // 2])
    near = sorted(step.seconds for step in steps if step.memory.total <= limit)
    fits = min(step.seconds for step in steps if step.memory.room_in(limit) == "fits")
    found = layouts(MODEL, gpus=16, batch=32, machine=machine, framework=preset, memory_nbytes=limit, number=5)
    assert found.complete and found.number == len(steps)
    assert [step.seconds for step in found.best[:5]] == near[:5]
    assert found.first.seconds == fits and found.first.room == "fits"


def test_tensor_parallel_layouts_are_sequence_parallel_too():
    found = list(jobs("small", MODEL, framework_named("megatron-core"), machine_named("h100"), 16, 32))
    assert {job.mesh.tensor for job in found} == {1, 2, 4, 8}
    assert all(job.sequence_parallel == (job.mesh.tensor > 1) for job in found)


def test_all_chunks_that_divide_evenly_are_tried():
    """Of 12 layers on 2 stages: 2, 3 and 6 chunks, 7 with the ends, and 4 (8 would be more than layers)."""
    model = replace(MODEL, layers=12)
    found = list(jobs("small", model, framework_named("megatron-core"), machine_named("h100"), 16, 32))
    chunks = {job.chunks: job.uneven for job in found if job.mesh.pipeline == 2 and job.schedule == "interleaved"}
    assert chunks == {2: False, 3: False, 4: True, 6: False, 7: False}


def test_sharded_parameters_may_have_a_replica_on_each_host():
    found = list(jobs("small", MODEL, framework_named("torchtitan"), machine_named("h100"), 32, 32))
    assert {job.replicas for job in found if job.mesh.data == 32} == {1, 4}
    assert {job.replicas for job in found if job.mesh.data <= 8} == {1}


def test_context_parallelism_leaves_as_many_tokens_as_measured_steps_have():
    found = list(jobs("small", MODEL, framework_named("megatron-core"), machine_named("h100"), 16, 32))
    tokens = {job.microbatch * MODEL.sequence // job.mesh.context for job in found if job.mesh.context > 1}
    assert min(tokens) == 2048
    shorter = replace(MODEL, sequence=512)
    found = list(jobs("small", shorter, framework_named("megatron-core"), machine_named("h100"), 16, 32))
    assert {(job.microbatch, job.mesh.context) for job in found} >= {(1, 1), (8, 2)}
    assert max(job.mesh.context for job in found) == 2
