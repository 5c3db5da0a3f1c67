# Needs git, make (GNU 3.81 or newer) and Python 3.11 or newer.

VENV   := .venv
BIN    := $(VENV)/bin
TREE   := build/tree
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3 python; do \
            command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
              2>/dev/null && { command -v $$p; break; }; done)
PIP     = $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types imports unit tree snap picture bench lock dist clean

help:  ## list what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | while IFS='	' read -r name words; do \
	  printf 'make %-8s %s\n' "$$name" "$$words"; done

demo: $(VENV)/installed  ## install, fetch the demo model once, and chat with it
	@$(BIN)/dspark-tui models pull demo
	@$(BIN)/dspark-tui --demo

test: lint types unit  ## everything that must hold: style, types, import directions, tests, packages

lint: $(VENV)/installed-dev imports  ## style, formatting and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev  ## put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev tree  ## strict type check
	MYPYPATH=$(TREE) $(BIN)/mypy -p dspark_tui
	MYPYPATH=$(TREE) $(BIN)/mypy tools

imports: $(VENV)/installed-dev tree  ## which part may import which
	cd $(TREE) && $(CURDIR)/$(BIN)/lint-imports --no-logo --no-cache $(CURDIR)/pyproject.toml

unit: $(VENV)/installed-dev  ## the tests alone (PYTEST=... passes options)
	$(BIN)/python -m pytest $(PYTEST)

snap: $(VENV)/installed-dev  ## accept the screens as they are now
	$(BIN)/python -m pytest tests/dspark_tui --snapshot-update

picture: $(VENV)/installed-dev  ## draw docs/screenshot.svg anew (on a quiet machine: its figures are real)
	$(BIN)/python tools/screenshot.py

bench: $(VENV)/installed-dev  ## measure the demo pair on this machine
	$(BIN)/python benchmarks/demo_speed.py

lock: ## write constraints.txt anew from the newest allowed versions
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --disable-pip-version-check --quiet '.[dev]'
	build/lock/bin/python tools/lock.py > constraints.new
	mv constraints.new constraints.txt

dist: $(VENV)/installed-dev  ## build wheel and sdist into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:  ## remove everything that was made here, the environment too
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The folders as one package, as installed: for tools that read files instead of importing.
tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/dspark_tui
	@for part in dspark_tui/* engine kernels themes; do \
	  case $$part in *__pycache__) ;; *) ln -s "$(CURDIR)/$$part" $(TREE)/dspark_tui/ ;; esac; done

$(VENV)/pyvenv.cfg:
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found: install one, or name it" \
	  "(make demo PYTHON=/path/to/python3)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) install --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/installed
