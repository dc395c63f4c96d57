"""`torchrun worlds_kit.py '{"run.dir": [settings], …}'`: trains tiny runs, one after the other, in these processes."""

import json
import os
import sys

from replay_kit import train_here

if __name__ == "__main__":
    for run_dir, settings in json.loads(sys.argv[1]).items():
        train_here(run_dir, *settings, "train.max_steps=5")
    sys.stdout.flush()
    os._exit(0)  # as mingpt.train ends (world/entry.py): gloo's threads must not meet Python's shutdown
