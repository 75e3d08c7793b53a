# Everything from a bare machine with Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-all lint bench clean

help:
	@echo "make demo      corpus, tokenizer, training, evaluation, sample and export, in a few minutes on a CPU"
	@echo "make test      lint and the quick tests"
	@echo "make test-all  the slow tests as well"
	@echo "make lint      ruff and mypy"
	@echo "make bench     ratios against peers on this machine's accelerator"

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Millrace needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing Millrace into .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/test: .venv/core
	@echo "installing what the tests need into .venv"
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

.venv/aot: .venv/test
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[aot]'
	@touch $@

demo: .venv/core
	@$(BIN)/python demo.py

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --quiet

test-all: .venv/aot lint
	$(BIN)/python -m pytest -n auto --quiet --slow

bench: .venv/test
	$(BIN)/python -m benchmarks.llama_1b

clean:
	rm -rf .venv build dist *.egg-info
