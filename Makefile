# What CI runs is what you run: .ci/run calls `make test`.
#
# `setup` makes .venv in the checkout; every other target works on it and makes it first when it is missing or older than
# pyproject.toml. A torch that is already in .venv is kept.

BASE_PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PYTHON := $(VENV)/bin/python
# uv takes a tenth of pip's time, and nothing is compiled that nobody imports. torch comes by pip, which may know a build on disk.
INSTALL ?= $(VENV)/bin/uv pip install -q --python $(PYTHON)
export UV_HTTP_TIMEOUT ?= 180
OLDEST := .venv-oldest
PYTEST_FLAGS ?=
QUICK := -m "not slow and not gpu and not models"
# More at a time than there are cores: tests wait for time-outs and for one another's processes. They are dealt out by files,
# and those that start services so that files which share one stay together (tests/conftest.py). What takes long comes first.
TOGETHER := -n 4 --dist loadfile --no-loadscope-reorder
BY_SERVICES := -n 3 --dist loadscope --no-loadscope-reorder
STARTS_NO_SERVICE := tests/distribution tests/contract tests/unit
OLDEST_TESTS = $(wildcard $(shell grep -v '^\#' tests/oldest/tests.txt))
CHAOS_AT_LENGTH := tests/chaos/test_chaos_at_length.py

# One compute thread a process unless the caller says otherwise: services pin themselves.
export OMP_NUM_THREADS ?= 1
# Whatever the caller says: a service under test is four processes, and each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup format lint types collect unit test test-slow test-chaos test-oldest proto vendor demo picture bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: $(VENV)/.complete  ## make .venv with everything that work on specpipe needs

$(VENV)/.complete: pyproject.toml
	@test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	@ls -d $(VENV)/lib/python3*/site-packages/torch >/dev/null 2>&1 || $(PYTHON) -m pip install -q --no-compile "$(TORCH)"
	@test -x $(VENV)/bin/uv || $(PYTHON) -m pip install -qq --no-compile "uv>=0.9,<1"
	$(INSTALL) -e ".[dev,gguf]"
	@touch $@

format: setup  ## rewrite the code in the project's format
	$(VENV)/bin/ruff check -q --fix-only .
	$(VENV)/bin/ruff format -q .

lint: setup  ## ruff: rules and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: setup  ## mypy --strict
	$(VENV)/bin/mypy

collect: setup  ## every test can be collected; what tests import is compiled once, and not by each of their processes
	@$(PYTHON) -m pytest -qqq --collect-only $(QUICK) tests >$(VENV)/collected.txt || { cat $(VENV)/collected.txt; exit 1; }

unit: setup  ## the quick tests only: no service is started
	$(PYTHON) -m pytest $(PYTEST_FLAGS) $(TOGETHER) $(QUICK) $(STARTS_NO_SERVICE)

test: setup  ## everything that must pass before a change lands
	$(MAKE) --no-print-directory -j 2 lint types collect $(OLDEST)/.complete
	$(PYTHON) -m pytest $(PYTEST_FLAGS) $(TOGETHER) $(QUICK) $(STARTS_NO_SERVICE)
	$(PYTHON) -m pytest $(PYTEST_FLAGS) $(BY_SERVICES) $(QUICK) $(STARTS_NO_SERVICE:%=--ignore=%) --ignore=tests/integration/test_oldest.py
	$(MAKE) --no-print-directory test-oldest

test-slow: setup  ## the long tests: about an hour
	$(PYTHON) -m pytest $(PYTEST_FLAGS) -m "slow and not gpu" --ignore=$(CHAOS_AT_LENGTH)

test-chaos: setup  ## 300 faults over 2,000 requests, faults between network namespaces, an hour's soak: about two hours
	$(PYTHON) -m pytest $(PYTEST_FLAGS) -m "slow and not gpu" $(CHAOS_AT_LENGTH)

# An environment of its own for the oldest versions we support. What is not pinned there comes from .venv by a .pth file.
test-oldest: $(OLDEST)/.complete  ## the version-sensitive tests on the oldest supported dependencies
	$(OLDEST)/bin/python tests/oldest/check_versions.py
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider $(PYTEST_FLAGS) $(TOGETHER) $(QUICK) $(OLDEST_TESTS)

$(OLDEST)/.complete: $(VENV)/.complete tests/oldest/requirements.txt
	@rm -rf $(OLDEST)
	$(PYTHON) -m venv --without-pip $(OLDEST)
	@$(PYTHON) -c 'import pathlib, sysconfig; site = pathlib.Path(sysconfig.get_path("purelib")); \
	  own = pathlib.Path("$(OLDEST)").resolve() / site.relative_to(pathlib.Path("$(VENV)").resolve()); \
	  (own / "rest.pth").write_text(f"{site}\n{pathlib.Path.cwd()}\n")'
	$(PYTHON) -m pip --python $(OLDEST)/bin/python install -qq --no-compile -r tests/oldest/requirements.txt
	@$(OLDEST)/bin/python -m pytest -p no:cacheprovider -qqq --collect-only $(QUICK) $(OLDEST_TESTS) >$(OLDEST)/collected.txt || { cat $(OLDEST)/collected.txt; exit 1; }
	@touch $@

proto: setup  ## regenerate specpipe/rpc/v1 from proto/
	$(PYTHON) proto/generate.py

vendor: setup  ## fetch the live page's front-end libraries again (needs npm)
	$(PYTHON) tools/vendor.py

demo: setup  ## the main job from nothing: a streamed, pipelined answer of the demo pair, then the same without drafts
	$(PYTHON) -m specpipe.cli.demo

picture: setup  ## docs/images/trace.svg: a real answer of the demo pair, for the README
	@mkdir -p docs/images
	$(PYTHON) -m specpipe generate 'import unittest' --temperature 0.6 --seed 3 --max-tokens 60 --json --trace-file docs/images/trace.svg >/dev/null

bench: setup  ## speed of off, sync and pipelined, interleaved
	$(PYTHON) -m benchmarks.modes

clean:  ## remove environments and caches
	rm -rf $(VENV) $(OLDEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
