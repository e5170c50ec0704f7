# One virtual environment, .venv, used by every target.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: dist release install demo test test-lab test-all check pytest pytest-all test-torch durations coverage lint docs linkcheck clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[all,test,docs]"
	touch $@

demo: install
	$(BIN)/legato demo

# Commands that tests start need not compile legato again and again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder
# Many of the slow tests wait for processes and links, so more of them run at a time than there are cores.
ALL := -n 3 --hypothesis-profile=usual

# What can break while you work: about five minutes on two cores.
test: install
	$(MAKE) --no-print-directory --jobs 2 check pytest

# The lab, when it changes: what stands in legato/lab.
test-lab: .venv/compiled .venv/late
	$(PYTEST) $(ALL) $(PYTEST_OPTIONS) tests/lab

# Everything, as CI runs it every night: about half an hour.
test-all: install
	$(MAKE) --no-print-directory --jobs 2 check pytest-all

check: install
	$(BIN)/ruff format --check legato tests examples benchmarks
	$(BIN)/ruff check legato tests examples benchmarks
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

# The simulator's and the bounds' loops are compiled once here, not by each of the processes that run tests.
.venv/compiled: .venv/installed legato/simulator/flow/engine/*.py legato/schedule/bound/arguments/two_sided_states.py
	$(BIN)/pytest tests/schedule/bound/test_bound.py::test_all_reduces_with_updates_anywhere \
		tests/simulator/flow/shared/test_jobs.py::test_a_disturbed_job_alone_is_what_it_was \
		tests/cli/test_share.py::test_disturbed_cases_are_beside_the_same_ones_undisturbed \
		tests/cli/test_share.py::test_priorities_beside_equal_ones \
		tests/cli/test_whole_jobs.py::test_a_job_is_simulated_link_by_link >/dev/null
	touch $@

# The accelerator without a GPU, where there is a compiler for it.
.venv/late: .venv/installed tests/support/late/*
	PYTHONPATH=tests $(BIN)/python -c "from support import late; late.can_be_built() and late.built()"
	touch $@

pytest: .venv/compiled .venv/late
	$(PYTEST) -m "not slow" --ignore=tests/lab $(PYTEST_OPTIONS)

pytest-all: .venv/compiled .venv/late
	$(PYTEST) $(ALL) $(PYTEST_OPTIONS)

# What runs under torch, with a version of one's choice: make test-torch TORCH=2.11.0, or TORCH=newest
TORCH ?= 2.13.0
OTHER := .venv-torch-$(TORCH)

test-torch:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check --editable ".[all,test]" $(if $(filter newest,$(TORCH)),--upgrade torch,torch==$(TORCH))
	$(OTHER)/bin/pytest --dist loadscope $(ALL) $(PYTEST_OPTIONS) tests/pytorch tests/lab/servers tests/test_auto.py

lint: install
	$(BIN)/ruff format legato tests examples benchmarks
	$(BIN)/ruff check --fix legato tests examples benchmarks

# What each file of tests takes, for tests/durations.json: on a machine that does nothing else, and one file at a time
# for those tests that are not slow.
durations: install
	$(BIN)/pytest --keep-durations -m "not slow" $(PYTEST_OPTIONS)
	$(PYTEST) --keep-durations -m slow $(ALL) $(PYTEST_OPTIONS)

# Lines and branches of legato/ that the tests reach, in their worker processes too.
coverage: install
	$(BIN)/coverage erase
	COVERAGE_ROOT=$(CURDIR) $(BIN)/coverage run $(PYTEST) $(ALL) $(PYTEST_OPTIONS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The wheel and the sources, in dist.
dist: install
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[release]"
	rm -rf dist
	$(BIN)/python -m hatchling build

# A release: make release VERSION=0.2.0 sets the version everywhere, builds what is uploaded, and tags the commit.
release:
	@test -n "$(VERSION)" || { echo "release: VERSION is missing (expected a version like 0.2.0)"; exit 2; }
	@test -z "$$(git status --porcelain)" || { echo "release: files differ from the last commit (expected none)"; exit 2; }
	sed -i 's/^__version__ = .*/__version__ = "$(VERSION)"/' legato/core/__init__.py
	sed -i 's/^version: .*/version: $(VERSION)/' CITATION.cff
	sed -i 's/^## Unreleased$$/## Unreleased\n\n## $(VERSION) - '"$$(date -u +%F)"'/' CHANGELOG.md
	$(MAKE) --no-print-directory dist
	git commit --quiet --all --message "Release $(VERSION)"
	git tag "v$(VERSION)"
	@echo "git push origin main v$(VERSION) publishes it: CI runs all tests and keeps dist"

# The site, in docs/_build; a warning is an error.
docs: install
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build
	@echo docs/_build/index.html

# Links, anchors, file names and command lines of every page.
linkcheck: install
	$(BIN)/pytest tests/docs/test_docs.py -k "links or exist or site"

clean:
	rm -rf .venv .venv-torch-* legato-demo docs/_build
