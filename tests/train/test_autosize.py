"""batch.micro_size=auto: chosen once, written down, and then taken by every start of the run."""

from dataclasses import replace
from pathlib import Path

import pytest

from config_kit import configured, problems
from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train import autosize
from mingpt.world.env import Env
from replay_kit import train_here
from run_kit import TINY
from snapshot_kit import PROVENANCE, save

AUTO = "batch.micro_size=auto"


def config_in(folder: Path, *more: str, world_size: int = 1) -> Config:
    return configured(
        *TINY, "data=random", f"run.dir={folder}", "batch.global_size=64", AUTO, *more, world_size=world_size
    )


def with_memory(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    monkeypatch.setattr(autosize, "_memory", lambda config, local_rank, per_node: (int(megabytes * 1e6), False))


def size(config: Config, processes: int = 1) -> int:
    return autosize.settled(config, replace(Env.read(), size=processes)).batch.micro_size


def test_it_is_chosen_by_memory_and_then_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ("model.n_embd=96", "model.block_size=256")
    with_memory(monkeypatch, 100_000)
    assert size(config_in(tmp_path / "large", *shape)) == 8  # so that 8 microbatches are left
    assert (tmp_path / "large/micro-size").read_text() == "8\n"
    with_memory(monkeypatch, 1_250)
    assert size(config_in(tmp_path / "small", *shape)) == 2
    for memory in (100_000, 10):
        with_memory(monkeypatch, memory)
        assert size(config_in(tmp_path / "large", *shape), 2) == 8
        assert size(config_in(tmp_path / "small", *shape), 2) == 2
    assert size(config_in(tmp_path / "tiny", *shape)) == 1  # nothing fits


def test_a_new_run_dir_takes_that_of_the_newest_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 100_000)
    provenance = {**PROVENANCE, "config": {"batch": {"micro_size": 4}}}
    save(Store(str(tmp_path / "elsewhere")), 3, provenance=provenance)
    assert size(config_in(tmp_path / "new", f"snapshot.dir={tmp_path}/elsewhere")) == 4


def test_others_wait_for_process_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    config = config_in(tmp_path, "world.init_timeout_seconds=0.5")
    with pytest.raises(UserError, match="micro-size"):
        size(config)
    (tmp_path / "micro-size").write_text("4\n")
    assert size(config) == 4


def test_what_can_not_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "micro-size").write_text("32\n")
    with pytest.raises(UserError, match="3 processes"):
        size(config_in(tmp_path, world_size=3), 3)
    (tmp_path / "micro-size").write_text("many\n")
    with pytest.raises(UserError, match="micro-size"):
        size(config_in(tmp_path))
    own = problems("model._target_=own_kit.Linear", "data._target_=examples.classifier.rows", AUTO)
    assert [problem.partition(" ")[0] for problem in own] == [AUTO]


def test_a_run_has_the_bits_of_that_size(tmp_path: Path) -> None:
    for name, how in (("auto", AUTO), ("same", "batch.micro_size=2")):
        train_here(f"{tmp_path}/{name}", "data=sort", "batch.global_size=16", how, "train.max_steps=4")
    auto, same = (read(Store(f"{tmp_path}/{name}/snapshots"), 4).manifest.digest for name in ("auto", "same"))
    assert auto == same
