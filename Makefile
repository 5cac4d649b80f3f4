# make demo    answers a few prompts with a small real model
# make test    the whole suite, as CI runs it
# make test-npu  the NPU path, proved without an NPU: torch_npu over stubbed libraries, in .venv-npu; part of make test
# make test-oldest  text, images and checkpoints with the oldest dependencies allowed, in .venv-oldest; part of make test
# make quick   lint, types, import contract and the quick tests: some two minutes
#
# Each prepares what it needs in .venv, once, and again when pyproject.toml or constraints.txt change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PROFILE := $(or $(NVA_HYPOTHESIS),$(if $(filter true,$(CI)),ci,full))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.NOTPARALLEL: # two pips in one environment would fight
.PHONY: help demo test test-npu test-oldest quick lint model models clean
help:
	@sed -n 's/^# make/make/p' Makefile

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	touch $@

model: $(VENV)/demo.installed
	$(BIN)/python scripts/demo_model.py

models: model
	$(BIN)/python scripts/gemma_model.py

demo: model
	$(BIN)/nva run --max-tokens 64 --temperature 0 \
	  "What is the capital of France? Answer briefly." \
	  "Write one sentence about the sea." \
	  "Explain in one sentence what a computer does." \
	  "What is 2 + 3?"

test: models lint
	NVA_HYPOTHESIS=$(PROFILE) $(PYTEST) -m "not npu"
	$(MAKE) test-oldest
	$(MAKE) test-npu

OLDEST_TESTS := tests/test_text.py tests/test_chat.py tests/test_pictures.py tests/test_images.py \
	tests/test_load.py tests/test_run.py tests/models

# The oldest transformers can't build the model that one case is compared with (YaRN for some layers only).
test-oldest: models $(VENV)/test.installed
	$(BIN)/python scripts/oldest_env.py .venv-oldest
	PYTHONPATH=.venv-oldest NVA_HYPOTHESIS=quick $(PYTEST) $(OLDEST_TESTS) -m "not npu and not slow" \
	  -k "not gemma3-layers and not ropes_of_gemma_swapped"

# torch_npu breaks a plain `import torch` where CANN is missing, so it gets an environment of its own.
test-npu: model $(VENV)/test.installed
	$(BIN)/python scripts/npu_env.py .venv-npu
	LD_LIBRARY_PATH=.venv-npu/cann OMP_NUM_THREADS=1 .venv-npu/bin/python -m pytest -n 2 tests/npu

quick: model lint
	NVA_HYPOTHESIS=quick $(PYTEST) -m "not npu and not slow"

lint: $(VENV)/test.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-npu .venv-oldest build *.egg-info .hypothesis .pytest_cache .ruff_cache .import_linter_cache
