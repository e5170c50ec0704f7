"""Profiles of hypothesis, ranks that tests of a file share, and the order of files on several processors."""

import importlib.util
import sys

import pytest
from hypothesis import settings
from support import durations
from support.ranks import Ranks
from support.strategies import QUICK, THOROUGH, USUAL

# `make test` is quick, `make test-all` usual, and both try the same examples every time; "thorough" looks for new ones,
# 25 times as long as usual. What a test asks for in `examples(n)` scales with it.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=QUICK)
settings.register_profile("usual", deadline=None, derandomize=True, max_examples=USUAL)
settings.register_profile("thorough", deadline=None, max_examples=THOROUGH)
settings.load_profile("quick")

# The planner's tests run without PyTorch; these need it.
collect_ignore = [] if importlib.util.find_spec("torch") else ["pytorch", "test_auto.py"]

#: Tasks after which worker processes are replaced.
TASKS = 25


@pytest.fixture(scope="module")
def ranks_of(request):
    """A function that returns so many ranks, which the tests of a file share; the file may name their `BACKEND`."""
    started = {}

    def ranks(size):
        if size not in started:
            started[size] = Ranks(size, getattr(request.module, "BACKEND", "gloo"))
        started[size].renew(TASKS)
        return started[size]

    yield ranks
    for each in started.values():
        each.close()


@pytest.fixture
def two_ranks(ranks_of):
    return ranks_of(2)


@pytest.fixture
def three_ranks(ranks_of):
    return ranks_of(3)


@pytest.fixture
def four_ranks(ranks_of):
    return ranks_of(4)


def pytest_addoption(parser):
    parser.addoption("--keep-durations", action="store_true", help="write what each file takes to tests/durations.json")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Measured(config.getoption("keep_durations")))


def pytest_collection_modifyitems(items):
    """Files that take long come first: the others fill what time processors have left."""
    kept = durations.kept()
    items.sort(key=lambda item: -sum(kept.get(durations.name(item.path), durations.UNKNOWN).values()))


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
            return "hosts" if file.startswith(("tests/lab/testbed/", "tests/lab/demo/")) else file

    return Files(config, log)
