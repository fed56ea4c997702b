# Needs Python 3.11 or later; everything else goes into .venv. A second run finds its stamps and is quick.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST_ARGS ?= -n auto
# Everything but what trains and what benchmarks.
EXTRAS := dev,exporters,serve,postgres,dashboards,replay,cluster

.PHONY: help demo test lint format bench clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A stamp, since .venv/bin/python is a link to an older file.
$(VENV)/.made: scripts/venv.sh
	bash scripts/venv.sh $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.made
	@echo "installing prioscope"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing the development tools"
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.train: $(VENV)/.dev
	@echo "installing torch and torch-geometric (large; only tests and training need them)"
	$(PIP) -e '.[$(EXTRAS),train]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "installing what the benchmark's baselines need"
	$(PIP) -e '.[$(EXTRAS),bench]'
	@touch $@

demo: $(VENV)/.base ## Explain a simulated incident, then every built-in scenario
	$(BIN)/rca demo --out out --report out/demo.html
	$(BIN)/rca demo --all

test: $(VENV)/.train ## Run the tests
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## Format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench ## Compare with the baselines on public incidents (needs PRIOSCOPE_DATA)
	@test -n "$${PRIOSCOPE_DATA:-}" || { echo "error: PRIOSCOPE_DATA is not set" >&2; \
	  echo "cure: set it to the folder with the public data sets (docs/benchmarks.md)" >&2; exit 2; }
	$(BIN)/python -m benchmarks rca

clean: ## Remove the virtual environment, caches and output
	rm -rf $(VENV) out build dist tests/web/dist tests/web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
