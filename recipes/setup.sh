#!/usr/bin/env bash
# One node's set-up, called by every recipe: .venv with the versions of constraints.txt, and the text to train on.
# May be run again at any time, and by several nodes at once; where all is done already, it takes a second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Slurm nodes share this folder and set up at the same moment: one works, the others wait and find all done. Cloud VMs
# have a folder each, so every one of them works.
exec 9>.setup.lock
flock 9

# What storage the run needs, by the URLs that it has been given.
extras=
case "${RUN_DIR:-} ${OVERRIDES:-}" in *s3://*) extras+=,s3 ;; esac
case "${RUN_DIR:-} ${OVERRIDES:-}" in *gs://* | *gcs://*) extras+=,gcs ;; esac
case "${RUN_DIR:-} ${OVERRIDES:-}" in *az://* | *abfs://*) extras+=,azure ;; esac
case "${RUN_DIR:-} ${OVERRIDES:-}" in *http://* | *https://*) extras+=,http ;; esac
package=.${extras:+[${extras#,}]}

# The stamp is written last and holds all that the environment follows from: a set-up that was cut short, or an edited
# pyproject.toml, is done again, in place (a running job may be using the environment).
stamp=.venv/.setup
wanted=$(cat pyproject.toml constraints.txt recipes/setup.sh <(echo "$package") | sha256sum)
if [ "$(cat $stamp 2>/dev/null)" != "$wanted" ]; then
  PATH=$PATH:$HOME/.local/bin # where SkyPilot and uv's installer put uv
  if command -v uv >/dev/null; then
    # Without --python, uv takes the Python that SkyPilot runs on; constraints.txt serves 3.10 to 3.13. --seed: with
    # pip, which fetches the text.
    [ -x .venv/bin/pip ] || uv venv --quiet --clear --seed --python '>=3.11,<3.14' .venv
    UV_LINK_MODE=copy uv pip install --quiet --python .venv/bin/python -c constraints.txt -e "$package"
  else
    python3 -m venv .venv || { echo "python3 can't make a venv here (apt install python3-venv), and there is no uv" >&2; exit 1; }
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$package"
  fi
  # A driver that is too old for torch's CUDA makes torch see no GPU, and the trainer would train on the CPU.
  if nvidia-smi -L 2>/dev/null | grep -q GPU && ! .venv/bin/python -c 'import torch; torch.zeros(1).cuda()'; then
    echo "torch can't use this node's GPUs: take an image whose driver fits the CUDA version of the pinned torch" >&2
    exit 1
  fi
  echo "$wanted" >$stamp
fi

.venv/bin/python -m mingpt.data.fetch shakespeare
