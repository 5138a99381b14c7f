# Two commands on a fresh machine: `make demo` and `make test`. Each makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := cli,plot,test,test-kernels,dev

.PHONY: help demo test lint format clean
help:
	@echo "make demo    install and run the main job on the small trace that ships with the package"
	@echo "make test    install and run every test"
	@echo "make lint    ruff (lint, format check) and strict typing"
	@echo "make format  let ruff format the sources"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(VENV)/installed
	$(BIN)/mla-index demo

test: $(VENV)/installed
	$(BIN)/python -m pytest --numprocesses 2

lint: $(VENV)/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
