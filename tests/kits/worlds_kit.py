"""`torchrun worlds_kit.py '{"run.dir": [settings], …}'`: trains tiny runs, one after the other, in these processes."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from unittest.mock import patch

from mingpt.errors import CRASHED, FINISHED
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from paths_kit import KITS, ROOT
from replay_kit import settings_of


def train_together(world: int, runs: Mapping[str, Sequence[str]]) -> None:
    """Train these runs, by their directories, to their ends: all of them in one launch of so many processes."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", str(KITS / "worlds_kit.py")]
    done = subprocess.run(
        [sys.executable, *command, json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": f"{KITS}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def train_to_end(run_dir: str, settings: Sequence[str]) -> None:
    """In this process, which starts a run again that goes back, and has more to do after that."""
    with patch("mingpt.world.joining._exit_after"):
        while (code := attempt(settings_of(run_dir, *settings), Lifetime())) == CRASHED:
            pass
    assert code == FINISHED


if __name__ == "__main__":
    for place, given in json.loads(sys.argv[1]).items():
        train_to_end(place, given)
    sys.stdout.flush()
    os._exit(0)  # as mingpt.train ends (world/entry.py): gloo's threads must not meet Python's shutdown
