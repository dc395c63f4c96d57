#!/usr/bin/env bash
# What a GPU computes, and how fast, in eight minutes: speed beside nanoGPT's, equal bits, small models, a kill, a profile, a stall, a start.
#   bash benchmarks/gpu_check.sh --minutes 8      in a checkout whose Python has torch 2.9 or newer; no network is needed
# PYTHON: another Python than .venv's. Leaves gpu_check/README.md, results.jsonl, kernels*.txt and the log of each command.
# nanoGPT's own model is measured if its model.py lies in gpu_check/nanoGPT; else this project's, in nanoGPT's loop.
# Without a GPU it takes tiny shapes: that shows whether the script works, and measures nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
exec "${PYTHON:-$python}" benchmarks/_gpu_check.py "$@"
