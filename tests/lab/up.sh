#!/usr/bin/env bash
# A real Slurm cluster and a real SkyPilot on this one machine: `make lab-up`. README.md says how it is made.
# May be run again: what is there is used, and a cluster that is up is taken down first.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
"$lab/possible.sh"
. "$lab/python310.sh"
"$lab/down.sh"

# What the nodes run, from Debian's packages. Their own services stay off: the lab starts its daemons itself.
needed=(slurmctld slurmd slurm-client munge openssh-server rsync netcat-openbsd iproute2 unzip debootstrap)
if ! dpkg -s "${needed[@]}" >/dev/null 2>&1; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${needed[@]}" >/dev/null 2>"/tmp/mingpt-lab-apt.log" ||
    { cat /tmp/mingpt-lab-apt.log >&2; exit 1; }
fi
mkdir -p "$LAB"/{opt/bin,etc/slurm,log,run/own-disks,state,spool,nodes,dev,home,disk,sky/.sky/catalogs/v8/common,sky/.slurm}
# SkyPilot installs itself on each node of each cluster and deletes it at the end, 20,000 files each time: on a disk that
# takes minutes. In memory, where there is enough: some GB are used at most.
if [ "$(awk '$1 == "MemAvailable:" {print int($2 / 1048576)}' /proc/meminfo)" -ge 12 ]; then
  for f in nodes home; do mount -t tmpfs -o mode=755,size=6g tmpfs "$LAB/$f"; done
fi
mkdir -p "$LAB/home/$WHO/.ssh"
PYTHON=$("$PYTHON" -c 'import os, sys; print(os.path.abspath(sys.executable))') PY310=$PY310 "$lab/wheelhouse.sh"
"$lab/cluster.sh"
"$lab/sky.sh"
