#!/usr/bin/env bash
# Ends all that up.sh has started; the wheelhouse and the logs stay. `rm -rf` of the lab's folder removes those, too.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
[ -d "$LAB" ] || exit 0
# SkyPilot's server and its workers: by their home, or, as they write their titles over their environment, by open files.
for e in /proc/[0-9]*/environ; do
  p=${e#/proc/} p=${p%/environ}
  if tr '\0' '\n' 2>/dev/null <"$e" | grep -qx "HOME=$LAB/sky"; then kill -9 "$p" 2>/dev/null; fi
done
find /proc/[0-9]*/fd -lname "$LAB/sky/*" 2>/dev/null | cut -d/ -f3 | sort -u | xargs -r kill -9 2>/dev/null
for n in $(ip netns list | awk -v one="^$ONE-" '$1 ~ one {print $1}'); do
  for p in $(ip netns pids "$n"); do kill -9 "$p" 2>/dev/null; done
  ip netns del "$n"
done
if munged=$(cat "$LAB/run/munged.pid" 2>/dev/null); then
  kill "$munged" 2>/dev/null
  for _ in {1..50}; do kill -0 "$munged" 2>/dev/null || break; sleep 0.1; done # it removes its own files as it ends
fi
for f in nodes home; do
  while mountpoint -q "$LAB/$f"; do umount -l "$LAB/$f" || break; done
done
rm -rf "${LAB:?}"/{run,state,spool,nodes,home,sky}
exit 0
