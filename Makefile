# make test      everything that checks the project
# make demo      train, get killed in the middle of a save, resume, compare bit for bit
# make demo-s3   the same on S3: a SeaweedFS server on loopback
# make bench     the CPU benchmark; results go to bench/results/
# make clean     remove what these made

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CPU_TORCH := torch==2.13.0
SOURCES := $(wildcard engine/* codec/* storage/*)
IN_TURN := tests/bench/ tests/demo/

.PHONY: test lint types unit demo demo-s3 bench clean

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# What measures time goes alone, everything else two at a time.
unit: $(STAMP)
	$(BIN)/python -m pytest $(IN_TURN) --cov --cov-report=
	$(BIN)/python -m pytest $(filter-out $(IN_TURN),$(wildcard tests/*/ tests/test_*.py)) -n 2 --cov --cov-append --cov-report=term

demo: $(STAMP)
	$(BIN)/python -m demo.run

demo-s3: $(STAMP)
	$(BIN)/python -m demo.run --s3

bench: $(STAMP)
	$(BIN)/python -m bench.save

# With an NVIDIA GPU: the extra that fits the CUDA version of torch. Without: the CPU build of torch.
$(STAMP): pyproject.toml $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
	  $(BIN)/pip install --quiet 'torch>=2.11' && \
	  cuda=$$($(BIN)/python -c 'import torch; print("cu" + torch.version.cuda.split(".")[0])') && \
	  $(BIN)/pip install --quiet -e ".[dev,bench,$$cuda]"; \
	else \
	  $(BIN)/pip install --quiet '$(CPU_TORCH)' && \
	  $(BIN)/pip install --quiet -e '.[dev,bench]'; \
	fi
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
