"""Training programs made at random in which ranks differ give DDP's bits, or one clear refusal (`differing.py`)."""

import pytest
from support import differing


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 60), marks=pytest.mark.slow)])
def test_programs_whose_ranks_differ_give_the_bits_of_ddp(seeds):
    differing.check(seeds, "auto")
