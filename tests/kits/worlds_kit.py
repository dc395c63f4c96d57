"""`worlds_kit.py '{"run.dir": [settings], …}'`: trains tiny runs one after the other, alone or under torchrun."""

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


def train_in_world(world: int, runs: Mapping[str, Sequence[str]], *settings: str) -> None:
    """Train all runs in one launch of so many processes. runs: by run.dir their settings, after which those for all."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"] if world > 1 else []
    given = {run_dir: [*own, *settings] for run_dir, own in runs.items()}
    done = subprocess.run(
        [sys.executable, *torchrun, __file__, json.dumps(given)],
        env={**os.environ, "PYTHONPATH": f"{KITS}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=1800,  # a busy machine needs minutes
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def train_to_end(run_dir: str, settings: Sequence[str]) -> None:
    """In this process, which starts a run again that goes back, and has more to do after that."""
    with patch("mingpt.world.joining._exit_after"):
        while (code := attempt(settings_of(run_dir, *settings), Lifetime())) == CRASHED:
            pass
    assert code == FINISHED


if __name__ == "__main__":
    for run_dir, settings in json.loads(sys.argv[1]).items():
        train_to_end(run_dir, settings)
    sys.stdout.flush()
    os._exit(0)  # as mingpt.train ends (world/entry.py): gloo's threads must not meet Python's shutdown
