# Every target but `wheel` creates .venv when it is missing or out of date, and compiles the native library anew when its sources
# changed. Needed on the machine: make and Python >= 3.11; with a C++ compiler attention is several times as fast.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
STAMP := .venv/.installed
READY := .venv/.native
NATIVE := src/deltaserve/compute/native

$(STAMP): pyproject.toml setup.py constraints.txt scripts/make-venv
	@scripts/make-venv

$(READY): $(STAMP) $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h) $(NATIVE)/compile_library.py
	@echo "compiling the native library (a minute or two)"
	@$(PYTHON) -m deltaserve.compute.native.compile_library
	@touch $@

.PHONY: help venv wheel demo docs check test test-full test-lowest sim sim-mutants features soak bench clients ray gpu-check format clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(READY) ## Create .venv: torch for CPU where there is no NVIDIA GPU, then deltaserve with its pinned dependencies

wheel: ## A release's source archive and wheel (manylinux), in dist: needs python3 >= 3.11 and a C++ compiler only
	@scripts/wheel

demo: $(READY) ## Prefill and decode apart, decode's cache off and on; a talk with a language model, left running by KEEP=1
	@$(PYTHON) -m deltaserve.cli.main demo $(if $(KEEP),--keep) $(ARGS)

docs: $(READY) ## The documentation as a site in out/site, built without a network
	@$(PYTHON) -m tools.docs_site

check: $(READY) ## Format, lint, strict types, import law, security rules: what CI checks
	@scripts/check

test: $(READY) ## The checks, then all tests that are not marked slow or wide; CI runs wide ones, too
	@scripts/check
	@scripts/test

test-full: $(READY) ## As test, with long property runs and all that is marked; then test-lowest, ray and all clients
	@scripts/check
	@scripts/test --full
	@scripts/test-lowest
	@scripts/test-ray
	@$(PYTHON) -m tools.clients.client_table --print

test-lowest: $(READY) ## The quick tests with the oldest dependencies that are allowed, in an environment of their own
	@scripts/test-lowest

sim: $(READY) ## The fault simulator, at length: SEEDS=100000; then every fault at every moment of a small run
	@$(PYTHON) -m deltaserve.cli.main sim faults --gates --seeds $(or $(SEEDS),100000) $(ARGS)
	@$(PYTHON) -m deltaserve.cli.main sim exhaustive --minutes $(or $(MINUTES),20)

sim-mutants: $(READY) ## Plant known faults in the code, one at a time: the simulator must find each
	@$(PYTHON) -m tools.sim_mutants $(ARGS)

features: $(READY) ## Which rows of docs/features.md hold: ROWS="A1 T5", by default all that are done
	@$(PYTHON) -m tools.features $(ROWS) $(ARGS)

soak: $(READY) ## Real processes in a storm of faults, MINUTES=30 of it; SEED=N repeats one
	@OMP_NUM_THREADS=1 PYTHONPATH=src:. $(PYTHON) -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) $(ARGS)

bench: $(READY) ## Benchmarks of docs/performance.md (about 37 minutes, idle machine); some: ARGS="cache e2e"
	@scripts/bench $(ARGS)

clients: $(READY) ## Unmodified clients of other projects, each in an environment of its own; writes docs/clients.md
	@$(PYTHON) -m tools.clients.client_table $(ARGS)

ray: $(READY) ## serve --cluster ray on four nodes of this machine, in an environment of its own that has Ray
	@scripts/test-ray $(ARGS)

gpu-check: $(READY) ## On a GPU: tests/gpu, and whether servers answer rightly there; speed, too: ARGS="--parts card,engine"
	@PYTHONPATH=src:. $(PYTHON) -m benchmarks.bench_gpu --budget-seconds 900 --parts tests,recall $(ARGS)

format: $(READY) ## Rewrite the sources in the one format
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format --quiet .

clean: ## Remove .venv and everything else that is not a source
	@rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
