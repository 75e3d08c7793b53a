# Everything from a bare machine with Python 3.11 or newer and make.
PYTHON ?= python3
BIN := .venv/bin

# A path in place of an import hook, which a folder named headrace in the working directory would hide.
EDITABLE := --config-settings editable_mode=compat --editable

# uv installs in a quarter of the time; `make UV= test` uses pip.
UV ?= $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python --quiet,$(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet)
CPU_TORCH := $(if $(UV),--torch-backend=cpu)

.PHONY: help demo test test-all chaos check fix lint mutants reference bench bench-cpu bench-data bench-plan clean

help:
	@echo "make demo        prepare data, train, evaluate, sample and export, in a few minutes on a CPU"
	@echo "make test        linters and the quick tests; FILE=tests/nn/test_rope.py: one file, or FILE=...::test_name"
	@echo "make check       linters and the tests that your changes can reach; BASE=main: the changes since main"
	@echo "make fix         format the code and fix what the linter can fix"
	@echo "make lint        formatting, lint and types"
	@echo "make test-all    the slow tests as well"
	@echo "make chaos       inject every fault of tests/support/faults.py and print what happened"
	@echo "make mutants     change operators and constants of MODULE=headrace/... and list what no test catches"
	@echo "make reference   regenerate docs/reference/recipe-keys.md from the comments in the code"
	@echo "make bench       ratios against peers, on a machine with one GPU"
	@echo "make bench-cpu   the demo recipe against torch, on any machine"
	@echo "make bench-data  the data pipeline against its peers, on any machine"
	@echo "make bench-plan  plans for TPU slices by their compiler, and MaxText's, on any machine"

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Headrace needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing Headrace into .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) --constraint constraints.txt $(EDITABLE) .
	@touch $@

.venv/test: .venv/core
	@echo "installing what the tests need into .venv"
	@$(INSTALL) --constraint constraints.txt $(CPU_TORCH) $(EDITABLE) '.[test]'
	@touch $@

# In a folder of its own, for tests/training/test_tpu_compile.py alone: among the other packages JAX would find it
# at every start, look for a TPU, and print that there is none.
.venv/libtpu: .venv/test
	@$(INSTALL) --constraint constraints.txt --upgrade --target $@ libtpu
	@touch $@

# In a folder of its own, for one test of tests/chaos/test_faults.py: thirty packages that nothing else needs.
.venv/wandb: .venv/test
	@$(INSTALL) --constraint constraints.txt --upgrade --target $@ wandb
	@touch $@

# An environment of its own, for one test of tests/tpu/test_components.py: it wants other versions than we do.
.venv/sky: .venv/test
	@rm -rf $@
	@$(BIN)/python -m venv $@
	@$@/bin/python -m pip --disable-pip-version-check install --quiet --quiet skypilot==0.14.1
	@touch $@

demo: .venv/core
	@echo; echo "1. Tokenize and pack text that every machine has: the source of the Python library"
	$(BIN)/headrace data prepare recipes/data/demo.yaml
	@echo; echo "2. Train a small Llama"
	$(BIN)/headrace train recipes/demo.yaml
	@echo; echo "3. Its loss on held-out text, and the entropy of single tokens to compare it with"
	$(BIN)/headrace eval runs/demo
	@echo; echo "4. A sample"
	$(BIN)/headrace generate runs/demo --prompt "def " --tokens 80
	@echo; echo "5. Export to the Hugging Face format"
	@rm -rf runs/demo/huggingface
	$(BIN)/headrace export runs/demo runs/demo/huggingface
	@echo; echo "What to try next:"
	@echo "  . $(BIN)/activate"
	@echo "  headrace generate runs/demo --prompt \"import \" --temperature 0.5"
	@echo "  headrace train recipes/demo.yaml schedule.steps=1000        # resumes at step 500"
	@echo "  headrace train recipes/demo.yaml run_dir=runs/muon optimizer.use=muon"
	@echo "  headrace recipe list; headrace recipe show recipes/llama3.2-1b.yaml"
	@echo "  less README.md docs/tour.md"

