#!/usr/bin/env bash
# The Slurm cluster: each node is a network, uts, mount and pid namespace with an address, host name, /tmp and /dev/shm
# of its own. No namespace has a route out.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# --- accounts, names: seen inside the namespaces only
cp /etc/passwd /etc/group /etc/shadow "$LAB/etc/"
echo "$WHO:x:$ID:$ID::$LAB/home/$WHO:/bin/bash" >>"$LAB/etc/passwd"
echo "$WHO:x:$ID:" >>"$LAB/etc/group"
echo "$WHO:*:19000:0:99999:7:::" >>"$LAB/etc/shadow" # '!' (locked) would be refused by sshd without PAM
chown -R $ID:$ID "$LAB/home/$WHO"
chmod 755 "$LAB" "$LAB/home"
chmod 700 "$LAB/home/$WHO/.ssh"
{
  printf '127.0.0.1 localhost\n%s.1 login\n' $NETWORK
  for i in $(seq "$NODES"); do echo "$NETWORK.$((10 + i)) n$i"; done
} >"$LAB/etc/hosts"
echo "nameserver 127.0.0.1" >"$LAB/etc/resolv.conf" # refuses at once; an unreachable one costs 10 s a look-up

# --- the network
ip netns add $ONE-ctl
ip -n $ONE-ctl link set lo up
ip -n $ONE-ctl link add br0 type bridge
ip -n $ONE-ctl addr add $NETWORK.1/24 dev br0
ip -n $ONE-ctl link set br0 up
for i in $(seq "$NODES"); do
  card=${INTERFACES[$(((i - 1) % ${#INTERFACES[@]}))]}
  ip netns add $ONE-n$i
  ip -n $ONE-n$i link set lo up
  ip link add v$i netns $ONE-ctl type veth peer name "$card" netns $ONE-n$i
  ip -n $ONE-ctl link set v$i master br0 up
  ip -n $ONE-n$i addr add $NETWORK.$((10 + i))/24 dev "$card"
  ip -n $ONE-n$i link set "$card" up
  ip -n $ONE-n$i route add default via $NETWORK.1
done

# --- Slurm's configuration, by the script that real clusters use
for g in $(seq 0 $((GPUS - 1))); do touch "$LAB/dev/nvidia$g"; done
for f in prolog-ctld.sh task-prolog.sh epilog.sh uv.toml; do
  sed "s#@LAB@#$LAB#g; s#@WHO@#$WHO#g" "$lab/slurm/$f" >"$LAB/etc/$f"
done
chmod 755 "$LAB"/etc/*.sh
# SkyPilot asks for 4 CPUs and 16 GB a GPU: nodes claim more than this machine has. Not in a namespace: cgroups, a
# switch of node health, accounting. Time limits are short here.
for i in $(seq "$NODES"); do echo "n$i $NETWORK.$((10 + i)) 64 262144 L4:$GPUS"; done |
  CLUSTER_NAME=lab SLURM_USER=root STATE_FOLDER=$LAB/state SPOOL_FOLDER=$LAB/spool LOG_FOLDER=$LAB/log \
    RUN_FOLDER=$LAB/run GPU_DEVICES=$LAB/dev/nvidia PROCTRACK=proctrack/linuxproc TASK_PLUGIN=task/none \
    CGROUP_CONF='CgroupPlugin=cgroup/v1' DEFAULT_TIME=30 KILL_WAIT=5 \
    MORE="SlurmdUser=root
AuthInfo=socket=$LAB/run/munge/socket
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SlurmdParameters=config_overrides
SlurmctldTimeout=20
InactiveLimit=0
SchedulerParameters=sched_interval=2,bf_interval=5
BatchStartTimeout=10
MessageTimeout=20
PropagateResourceLimits=NONE
PrologSlurmctld=$LAB/etc/prolog-ctld.sh
TaskProlog=$LAB/etc/task-prolog.sh
Epilog=$LAB/etc/epilog.sh" bash "$project/recipes/slurm/cluster/config.sh" "$LAB/etc/slurm" login $NETWORK.1

# --- daemons
[ -f "$LAB/etc/munge.key" ] || { (umask 077; head -c 1024 /dev/urandom >"$LAB/etc/munge.key"); }
mkdir -p "$LAB/run/munge" /run/sshd /etc/slurm # munged wants a folder that nobody else can write
munged --force --key-file="$LAB/etc/munge.key" --socket="$LAB/run/munge/socket" --pid-file="$LAB/run/munged.pid" \
  --log-file="$LAB/log/munged.log" --seed-file="$LAB/run/munge.seed"
setsid ip netns exec $ONE-ctl unshare --uts --mount "$lab/enter.sh" login slurmctld -D -c \
  >>"$LAB/log/slurmctld.out" 2>&1 </dev/null &
echo $! >"$LAB/run/ctl.pid"
for i in $(seq "$NODES"); do "$lab/node.sh" "$i"; done
for _ in $(seq 150); do
  idle=$("$lab/on.sh" login sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)
  [ "$idle" -lt "$NODES" ] || break
  sleep 0.2
done
"$lab/on.sh" login sinfo
[ "$idle" -ge "$NODES" ] || { echo "only $idle of $NODES nodes are idle: see $LAB/log" >&2; exit 1; }
