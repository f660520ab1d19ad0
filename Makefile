# Every target creates .venv when it is missing or out of date. Needed on the machine: make and Python >= 3.11.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
STAMP := .venv/.installed

$(STAMP): pyproject.toml constraints.txt scripts/make-venv
	@scripts/make-venv

.PHONY: help venv demo check test test-full sim sim-mutants features soak bench gpu-check format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv: CPU or CUDA torch as pip finds it, then deltaserve with its pinned dependencies

demo: $(STAMP) ## Prefill and decode apart, decode's cache off and on; a talk with a language model, left running by KEEP=1
	@$(PYTHON) -m deltaserve.cli.main demo $(if $(KEEP),--keep) $(ARGS)

check: $(STAMP) ## Format, lint, strict types, import law, security rules: what CI checks
	@scripts/check

test: $(STAMP) ## The checks, then all tests (about 16 minutes on 2 cores)
	@scripts/check
	@scripts/test

test-full: $(STAMP) ## As test, with the long property runs and the tests marked slow
	@scripts/check
	@scripts/test --full

sim: $(STAMP) ## The fault simulator, at length: SEEDS=100000; then every fault at every moment of a small run
	@$(PYTHON) -m deltaserve.cli.main sim faults --gates --seeds $(or $(SEEDS),100000) $(ARGS)
	@$(PYTHON) -m deltaserve.cli.main sim exhaustive --minutes $(or $(MINUTES),20)

sim-mutants: $(STAMP) ## Plant known faults in the code, one at a time: the simulator must find each
	@$(PYTHON) -m tools.sim_mutants $(ARGS)

features: $(STAMP) ## Which rows of docs/features.md hold: ROWS="A1 T5", by default all that are done
	@$(PYTHON) -m tools.features $(ROWS) $(ARGS)

soak: $(STAMP) ## Real processes in a storm of faults, MINUTES=30 of it; SEED=N repeats one
	@OMP_NUM_THREADS=1 PYTHONPATH=src:. $(PYTHON) -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

bench: $(STAMP) ## Every benchmark of docs/performance.md (about 15 minutes, idle machine); some: ARGS="cache e2e"
	@scripts/bench $(ARGS)

gpu-check: $(STAMP) ## The tests that need a CUDA device
	@$(PYTHON) -m pytest tests/gpu $(ARGS)

format: $(STAMP) ## Rewrite the sources in the one format
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format --quiet .

clean: ## Remove .venv and everything else that is not a source
	@rm -rf .venv build out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
