# make demo | test | test-all | lint | bench: each sets up what it needs in .venv first.
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin
SHELL := /bin/bash
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all lint bench

demo: .venv/.demo
	$(BIN)/anyformer demo

test: lint
	$(BIN)/pytest -n 2
	scripts/check_wheel.sh

test-all: .venv/.dev
	HYPOTHESIS_PROFILE=all $(BIN)/pytest -n 2

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: .venv/.dev
	set -o pipefail; for file in $(filter-out benchmarks/measure.py,$(wildcard benchmarks/*.py)); do \
		echo "== python $$file"; $(BIN)/python $$file || failed=1; \
	done | tee results/benchmarks.txt; test -z "$$(grep FAILS results/benchmarks.txt)"

.venv/.created:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.demo: pyproject.toml constraints.txt | .venv/.created
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[viz,hf,exact]'
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/.created
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[viz,dev]'
	touch $@ .venv/.demo
