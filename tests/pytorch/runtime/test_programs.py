"""Training programs made at random give DDP's bits, or one clear refusal; `programs.py` makes as many as one likes."""

import collections

import pytest
from support import PATIENCE_S, programs

#: Programs under given plans, and under plans that legato makes.
SEEDS = {"legato": range(25), "auto": range(10)}


@pytest.fixture
def pool(monkeypatch):
    # None of these hangs, under DDP either, and a busy machine may take long.
    monkeypatch.setattr(programs, "PATIENCE_S", dict.fromkeys(programs.PATIENCE_S, PATIENCE_S))
    monkeypatch.setattr(programs, "AFTER_A_FAILURE_S", PATIENCE_S)
    pool = programs.Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", [pytest.param("legato", marks=pytest.mark.slow), "auto"])
def test_programs_made_at_random_give_the_bits_of_ddp(pool, kind):
    outcomes, failures = collections.Counter(), []
    for seed in SEEDS[kind]:
        names = programs.drawn(seed, auto=kind == "auto")
        outcome, what = programs.verdict(pool, seed, names, kind)
        outcomes[outcome] += 1
        if outcome == "fails":
            failures.append(programs.report(pool, seed, names, what, kind)[1])
    assert not failures, "\n".join(failures)
    assert outcomes["equal"] > len(SEEDS[kind]) / 2, outcomes
