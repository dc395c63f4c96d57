#!/usr/bin/env bash
# Says why there can be no lab on this machine, in one line; silent, with exit code 0, where there can.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
no() { echo "no lab here: $*"; exit 1; }
[ "$(uname -s)" = Linux ] || no "it needs Linux"
[ "$(id -u)" = 0 ] || no "it needs root (network namespaces)"
command -v apt-get >/dev/null || no "it needs apt-get (Debian or Ubuntu), which brings Slurm"
unshare --net --uts --mount --pid --fork true 2>/dev/null || no "this kernel or container allows no namespaces"
. "$lab/python310.sh"
[ -n "$PY310" ] || no "SkyPilot's runtime on the nodes needs a Python 3.10: install one, or set PY310=/path/to/python3.10"
