# Everything a person or CI does with this project. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SITE_TOOLS := $(VENV)/.installed-docs

# More arguments for the tool of a target: make test ARGS="-k conformance", make bench ARGS=...
ARGS ?=

# How long `make test` may take on two quiet cores: it leaves out the longest tests until the others fit.
MINUTES ?= 4

# How many processes run tests, one file after another. A test keeps two to five ranks busy, and waits as long as it
# computes, so that two fill two cores. WORKERS=0 runs the tests in pytest's own process, for -s and --pdb.
WORKERS ?= 2
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# What `make bench` measures, in under five minutes. The others: make bench BENCH="hosts record horovod contention decode epoch listing"
BENCH ?= all_reduce train_step startup

# Nothing is written outside the clone (pip keeps its own cache): what programs would put under
# the home directory or leave in /tmp goes under the environment's folder.
VAR := $(CURDIR)/$(VENV)/var
RUN := MPLCONFIGDIR=$(VAR)/matplotlib XDG_CACHE_HOME=$(VAR)/cache PYTEST_DEBUG_TEMPROOT=$(VAR)/tmp
# mkdocs-material advertises at each start, unless it is told not to.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs
# Tests start Python thousands of times, and without its byte code each start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help venv site-tools train docs docs-serve test test-all gpu lab samples matrix check lint types doctests layers torch-suite nightly bench failures clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do \
		printf '  make %-11s %s\n' "$$name" "$$text"; done

venv: $(INSTALLED) ## make the virtual environment .venv with the pinned versions

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"Lockstep needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned versions into $(VENV); the first time this takes a while."
	@# The build tool comes from the constraints too, so the build needs no environment of its own.
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@mkdir -p $(VAR)/tmp
	@touch $@

$(SITE_TOOLS): $(INSTALLED)
	@$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

site-tools: $(SITE_TOOLS)

train: venv ## train on handwritten digits with 2 processes
	@$(RUN) $(BIN)/lockstep train digits --nproc 2 $(ARGS)

test: venv ## run the tests, all but the longest; under 8 minutes on two quiet cores
	$(RUN) $(BIN)/python $(PYTEST) --minutes $(MINUTES) $(ARGS)

test-all: venv ## run all tests
	$(RUN) $(BIN)/python $(PYTEST) $(ARGS)

gpu: ## what CUDA needs, on one GPU with the torch of PYTHON; writes benchmarks/results/gpu.json
	PYTHONPATH=src $(PYTHON) tests/gpu/gpu_run.py $(ARGS)

lab: ## what a larger machine at hand can tell in eight minutes, GPU and cores; writes benchmarks/results/lab
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.lab $(ARGS)

samples: venv ## run what README shows the output of, and write it there
	$(RUN) $(BIN)/python -m docs.samples

matrix: ## run the tests with every supported release of torch; writes docs/versions.md
	$(PYTHON) tests/matrix/run.py $(ARGS)

check: lint types doctests layers ## all that needs no ranks: style, types, documentation examples, layers

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

doctests: venv
	$(RUN) $(BIN)/python -m pytest --doctest-modules src/lockstep

layers: venv
	$(RUN) $(BIN)/python -m pytest tests/unit/test_layers.py tests/unit/test_public_names.py

docs: $(SITE_TOOLS) ## build the documentation site into build/site
	$(SITE) build --strict

docs-serve: $(SITE_TOOLS) ## show the documentation site, and what changes in it
	$(SITE) serve

torch-suite: venv ## run PyTorch's own tests of process groups on this backend
	$(RUN) $(BIN)/python tests/torch_suite/run.py $(ARGS)

nightly: venv ## what is too long for every commit: PyTorch's own suite, and three hours of random programs and input
	$(RUN) $(BIN)/python tests/torch_suite/run.py
	$(RUN) SOAK_MINUTES=60 $(BIN)/python -m pytest tests/soak $(ARGS)
	$(RUN) FUZZ_MINUTES=60 $(BIN)/python -m pytest tests/fuzz $(ARGS)

bench: venv ## measure against gloo and torch, BENCH=… chooses; writes JSON, tables and plots
	$(RUN) $(BIN)/python -m benchmarks $(BENCH) $(ARGS)

failures: venv ## run every failure on gloo and lockstep side by side; writes docs/failures.md
	$(RUN) $(BIN)/python -m docs.failures.measure

clean: ## remove the virtual environment, caches and runs
	rm -rf $(VENV) .venv-matrix build dist runs src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
