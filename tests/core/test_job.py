"""Whole jobs: groups of the mesh by hand, layers of stages, and one line for everything that does not fit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.jobs import GPT, IDEAL, LLAMA, MIXTURE, job

from legato.core.errors import FileError, InputError, TooLargeError
from legato.core.files import decode, encode, read, write
from legato.core.job import DIMENSIONS, Framework, Job, Mesh, WorkerGroup

PIPELINE = Mesh(pipeline=2)
TOO_LARGE = "mesh: 2,097,152 workers", "stages x chunks x microbatches: more than 4,194,304"
TWO_HOSTS = Mesh(tensor=2, context=2, pipeline=2, data=4, expert=2)


def test_a_file_holds_a_job(tmp_path):
    one = job(
        MIXTURE, TWO_HOSTS, Framework("own", hidden=("data",)), microbatches=8, schedule="interleaved", chunks=3,
        shard="optimizer", sequence_parallel=True, recompute="core",
    )  # fmt: skip
    write(tmp_path / "job.json", one)
    assert read(tmp_path / "job.json") == one
    assert b'"format":"legato.job/1"' in encode(one)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"tensor":1', b'"tensor":3', "model.heads: 8 (expected a multiple of the 3 workers of tensor)"),
        (b'"tensor":1', b'"tensor":0', "mesh.tensor: 0 (expected 1 to 1,048,576)"),
        (b'"schedule":"1f1b"', b'"schedule":"2f2b"', "schedule: \"2f2b\" (expected one of 'gpipe', '1f1b'"),
        (b'"flash":true', b'"flush":true', "framework.flush: unknown field (expected name, flash"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(old, new, message):
    data = encode(job())
    assert old in data
    with pytest.raises(FileError) as caught:
        decode(data.replace(old, new), Job)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: job(mesh=Mesh(tensor=8)), "model.kv_heads: 4"),
        (lambda: job(replace(LLAMA, intermediate=190), Mesh(tensor=4)), "model.intermediate: 190"),
        (lambda: job(mesh=Mesh(context=3)), "model.sequence: 128 (expected a multiple of 2 x 3 of context)"),
        (lambda: job(mesh=Mesh(data=2, expert=2)), "mesh.expert: 2 (expected a divisor of the 1 experts)"),
        (lambda: Mesh(data=4, expert=3), "expert: 3 (expected a divisor of the 4 workers of data)"),
        (lambda: Mesh(order=("tensor", "data", "data", "context")), "order: tensor, data, data, context"),
        (lambda: Mesh(tensor=2**20, data=2), "mesh: 2,097,152 workers"),
        (lambda: job(mesh=Mesh(pipeline=9)), "layers: 6 for 9 chunks (expected one or more a chunk)"),
        (
            lambda: job(mesh=PIPELINE, layers=(6,)),
            "layers: 1 numbers (expected one of at least 0 for each of 2 chunks)",
        ),
        (lambda: job(mesh=PIPELINE, layers=(3, 4)), "layers: 7 together (expected the model's 6)"),
        (lambda: job(mesh=Mesh(pipeline=3), layers=(3, 0, 3)), "layers: 6 for 3 chunks"),
        (lambda: job(chunks=2), "chunks: 2 (expected 1: only the schedule interleaved has more)"),
        (lambda: job(mesh=PIPELINE, schedule="interleaved", microbatches=3), "microbatches: 3 (expected a multiple"),
        (lambda: job(sequence_parallel=True), "sequence_parallel: true"),
        (lambda: job(mesh=PIPELINE, microbatches=2**22), "stages x chunks x microbatches: more than 4,194,304"),
        (lambda: job(microbatch=0), "microbatch: 0 (expected 1 to"),
        (lambda: replace(LLAMA, kv_heads=3), "kv_heads: 3 (expected a divisor of the 8 heads)"),
        (lambda: replace(MIXTURE, active_experts=9), "active_experts: 9"),
        (lambda: replace(MIXTURE, expert_intermediate=0), "expert_intermediate: 0"),
        (lambda: replace(MIXTURE, dense_layers=7), "dense_layers: 7"),
        (lambda: replace(IDEAL, efficiency=1.5), "efficiency: 1.5 (expected a share, above 0 to 1)"),
        (lambda: replace(IDEAL, card_bytes_per_s=float("inf")), "card_bytes_per_s: inf (expected a number above 0)"),
        (lambda: replace(IDEAL, latency_s=-1.0), "latency_s: -1.0 (expected seconds, 0 to 1)"),
        (lambda: Framework(mixture_s=float("nan")), "mixture_s: nan"),
    ],
)
def test_what_does_not_fit_is_one_line(make, message):
    with pytest.raises(InputError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, TooLargeError) == (message in TOO_LARGE)


def test_groups_of_a_mesh():
    """32 workers: pipeline 2 x data 4 (2 replicas of 2) x context 2 x tensor 2; strides 16, 4 (8 and 4), 2, 1."""
    one = job(MIXTURE, TWO_HOSTS, microbatches=2)
    assert one.mesh.workers == 32
    assert one.group("tensor") == WorkerGroup(2, 1, 2)
    assert one.group("context") == WorkerGroup(2, 1, 2)
    assert one.group("expert") == WorkerGroup(2, 1, 2)
    assert one.group("data") == WorkerGroup(4, 2, 2)
    assert one.group("replica") == WorkerGroup(2, 2, 1)
    assert one.group("data", "context") == WorkerGroup(8, 2, 4)
    assert one.group("pipeline") == WorkerGroup(2, 2, 1)
    assert one.mesh.placements(["pipeline"], 8) == [(0, 2)]
    inside = replace(one.mesh, order=("data", "context", "tensor", "pipeline"))
    assert inside.placements(["pipeline"], 8) == [(0, 0)]
    assert inside.placements(["data"], 8) == [(0, 1, 2, 3)]


def test_the_slowest_of_groups_that_lie_differently():
    """Six neighbours of 8 a host: 0 to 5 are on one host; of 6 to 11 two are on the first and four on the second."""
    one = job(LLAMA, Mesh(pipeline=4, data=6))
    assert one.group("data") == WorkerGroup(6, 2, 2)
    assert one.group("data", stage=0) == WorkerGroup(6, 1, 6)
    assert one.group("data", stage=1) == WorkerGroup(6, 2, 2)
    assert one.mesh.placements(["data"], 8) == [(0,) * 6, (0, 0, 0, 0, 1, 1), (0, 0, 1, 1, 1, 1)]


sizes = st.sampled_from([1, 2, 3, 4, 6])


@given(sizes, sizes, sizes, sizes, st.permutations(DIMENSIONS), st.integers(1, 20), st.data())
def test_groups_of_any_mesh(tensor, context, pipeline, data, order, gpus_per_host, drawn):
    """Against all groups of all workers, each from the coordinates of its members."""
    expert = drawn.draw(st.sampled_from([n for n in (1, 2, 3) if data % n == 0]))
    mesh = Mesh(tensor, context, pipeline, data, expert, tuple(order))
    names = drawn.draw(st.lists(st.sampled_from([*DIMENSIONS, "expert", "replica"]), unique=True))
    outermost_first = []
    for name in order:
        parts = [("replica", data // expert), ("expert", expert)] if name == "data" else [(name, getattr(mesh, name))]
        outermost_first += parts
    shared = set(names) | ({"replica", "expert"} if "data" in names else set())
    groups, stages = {}, {}
    for rank, place in enumerate(itertools.product(*(range(size) for _, size in outermost_first))):
        key = tuple(at for at, (name, _) in zip(place, outermost_first, strict=True) if name not in shared)
        groups.setdefault(key, []).append(rank)
        stages[key] = next(at for at, (name, _) in zip(place, outermost_first, strict=True) if name == "pipeline")
    found, alike = {}, {}
    for key, ranks in groups.items():
        base = ranks[0] // gpus_per_host
        found.setdefault(stages[key], set()).add(tuple(rank // gpus_per_host - base for rank in ranks))
    placements = mesh.placements(names, gpus_per_host)
    assert set(placements) == set().union(*found.values()) and len(placements) == len(set(placements))
    if "pipeline" in names:
        return
    for stage, own in found.items():
        assert set(mesh.placements(names, gpus_per_host, stage)) == own
        assert alike.setdefault(mesh.offset(stage, gpus_per_host), own) == own


@pytest.mark.parametrize(
    ("layers", "pipeline", "chunks", "split"),
    [
        (6, 3, 1, (2, 2, 2)),
        (126, 8, 1, (15, 16, 16, 16, 16, 16, 16, 15)),
        (126, 8, 2, (7, *[8] * 14, 7)),
        (126, 16, 8, (0, *[1] * 126, 0)),
        (7, 4, 1, (1, 3, 2, 1)),
        (5, 1, 1, (5,)),
    ],
)
def test_layers_of_the_chunks(layers, pipeline, chunks, split):
    schedule = "interleaved" if chunks > 1 else "1f1b"
    model = replace(LLAMA, layers=layers)
    one = job(model, Mesh(pipeline=pipeline), schedule=schedule, chunks=chunks, microbatches=pipeline)
    assert one.split == split and sum(split) == layers


def test_tokens_of_a_step():
    assert job(GPT, Mesh(data=4, tensor=2), microbatch=3, microbatches=5).tokens == 4 * 3 * 5 * 128


def test_mixtures_are_the_layers_behind_the_dense_ones():
    assert list(MIXTURE.mixtures) == [1, 2, 3, 4, 5]
    assert list(LLAMA.mixtures) == []
