"""Small runs that are trained in this process, in tenths of a second each."""

from pathlib import Path

from mingpt.errors import FINISHED
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.run_kit import TINY


def train(folder: Path, text: Path, cache: Path, *overrides: str) -> None:
    """A run of TINY to step 12, with snapshots at 4, 8 and 12."""
    places = (f"run.dir={folder}", f"data.path={text}", f"data.cache_dir={cache}")
    assert attempt([*TINY, *places, "run.name=run", "train.max_steps=12", *overrides], Lifetime()) == FINISHED


def go_on(folder: Path | str) -> None:
    """The command that `mingpt fork` prints."""
    assert attempt([f"--config-dir={folder}", "--config-name=config"], Lifetime()) == FINISHED
