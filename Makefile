# Everything a developer runs. A fresh machine needs Python >= 3.10, g++ and make.
#
# Each target sets up what it needs in .venv and build/ first; a second run does only what changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PK_CPU ?= 1# here an extension that does not build is an error

.PHONY: help
help: ## list the targets (the default)
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.requirements: requirements-dev.txt
	@echo "== $(VENV): installing requirements-dev.txt"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# Editable, so that a test sees the sources as they stand.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml setup.py
	@echo "== installing parallelkit (editable) into $(VENV)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

.PHONY: build
build: $(VENV)/.installed ## compile what changed in csrc/
	@echo "== compiling what changed in csrc/"
	@$(BIN)/python setup.py --quiet build_ext --inplace

.PHONY: test
test: build ## run all tests
	@echo "== running the tests"
	$(BIN)/pytest

.PHONY: demo
demo: build ## train a small GPT on two ranks and check it against one process
	@echo "== training on two ranks, then checking against one process"
	$(BIN)/parallelkit train --nproc 2 --steps 50
