"""Profiles of hypothesis, and ranks that tests share."""

import importlib.util

import pytest
from hypothesis import settings
from support.ranks import Ranks

settings.register_profile("legato", deadline=None)
settings.load_profile("legato")

# The planner's tests run without PyTorch; these need it.
collect_ignore = [] if importlib.util.find_spec("torch") else ["pytorch", "test_auto.py"]

#: Tasks after which worker processes are replaced.
TASKS = 25


@pytest.fixture(scope="session")
def pair():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def trio():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def quartet():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def two_ranks(pair):
    pair.renew(TASKS)
    return pair


@pytest.fixture
def three_ranks(trio):
    trio.renew(TASKS)
    return trio


@pytest.fixture
def four_ranks(quartet):
    quartet.renew(TASKS)
    return quartet
