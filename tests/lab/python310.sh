# shellcheck shell=bash
# PY310: the Python 3.10 on which SkyPilot's runtime on the nodes runs; empty if there is none. Sourced.
PY310=${PY310:-$(command -v python3.10 || ls -d "$HOME"/.pyenv/versions/3.10.*/bin/python3.10 2>/dev/null | head -n1 || true)}
# pyenv's shims ask which version is meant; the nodes need the program itself.
[ -z "$PY310" ] || PY310=$("$PY310" -c 'import sys; print(sys.executable)' 2>/dev/null || ls -d "$HOME"/.pyenv/versions/3.10.*/bin/python3.10 2>/dev/null | head -n1 || true)
