"""Worlds of one, two and three give the same digest: what tests/exactness does not train, all in one launch a world."""

from pathlib import Path

import pytest

from own_kit import CLASSIFIER
from poison_kit import GUARDED, POISONED, poison
from run_kit import Run
from weights_kit import saved
from worlds_kit import train_in_world, train_to_end

pytestmark = pytest.mark.slow
OWN = (*CLASSIFIER, "model.dropout=0.1", "data.count=300", "batch.micro_size=2", "train.max_steps=12")
BAD = (*POISONED, *GUARDED, "health.max_rollbacks=2", *poison([12, 17, 18, 30, 31]))
KINDS = ("loss rows", "own model", "bad steps", "finetune")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path, cache: Path) -> Path:
    """runs/WORLD/KIND"""
    folder = tmp_path_factory.mktemp("worlds")
    saved(folder / "gpt2", vocab_size=len(set(text.read_text())), n_head=3)
    of_text = (f"data.path={text}", f"data.cache_dir={cache}", "train.max_steps=6")
    weights = (f"model.init_from={folder}/gpt2", "train.freeze=[transformer.wte.*,'transformer.h.[0].*']")
    settings = dict(zip(KINDS, ((*of_text, "train.loss_rows=5"), OWN, BAD, (*of_text, *weights)), strict=True))
    for kind in KINDS:
        train_to_end(f"{folder}/1/{kind}", settings[kind])
    for world in (2, 3):
        train_in_world(world, {f"{folder}/{world}/{kind}": settings[kind] for kind in KINDS})
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_worlds_of_one_two_and_three_give_the_same_digest(runs: Path, kind: str) -> None:
    assert len({Run(f"{runs}/{world}/{kind}", runs, runs).digest() for world in (1, 2, 3)}) == 1
