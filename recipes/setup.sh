#!/usr/bin/env bash
# One node's set-up, called by every recipe: .venv with what constraints.txt says, and whatever the experiment
# needs beyond: clients of stores, tokenizers, data. It reads the variables that recipes have; arguments are overrides:
#   bash recipes/setup.sh experiment=mnist run.dir=s3://bucket/run
# May be run again at any time, and by several nodes at once; where all is done already, it takes seconds.
set -euf -o pipefail # -f: the words of OVERRIDES may hold * and [
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC2206 # OVERRIDES is several words
overrides=(${EXPERIMENT:+experiment="$EXPERIMENT"} ${RUN_DIR:+run.dir="$RUN_DIR"} ${OVERRIDES:-} "$@")

# Whoever removes a folder may be killed in the middle of that: SkyPilot on Slurm removes that of a lost cluster, in which
# the next one of the same name works. An environment without its pyvenv.cfg is the system's Python, to be left alone.
whole() { .venv/bin/python -c 'import sys, pip, torch; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; }
ready=''
! whole || ready=1 # before the lock: this takes seconds, and all nodes look at the same time

# Slurm nodes share this folder and set up at the same moment: one works, the others wait and find all done. Cloud VMs
# have a folder each, so every one of them works.
exec 9>.setup.lock
flock -w 3600 9 || { echo "another set-up has held $PWD/.setup.lock for an hour: end it, then start again" >&2; exit 1; }

# A running job may be using the environment: it is changed in place, and what an earlier run needed stays.
install() { # the extras, with commas
  local package=.${1:+[$1]}
  UV_LINK_MODE=copy .venv/bin/python recipes/locked.py ${uv:+--uv "$uv"} constraints.txt -e "$package"
}
uv=$(PATH=$PATH:$HOME/.local/bin command -v uv || true) # where SkyPilot and uv's installer put it
extras=$(cat .venv/.extras 2>/dev/null || true)

# The stamp is written last and holds all that the environment follows from: a set-up that was cut short, or an edited
# pyproject.toml, is done again.
stamp=.venv/.setup
wanted=$(cat pyproject.toml constraints.txt constraints-cpu.txt recipes/setup.sh recipes/locked.py | sha256sum)
[ -n "$ready" ] || ! whole || ready=1 # another node has made it meanwhile
if [ -z "$ready" ] || [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
  if [ -z "$ready" ]; then
    rm -rf .venv # uv clears nothing that lacks a pyvenv.cfg
    if [ -n "$uv" ]; then
      # Without --python, uv takes the Python that SkyPilot runs on; constraints.txt serves 3.10 to 3.13.
      "$uv" venv --quiet --python '>=3.11,<3.14' .venv
    else
      python3 -m venv .venv || { echo "python3 can't make a venv here (apt install python3-venv), and there is no uv" >&2; exit 1; }
    fi
  fi
  install "$extras"
  echo "$extras" >.venv/.extras
  # A driver that is too old for torch's CUDA makes torch see no GPU, and the trainer would train on the CPU.
  if nvidia-smi -L 2>/dev/null | grep -q GPU && ! .venv/bin/python -c 'import torch; torch.zeros(1).cuda()'; then
    echo "torch can't use this node's GPUs: take an image whose driver fits the CUDA version of the pinned torch" >&2
    exit 1
  fi
  echo "$wanted" >$stamp
fi

# A mistake in the overrides ends the set-up here, with every problem listed.
needed=$(.venv/bin/python -m mingpt.prepare.extras "${overrides[@]}")
all=$(printf '%s\n' ${extras//,/ } $needed | sort -u | paste -sd, -)
if [ "${all#,}" != "$extras" ]; then
  install "${all#,}"
  echo "${all#,}" >.venv/.extras
fi
.venv/bin/python -m mingpt.data.fetch --for "${overrides[@]}"
