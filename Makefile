# make demo: everything, end to end, in a virtual environment of its own
# make test: lint, type-check and tests on two cores, a file of tests at a time; what .ci/run runs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS = 1

.PHONY: demo test lint install clean
.DEFAULT_GOAL := test

install: $(VENV)/installed

# pip sees the pins of constraints.txt only; the environment is made again when they or pyproject.toml change.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	touch $@

demo: install
	PATH="$(abspath $(BIN)):$$PATH" bash examples/gpt/demo.sh

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
