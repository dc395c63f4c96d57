"""train.recompute=block: what is not kept is computed again, with the same bits. (Less of it: test_footprint.py.)"""

from pathlib import Path

import pytest

from tests.kits.replay_kit import train_here
from tests.kits.verb_kit import verified


@pytest.mark.parametrize("model", [(), ("model=modern-nano", "~model.dropout")])
def test_the_bits_are_the_same(model: tuple[str, ...], tmp_path: Path, text: Path, cache: Path) -> None:
    run = (f"data.path={text}", f"data.cache_dir={cache}", *model, "train.max_steps=2")
    for how in ("none", "block"):
        train_here(f"{tmp_path}/{how}", *run, f"train.recompute={how}")
    assert verified(f"{tmp_path}/none", 2).digest == verified(f"{tmp_path}/block", 2).digest
