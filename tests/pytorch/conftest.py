import importlib.util

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


# The planner's tests run without PyTorch; these need it.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
