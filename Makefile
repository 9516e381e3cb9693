# make train: the main job.  make test: all checks.  Both set up what they need in .venv, from nothing but Python 3.11+ and make.
# More settings for the main job: make train ARGS="trainer.total_steps=30 lora.rank=32"

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
ARGS ?=

.PHONY: train test test-all test-verl lint format setup clean

train: .venv/.ready
	$(BIN)/rllm train examples/solver_judge/solver_judge_flow.py $(ARGS)

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest -m "not gpu"

# With verl 0.9.1 in VERL_SITE, a folder made on Linux without a GPU by
#   pip install --target DIR --no-deps verl==0.9.1 TransferQueue==0.1.11 torchdata pyzmq msgspec
#   pip install --target DIR -c constraints.txt 'ray[default]' 'tensordict<0.16' hydra-core datasets accelerate codetiming dill pandas \
#       pyarrow pybind11 pylatexenc orjson cachetools
# (1.7 GB, as two of these bring torch). It comes before .venv on the path, so both need the same versions: hence the constraints.
test-verl: .venv/.ready-dev
	@test -d "$(VERL_SITE)" || { echo "make: say VERL_SITE=DIR, a folder with verl 0.9.1 (see the Makefile)"; exit 2; }
	PYTHONPATH=src:tests/cluster:$(VERL_SITE) $(BIN)/python -m pytest tests/cluster

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: .venv/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: .venv/.ready-dev

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one, or say make PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv .venv

# torch goes first and alone, so that its exact version is the one that everything else is resolved against.
.venv/.ready: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/.ready-dev: .venv/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