fix: .venv/test
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .
	$(BIN)/ruff check .

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ifdef FILE
test: .venv/test
	$(BIN)/python -m pytest --quiet $(FILE)
else
test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal --quiet
endif

BASE ?= HEAD
check: lint
	@files=$$($(BIN)/python -m tests.support.reach $(BASE)) || exit 1; \
	if [ -z "$$files" ]; then echo "no test can be reached from the changes since $(BASE)"; exit 0; fi; \
	echo "$$(echo "$$files" | wc -l) test files can be reached from the changes since $(BASE)"; \
	$(BIN)/python -m pytest -n auto --dist worksteal --quiet $$files

MODULE ?=
COUNT ?= 0
mutants: .venv/test
	$(BIN)/python -m tests.support.mutants $(MODULE) --count $(COUNT)

# lm-evaluation-harness, and the thirty packages that come with it.
.venv/eval: .venv/test
	@$(INSTALL) --constraint constraints.txt $(EDITABLE) '.[eval]'
	@touch $@

test-all: .venv/libtpu .venv/sky .venv/wandb .venv/eval lint
	$(BIN)/python -m pytest -n auto --dist worksteal --quiet --slow -o faulthandler_timeout=3600

# Two at a time: many of the faults are timed, and a busy machine would miss the moment.
chaos: .venv/wandb
	$(BIN)/python -m pytest -n 2 --dist worksteal --quiet --slow -o faulthandler_timeout=3600 -m fault

.venv/gpu: .venv/test
	@$(INSTALL) --constraint constraints.txt $(EDITABLE) '.[gpu]'
	@touch $@

reference: .venv/core
	$(BIN)/python -m headrace.config.reference docs/reference/recipe-keys.md

bench: .venv/gpu
	$(BIN)/python -m benchmarks.llama_gpu
	$(BIN)/python -m benchmarks.loss_gpu
	$(BIN)/python -m benchmarks.attention_gpu
	$(BIN)/python -m benchmarks.low_precision
	$(BIN)/python -m benchmarks.encoder_gpu
	$(BIN)/python -m benchmarks.xlstm_gpu
	$(BIN)/python -m benchmarks.long_gpu
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.cpu

bench-cpu: .venv/test
	$(BIN)/python -m benchmarks.cpu

# Two environments: mosaicml-streaming wants an older huggingface_hub than the others.
.venv/peers/ready: .venv/core
	@$(PYTHON) -m venv .venv/peers
	@.venv/peers/bin/python -m pip --disable-pip-version-check install --quiet 'datatrove[processing]' datasets grain \
		array_record tokenizers gigatoken fastokens tiktoken orjson torch==2.13.0
	@touch $@

.venv/streaming/ready: .venv/core
	@$(PYTHON) -m venv .venv/streaming
	@.venv/streaming/bin/python -m pip --disable-pip-version-check install --quiet mosaicml-streaming torch==2.13.0
	@touch $@

bench-data: .venv/test .venv/peers/ready .venv/streaming/ready
	$(BIN)/python -m benchmarks.data

# MaxText recommends Python 3.12, which uv finds or brings; the lowest versions it allows are the same every day.
.venv/maxtext/ready: .venv/core
	@echo "installing MaxText into .venv/maxtext"
	@$(PYTHON) -m venv .venv/uv
	@.venv/uv/bin/python -m pip --disable-pip-version-check install --quiet uv
	@.venv/uv/bin/uv venv --quiet --clear --python 3.12 .venv/maxtext
	@.venv/uv/bin/uv pip install --quiet --python .venv/maxtext/bin/python --resolution=lowest 'maxtext[tpu]==0.2.5'
	@touch $@

bench-plan: .venv/libtpu .venv/maxtext/ready
	$(BIN)/python -m benchmarks.plan

clean:
	rm -rf .venv build dist *.egg-info
