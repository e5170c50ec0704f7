"""On a GPU: capture by events, and the runtime with gloo on CUDA tensors and with NCCL. Skipped where there is none."""

import pytest
import torch
from support import cuda_cases

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.fixture(scope="module")
def gloo_ranks():
    from support.ranks import Ranks

    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent", "Checkpointed"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adam-fused"])
def test_gloo_on_cuda_tensors(gloo_ranks, model, optimizer):
    assert gloo_ranks.run(cuda_cases.equality, model, optimizer, "cuda") == [0.0, 0.0]


@pytest.mark.parametrize("model", ["Convolutional", "Attention"])
def test_nccl_on_one_gpu(model):
    from support.ranks import Ranks

    ranks = Ranks(1, backend="nccl")
    try:
        assert ranks.run(cuda_cases.equality, model, "adam", "cuda") == [0.0]
    finally:
        ranks.close()


@pytest.mark.parametrize("model", ["Convolutional", "Attention", "Recurrent", "Checkpointed"])
def test_capture_by_events(model):
    order, hooked, compute_s, untraced_s = cuda_cases.captured(model)
    assert order == hooked
    assert compute_s == pytest.approx(untraced_s, rel=1e-6)


def test_automatic_plan(gloo_ranks):
    for difference, after in gloo_ranks.run(cuda_cases.automatic, "Convolutional"):
        assert difference == 0.0 and after != "default-buckets"
