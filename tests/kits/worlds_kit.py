"""`torchrun worlds_kit.py '{"run.dir": [settings], …}'`: trains tiny runs, one after the other, in these processes."""

import json
import sys

from replay_kit import train_here

if __name__ == "__main__":
    for run_dir, settings in json.loads(sys.argv[1]).items():
        train_here(run_dir, *settings, "train.max_steps=5")
