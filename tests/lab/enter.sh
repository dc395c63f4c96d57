#!/usr/bin/env bash
# enter.sh NAME COMMAND…: runs a command as host NAME, in fresh uts and mount namespaces.
set -e
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
name=$1
shift
hostname "$name"
mount --make-rprivate /
for f in hosts resolv.conf passwd group shadow; do mount --bind "$LAB/etc/$f" "/etc/$f"; done
mount --bind "$LAB/etc/slurm" /etc/slurm
# The checkout, whose environment a job may use, is kept in sight, wherever it lies.
mkdir -p "$LAB/nodes/$name/project"
mount --rbind "$project" "$LAB/nodes/$name/project"
# Where a Python lies below /root, which is closed to users: only pyenv is shown.
if [ -d /root/.pyenv ]; then
  mkdir -p "$LAB/nodes/$name/pyenv"
  mount --rbind /root/.pyenv "$LAB/nodes/$name/pyenv"
  mount -t tmpfs -o mode=755 tmpfs /root
  mkdir /root/.pyenv
  mount --rbind "$LAB/nodes/$name/pyenv" /root/.pyenv
fi
if [ "$name" != login ]; then
  rm -rf "$LAB/nodes/$name/tmp"
  mkdir -p "$LAB/nodes/$name/tmp"
  chmod 1777 "$LAB/nodes/$name/tmp"
  mount --bind "$LAB/nodes/$name/tmp" /tmp
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  # A disk that is this node's alone, and stays when the node is started again: the same path on all nodes.
  mkdir -p "$LAB/nodes/$name/disk"
  chown $ID:$ID "$LAB/nodes/$name/disk"
  mount --bind "$LAB/nodes/$name/disk" "$LAB/disk"
fi
mkdir -p "$project"
mount --rbind "$LAB/nodes/$name/project" "$project"
exec "$@"
