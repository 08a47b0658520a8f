# What a bare machine needs: python3 (3.11 or newer, with venv), make, and a way to PyPI and the Go module proxy.
# PYTHON=python3.12 chooses the interpreter; NEBULA_CACHE moves the cache of the local Kubernetes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A shell's own environment must not reach into ours.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: demo test test-slow model chaos soak lint bench e2e cluster clean help

demo: $(READY) ## Show it all on this machine: two fake clouds, failover, a killed controller (SCENE=NAME or all, KEEP=1)
	@$(BIN)/python -m hack.demo

test: $(READY) ## Run the tests, but for the slow ones, against a real API server and a real Postgres
	@$(BIN)/python -m hack.cluster build
	@$(BIN)/python -m hack.shards

test-slow: $(READY) ## Run the slow tests: faults, kill matrices, conformance under faults
	@$(BIN)/python -m hack.cluster build
	@$(BIN)/python -m hack.shards --slow

model: $(READY) ## Search for a schedule that breaks the renting protocol (SEEDS=100000)
	@$(BIN)/python -m tests.model --seeds $(or $(SEEDS),100000)

chaos: $(READY) ## Seeded faults against the whole system (SEEDS=100, FIRST=1, or SEED=n for that one alone; RUNPOD=1)
	@$(BIN)/python -m hack.cluster build
	@SEEDS=$(or $(SEEDS),100) $(BIN)/python -m pytest tests/chaos/$(if $(RUNPOD),test_runpod_seeds,test_seeds).py -q -s

soak: $(READY) ## Seven minutes without a leader, unscaled: no Pod of ours is evicted (nine minutes)
	@$(BIN)/python -m hack.cluster build
	@$(BIN)/python -m pytest tests/soak -q -s

lint: $(READY) ## Check style, types, the direction of imports, and drift of CRDs and migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if grep -q '^\[\[tool.importlinter.contracts\]\]' pyproject.toml; then $(BIN)/lint-imports; fi
	$(BIN)/python -m app.api.crds --check
	$(BIN)/python -m app.api.crds --check --folder chart/files/crds
	$(BIN)/python -m app.store.migrate --check

bench: $(READY) ## Measure times, writes and CPU per Pod beside a floor (N=500, ARGS=--help)
	@$(BIN)/python -m hack.cluster build
	@$(BIN)/python -m tests.bench $(if $(N),--pods $(N)) $(ARGS)
	@$(BIN)/python -m pytest tests/bench/test_kubelet.py tests/bench/test_runpod.py -q -s

e2e: $(READY) ## As root: a release on a real node, from install to leaving, without a registry (ARGS=--help)
	@$(BIN)/python -m hack.e2e $(ARGS)

cluster: $(READY) ## Keep a local Kubernetes running, and print its export KUBECONFIG= line; Ctrl-C stops it
	@$(BIN)/python -m hack.cluster run

clean: ## Remove what was made in this folder; the shared cache of the local Kubernetes stays
	@if [ -x $(BIN)/python ] && [ -d .run/cluster ]; then $(BIN)/python -m hack.cluster down; fi
	rm -rf $(VENV) .run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Made again when the dependencies change. The stamp is written last: a half-made environment is finished next time.
$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON): install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $$($(PYTHON) --version) is too old: make PYTHON=python3.11 (or newer) $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: this Python has no venv; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) (about a minute, once)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
