#!/usr/bin/env bash
# The login node's sshd, and SkyPilot's client side: a home of its own below $LAB/sky.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
home=$LAB/sky
mkdir -p "$LAB/ssh"
[ -f "$LAB/ssh/host" ] || ssh-keygen -q -t ed25519 -N '' -f "$LAB/ssh/host"
[ -f "$LAB/ssh/id" ] || ssh-keygen -q -t ed25519 -N '' -f "$LAB/ssh/id"
install -o $ID -g $ID -m 600 "$LAB/ssh/id.pub" "$LAB/home/$WHO/.ssh/authorized_keys"
cat >"$LAB/ssh/sshd_config" <<CONF
Port 2222
ListenAddress 127.0.0.1
HostKey $LAB/ssh/host
PidFile $LAB/run/sshd.pid
PasswordAuthentication no
UsePAM no
StrictModes no
UseDNS no
AcceptEnv LANG
Subsystem sftp internal-sftp
MaxSessions 100
MaxStartups 100
AllowUsers $WHO
CONF
setsid ip netns exec $ONE-ctl unshare --uts --mount "$lab/enter.sh" login \
  /usr/sbin/sshd -D -E "$LAB/log/sshd.log" -f "$LAB/ssh/sshd_config" </dev/null >/dev/null 2>&1 &
cat >"$home/.slurm/config" <<CONF
Host lab
  HostName 127.0.0.1
  Port 2222
  User $WHO
  IdentityFile $LAB/ssh/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  ProxyCommand ip netns exec $ONE-ctl nc 127.0.0.1 2222
CONF
# Nothing is bundled with SkyPilot, and nothing may be asked of a public address: this is all that it must know of GPUs.
cp "$lab/slurm/accelerators.csv" "$home/.sky/catalogs/v8/common/"
cp "$lab/slurm/sky-config.yaml" "$home/.sky/config.yaml"
# The managed-jobs controller asks two public addresses whether the network is up, and waits for ever without an answer:
# here it asks the local API server.
probe=$(HOME=$home "$sky/bin/python" -c 'from importlib.util import find_spec; print(find_spec("sky").submodule_search_locations[0])')/backends/backend_utils.py
sed -i "s#^_TEST_IP_LIST = .*#_TEST_IP_LIST = ['http://127.0.0.1:46580/api/health']#" "$probe"
grep -q "^_TEST_IP_LIST = \['http://127.0.0.1" "$probe" || { echo "no list of probes in $probe: this SkyPilot is another one" >&2; exit 1; }
# As many controllers as fit into memory, a dozen, would be started with the server, and look for jobs: one is enough.
controllers=${probe%/backends/*}/utils/controller_utils.py
sed -i "s#^MAX_CONTROLLERS = .*#MAX_CONTROLLERS = 1#" "$controllers"
grep -q "^MAX_CONTROLLERS = 1$" "$controllers" || { echo "no number of controllers in $controllers: this SkyPilot is another one" >&2; exit 1; }
# What is changed is compiled again, once.
"$sky/bin/python" -m compileall -q "$probe" "$controllers"
for _ in $(seq 50); do
  ssh -F "$home/.slurm/config" -o LogLevel=ERROR lab sinfo -h >/dev/null 2>&1 && exit 0
  sleep 0.2
done
echo "no answer from the lab's login node: see $LAB/log/sshd.log" >&2
exit 1
