#!/usr/bin/env bash
# Makes this machine (Ubuntu or Debian, root) the controller of a Slurm cluster:
#
#   sudo bash controller.sh nodes.txt [ADDRESS]
#
# ADDRESS: how the nodes reach this machine (default: its address on the route to the first node). You may run it again at
# any time: it writes the same files and restarts the services. Then run node.sh on every node.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
nodes=${1:?controller.sh: name the file that lists the nodes, as nodes.example does}
first=$(awk '!/^(#|$)/ {print $2; exit}' "$nodes")
address=${2:-$(ip route get "$first" | sed -nE 's/.* src ([^ ]+).*/\1/p')}
[ "$(id -u)" = 0 ] || { echo "controller.sh: needs root" >&2; exit 64; }

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq slurmctld slurm-client munge >/dev/null # munge makes its key if there is none
install -d -o slurm -g slurm -m 755 /var/lib/slurm/slurmctld /var/log/slurm
bash "$here/config.sh" /etc/slurm "$(hostname -s)" "$address" <"$nodes"
# What a node needs to join this cluster. Whoever has the key can run jobs as any user, so only root may read it.
install -d -m 700 /root/slurm-node
install -m 600 /etc/munge/munge.key /etc/slurm/slurm.conf /etc/slurm/gres.conf /etc/slurm/cgroup.conf \
  "$here/node.sh" /root/slurm-node
systemctl enable --quiet munge slurmctld
systemctl restart munge slurmctld
for _ in $(seq 30); do # systemctl does not wait until it listens
  said=$(scontrol ping) && break
  sleep 1
done
echo "$said"
[[ $said == *" is UP"* ]] || { echo "controller.sh: slurmctld does not answer after 30 s: see /var/log/slurm/slurmctld.log" >&2; exit 70; }
echo "controller.sh: now, for each node: scp -r /root/slurm-node NODE: && ssh NODE sudo bash slurm-node/node.sh"
