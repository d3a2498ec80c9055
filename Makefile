# What a fresh machine needs: Python 3.11 or later and make. Everything else goes into .venv, in the versions of constraints.txt.
#   make demo       a short training run with shared values, on two ranks
#   make test       the linters, the type checker and the tests
#   make benchmark  the figures, measured on this machine
# PYTHON=... picks the interpreter; PIP_ARGS=... reaches pip (another index, for instance); WORKERS=... is how many files
# of tests run at a time.

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
BIN := .venv/bin
# Twice quiet: errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install $(PIP_ARGS) -c constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test lint benchmark clean

demo: .venv/.recipes
	$(BIN)/python recipes/lightning_curriculum.py

test: lint
	@# Whole files, in their order: what a file computes once for its tests, a worker computes once.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmark: .venv/.test
	$(BIN)/python recipes/benchmark.py

clean:
	rm -rf .venv build dist *.egg-info outputs multirun lightning_logs
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps are made last, so that an installation that failed or was interrupted is tried again.
.venv/.torch: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, this is {sys.version}")'
	$(PYTHON) -m venv .venv
	@# First and by its pinned version: with other packages in the same call pip may look at other builds of it.
	$(PIP) $(TORCH)
	touch $@

.venv/.recipes: .venv/.torch pyproject.toml
	$(PIP) -e '.[recipes]'
	touch $@

.venv/.test: .venv/.torch pyproject.toml
	$(PIP) -e '.[dev,all]'
	touch $@
