"""What makes a scene's data bad, for tests/faults/test_bad_input.py's table."""

import os
from collections.abc import Callable
from pathlib import Path

import bpe_kit
from bad_input_kit import Scene
from mingpt.prepare.documents import Options
from mingpt.prepare.prepare import prepare


def data_set(damage: Callable[[Path], None]) -> Callable[[Scene], None]:
    """The scene's text as a data set in the folder `set`, damaged."""

    def spoil(scene: Scene) -> None:
        prepare([str(scene.text)], str(scene.dir / "set"), bpe_kit.small(), Options("\n"), shard_tokens=1000)
        damage(scene.dir / "set")

    return spoil


def vocabulary(scene: Scene) -> None:
    """The folder `gpt2` has two files that do not belong together."""
    folder = bpe_kit.write_gpt2(scene.dir / "gpt2")
    (folder / "encoder.json").write_text("{}")


def flipped(folder: Path) -> None:
    content = bytearray((folder / "train-00001.bin").read_bytes())
    content[99] ^= 1
    (folder / "train-00001.bin").write_bytes(content)


def truncated(folder: Path) -> None:
    os.truncate(folder / "train-00001.bin", 77)


def missing(folder: Path) -> None:
    (folder / "train-00001.bin").unlink()
