# `make demo` and `make test` do their own set-up; see README.md.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell grep '^torch==' constraints.txt)
PIP_FLAGS ?= --only-binary :all:
# Three workers for two cores. Each goes through files next to each other, so that module-scoped fixtures are made once; one that is
# done takes from the end of another's.
PYTEST_ARGS ?= -n auto --maxprocesses 16 --dist worksteal
# `make bench BENCHMARKS=disk BENCH_ARGS="--path /mnt/nvme"` runs one of them on another drive.
BENCHMARKS ?= $(basename $(notdir $(shell grep -l __main__ bench/*.py)))
# `make gpu GPU_ARGS="--only step --redo"` runs one part anew; `--path FOLDER` names the drive.
GPU_ARGS ?=
# A Python with torch of the machine's own, which is used as it is, and the folder of wheels with what it lacks. An environment
# that was not made here is one.
GPU_PYTHON ?= $(if $(filter file,$(origin TORCH)),$(if $(wildcard $(VENV)/stamp-torch),,$(wildcard $(VENV)/bin/python)))
GPU_WHEELS ?= build/gpu-wheels
# Pins that replace those of constraints.txt.
PINS ?=
# Where `make test` leaves pytest's exit code, which make replaces with its own.
STATUS ?= /dev/null
export TORCH

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench gpu oldest newest pythons soak clean FORCE

help: ## list what there is to make
	@grep -E '^[a-z]+:.* ## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.* ## (.*)/make \1\t\2/' | expand -t 14
	@echo "Each makes its own environment first; TORCH=..., PYTHON=... and VENV=... choose another: see README.md."

demo: $(VENV)/stamp-run ## train, resume, reshard and consolidate a small model: a minute
	@PATH="$(abspath $(VENV)/bin):$$PATH" examples/demo.sh

# Each worker, and each process that a test starts, would compile the same files where bytecode is not kept.
test: $(VENV)/stamp-test ## run the tests; PYTEST_ARGS="tests/tools/test_cli.py -q" runs some
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest --durations 20 $(PYTEST_ARGS); code=$$?; echo $$code > $(STATUS); exit $$code

oldest: ## run the tests of the engine, the store and the integrations with the oldest versions that are supported
	@$(MAKE) --no-print-directory test VENV=.venv-oldest PINS=constraints-oldest.txt TORCH="$$(grep '^torch==' constraints-oldest.txt)" \
	  PYTEST_ARGS="tests/engine tests/store tests/integrations -q -n auto --dist worksteal"

newest: ## run the tests with the newest torch that is known to serve (constraints-newest.txt)
	@$(MAKE) --no-print-directory test VENV=.venv-newest PINS=constraints-newest.txt TORCH="$$(grep '^torch==' constraints-newest.txt)"

pythons: ## run the tests on every Python from 3.11 on that is found
	@.ci/pythons all

soak: $(VENV)/stamp-test ## run the long tests, and those of the oldest and newest versions: hours
	$(PY) -m pytest --new-processes
	$(PY) -m pytest --sqrt-errs tests/engine tests/integrations/test_offloaded*.py
	$(PY) -m pytest -m soak --timeout 14400 -o faulthandler_timeout=0
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory oldest
	@$(MAKE) --no-print-directory newest

lint: $(VENV)/stamp-dev ## run ruff, mypy and the import contract
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/stamp-dev ## format, and apply ruff's fixes
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(VENV)/stamp-docs ## build the site into build/docs; a dead link or a bad docstring is an error
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/docs
	@echo "The site is in build/docs/index.html"

bench: $(VENV)/stamp-test ## run the benchmarks; BENCHMARKS=disk runs one
	@for name in $(BENCHMARKS); do echo "== bench.$$name" && $(PY) -m bench.$$name $(BENCH_ARGS) || exit 1; done

ifneq ($(GPU_PYTHON),)
# Nothing is installed: what that Python lacks comes from the wheels that bench.gpu_wheels gathered.
gpu:
	@rm -rf build/gpu-site && mkdir -p build/gpu-site
	@for wheel in $(wildcard $(GPU_WHEELS)/*.whl); do $(GPU_PYTHON) -m zipfile -e $$wheel build/gpu-site || exit 1; done
	@PATH="$(abspath $(GPU_WHEELS))/fio:$$PATH" PYTHONPATH="$(CURDIR):$(CURDIR)/build/gpu-site" $(GPU_PYTHON) -m bench.gpu $(GPU_ARGS)
else
# Nothing is installed before it is known that there is a device. Without TORCH the torch of an environment that is there stays.
gpu: GPU_TORCH = $(if $(filter file,$(origin TORCH)),$(if $(wildcard $(VENV)/stamp-torch),TORCH="$$(cat $(VENV)/stamp-torch)"))
gpu: ## run all that needs a CUDA device, in five parts of at most 5 minutes; GPU_PYTHON=python3 uses that torch
	@command -v nvidia-smi > /dev/null || [ -e /dev/nvidiactl ] || { echo 'make gpu: there is no NVIDIA driver here. It needs an NVIDIA GPU, and a torch with CUDA: make gpu TORCH="torch==VERSION --index-url URL"' >&2; exit 2; }
	@$(MAKE) --no-print-directory $(VENV)/stamp-torch $(GPU_TORCH)
	@$(PY) -m bench.gpu --check
	@$(MAKE) --no-print-directory $(VENV)/stamp-test $(GPU_TORCH)
	@$(PY) -c 'import deepspeed' 2> /dev/null || $(MAKE) --no-print-directory $(VENV)/stamp-bench $(GPU_TORCH) \
	  PIP_FLAGS='$(PIP_FLAGS) --no-binary deepspeed' || echo 'DeepSpeed could not be installed; what is compared with it is left out'
	@$(PY) -m bench.gpu $(GPU_ARGS)
endif

clean: ## remove the environment and all that was made
	rm -rf $(VENV) .venv-* demo-run build dist *.egg-info .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that its own index serves nothing else; the constraint then names the very build that is there,
# and no later installation can replace it. Made anew when TORCH changes.
$(VENV)/stamp-torch: FORCE
	@set -e; if [ "$$TORCH" != "$$(cat $@ 2>/dev/null)" ]; then \
	  if [ -e $(PY) ] && [ ! -e $@ ]; then \
	    echo 'make: $(VENV) was not made by make, which would replace what it has: name another folder as VENV ("make gpu" alone takes it as it is)' >&2; exit 2; \
	  fi; \
	  $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("zstore needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...")'; \
	  echo "Making the environment $(VENV) with $$($(PYTHON) --version)"; \
	  mkdir -p $(VENV); touch $@; $(PYTHON) -m venv $(VENV); \
	  echo "Installing $$TORCH into $(VENV) (up to several GB, unless pip has it)"; \
	  $(PIP) install --quiet $(PIP_FLAGS) $$TORCH; \
	  echo "$$TORCH" > $@; \
	fi

$(VENV)/constraints.txt: constraints.txt $(PINS) $(VENV)/stamp-torch
	@awk -F== '/^#/ || $$1 in seen || $$1 == "torch" {next} {seen[$$1]; print}' $(PINS) constraints.txt > $@
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >> $@

$(VENV)/stamp-run: $(VENV)/constraints.txt pyproject.toml
	@echo "Installing zstore and what it runs on into $(VENV)"
	@$(PIP) install --quiet $(PIP_FLAGS) --constraint $(VENV)/constraints.txt --editable .
	@touch $@

$(VENV)/stamp-%: $(VENV)/constraints.txt pyproject.toml
	@echo "Installing zstore and what its $* needs into $(VENV)"
	@$(PIP) install --quiet $(PIP_FLAGS) --constraint $(VENV)/constraints.txt --editable '.[$*]'
	@touch $@
