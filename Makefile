# Every target sets up .venv first (tools/setup.sh; at once done the second time). Nothing needs activation.
PYTHON := .venv/bin/python
SHELL := /bin/bash

.PHONY: help setup demo test test-fast lint clean

help:
	@echo "make demo       train the demo recipe on this machine (CPU is enough)"
	@echo "make test       all tests; make test-fast: the quick unit tests only (under a minute)"
	@echo "make lint       ruff, shellcheck"
	@echo "make clean      remove .venv, caches and build outputs (runs/ is kept)"

setup:
	@bash tools/setup.sh

# Each demo gets a run folder of its own, so that a second `make demo` does not meet the first one's.
demo: setup
	@name=demo-$$(date +%Y%m%d-%H%M%S) && \
	$(PYTHON) -m sao_megatron.cli train configs/guess-number-cpu.yaml name=$$name && \
	echo "Look at the curves:   .venv/bin/tensorboard --logdir runs/$$name" && \
	echo "Look at every token:  .venv/bin/sao-megatron inspect runs/$$name --html $$name.html" && \
	echo "Logs and summary:     runs/$$name/logs/, runs/$$name/summary.json"

test: setup
	@bash tools/chromium.sh
	@bash tools/slurm.sh
	@$(PYTHON) -m pytest tests

test-fast: setup
	@$(PYTHON) -m pytest -q tests/unit -m "not slow"

lint: setup
	@$(PYTHON) -m ruff check .
	@if command -v shellcheck >/dev/null; then shellcheck -x slurm/*.sbatch slurm/*.sh launch/*.sh tools/*.sh; \
	else echo "shellcheck is not installed: the shell scripts were not checked"; fi

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
