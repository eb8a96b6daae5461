# `make demo` and `make test` each do all set-up on a fresh machine; nothing else has to be typed.
#
#   PYTHON  the interpreter the environment is made from (3.11 or newer)
#   TORCH   the torch build that is installed first, before anything can choose another one; pip's
#           own options may follow it: TORCH="torch==2.13.0 --index-url URL"
#   VENV    where the environment is put
#   ARGS    what is handed on to `gradwire demo` or to pytest

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
# One stamp for what the demo needs and one for what development needs besides. Another TORCH is
# another stamp, so that changing it installs again.
TORCH_SUM := $(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)
REPORT_STAMP := $(VENV)/.installed-report-$(TORCH_SUM)
DEV_STAMP := $(VENV)/.installed-dev-$(TORCH_SUM)
DOCS_STAMP := $(VENV)/.installed-docs-$(TORCH_SUM)
# The library, the lab and the benchmarks are three packages, and are installed together here.
PROJECTS := pyproject.toml lab/pyproject.toml bench/pyproject.toml

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export DEBIAN_FRONTEND := noninteractive

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-nightly test-all fuzz check docs marks dist format setup system clean
# Two installs at once would write the same environment.
.NOTPARALLEL:

help:
	@echo 'make demo      train one model seven ways on four shaped hosts and write a report'
	@echo 'make test      run the tests, but for the slow ones'
	@echo 'make test-slow run the tests that make test leaves out'
	@echo 'make test-nightly run the tests that take minutes each'
	@echo 'make test-all  run all tests'
	@echo 'make fuzz      ten minutes of damaged payloads, exchanges and programs under AddressSanitizer'
	@echo 'make check     lint, formatting, types'
	@echo 'make docs      build the documentation site into build/site'
	@echo 'make marks     mark figures of docs/measured.md with the age of the code that they measure'
	@echo 'make dist      build all wheels and source archives into dist, and check them'
	@echo 'make format    rewrite the sources in the house format'
	@echo 'make clean     remove the environment and what tools left behind'

demo: system $(REPORT_STAMP)
	@$(BIN)/gradwire demo $(ARGS)

# Three workers for two cores: tests wait for ranks, and for faults to be noticed.
PYTEST = $(BIN)/python -m pytest --numprocesses=3 --max-worker-restart=0 --dist=loadgroup

test: system $(DEV_STAMP)
	@$(PYTEST) -m 'not slow' $(ARGS)

test-slow: system $(DEV_STAMP)
	@$(PYTEST) -m 'slow and not nightly' $(ARGS)

test-nightly: system $(DEV_STAMP)
	@$(PYTEST) -m nightly $(ARGS)

test-all: system $(DEV_STAMP)
	@$(PYTEST) $(ARGS)

fuzz: system $(DEV_STAMP)
	@$(BIN)/python -m tests.fuzzing $(ARGS)

check: $(DEV_STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(DEV_STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: system $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'build/site/index.html'

# The site has the marks of the day; this writes them into the page too.
marks: $(DEV_STAMP)
	@$(BIN)/python -m scripts.measured_marks

# The pure wheel and the source archive of each package, and gradwire's wheels with kernels. That of
# another platform needs g++-aarch64-linux-gnu, and is left out where that is not there.
dist: system $(DEV_STAMP)
	@$(BIN)/python -m pip install --quiet build twine
	@rm -rf dist
	@for folder in . lab bench; do $(BIN)/python -m build --outdir dist $$folder || exit 1; done
	@for platform in x86_64 aarch64; do \
	  if test $$platform = "$$(uname -m)" || command -v $$platform-linux-gnu-g++ >/dev/null; then \
	    GRADWIRE_WHEEL=$$platform $(BIN)/python -m build --no-isolation --wheel --outdir dist . || exit 1; \
	  else echo "no wheel for $$platform: no $$platform-linux-gnu-g++"; fi; \
	done
	@$(BIN)/python -m twine check --strict dist/*

setup: $(DEV_STAMP)

# torch comes first and alone: what pip is configured to look at (an index, a folder of wheels)
# decides which build it is, and the second install then finds its requirement satisfied.
define install
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[$(1)]' --editable lab --editable bench
endef

$(REPORT_STAMP): $(PROJECTS) | system
	$(call install,report)
	@touch $@

$(DOCS_STAMP): $(PROJECTS) | system
	$(call install,docs)
	@touch $@

# The extra dev contains report.
$(DEV_STAMP): $(PROJECTS) | system
	$(call install,dev)
	@touch $(REPORT_STAMP) $@

# iproute2 shapes the hosts and g++ builds the kernels: fetched where that can be done without
# asking (root, apt), and otherwise gradwire runs and says what it lacks. Only an interpreter that
# can make an environment cannot be missing.
system:
	@PATH="$$PATH:/usr/sbin:/sbin"; missing=""; \
	command -v "$(PYTHON)" >/dev/null || missing=" python3 python3-venv"; \
	test -x $(BIN)/python || "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
	  || missing=" python3 python3-venv"; \
	command -v ip >/dev/null && command -v tc >/dev/null || missing="$$missing iproute2"; \
	command -v g++ >/dev/null || missing="$$missing g++"; \
	if test -n "$$missing"; then \
	  if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	    echo "installing with apt-get:$$missing"; \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } \
	      >/dev/null || echo "apt-get could not install:$$missing; going on without"; \
	  else \
	    echo "not installed:$$missing; with root rights: apt-get install$$missing"; \
	  fi; \
	fi; \
	test -x $(BIN)/python || "$(PYTHON)" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gradwire needs Python 3.11 or newer with its venv module, and '$(PYTHON)' is not that;" \
	    "name another one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),test)" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist demo-report .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
