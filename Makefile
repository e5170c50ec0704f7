# One virtual environment, .venv, used by every target.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo,test,docs]"
	touch $@

demo: install
	$(BIN)/legato demo

test: install
	$(BIN)/ruff check legato tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/pytest

lint: install
	$(BIN)/ruff format legato tests examples benchmarks
	$(BIN)/ruff check --fix legato tests examples benchmarks

clean:
	rm -rf .venv legato-demo
