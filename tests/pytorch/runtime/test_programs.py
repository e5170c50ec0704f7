"""Training programs made at random give DDP's bits, or one clear refusal; `programs.py` makes as many as one likes."""

import collections

import pytest
from support import PATIENCE_S, programs

pytestmark = pytest.mark.processes

SEEDS = range(25)


@pytest.fixture
def pool(monkeypatch):
    # None of these hangs, under DDP either, and a busy machine may take long.
    monkeypatch.setattr(programs, "PATIENCE_S", dict.fromkeys(programs.PATIENCE_S, PATIENCE_S))
    monkeypatch.setattr(programs, "AFTER_A_FAILURE_S", PATIENCE_S)
    pool = programs.Pool()
    yield pool
    pool.close()


def test_programs_made_at_random_give_the_bits_of_ddp(pool):
    outcomes, failures = collections.Counter(), []
    for seed in SEEDS:
        names = programs.drawn(seed)
        outcome, what = programs.verdict(pool, seed, names)
        outcomes[outcome] += 1
        if outcome == "fails":
            failures.append(programs.report(pool, seed, names, what)[1])
    assert not failures, "\n".join(failures)
    assert outcomes["equal"] > len(SEEDS) / 2, outcomes
