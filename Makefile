# Two commands do everything on a machine with Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test bench clean

demo: $(VENV)/.demo  ## Install kedge and run the demo: a trained detector and a report in runs/demo.
	$(BIN)/kedge demo

test: $(VENV)/.test  ## Install kedge with its test tools; lint, check types, run the tests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

bench: $(VENV)/.test  ## Time kedge's metrics against scikit-learn's, side by side.
	$(BIN)/python benchmarks/metrics.py

clean:  ## Remove the environment and everything that was made in it.
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing kedge[$*] into $(VENV): about two minutes the first time"
	@$(INSTALL) -e ".[$*]"
	@touch $@
