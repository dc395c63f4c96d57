#!/usr/bin/env bash
# Sets up one node; every recipe calls it. It installs constraints.txt into .venv, and what else the experiment needs:
# clients of stores, tokenizers, data; and EXTRAS. It reads the recipes' variables; arguments are overrides:
#   bash recipes/setup.sh experiment=mnist run.dir=s3://bucket/run
# You may run it again at any time, and on several nodes at once. If everything is there, it takes seconds.
set -euf -o pipefail # -f: OVERRIDES may contain * and [
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC2206 # OVERRIDES is several words
overrides=(${EXPERIMENT:+experiment="$EXPERIMENT"} ${RUN_DIR:+run.dir="$RUN_DIR"} ${OVERRIDES:-} "$@")

# Before anything is installed: each cloud VM has a disk of its own, so several nodes can't share a folder of it. (Slurm's
# nodes share a home; an absolute path may be a mount, and the nodes compare what they see there before training.)
if [[ ${SKYPILOT_SETUP_NODE_IPS:-} == *$'\n'* ]] && [ -z "${SLURM_JOB_ID:-}" ] &&
  [ ! -e "${SKY_RUNTIME_DIR:-$HOME}/.sky/.sky_slurm_cluster" ]; then
  place=''
  for word in "${overrides[@]}"; do
    case $word in run.dir=*) place=${word#run.dir=} ;; esac # the last one counts
  done
  case $place in
    *://* | /*) ;;
    *)
      echo "RUN_DIR='$place' is a folder on each node's own disk: give several nodes a bucket or a shared mount" \
        "(--env RUN_DIR=s3://bucket/run1), or take one node (sky down, then --num-nodes 1)" >&2
      exit 64
      ;;
  esac
fi

# Is .venv complete? Its removal may have been cut short: SkyPilot on Slurm removes the folder of a lost cluster, which the
# next cluster of the same name uses. Without pyvenv.cfg, .venv/bin/python is the system's Python: never install into that.
whole() { .venv/bin/python -c 'import sys, pip, torch; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; }
ready=''
! whole || ready=1 # before the lock: this takes seconds, and all nodes can check at the same time

# Slurm nodes share this folder and set up at the same moment: one installs, the others wait for the lock. Cloud VMs have a
# folder each, so each of them installs.
exec 9>.setup.lock
flock -w 3600 9 || { echo "another set-up has held $PWD/.setup.lock for an hour: end it, then start again" >&2; exit 1; }

# A running job may be using the environment. So it is changed in place, and what an earlier run needed stays.
install() { # the extras, with commas
  local package=.${1:+[$1]}
  UV_LINK_MODE=copy .venv/bin/python recipes/locked.py ${uv:+--uv "$uv"} constraints.txt -e "$package"
}
uv=$(PATH=$PATH:$HOME/.local/bin command -v uv || true) # where SkyPilot and uv's installer put it
extras=$(cat .venv/.extras 2>/dev/null || true)

# The stamp is written last. It is a hash of the files that define the environment: after a set-up that was cut short, or an
# edit of pyproject.toml, the environment is set up again.
stamp=.venv/.setup
wanted=$(cat pyproject.toml constraints.txt constraints-cpu.txt recipes/setup.sh recipes/locked.py | sha256sum)
[ -n "$ready" ] || ! whole || ready=1 # another node has made it meanwhile
if [ -z "$ready" ] || [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
  if [ -z "$ready" ]; then
    rm -rf .venv # uv does not clear a folder without pyvenv.cfg
    if [ -n "$uv" ]; then
      # Without --python, uv takes the Python that SkyPilot runs on; constraints.txt is for 3.10 to 3.13.
      "$uv" venv --quiet --python '>=3.11,<3.14' .venv
    else
      python3 -m venv .venv || { echo "python3 can't make a venv here (apt install python3-venv), and there is no uv" >&2; exit 1; }
    fi
  fi
  install "$extras"
  echo "$extras" >.venv/.extras
  # With a driver that is too old for torch's CUDA, torch sees no GPU, and the trainer would train on the CPU.
  if nvidia-smi -L 2>/dev/null | grep -q GPU && ! .venv/bin/python -c 'import torch; torch.zeros(1).cuda()'; then
    echo "torch can't use this node's GPUs: take an image whose driver fits the CUDA version of the pinned torch" >&2
    exit 1
  fi
  echo "$wanted" >$stamp
fi

# If the overrides are wrong, set-up ends here and lists every problem.
needed=$(.venv/bin/python -m mingpt.prepare.extras "${overrides[@]}")
all=$(printf '%s\n' ${extras//,/ } ${EXTRAS:-} $needed | sort -u | paste -sd, -)
if [ "${all#,}" != "$extras" ]; then
  install "${all#,}"
  echo "${all#,}" >.venv/.extras
fi
.venv/bin/python -m mingpt.data.fetch --for "${overrides[@]}"
