"""What a container platform starts in each container of a job: `python dist.py`, without arguments.

The platform says in SING_* who this container is among the others (world/platforms.py), the user in these, if at all:
EXPERIMENT (mnist), RUN_DIR (a bucket's URL, or a folder that all containers share), OVERRIDES (Hydra's, between
spaces), PREFLIGHT=0 (no look at the machines and the network first).
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

RUNS = Path("/runs")  # where the platform mounts a folder for all containers
# A third of the experiment: 67 s in two containers with an idle CPU each, and 94.9% of the test images told right.
DEFAULT = ["experiment=mnist", "train.max_steps=800", "train.eval_every=400"]

given = os.environ.get
overrides = [f"experiment={given('EXPERIMENT')}"] if given("EXPERIMENT") else [*DEFAULT]
if given("RUN_DIR"):
    overrides += [f"run.dir={given('RUN_DIR')}"]
elif os.access(RUNS, os.W_OK):
    overrides += [f"run.dir={RUNS}/${{run.name}}"]
overrides += given("OVERRIDES", "").split()

# For whatever else runs in this container; the launcher compares.
if {"SING_JOB_NAME", "SING_RANK", "SING_HOSTNAME_SUFFIX"} <= os.environ.keys():
    name = "{SING_JOB_NAME}-{SING_RANK}.{SING_HOSTNAME_SUFFIX}".format_map(os.environ)
    os.environ.setdefault("SING_HOST_ADDR", name)
if given("PREFLIGHT") != "0":
    # As process 1 of a container it would hear no signal without a handler. 75: nothing is lost, as in mingpt.launch.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    look = [sys.executable, "-m", "mingpt.preflight", "--seconds=300", *overrides]  # containers may start minutes apart
    if code := subprocess.run(look).returncode:
        sys.exit(code if code > 0 else 70)  # below 0: a signal has ended it
# In place of this process: the platform's signals reach the launcher.
os.execv(sys.executable, [sys.executable, "-m", "mingpt.launch", *overrides])
