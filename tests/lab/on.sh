#!/usr/bin/env bash
# on.sh HOST COMMAND…: runs a command as root inside the lab, on `login` or on n1, n2, …: that host's network, names,
# files and processes.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
host=$1
shift
case $host in
  login) exec nsenter --target "$(cat "$LAB/run/ctl.pid")" --net --uts --mount "$@" ;;
  # node.sh's pid is `unshare`'s; the host's first process is its child.
  *) exec nsenter --target "$(pgrep -P "$(cat "$LAB/run/node${host#n}.pid")")" --net --uts --mount --pid "$@" ;;
esac
