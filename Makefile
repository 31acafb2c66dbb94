# Every command works alone from a clean clone: it makes its virtual environment and installs into it what it needs.
# A second call skips that, until setup.cfg or pyproject.toml changes.

PYTHON ?= python3
ARGS ?=

VENV := .venv
LATEST := .venv-latest
TRAIN := $(VENV)/.has-train
TEST := $(VENV)/.has-test
# Two processes, each with half of the files; the one that is done first takes over some of the other's.
PYTEST := -m pytest -n 2 --dist worksteal

# An activated environment or the caller's Python settings change nothing here.
unexport PYTHONHOME PYTHONOPTIMIZE PYTHONPATH PYTHONSAFEPATH PYTHONSTARTUP PYTHONWARNINGS VIRTUAL_ENV
unexport PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV

.NOTPARALLEL:
.PHONY: help train bench chaos notebooks test test-latest lint format clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1: /p' Makefile

train: $(TRAIN) ## train the example language model; ARGS="--steps 20" for its options
	@$(VENV)/bin/python -m examples.train_lm $(ARGS)

bench: $(TRAIN) ## all benchmarks in turn: one layer, the runner, the policies, and what TPUs would need
	@$(VENV)/bin/python -m benchmarks.layer
	@$(VENV)/bin/python -m benchmarks.runner
	@$(VENV)/bin/python -m benchmarks.scopes
	@$(VENV)/bin/python -m benchmarks.policies
	@$(VENV)/bin/python -m benchmarks.aot || test $$? -eq 3  # 3: no compiler for TPUs is installed, and it says so

chaos: $(TRAIN) ## kill a training at 50 random moments and compare what comes of it with one that was left alone
	@$(VENV)/bin/python -m examples.train_lm.chaos $(ARGS)

notebooks: $(TEST) ## bring each notebook and its text file to the newer of the two
	@$(VENV)/bin/jupytext --sync notebooks/*.py

test: $(TEST) ## run the whole suite; ARGS="-k capacity" for some of it
	@$(VENV)/bin/python $(PYTEST) $(ARGS)

test-latest: $(LATEST)/.has-test ## the suite on the newest Python found beside this one, with the newest jax
	@$(LATEST)/bin/python $(PYTEST) $(ARGS)

lint: $(TEST) ## check format, style and types
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

format: $(TEST) ## format the code and mend what can be mended
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/ruff check --fix .

clean: ## remove the virtual environments and all caches
	rm -rf $(VENV) $(LATEST) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache

$(TRAIN): setup.cfg pyproject.toml
	@sh .ci/install $(PYTHON) $(VENV) train
	@touch $@

# What the tests need holds what the training needs.
$(TEST): setup.cfg pyproject.toml
	@sh .ci/install $(PYTHON) $(VENV) train,notebooks,test
	@touch $@ $(TRAIN)

$(LATEST)/.has-test: setup.cfg pyproject.toml
	@latest=$$($(PYTHON) .ci/newest_python) || { \
	  echo "Install one beside $(PYTHON) (on PATH, or where pyenv or uv put it); make test runs the suite on $(PYTHON)." >&2; exit 1; }; \
	sh .ci/install "$$latest" $(LATEST) train,notebooks,test --upgrade --upgrade-strategy eager
	@touch $@
