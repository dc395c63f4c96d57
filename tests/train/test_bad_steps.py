"""Batches that would spoil the weights: skipped, named, and after too many of them left out for ever."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mingpt.errors import CRASHED, FINISHED, USER_ERROR
from mingpt.snapshot.attempts import records
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from own_kit import OwnRun
from paths_kit import KITS
from poison_kit import MICRO, PLAN, POISONED, poison
from run_kit import Run

GUARDED = ("health.spike_sigma=8", "health.max_skips=2", "health.max_rollbacks=1")


@pytest.fixture(autouse=True)
def outlived(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure a process has some seconds to live. This one has more tests to run."""
    monkeypatch.setattr("mingpt.world.joining._exit_after", lambda seconds, code: None)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., int]]:
    threads = torch.get_num_threads()
    yield lambda *overrides: attempt([*POISONED, f"run.dir={tmp_path}/run", *overrides], Lifetime())
    torch.set_num_threads(threads)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"{tmp_path}/run/snapshots")


def dropped(store: Store, step: int) -> list[list[int]]:
    return [r for r in read(store, step).state["optimizer"]["health.dropped"].tolist() if r[0] >= 0]


@pytest.mark.parametrize(("times", "what"), [(1e3, "the loss is a spike, highest in"), (1e25, "the loss of")])
def test_a_bad_batch_is_skipped_and_named(
    train: Callable[..., int],
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    times: float,
    what: str,
) -> None:
    assert train("health.spike_sigma=8", *poison([20], times)) == FINISHED
    samples = PLAN.sample_ids(20)[MICRO : 2 * MICRO].tolist()
    named = re.escape(f"microbatch 1 {'' if times < 1e9 else 'is not finite '}(samples {samples[0]}, {samples[1]})")
    assert re.findall(
        rf"^step 21: SKIPPED \(1 in a row\): loss \S+, norm \S+: {what} {named}$", capsys.readouterr().out, re.M
    )
    assert len(samples) == MICRO
    rows = [json.loads(line) for line in (tmp_path / "run/metrics/attempt-00001.jsonl").read_text().splitlines()]
    assert [(row["step"], row["skipped"]["microbatches"]) for row in rows if "skipped" in row] == [(21, [1])]
    assert read(store, 36).state["optimizer"]["layer.weight.step"] == 35


def test_without_it_a_spike_goes_into_the_weights(train: Callable[..., int], store: Store) -> None:
    assert train(*poison([20])) == FINISHED
    remembered = read(store, 36).state["optimizer"]
    assert remembered["layer.weight.step"] == 36
    assert not [name for name in remembered if name.startswith("health.")]


def test_after_too_many_skips_a_run_goes_back_and_never_shows_these_batches_again(
    train: Callable[..., int], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*GUARDED, *poison([17, 18]))
    assert train(*overrides) == CRASHED
    assert (
        "2 steps in a row were skipped after step 17: the run goes back to step 15, and batches 17 to 18 are shown no "
        "more (rollback 1 of 1): start again"
    ) in capsys.readouterr().err
    assert store.steps() == [15, 10, 5]
    assert [(r.by, r.from_step, r.dropped) for r in records(f"{tmp_path}/run").values()][1:] == [
        ("rewind", 15, (17, 19))
    ]
    assert train(*overrides) == FINISHED
    assert "SKIPPED" not in capsys.readouterr().out
    assert dropped(store, 36) == [[17, 19]]
    assert dropped(store, 15) == []
    assert read(store, 36).state["optimizer"]["layer.weight.step"] == 36
    # As a run that never had them, up to what it remembers of them.
    clean = f"{tmp_path}/clean"
    assert attempt([*POISONED, *GUARDED, *poison([]), f"run.dir={clean}", "train.max_steps=17"], Lifetime()) == FINISHED
    ours, theirs = (read(Store(f"{place}/snapshots"), 15).manifest.digest for place in (f"{tmp_path}/run", clean))
    assert ours == theirs


def test_a_run_that_has_gone_back_often_enough_ends(
    train: Callable[..., int], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*GUARDED, *poison([17, 18, 25, 26]))
    assert train(*overrides) == CRASHED
    assert train(*overrides) == USER_ERROR
    # Batch 25 is that of step 23: two are left out.
    assert (
        "error: nothing was learnt since step 23: 2 steps in a row were skipped. The run went back 1 time, and it was "
        "no help. The run has diverged: give a lower optimizer.lr with resume.changed=true, and go back to a step "
        "before the trouble, 20 at the latest"
    ) in capsys.readouterr().err
    assert store.steps() == [20, 15, 10, 5]


def test_a_run_without_a_good_snapshot_ends(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*GUARDED, *poison([9, 10]), "snapshot.every_steps=0") == USER_ERROR
    assert (
        "nothing was learnt since step 9: 2 steps in a row were skipped. The run has diverged, and nothing was stored"
        in (capsys.readouterr().err)
    )


def test_another_seed_of_settings_is_another_result(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("train.max_steps=10") == FINISHED
    assert train("train.max_steps=12", "health.spike_sigma=8") == USER_ERROR
    assert "health.spike_sigma: 0.0 -> 8.0" in capsys.readouterr().err
    assert train("train.max_steps=14", "health.spike_sigma=8", "resume.changed=true") == FINISHED


def finish(run: Run, world: int, *overrides: str) -> str:
    """Start it until it ends, as a launcher would."""
    output = ""
    for _ in range(4):
        started = run.start(world, *overrides)
        code = started.wait()
        output += started.output
        if code == 0:
            return output
    raise AssertionError(output)


@pytest.mark.slow
def test_every_world_decides_alike_whatever_is_killed_between_skip_and_rollback(
    tmp_path: Path, text: Path, cache: Path
) -> None:
    bad = (*GUARDED, "health.max_rollbacks=2", "health.max_skips=3", *poison([12, 17, 18, 19, 30, 31, 32]))

    def new(name: str) -> OwnRun:
        where = (*POISONED, "run.name=" + name, f"run.dir={tmp_path}/{name}")
        return OwnRun(f"{tmp_path}/{name}", Path(), Path(), where, {"PYTHONPATH": str(KITS)}, bad)

    alone = new("alone")
    output = finish(alone, 1)
    assert re.findall(r"rollback . of 2", output) == ["rollback 1 of 2", "rollback 2 of 2"]
    three = new("three")
    finish(three, 3)
    assert three.digest() == alone.digest()
    # Killed after the second of three skips; then stopped there, so that a snapshot holds the count; then two go on.
    killed = new("killed")
    for number in (signal.SIGKILL, signal.SIGTERM):
        started = killed.start(1)
        started.on_step = lambda step, started=started, number=number: (  # type: ignore[misc]
            os.kill(started.process.pid, number) if step == 19 else None
        )
        started.wait()
    finish(killed, 2)
    assert killed.digest() == alone.digest()
    assert dropped(killed.store, 36) == dropped(alone.store, 36) == [[17, 20], [30, 33]]
