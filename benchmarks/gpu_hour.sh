#!/usr/bin/env bash
# The first hour on a rented GPU: does it compute the same bits again, how fast is it, what do a kill and a snapshot cost?
#   sky launch -c hour --gpus H100:1 --workdir . 'bash benchmarks/gpu_hour.sh' && rsync -a hour:sky_workdir/gpu_hour .
# Leaves gpu_hour/results.json and gpu_hour/README.md, and the log of each command beside them. GPT-2 124M, bf16,
# compiled; no data is needed. Without a GPU, to see that it works: bash benchmarks/gpu_hour.sh --tiny (some minutes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/mingpt ] || EXTRAS=gpu,tensorboard bash recipes/setup.sh experiment=synthetic
if [ ! -d gpu_hour/nanoGPT ] && ! git clone --quiet --depth 1 https://github.com/karpathy/nanoGPT gpu_hour/nanoGPT; then
  echo "nanoGPT can't be downloaded here: its speed is not measured" >&2
fi
exec .venv/bin/python benchmarks/_gpu_hour.py "$@"
