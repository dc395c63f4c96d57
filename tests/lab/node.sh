#!/usr/bin/env bash
# node.sh I: starts (again) the slurmd of node I, and with it the node.
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
mkdir -p "$LAB/spool/n$1"
setsid ip netns exec $ONE-n"$1" unshare --uts --mount --pid --fork --kill-child --mount-proc \
  "$lab/enter.sh" "n$1" slurmd -D -N "n$1" >>"$LAB/log/slurmd-n$1.out" 2>&1 </dev/null &
echo $! >"$LAB/run/node$1.pid"
