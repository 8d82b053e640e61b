# Everything a developer runs. A fresh machine needs Python 3.10 or newer, g++ and make.
#
# Each target first sets up what it needs in .venv and build/; a second run does only what changed.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PK_CPU ?= 1# where we develop, an extension that cannot be built is an error

STEPS ?= 50
NATIVE_TESTS ?= tests/test_collectives.py
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help build test demo lint typecheck format dist sanitize gpu-check clean
help: ## list the targets (the default)
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.requirements: requirements-dev.txt
	@echo "== setting up $(VENV) with requirements-dev.txt"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# Editable: tests see the sources as they stand.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml setup.py
	@echo "== installing parallelkit into $(VENV), editable"
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

build: $(VENV)/.installed ## compile what changed in csrc/
	@echo "== compiling what changed in csrc/"
	@$(BIN)/python setup.py --quiet build_ext --inplace

test: build ## run all tests
	@echo "== running all tests, two files at a time"
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

demo: build ## train a small GPT on two ranks and check it against one process (STEPS=50)
	@echo "== training on two ranks, checking against one process"
	$(BIN)/parallelkit train --nproc 2 --steps $(STEPS)

lint: typecheck ## ruff, clang-format and mypy; changes nothing
	@echo "== ruff and clang-format"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# mypy sees the packages laid out as an installation has them: kernels/ as parallelkit.kernels.
typecheck: $(VENV)/.requirements ## mypy alone
	@echo "== mypy"
	@rm -rf build/typecheck
	@$(BIN)/python setup.py --quiet build_py --build-lib build/typecheck
	cd build/typecheck && $(BIN)/mypy --config-file ../../pyproject.toml \
		--cache-dir ../../.mypy_cache -p parallelkit

format: $(VENV)/.requirements ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CXX_FILES)

# Python is neither instrumented nor C++: the sanitizer and the C++ runtime whose exceptions it watches
# must be there before it starts, and what Python never frees is no leak of ours.
sanitize: $(VENV)/.installed ## run the tests of the native code under AddressSanitizer and UBSan
	@echo "== compiling csrc/ for the sanitizers"
	@PK_CUDA=0 PK_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build --build-lib build/sanitize
	@echo "== running the tests of the native code under the sanitizers"
	cd build/sanitize && PYTHONPATH=. ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		$(BIN)/pytest $(addprefix $(CURDIR)/,$(NATIVE_TESTS))

gpu-check: ## on a machine with a GPU: build, test and time everything that needs one (8 minutes)
	@python3 bench/gpu_check.py

dist: $(VENV)/.requirements ## build sdist and wheel into dist/
	@echo "== building sdist and wheel"
	@rm -rf dist build/lib* build/bdist*
	$(BIN)/python -m build --quiet --no-isolation --sdist --wheel

clean: ## remove what was built, keep .venv
	rm -rf build dist parallelkit.egg-info parallelkit/*.so $(VENV)/.installed
