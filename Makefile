# One virtual environment, .venv, used by every target.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test quick quick-pytest check pytest test-torch coverage lint docs linkcheck clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[all,test,docs]"
	touch $@

demo: install
	$(BIN)/legato demo

# Commands that tests start need not compile legato again and again.
unexport PYTHONDONTWRITEBYTECODE

# Many tests wait for processes and links, so more of them run at a time than there are cores.
PYTEST := $(BIN)/pytest -n 3 --dist loadscope --no-loadscope-reorder $(PYTEST_OPTIONS)

test: install
	$(MAKE) --no-print-directory --jobs 2 check pytest

# While you work: lint, what is fast, and one file on real processes; CONTRIBUTING.md says how long it takes.
QUICK := tests/core tests/ingest tests/zoo tests/report tests/pytorch/recording tests/testbed tests/test_public_api.py \
	tests/schedule/test_plans.py tests/simulator/flow/test_fabrics.py

quick: install
	$(MAKE) --no-print-directory --jobs 2 check quick-pytest

quick-pytest: install
	$(PYTEST) -m "not processes and not browser" $(QUICK)
	$(PYTEST) tests/pytorch/runtime/test_runtime.py

check: install
	$(BIN)/ruff format --check legato tests examples benchmarks
	$(BIN)/ruff check legato tests examples benchmarks
	$(BIN)/lint-imports
	$(BIN)/mypy

pytest: install
	$(PYTEST)

# What runs under torch, with a version of one's choice: make test-torch TORCH=2.11.0, or TORCH=newest
TORCH ?= 2.13.0
OTHER := .venv-torch-$(TORCH)

test-torch:
	test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/pip install --quiet --disable-pip-version-check --editable ".[all,test]" $(if $(filter newest,$(TORCH)),--upgrade torch,torch==$(TORCH))
	$(OTHER)/bin/pytest -n 3 --dist loadscope $(PYTEST_OPTIONS) tests/pytorch tests/test_auto.py

lint: install
	$(BIN)/ruff format legato tests examples benchmarks
	$(BIN)/ruff check --fix legato tests examples benchmarks

# Lines and branches of legato/ that the tests reach, in their worker processes too.
coverage: install
	$(BIN)/coverage erase
	COVERAGE_ROOT=$(CURDIR) $(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The site, in docs/_build; a warning is an error.
docs: install
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build
	@echo docs/_build/index.html

# Links, anchors, file names and command lines of every page.
linkcheck: install
	$(BIN)/pytest tests/docs/test_docs.py -k "links or exist or site"

clean:
	rm -rf .venv .venv-torch-* legato-demo docs/_build
