#!/usr/bin/env bash
# Writes slurm.conf, gres.conf and cgroup.conf for a list of machines:
#
#   bash config.sh FOLDER CONTROLLER ADDRESS < nodes.txt
#
# CONTROLLER and ADDRESS: host name and address of the machine that runs slurmctld. A line of nodes.txt is one machine:
#   NAME ADDRESS CPUS MEMORY_MB GPUS    with GPUS as TYPE:NUMBER (see `slurmd -C` and `nvidia-smi -L`), or 0
# The same list always gives the same three files. The lab of tests/lab runs on what this script writes.
set -euo pipefail
folder=$1 controller=$2 address=$3

# For clusters whose folders are not those of Debian's packages, such as the lab.
cluster=${CLUSTER_NAME:-mingpt} user=${SLURM_USER:-slurm}
state=${STATE_FOLDER:-/var/lib/slurm/slurmctld} spool=${SPOOL_FOLDER:-/var/lib/slurm/slurmd}
log=${LOG_FOLDER:-/var/log/slurm} run=${RUN_FOLDER:-/run} devices=${GPU_DEVICES:-/dev/nvidia}
# cgroups contain every process of a job, also one that has left its session. With linuxproc such a process outlives the job,
# and an Epilog must find it.
proctrack=${PROCTRACK:-proctrack/cgroup} task=${TASK_PLUGIN:-task/cgroup,task/affinity}
cgroup=${CGROUP_CONF:-$'ConstrainCores=yes\nConstrainDevices=yes\nConstrainRAMSpace=yes'}
more=${MORE:-} # lines of slurm.conf

names=() nodes='' gres=''
while read -r name own cpus memory gpus _ || [ -n "$name" ]; do # the last line may lack a newline
  case $name in '' | \#*) continue ;; esac
  [[ $own && $cpus =~ ^[0-9]+$ && $memory =~ ^[0-9]+$ && $gpus =~ ^(0|[A-Za-z0-9_.-]+:[1-9][0-9]*)$ ]] || {
    echo "config.sh: '$name ${own:-} ${cpus:-} ${memory:-} ${gpus:-}': a line is NAME ADDRESS CPUS MEMORY_MB TYPE:NUMBER, or 0 GPUs" >&2
    exit 64
  }
  names+=("$name")
  nodes+="NodeName=$name NodeAddr=$own CPUs=$cpus RealMemory=$memory"
  if [ "$gpus" != 0 ]; then
    nodes+=" Gres=gpu:$gpus"
    # Without File= Slurm counts no GPUs, and gives jobs no CUDA_VISIBLE_DEVICES.
    gres+="NodeName=$name Name=gpu Type=${gpus%:*} File=${devices}[0-$((${gpus#*:} - 1))]"$'\n'
  fi
  nodes+=$' State=UNKNOWN\n'
done
[ ${#names[@]} -gt 0 ] || { echo "config.sh: no machines: give one a line on standard input" >&2; exit 64; }

mkdir -p "$folder"
cat >"$folder/slurm.conf" <<CONF
# Written by recipes/slurm/cluster/config.sh; the same file on all machines.
ClusterName=$cluster
SlurmctldHost=$controller($address)
SlurmUser=$user
AuthType=auth/munge
StateSaveLocation=$state
SlurmdSpoolDir=$spool/%n
SlurmctldPidFile=$run/slurmctld.pid
SlurmdPidFile=$run/slurmd-%n.pid
SlurmctldLogFile=$log/slurmctld.log
SlurmdLogFile=$log/slurmd-%n.log
ProctrackType=$proctrack
TaskPlugin=$task
MpiDefault=none
# A job gets the GPUs, CPUs and memory that it asks for, and no more.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
# A node that does not answer for 20 s is lost: its jobs end or are requeued, and resume elsewhere. A node that comes back is
# used again without an administrator.
SlurmdTimeout=20
ReturnToService=2
JobRequeue=1
# After SIGTERM a process has 60 s for its snapshot before SIGKILL.
KillWait=${KILL_WAIT:-60}
SchedulerType=sched/backfill
$more
${nodes}PartitionName=main Nodes=$(IFS=,; echo "${names[*]}") Default=YES DefaultTime=${DEFAULT_TIME:-1-00:00:00} MaxTime=UNLIMITED State=UP
CONF
printf '%s' "$gres" >"$folder/gres.conf"
printf '%s\n' "$cgroup" >"$folder/cgroup.conf"
