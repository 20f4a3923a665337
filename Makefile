# make help lists the targets. Variables:
#   PYTHON=python3.12   the interpreter that .venv is made with
#   TORCH=auto          auto, cpu, system or default: see scripts/setup_env.py
#   WORKERS=2           test processes
#   BENCH=name          a module of benchmarks/
#   ARGS="..."          passed on to the demo, to pytest or to the benchmarks

PYTHON  ?= python3
TORCH   ?= auto
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)
ARGS    ?=

VENV := .venv
PY   := $(VENV)/bin/python
SETUP_INPUTS := pyproject.toml constraints-cpu.txt scripts/setup_env.py

# A tool that could not be installed (a GPU machine without a network) is named and passed over.
have = $(PY) -c 'import $(1)' 2>/dev/null || { echo "$@: $(1) is not installed here: skipped"; exit 0; }

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types format bench clean

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.stamp-%: $(SETUP_INPUTS)
	@command -v $(PYTHON) >/dev/null || { echo "setup: error: '$(PYTHON)' not found; choose a Python 3.10 or newer with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py --venv $(VENV) --extra $* --torch $(TORCH)
	@touch $@

demo: $(VENV)/.stamp-demo  ## answer a question from a long text, dense and sparse (ARGS="--help")
	@$(PY) examples/long_context_qa.py $(ARGS)

test: lint types  ## everything CI runs: lint, types, tests, docs, examples (ARGS="-k name")
	@$(PY) -m pytest $$($(PY) -c 'import xdist' 2>/dev/null && echo "-n $(WORKERS)") $(ARGS)

test-all: lint types  ## the same with the slow tests
	@$(PY) -m pytest --run-slow $$($(PY) -c 'import xdist' 2>/dev/null && echo "-n $(WORKERS)") $(ARGS)

lint: $(VENV)/.stamp-dev  ## ruff: lint and format
	@$(call have,ruff); $(PY) -m ruff check . && $(PY) -m ruff format --check .

format: $(VENV)/.stamp-dev  ## let ruff reformat and repair what it can
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .

types: $(VENV)/.stamp-dev  ## mypy on the package
	@$(call have,mypy); $(PY) scripts/typecheck.py

bench: $(VENV)/.stamp-dev  ## one layer's attention on this machine (BENCH=name of another in benchmarks/)
	@$(PY) -m benchmarks.$(or $(BENCH),$$($(PY) -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')_attention_layer) $(ARGS)

clean:  ## remove what make and the tools made, .venv included
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
