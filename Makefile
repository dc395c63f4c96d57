# Each target installs what it needs, once.

PYTHON ?= python3
PROMPT ?= To be, or not to be
ARGS ?=
N ?= 200
# How many tests run at a time. Many of them only wait, for a time limit or for processes that start.
JOBS ?= 3
SLOW_JOBS ?= 6
SEED ?= 1

VENV := .venv
BIN := $(VENV)/bin
TRAINER := $(VENV)/.trainer
INSTALLED := $(VENV)/.installed
SKY := .venv-sky
SKY_INSTALLED := $(SKY)/.installed
DOCS := .venv-docs
DOCS_INSTALLED := $(DOCS)/.installed
# A store for tests, from npm. Without npm, the tests that need it are skipped and say so.
AZURITE := .azurite
AZURITE_INSTALLED := $(AZURITE)/.installed

# What bash runs.
SCRIPTS = $(shell find recipes tests/lab .ci -name '*.sh' -o -name '*.sbatch' -o -path .ci/run)

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-nightly test-torch test-cuda-wheel mutations fast slow lint azurite lab-up lab-down test-lab short-lab crash-campaign bench docs dist clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

train: $(TRAINER) ## train a character GPT on Shakespeare with two processes, and write a report (ARGS="key=value …", PROMPT="…")
	$(BIN)/python -m mingpt fetch shakespeare
	$(BIN)/python -m mingpt.launch --nproc-per-node 2 experiment=shakespeare_char $(ARGS)
	@config=$$($(BIN)/python -m mingpt.train experiment=shakespeare_char $(ARGS) --cfg job --resolve); \
	of() { printf '%s\n' "$$config" | sed -n "/^$$1:/,/^[^ ]/ s/^  dir: //p"; }; \
	snapshots=$$(of snapshot); \
	(set -x; $(BIN)/python -m mingpt generate "$$snapshots" --prompt "$(PROMPT)" --tokens 300 --seed 1) && \
	{ $(BIN)/python -m mingpt report "$$(of run)" || echo "the run is finished; only its report is missing, for the reason above" >&2; }

test: lint ## before a commit: lint, the fast tests, and one real kill, resize and recipe
	$(BIN)/python -m pytest -n $(JOBS) -m "example or not (lab or slow)"

test-all: ## make test and make docs, then all other tests of each commit
	@$(MAKE) --no-print-directory -j3 $(INSTALLED) $(SKY_INSTALLED) $(DOCS_INSTALLED) $(if $(shell command -v npm 2>/dev/null),azurite)
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory slow

slow: $(INSTALLED)
	$(BIN)/python -m pytest -n $(SLOW_JOBS) --durations=12 -m "slow and not (lab or example or nightly)"

mutations: $(INSTALLED) ## break the code in one place at a time, and see that the tests notice
	$(BIN)/python tests/mutations/run.py

test-nightly: ## make test-all, all other faults, the lab's short tests, 60 kills, the oldest and the newest torch, fake CUDA tensors, the mutation round; all of the lab is make lab-up test-lab
	@$(MAKE) --no-print-directory test-all
	$(BIN)/python -m pytest -n $(SLOW_JOBS) -m nightly
	@$(MAKE) --no-print-directory short-lab
	@$(MAKE) --no-print-directory crash-campaign N=60
	@$(MAKE) --no-print-directory test-torch TORCH=2.9.1
	@$(MAKE) --no-print-directory test-torch TORCH=2.15.0
	@$(MAKE) --no-print-directory test-cuda-wheel
	@$(MAKE) --no-print-directory mutations

# In an environment of its own: some GB where pip finds no build for CPUs alone.
test-torch: $(INSTALLED) ## the fast tests and those of exactness with another torch (TORCH=2.15.0)
	@test -n "$(TORCH)" || { echo "test-torch: which torch? Say TORCH=2.15.0" >&2; exit 64; }
	$(PYTHON) -m venv $(VENV)-torch
	bash recipes/install.sh $(VENV)-torch/bin/python dev -e
	$(VENV)-torch/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(VENV)-torch/bin/python -m pytest -n $(JOBS) -m "not lab and not slow"
	$(VENV)-torch/bin/python -m pytest -n $(JOBS) -m "slow and not nightly" tests/exactness

# Of 5 GB. Three =: never a build for CPUs, whose version ends in +cpu.
test-cuda-wheel: $(INSTALLED) ## steps on fake CUDA tensors, with torch's CUDA wheel and without a GPU
	$(PYTHON) -m venv $(VENV)-cuda
	bash recipes/install.sh $(VENV)-cuda/bin/python dev -e
	$(VENV)-cuda/bin/python -m pip install --quiet --disable-pip-version-check torch===2.13.0
	$(VENV)-cuda/bin/python -m pytest tests/cuda_wheel

# The lab is taken down even if tests fail.
short-lab: $(SKY_INSTALLED)
	@if tests/lab/possible.sh; then \
		PYTHON=$(PYTHON) tests/lab/up.sh && { $(BIN)/python -m pytest -m "lab and not slow" tests/lab; code=$$?; tests/lab/down.sh; exit $$code; }; \
	else echo "Not run here: the tests of tests/lab, for the reason above."; fi

