#!/usr/bin/env bash
# Installs this project with extras into the environment of a Python. An archive that has none of the hashes in
# constraints.txt is refused, and so is a package that is not there.
#   bash recipes/install.sh .venv/bin/python dev -e # without -e: a copy
#   bash recipes/install.sh .venv/bin/python config # nothing but what reads a config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_REQUIRE_VIRTUALENV=1 # never the system's
pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation "$@"; }
python=$1 extras=$2

# A pip that takes hashes of constraints (older ones don't); what builds packages; torch for CPUs, if the index has it.
grep -A 2 '^pip==' constraints.txt | pip --no-deps --require-hashes -r /dev/stdin
pip -c constraints.txt hatchling setuptools
[ "$extras" != config ] || { pip -c constraints.txt hydra-core pydantic fsspec; exit; }
pip --no-deps --require-hashes -r constraints-cpu.txt 2>/dev/null || true
pip --no-deps "${@:3}" .
pip -c constraints.txt "mingpt-exact[$extras]"
