#!/usr/bin/env bash
# Makes this machine (Ubuntu or Debian, root, NVIDIA driver installed where it has GPUs) a node of the cluster:
#
#   sudo bash slurm-node/node.sh
#
# controller.sh has put it into one folder with the key and the configuration. You may run it again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ "$(id -u)" = 0 ] || { echo "node.sh: needs root" >&2; exit 64; }
name=$(hostname -s)
line=$(grep -E "^NodeName=$name " "$here/slurm.conf") ||
  { echo "node.sh: this machine is called $name, and no line of the controller's list is: correct one of them" >&2; exit 64; }

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq slurmd slurm-client munge python3 >/dev/null
install -o munge -g munge -m 400 "$here/munge.key" /etc/munge/munge.key
install -m 644 "$here/slurm.conf" "$here/gres.conf" "$here/cgroup.conf" /etc/slurm
install -d -m 755 /var/lib/slurm/slurmd /var/log/slurm

# The driver makes its device files at the first use after the boot; nvidia-smi is such a use.
want=$(sed -nE 's/.* Gres=gpu:[^:]+:([0-9]+).*/\1/p' <<<"$line")
have=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
[ "${want:-0}" = "$have" ] ||
  { echo "node.sh: the controller's list gives $name ${want:-0} GPUs, and nvidia-smi finds $have: correct the list, or the driver" >&2; exit 64; }

systemctl enable --quiet munge slurmd
systemctl restart munge slurmd
for _ in $(seq 30); do
  state=$(sinfo -h -n "$name" -o %T | head -n1)
  case $state in idle | mixed | allocated) echo "node.sh: $name is $state"; exit 0 ;; esac
  sleep 1
done
echo "node.sh: $name is ${state:-unknown to the controller} after 30 s: see /var/log/slurm/slurmd-$name.log, and open ports 6817 (controller) and 6818 (nodes)" >&2
exit 70
