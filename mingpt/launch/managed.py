"""`mingpt launch --platform sky`: a node's part of a managed job of SkyPilot's, for recipes/train-spot.yaml.

It runs the preflight, then mingpt.launch, each as a process of its own, since this one must outlive a launcher that is
killed. It ends so that SkyPilot starts the job again after all but a user error, whichever node ends first. A job whose
starts make no progress ends with a user error, too (launch/starts.py).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR
from mingpt.world import slurm
from mingpt.world.env import START
from mingpt.world.lifetime import Lifetime

CRASH_SECONDS = 30.0  # what another node, a busy one too, has for its user error: then that is why this one crashed
LOG_SECONDS = 1.0  # until SkyPilot's own process on this node has passed on what was printed


def managed(lifetime: Lifetime) -> int:
    lifetime.ignore_signals()  # SkyPilot signals all processes of a job: the launcher writes a snapshot, and this waits
    # What is left of the command line, letter by letter, is for the preflight and the launcher, which check it.
    platform = argparse.ArgumentParser(add_help=False)
    platform.add_argument("--platform")
    _, arguments = platform.parse_known_args(sys.argv[1:])
    code = run(arguments)
    # SkyPilot 0.14.1 stops all nodes as soon as one has failed: one that crashed because another met a user error must
    # not be the first to end, or the job would be started again.
    if code == CRASHED and os.environ.get("SKYPILOT_NUM_NODES", "1") != "1":
        time.sleep(CRASH_SECONDS)
    # Elsewhere SkyPilot sees the codes of all nodes. On Slurm it sees what srun returns: the highest code of a task,
    # but any signal ranks above all codes. A node that is stopped ends by SIGTERM, so srun returns 143 after a crash
    # and after a user error alike, often even if both nodes end within the same millisecond. No code can tell them
    # apart; a signal that ranks above SIGTERM can. (Did not work: nodes that meet before they end; others that end with
    # 0 first.)
    if code == USER_ERROR:
        task = slurm.task()
        if task:
            time.sleep(LOG_SECONDS)
            os.kill(task, signal.SIGRTMAX)
    return code


def run(arguments: Sequence[str]) -> int:
    """Run the preflight and the launcher, on the first node after a look at the starts before this one.

    Returns the exit code of the first that fails.
    """
    programs = ["mingpt.preflight", "mingpt.launch"]
    if os.environ.get("SKYPILOT_NODE_RANK") == "0":  # one count for all nodes
        programs.insert(0, "mingpt.launch.starts")
    for program in programs:
        # By START and not by `-m`, which would run a torch.py of the current folder before the package.
        code = subprocess.call([sys.executable, START, program, *arguments])
        if code != FINISHED:
            # Any other code (137 of a kill, 1 of an interpreter that can't start) is worth another try.
            return code if code in (USER_ERROR, STOPPED) else CRASHED
    return FINISHED
