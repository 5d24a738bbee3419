# make quickstart   sets everything up, trains a small GPT and nGPT on real text, and compares them
# make test         sets everything up and runs lint, types and the fast tests
# make test-slow         the slow tests, which .ci/run runs after these
# make test-exhaustive   the tests that are run by hand, an hour

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Pytest processes: `auto` is one a core and one more, at most 8. `make test WORKERS=0` runs all tests in one.
WORKERS ?= auto
# A test that takes so many seconds hangs, and fails; the longest takes 100 on two cores. A thread ends its process,
# because a signal would not reach a test that hangs in torch.
HANGS   := --timeout 900 --timeout-method thread
# Where tests are looked for: `make test-exhaustive TESTS=tests/unit/kernels`.
TESTS   ?= tests
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=30 --durations-min=5

.PHONY: quickstart test test-slow test-exhaustive lint clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m ngpt_train study study=quickstart

test: lint
	$(PYTEST) $(HANGS) -m "not slow and not exhaustive" $(TESTS)

test-slow: $(VENV)/.installed-dev
	$(PYTEST) $(HANGS) -m slow $(TESTS)

test-exhaustive: $(VENV)/.installed-dev
	$(PYTEST) -m exhaustive $(TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version); ngpt-train needs Python 3.11 to 3.13: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@# Only a model file inside it is wanted; on some Pythons it asks for an older numpy.
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt mistral-common
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache
