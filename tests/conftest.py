"""Profiles of hypothesis, ranks that tests of a file share, and the order of files on several processors."""

import importlib.util
import sys

import pytest
from hypothesis import settings
from support.ranks import Ranks
from support.strategies import QUICK, THOROUGH

# `--hypothesis-profile=thorough` looks 25 times as long; what a test asks for in `examples(n)` scales with it.
settings.register_profile("quick", deadline=None, max_examples=QUICK)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("quick")

# The planner's tests run without PyTorch; these need it.
collect_ignore = [] if importlib.util.find_spec("torch") else ["pytorch", "test_auto.py"]

#: Tasks after which worker processes are replaced.
TASKS = 25


@pytest.fixture(scope="module")
def pair():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def trio():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
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


def pytest_collection_modifyitems(items):
    """Files whose tests start processes come first: the others fill what time processors have left."""
    slow = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_sessionfinish():
    """xdist gives its workers ten seconds to end, in which a slow machine does not write what coverage measured."""
    if (coverage := sys.modules.get("coverage")) and (measuring := coverage.Coverage.current()):
        measuring.save()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n 2` a file is run by one of two workers; network namespaces are a matter of one alone."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return "hosts" if file.startswith(("tests/testbed/", "tests/demo/")) else file

    return Files(config, log)
