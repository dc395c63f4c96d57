"""A platform that sets SING_* starts `python dist.py`, without arguments, in each container of a job.

SING_* say which of the containers this is (world/platforms.py). The user may set EXPERIMENT (default: mnist), RUN_DIR
(a bucket's URL, or a folder that all containers share), OVERRIDES (Hydra's, separated by spaces outside of quotes) and
PREFLIGHT=0 (do not check the machines and the network first).
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from mingpt.cli.command import WORD

RUNS = Path("/runs")  # where the platform mounts a folder for all containers
# A third of the experiment.
DEFAULT = ["experiment=mnist", "train.max_steps=800", "train.eval_every=400"]

given = os.environ.get
overrides = [f"experiment={given('EXPERIMENT')}"] if given("EXPERIMENT") else [*DEFAULT]
if given("RUN_DIR"):
    overrides += [f"run.dir={given('RUN_DIR')}"]
elif os.access(RUNS, os.W_OK):
    overrides += [f"run.dir={RUNS}/${{run.name}}"]
overrides += WORD.findall(given("OVERRIDES", ""))

# For other programs in this container. The launcher compares it with the other variables.
if {"SING_JOB_NAME", "SING_RANK", "SING_HOSTNAME_SUFFIX"} <= os.environ.keys():
    name = "{SING_JOB_NAME}-{SING_RANK}.{SING_HOSTNAME_SUFFIX}".format_map(os.environ)
    os.environ.setdefault("SING_HOST_ADDR", name)
if given("PREFLIGHT") != "0":
    asked, started = list[int](), list[subprocess.Popen[bytes]]()

    def stop(number: int, _: object) -> None:
        asked.append(number)
        for process in started:
            process.kill()

    # Process 1 of a container gets no signal without a handler. The handler raises nothing: an exception while Popen
    # starts the preflight would leave that behind.
    signal.signal(signal.SIGTERM, stop)
    look = [sys.executable, "-m", "mingpt.preflight", "--seconds=300", *overrides]  # containers may start minutes apart
    started.append(subprocess.Popen(look))
    if asked:
        started[0].kill()
    code = started[0].wait()
    if asked:
        sys.exit(75)  # as in mingpt.launch: nothing is lost
    if code:
        sys.exit(code if code > 0 else 70)  # below 0: a signal ended it
# The launcher replaces this process, so it gets the platform's signals.
os.execv(sys.executable, [sys.executable, "-m", "mingpt.launch", *overrides])
