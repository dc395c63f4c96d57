#!/bin/bash
# Epilog (root, on each node): without cgroups, Slurm does not see processes that have left their session. Without this
# the ranks of a job whose node was lost live on, and go on writing snapshots.
for e in /proc/[0-9]*/environ; do
  p=${e#/proc/}
  p=${p%/environ}
  [ "$p" = $$ ] || [ "$p" = "$PPID" ] && continue
  [ "$(stat -c %u "/proc/$p" 2>/dev/null)" = "$SLURM_JOB_UID" ] || continue
  tr '\0' '\n' 2>/dev/null <"$e" | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID" && kill -9 "$p" 2>/dev/null
done
exit 0
