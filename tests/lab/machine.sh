#!/usr/bin/env bash
# machine.sh NAME LOWER FOLDER HOSTS [PATH…]: becomes a machine called NAME, and boots it with systemd.
#
# Runs as process 1 of new pid, mount, uts, ipc and cgroup namespaces. LOWER is a Debian root, which stays as it is; FOLDER
# holds what this machine writes. HOSTS becomes /etc/hosts, FOLDER/../home the /home of all machines. Each PATH is shown
# read-only under its own name. GPUS=N: makes N device files as the driver does, and a program that counts them.
set -euo pipefail
name=$1 lower=$2 folder=$3 hosts=$4
shift 4
root=$folder/root
hostname "$name"
mount --make-rprivate /
mkdir -p "$folder"/{root,upper,work}
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$folder/upper,workdir=$folder/work" "$root"

echo "$name" >"$root/etc/hostname"
cp "$hosts" "$root/etc/hosts"
echo "nameserver 127.0.0.1" >"$root/etc/resolv.conf" # refuses at once
mount --bind "$folder/../home" "$root/home"
for path; do
  mkdir -p "$root$path"
  mount --bind "$path" "$root$path"
  mount -o remount,bind,ro "$root$path"
done

# Kernel settings and devices are those of the whole computer: read-only, or only what a machine needs.
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
while read -r file major minor; do mknod -m 666 "$root/dev/$file" c "$major" "$minor"; done <<'DEVICES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
console 1 3
DEVICES
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for g in $(seq 0 $((${GPUS:-0} - 1))); do mknod -m 666 "$root/dev/nvidia$g" c 195 "$g"; done
if [ "${GPUS:-0}" != 0 ]; then
  printf '#!/bin/sh\nfor g in /dev/nvidia[0-9]*; do echo "GPU ${g#/dev/nvidia}: a stand-in"; done\n' >"$root/usr/local/bin/nvidia-smi"
  chmod 755 "$root/usr/local/bin/nvidia-smi"
fi

# This kernel's cgroup hierarchies: what is mounted in this cgroup namespace shows this machine's part alone.
while read -r _ there kind options _; do
  case $kind:$there in
    tmpfs:/sys/fs/cgroup) mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup" ;;
    cgroup2:/sys/fs/cgroup | cgroup2:/sys/fs/cgroup/* | cgroup:/sys/fs/cgroup/*)
      mkdir -p "$root$there"
      options=$(sed -E 's/(^|,)(rw|relatime|nosuid|nodev|noexec|seclabel)\b//g; s/^,//' <<<"$options")
      mount -t "$kind" ${options:+-o "$options"} "$kind" "$root$there"
      ;;
  esac
done </proc/self/mounts

cd "$root"
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
# The clock, modules and raw devices, too, belong to the whole computer.
exec env -i container=other PATH=/usr/sbin:/usr/bin setpriv --bounding-set=-sys_time,-sys_module,-sys_rawio \
  /sbin/init </dev/null >/dev/null 2>&1
