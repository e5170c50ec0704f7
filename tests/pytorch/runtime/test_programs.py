"""Training programs made at random give DDP's bits, or one clear refusal; `programs.py` makes as many as one likes."""

import pytest
from support import programs

#: Programs under given plans, and under plans that legato makes.
SEEDS = {"legato": range(25), "auto": range(10)}


@pytest.mark.parametrize("kind", [pytest.param("legato", marks=pytest.mark.slow), "auto"])
def test_programs_made_at_random_give_the_bits_of_ddp(kind):
    programs.check(SEEDS[kind], kind)