lab-up: $(INSTALLED) $(SKY_INSTALLED) ## start a real Slurm and SkyPilot on this machine (root; tests/lab/README.md)
	PYTHON=$(PYTHON) tests/lab/up.sh

lab-down: ## stop it
	tests/lab/down.sh

# Beside the lab, whose tests wait for Slurm most of the time: bare machines and the container's image.
test-lab: $(INSTALLED) ## all tests of recipes in the lab (make lab-up first)
	$(BIN)/python -m pytest -n 2 -m lab tests/lab

fast: $(INSTALLED) ## the fast tests only
	$(BIN)/python -m pytest -n $(JOBS) -m "not lab and not slow"

lint: $(INSTALLED) ## ruff, mypy, shellcheck and yamllint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@# Names that come from a sourced file, or go to one, are found at run time only.
	$(BIN)/shellcheck --severity=warning --exclude=SC1091,SC2034,SC2154 $(SCRIPTS)
	$(BIN)/yamllint --strict recipes configs

crash-campaign: $(INSTALLED) ## kill training and its store N times (N=200 SEED=1), compare the digests
	$(BIN)/python -m tests.kits.crash_campaign --kills $(N) --seed $(SEED)

bench: $(INSTALLED) ## run every benchmark; each prints JSON
	$(BIN)/python -m mingpt fetch shakespeare
	$(BIN)/python -m mingpt fetch gpt2-vocabulary
	@set -e; for b in benchmarks/[a-z]*.py; do echo "== $$b" >&2; $(BIN)/python $$b; done

docs: $(DOCS_INSTALLED) ## the pages as a site, into site/; a link, an anchor or a name that is not there is an error
	@# --quiet would make --strict see no warnings.
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

dist: $(DOCS_INSTALLED) ## the wheel and the source archive, into dist/, checked as an index would
	rm -rf dist
	$(DOCS)/bin/python -m build --no-isolation
	$(DOCS)/bin/twine check --strict dist/*

azurite: $(AZURITE_INSTALLED) ## a store for tests, from npm (make test-all does it where there is npm)

clean: ## remove .venv and its like, .azurite, caches and build outputs (runs/ and data/ stay)
	rm -rf $(VENV) $(VENV)-torch $(VENV)-cuda $(SKY) $(DOCS) $(AZURITE) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
	find mingpt tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# constraints.txt is the lock, with hashes, for Python 3.10 to 3.13 and every platform. recipes/install.sh installs only what
# it names. To renew it, run the command in its first lines. (uv keeps the versions that it finds there;
# `--upgrade-package NAME` changes one.) If torch's version changes, renew constraints-cpu.txt, too.
LOCKS := pyproject.toml constraints.txt constraints-cpu.txt recipes/install.sh
define install # of an environment with these extras, which take so much
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "mingpt needs Python 3.10 or newer, and $(PYTHON) is `$(PYTHON) -V 2>&1`: try make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): $(2), some minutes the first time."
	bash recipes/install.sh $(BIN)/python "$(1)" -e
endef

$(TRAINER): $(LOCKS) # what training needs
	$(call install,,1 GB)
	@touch $@

$(INSTALLED): $(LOCKS) # what tests need, too
	$(call install,dev,2.7 GB)
	@touch $(TRAINER) $@

# SkyPilot launches jobs and never trains, so it needs neither torch nor the versions above. Tests check how it reads
# recipes/: alone, with moto's AWS, and on Slurm. constraints-sky.txt is its lock. To renew it:
#   printf 'skypilot[aws,slurm]==0.14.1\nmoto[server,ec2,sts]\n' | uv pip compile --universal --python-version 3.10 --no-annotate --generate-hashes - -o constraints-sky.txt
$(SKY_INSTALLED): constraints-sky.txt
	$(PYTHON) -m venv $(SKY)
	@echo "Installing SkyPilot into $(SKY)."
	grep -A 2 '^pip==' constraints.txt | $(SKY)/bin/python -m pip install --quiet --require-hashes -r /dev/stdin
	$(SKY)/bin/python -m pip install --quiet -c constraints-sky.txt setuptools
	$(SKY)/bin/python -m pip install --quiet --no-build-isolation -c constraints-sky.txt 'skypilot[aws,slurm]' 'moto[server,ec2,sts]'
	@touch $@

# What makes the site and checks an archive: constraints-docs.txt is its lock. To renew it:
#   printf 'mkdocs-material\nbuild\ntwine\nhatchling\n' | uv pip compile --universal --python-version 3.10 --no-annotate --generate-hashes - -o constraints-docs.txt
$(DOCS_INSTALLED): constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	@echo "Installing mkdocs into $(DOCS)."
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints-docs.txt
	@touch $@

# To renew azurite's lock, run this in tests/azurite (without the last option the lock names this machine's registry):
#   npm install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved azurite@VERSION
$(AZURITE_INSTALLED): tests/azurite/package.json tests/azurite/package-lock.json
	rm -rf $(AZURITE)
	@echo "Installing azurite into $(AZURITE)."
	mkdir $(AZURITE)
	cp tests/azurite/package.json tests/azurite/package-lock.json $(AZURITE)
	npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(AZURITE)
	@touch $@
