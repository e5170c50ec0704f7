"""Blocks of tensors: they carry all bytes, and plans made of them are valid and nearly as good."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.strategies import clusters, examples, workloads

from legato.core.plan import check_plan
from legato.schedule import SCHEDULERS, schedule
from legato.schedule.basics.compose import is_runnable
from legato.schedule.bound.lower_bound import lower_bound
from legato.schedule.search import blocks as module
from legato.schedule.search.blocks import Blocks
from legato.schedule.search.fill import Piece
from legato.simulator.collective import iteration_time


@pytest.fixture(autouse=True, scope="module")
def few_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_BLOCKS", 3)
        yield


@given(workloads(max_tensors=12), st.data())
def test_a_block_is_ready_with_its_last_tensor_and_as_urgent_as_its_most_urgent_one(workload, data):
    count = len(workload.tensors)
    times = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    ready, tail = data.draw(times), data.draw(times)
    blocks = Blocks(workload, ready, tail)
    assert sorted(t for block in blocks.members for t in block) == list(range(count))
    for k, block in enumerate(blocks.members):
        assert blocks.nbytes[k] == sum(workload.tensors[t].nbytes for t in block)
        assert blocks.release_s[k] == max(ready[t] for t in block)
        assert blocks.tail_s[k] == max(tail[t] for t in block)
    share = workload.nbytes / 3
    assert count <= 3 or all(a + b > share for a, b in zip(blocks.nbytes, blocks.nbytes[1:], strict=False))


@given(workloads(max_tensors=12), st.data())
def test_pieces_of_blocks_carry_every_byte_once(workload, data):
    workload = replace(workload, tensors=tuple(replace(t, nbytes=5 * t.nbytes) for t in workload.tensors))
    blocks = Blocks(workload, [float(t) for t in range(len(workload.tensors))], [0.0] * len(workload.tensors))
    pieces = []
    for k, nbytes in enumerate(blocks.nbytes):
        cuts = sorted(16 * cut for cut in data.draw(st.sets(st.integers(1, max(1, nbytes // 16)))) if 16 * cut < nbytes)
        pieces += [Piece(k, a, b - a) for a, b in zip([0, *cuts], [*cuts, nbytes], strict=True)]
    slices = blocks.slices(data.draw(st.permutations(pieces)))
    sent = sorted((s.tensor, byte) for s in slices for byte in range(s.start, s.stop))
    assert sent == sorted((t.name, byte) for t in workload.tensors for byte in range(t.nbytes))
    assert all(s.start % 16 == 0 for s in slices)


@examples(60)
@given(
    workloads(max_tensors=12) | workloads(max_tensors=12, compiled=True),
    clusters(contended=True),
    st.sampled_from([0.0, 0.125]),
)
def test_legato_is_within_its_gap_of_every_other(workload, cluster, unpack_s_per_byte):
    cluster = replace(cluster, unpack_s_per_byte=unpack_s_per_byte)
    plan = schedule("legato", workload, cluster, rounds=20)
    check_plan(plan, workload)
    assert is_runnable(plan, workload)
    ours = iteration_time(workload, plan, cluster)
    assert ours >= lower_bound(workload, cluster, order="any").seconds * (1 - 1e-9)
    for name in set(SCHEDULERS) - {"legato"}:
        other = schedule(name, workload, cluster)
        if is_runnable(other, workload):
            assert ours <= iteration_time(workload, other, cluster) * 1.005 * (1 + 1e-12), name
