# Everything a person or a machine runs. `make` alone lists the targets.

PYTHON    ?= python3.11
VENV      ?= .venv
WORKERS   ?= 2
PIP_FLAGS ?=
SEEDS     ?= 0:500

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/installed
SOURCES   := partitioner passes cost_models tests examples benchmarks
PYTEST    := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q

# One thread a worker: the workers share the cores.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-weekly test-gpu fuzz lint format bench docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)   the interpreter that makes the environment"
	@echo "  VENV=$(VENV)          where the environment is"
	@echo "  WORKERS=$(WORKERS)           processes that run the tests"
	@echo "  SEEDS=$(SEEDS)         seeds of make fuzz, the last not included"
	@echo "  PIP_FLAGS=$(PIP_FLAGS)          more arguments for pip install, for example, for a torch without CUDA:"
	@echo "                      --extra-index-url https://download.pytorch.org/whl/cpu"

demo: $(INSTALLED) ## train a small GPT over four stages, beside the same model in one piece
	@$(BIN)/python examples/gpt_pipeline.py

test: lint ## lint, types, layers, then the tests that fit in ten minutes on two cores
	$(PYTEST) -m "not slow and not gpu"

test-all: lint ## the same, with the full matrices
	$(PYTEST) -m "not gpu"

test-weekly: $(INSTALLED) ## the full matrices, with warnings of torch as errors
	$(PYTEST) -m "not gpu" --torch-warnings

test-gpu: $(INSTALLED) ## the tests that need an accelerator
	$(BIN)/python -m pytest -q -m gpu

fuzz: $(INSTALLED) ## random models, partitioned at random, beside the same in one piece: SEEDS=FIRST:LAST
	@$(BIN)/python -m tests.fuzz $(SEEDS) --workers $(WORKERS)

lint: $(INSTALLED) ## ruff, mypy --strict, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy $(SOURCES)
	$(BIN)/lint-imports --no-logo

format: $(INSTALLED) ## let ruff fix and format
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## ours beside torch's pipelining, DTensor, DistributedDataParallel, fully_shard, and halos by hand
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.tensor_parallel
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.tile

docs: $(INSTALLED) ## the pages as a site, in build/site
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove the environment, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints hold inside pip's isolated build too: old pip reads them from one variable, new pip from the other.
$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not on the path; pass another one: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing into $(VENV) (torch is large: minutes the first time, nothing afterwards)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install \
		--quiet --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@
