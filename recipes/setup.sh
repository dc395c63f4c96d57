#!/usr/bin/env bash
# Sets up one node, again at any time and on several at once; if everything is there, it takes seconds. It makes .venv
# with what the run needs, and fetches its data. The run: EXPERIMENT, RUN_DIR and OVERRIDES, or arguments:
#   bash recipes/setup.sh experiment=mnist run.dir=s3://bucket/run
set -euf -o pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:$HOME/.local/bin # where SkyPilot and uv's installer put uv
extras=$(cat .venv/.extras 2>/dev/null || true) # what earlier runs needed stays

# SkyPilot on Slurm may have been removing .venv. Without pyvenv.cfg its python is the system's.
whole() { .venv/bin/python -c 'import sys, pip, torch; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; }
ready=
whole && ready=1 # before the lock: it takes seconds

# Slurm's nodes share this folder: one installs, in place, since a running job may use it, and the others wait.
exec 9>.setup.lock
flock -w 3600 9 || { echo "another set-up has held $PWD/.setup.lock for an hour: end it, then start again" >&2; exit 1; }
if [ -z "$ready" ] && ! whole; then
  rm -rf .venv
  if command -v uv >/dev/null; then # it may take another Python than the one that SkyPilot runs on
    uv venv --quiet --python '>=3.11,<3.14' .venv
    uv pip install --quiet --python .venv --constraint constraints.txt pip
  else
    python3 -m venv .venv || { echo "python3 can't make a venv here (apt install python3-venv), and there is no uv" >&2; exit 1; }
  fi
fi

# Before torch is there, which is 3 GB with CUDA: a mistake in the config ends the set-up here. (Without the nodes'
# addresses: that only one of them will have the run on its disk is said once, below.)
needed() { .venv/bin/python -m mingpt.prepare.extras --from-env "$@"; }
early() { bash recipes/install.sh .venv/bin/python config && SKYPILOT_SETUP_NODE_IPS='' needed "$@" >/dev/null; }
install() { bash recipes/install.sh .venv/bin/python "$extras" -e && echo "$extras" >.venv/.extras; }
wanted=$(cat pyproject.toml constraints.txt constraints-cpu.txt recipes/install.sh | sha256sum)
if [ "$(cat .venv/.setup 2>/dev/null)" != "$wanted" ]; then
  early "$@"
  install
fi
# With a driver that is too old for torch's CUDA, the run would train on the CPU.
if nvidia-smi -L 2>/dev/null | grep -q GPU; then .venv/bin/python -c 'import torch; torch.zeros(1).cuda()'; fi
echo "$wanted" >.venv/.setup
needed=$(needed "$@") # also for an environment that was there
all=$(printf '%s\n' ${extras//,/ } ${EXTRAS:-} $needed | sort -u | paste -sd, -)
[ "$all" = "$extras" ] || { extras=$all; install; }
.venv/bin/python -m mingpt fetch --for --from-env "$@"
