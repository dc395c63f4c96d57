#!/bin/bash
# PrologSlurmctld: prepares the home that SkyPilot makes for each of its clusters, whose names end in a user's hash.
[ "$SLURM_JOB_USER" = @WHO@ ] && [[ $SLURM_JOB_NAME =~ -[0-9a-f]{8}$ ]] || exit 0
cluster=${SLURM_JOB_NAME%-*} home=@LAB@/home/@WHO@/.sky_clusters/$SLURM_JOB_NAME seed=@LAB@/home/@WHO@/seed
as_user() { runuser -u @WHO@ -- "$@"; }
as_user mkdir -p "$home/.local/bin" "$home/sky_workdir"
cd "$home/sky_workdir" || exit 1

# SkyPilot looks for uv there; found, it isn't downloaded.
as_user ln -sf @LAB@/opt/bin/uv @LAB@/opt/bin/uvx "$home/.local/bin/"

# What recipes/setup.sh has installed before (lab_kit.py, `installed`), as an image of a machine has it.
if [ -e "$seed/.complete" ] && [ ! -e .venv ] && [[ $cluster != new* ]]; then
  as_user cp -al "$seed"/{.venv,data} .
  # Its own path is in some files, and set-up writes two in place: those are copies (sed -i makes new files).
  as_user grep -rIlF "$seed" .venv --include=*.pth --include=pyvenv.cfg --include=direct_url.json |
    as_user xargs -r sed -i "s#$seed#$PWD#g"
  as_user find .venv/bin -type f -exec grep -IlF "$seed" {} + | as_user xargs -r sed -i "s#$seed#$PWD#g"
  as_user sed -i '' .venv/.setup .venv/.extras
fi

# The nodes of this cluster have no folder for runs in common: each sees its own disk there.
[ ! -e "@LAB@/run/own-disks/$cluster" ] || [ -e runs ] || as_user ln -s @LAB@/disk runs
exit 0
