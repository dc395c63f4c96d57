"""batch.micro_size=auto: chosen once, written down, and then taken by every start of the run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from config_kit import configured, problems
from mingpt.config.schema import Config
from mingpt.config.stored import evaluation_config, fork_config, replay_config
from mingpt.errors import UserError
from mingpt.snapshot.store import Store
from mingpt.train import autosize
from run_kit import TINY, Run
from snapshot_kit import PROVENANCE, save

AUTO = "batch.micro_size=auto"


def config_in(folder: Path, *more: str, world_size: int = 1) -> Config:
    return configured(
        *TINY, "data=random", f"run.dir={folder}", "batch.global_size=64", AUTO, *more, world_size=world_size
    )


def with_memory(monkeypatch: pytest.MonkeyPatch, megabytes: float) -> None:
    monkeypatch.setattr(autosize, "_memory", lambda config, per_node: (int(megabytes * 1e6), False))


def size(config: Config, processes: int = 1) -> int:
    return autosize.settled(config, processes).batch.micro_size


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
    with pytest.raises(UserError, match="does not see micro-size, which process 0 writes there"):
        size(config)
    (tmp_path / "micro-size").write_text("4\n")
    assert size(config) == 4


def test_what_can_not_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "micro-size").write_text("32\n")
    with pytest.raises(UserError, match="3 processes, but only 2 microbatches"):
        size(config_in(tmp_path, world_size=3), 3)
    (tmp_path / "micro-size").write_text("many\n")
    with pytest.raises(UserError, match="micro-size is damaged"):
        size(config_in(tmp_path))
    own = problems("model._target_=own_kit.Linear", "data._target_=examples.classifier.rows", AUTO)
    assert own == ["batch.micro_size=auto knows only this package's models: give a number"]


def test_only_training_can_choose() -> None:
    stored = configured("data=random", "batch.micro_size=4").model_dump()
    for config in (
        lambda: evaluation_config(stored, "run", [AUTO], 1),
        lambda: replay_config(stored, "run", changed=[AUTO]),
        lambda: fork_config(stored, [AUTO], "b", "runs/b", "run"),
    ):
        with pytest.raises(UserError, match=r"batch\.micro_size=auto is for the first start of a run"):
            config()


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_first_snapshot_goes_on_with_the_same_bits(
    new_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(AUTO, "snapshot.every_steps=20", "snapshot.keep_best=false")
    started = run.start(1)
    started.on_step = lambda step: os.killpg(started.process.pid, signal.SIGKILL) if step == 5 else None
    assert started.wait() < 0
    assert "batch.micro_size=auto: 2, which needs" in started.output
    assert run.store.steps() == []
    assert "micro_size=auto" not in run.finish(2).partition("attempt 2")[2]
    told = new_run("batch.micro_size=2", "snapshot.every_steps=20", "snapshot.keep_best=false")
    told.dir += "-told"
    told.finish(1)
    assert run.digest() == told.digest()
