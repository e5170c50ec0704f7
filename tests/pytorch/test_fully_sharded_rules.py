"""The rules of FSDP2 that plans are made by, beside what torch's own `fully_shard` does."""

import pytest

pytest.importorskip("torch")

from support import wrapped
from support.architectures import ARCHITECTURES
from support.wrapped import WRAPPINGS

pytestmark = pytest.mark.processes


def test_the_order_of_collectives_is_torchs_own(two_ranks):
    for seed in range(WRAPPINGS):
        (found, said), _ = two_ranks.run(wrapped.order, seed)
        assert found == said, f"wrapping {seed}"


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_the_memory_of_a_step_is_what_torch_allocates(two_ranks, mixed):
    exact = 0.01 if mixed else 0.005  # on a CPU, products in bf16 are slow, and take memory of their own
    for seed in range(WRAPPINGS // (12 if mixed else 4)):
        for _ in range(8):  # the profiler loses events now and then, often several times in a row
            found, said = two_ranks.run(wrapped.peaks, seed, mixed)[0]
            if found and abs(said / found - 1) <= exact:
                break
        assert said == pytest.approx(found, rel=exact), f"wrapping {seed}"


@pytest.mark.parametrize("name", list(ARCHITECTURES) if WRAPPINGS >= 300 else ["unet", "gpt2, tied", "t5"])
def test_captured_models_are_wrapped_in_torchs_order(two_ranks, name):
    for seed in range(4 if WRAPPINGS >= 300 else 2):
        (found, said), _ = two_ranks.run(wrapped.architecture_order, name, seed)
        assert found == said, f"{name}, wrapping {seed}"
