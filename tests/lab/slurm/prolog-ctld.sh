#!/bin/bash
# PrologSlurmctld. SkyPilot looks for uv below a home that it makes for each cluster; found there, it isn't downloaded.
[ "$SLURM_JOB_USER" = @WHO@ ] || exit 0
bin=@LAB@/home/@WHO@/.sky_clusters/$SLURM_JOB_NAME/.local/bin
runuser -u @WHO@ -- mkdir -p "$bin" && ln -sf @LAB@/opt/bin/uv @LAB@/opt/bin/uvx "$bin/"
exit 0
