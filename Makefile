# Two commands do everything on a machine with Python, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PEERS := .venv-peers
BIN := $(VENV)/bin
PIP := python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALL := $(BIN)/$(PIP)

.PHONY: demo test coverage e2e evidence fuzz load chaos bench peers clean docs tables gallery

# Whole files, since their tests share fixtures; in order of their names, so that short files come last.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
SECONDS ?= 600
MINUTES ?= 5

demo: $(VENV)/.demo  ## Install kedge and run the demo: a trained detector and a report in runs/demo.
	$(BIN)/kedge demo --overwrite

test: $(VENV)/.test  ## Install kedge with its test tools; lint, check types, run the tests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(WORKERS)

coverage: $(VENV)/.test  ## Lines and branches that the tests run, room by room; fails below the gate in pyproject.toml.
	$(BIN)/python -m coverage run -m pytest $(WORKERS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

e2e: $(VENV)/.e2e  ## Open the reports, the service and the site in a real browser (chromium); without one the tests are skipped and say so.
	$(BIN)/python -m pytest -m e2e tests/e2e

evidence: $(VENV)/.test  ## The slow tests.
	$(BIN)/python -m pytest -m slow

fuzz: $(VENV)/.test  ## Fuzz every parser with a fresh seed: make fuzz SECONDS=600.
	cd tests && $(CURDIR)/$(BIN)/python -m fuzzing --seconds $(SECONDS)

load: $(VENV)/.test  ## Hold four times the capacity of the service, with hostile clients: make load MINUTES=5.
	$(BIN)/python benchmarks/load.py --minutes $(MINUTES)

chaos: $(VENV)/.test  ## Kill scoring, training and serving at random lines, resume, compare: make chaos MINUTES=60.
	$(BIN)/python benchmarks/chaos.py --minutes $(MINUTES)

docs: $(VENV)/.docs  ## Build the site into build/site, strictly; open build/site/index.html.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tables: $(VENV)/.test  ## Write docs/methods.md out of the docstrings, and the tables of docs/results.
	$(BIN)/python docs/methods.py
	$(BIN)/python docs/tables

gallery: $(VENV)/.test  ## Run the examples and write what they print and draw to docs/gallery.
	KEDGE_GALLERY=write $(BIN)/python -m pytest tests/test_gallery.py

bench: $(VENV)/.test  ## Time verdicts in plain forward passes, training steps, and metrics against scikit-learn's.
	$(BIN)/kedge bench --overwrite
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/training.py

peers: $(PEERS)/.installed  ## Compare scores, time and memory with pytorch-ood's, in an environment of its own.
	$(PEERS)/bin/python benchmarks/peers.py

clean:  ## Remove the environment and everything that was made in it.
	rm -rf $(VENV) $(PEERS) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); exit 1)

$(VENV)/.%: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing kedge[$*] into $(VENV): about two minutes the first time"
	@$(INSTALL) -e ".[$*]"
	@touch $@

# torchvision asks for its own torch and timm for downloads; neither is needed here, so they come without what they ask for.
$(PEERS)/.installed: pyproject.toml constraints.txt
	@echo "installing kedge, pytorch-ood and timm into $(PEERS): about two minutes the first time"
	@$(PYTHON) -m venv $(PEERS) || (rm -rf $(PEERS); exit 1)
	@$(PEERS)/bin/$(PIP) -e ".[demo]" scipy scikit-learn
	@$(PEERS)/bin/$(PIP) --no-deps torchvision==0.28.0 timm==1.0.30 pytorch-ood==0.4.0
	@touch $@
