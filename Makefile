# Two commands do everything on a machine with python3 (3.11+) and make:
#   make run PROMPT="..."    virtual environment, install, default model, answer
#   make test                the whole suite
# And `make bench PEER_PYTHON=...` compares with llama.cpp: bench/README.md.

PYTHON ?= python3
VENV ?= .venv
PROMPT ?= Why is the sky blue? Answer in two sentences.
PYTEST_ARGS ?=
BENCH_ARGS ?=
# The interpreter that has llama-cpp-python (the extra `peers`).
PEER_PYTHON ?= $(VENV)/bin/python

BIN := $(VENV)/bin
# Handed over in the environment, so that quotes and dollars in a prompt survive the shell.
export PROMPT

.PHONY: run test lint bench wheel clean

run: $(VENV)/.installed
	@$(BIN)/ignis pull smollm2 >/dev/null
	@printf '%s' "$$PROMPT" | $(BIN)/ignis run

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check
	$(BIN)/python -m mypy

bench: $(VENV)/.installed-bench
	$(BIN)/python -m bench.compare --peer-python $(PEER_PYTHON) --json docs/benchmarks.json --svg docs/benchmarks.svg $(BENCH_ARGS)

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("error: Ignis needs Python 3.11 or newer, got %d.%d; set PYTHON=python3.11" % v[:2])'
	@$(PYTHON) -m venv $(VENV) || { echo "error: python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# The stamps depend on pyproject.toml: a changed dependency is installed again, nothing else is.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@ $(VENV)/.installed
