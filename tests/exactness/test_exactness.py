"""The claim: kill it, move it, resize it: the same weights, bit for bit. Digests of real runs, compared."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mingpt.observe.jsonl import read_metrics
from mingpt.snapshot.reader import read
from node_kit import ask_to_stop
from run_kit import Run

pytestmark = pytest.mark.slow

NewRun = Callable[..., Run]
POWER_OF_TWO, NOT = ("batch.global_size=16",), ("batch.global_size=12",)  # 8 and 6 microbatches


def figures(run: Run) -> list[dict[str, Any]]:
    """What the metrics say that is a function of (config, step): not speeds, not the world, not the attempt."""
    names = ("step", "loss", "lr", "grad_norm", "val_loss", "val_accuracy")
    return [{n: row[n] for n in names if n in row} for row in read_metrics(run.dir)]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("batch", [POWER_OF_TWO, NOT], ids=["8 microbatches", "6 microbatches"])
def test_any_number_of_processes_gives_the_same_bits(
    new_run: NewRun, undisturbed: NewRun, world: int, batch: tuple[str, ...]
) -> None:
    run = new_run(*batch)
    run.finish(world)
    assert run.digest() == undisturbed(*batch).digest()
    assert figures(run) == figures(undisturbed(*batch))
    assert len(figures(run)) == 24


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [(4, ("batch.micro_size=4",)), (2, ("batch.micro_size=1",))],
    ids=["flat: 1 microbatch a process", "deep: 8 microbatches a process"],
)
def test_accumulation_may_be_flat_or_deep(
    new_run: NewRun, undisturbed: NewRun, world: int, accumulation: tuple[str, ...]
) -> None:
    run = new_run(*accumulation)
    run.finish(world)
    assert run.digest() == undisturbed(*accumulation).digest()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_gives_the_same_bits_too(new_run: NewRun, undisturbed: NewRun, precision: str) -> None:
    """Weights that travel in 16 bits are whole again in snapshots, and evaluations see the same model."""
    options = (f"precision={precision}", "train.max_steps=12", "train.eval_every=4")
    run = new_run(*options)
    run.finish(3, "train.max_steps=8")
    run.finish(2)
    assert run.digest() == undisturbed(*options).digest() != undisturbed().digest()
    assert figures(run) == figures(undisturbed(*options))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_model_gives_the_same_bits_too(new_run: NewRun, undisturbed: NewRun, precision: str) -> None:
    options = ("train.compile=true", "train.max_steps=6", f"precision={precision}")
    run = new_run(*options)
    run.finish(2)
    assert run.digest() == undisturbed(*options).digest()


@pytest.mark.parametrize(("world", "seed"), [pytest.param(2, 1, marks=pytest.mark.example), (3, 2)])
def test_sigkill_of_a_random_worker_at_random_steps_changes_nothing(
    new_run: NewRun, undisturbed: NewRun, world: int, seed: int
) -> None:
    chooser = random.Random(seed)
    kills = sorted(chooser.sample(range(5, 24), 3))
    run = new_run()
    started = run.start(world, restarts=10)

    def kill(step: int) -> None:
        if kills and step >= kills[0] and started.attempt == 4 - len(kills):
            kills.pop(0)
            os.kill(chooser.choice(started.workers()), signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert not kills, "not all kills took place"
    assert "attempt 4: steps" in started.output  # from step 1 if the kill came before a snapshot was durable
    assert run.digest() == undisturbed().digest()
    assert figures(run) == figures(undisturbed())


@pytest.mark.parametrize("worlds", [pytest.param((2, 3), marks=pytest.mark.example), (4, 1), (1, 4)])
def test_a_stopped_run_goes_on_with_another_number_of_processes(
    new_run: NewRun, undisturbed: NewRun, worlds: tuple[int, int]
) -> None:
    # The only snapshots are those at the stop and at the end; an evaluation at step 8 would leave one, too.
    run = new_run("snapshot.every_steps=0", "snapshot.keep_best=false")
    before, after = worlds
    started = run.start(before)

    def stop(step: int) -> None:
        if step == 7:
            ask_to_stop(started.process.pid, workers=started.workers())

    started.on_step = stop
    assert started.wait() == (75 if before == 1 else 1), started.output  # torchrun turns its workers' 75 into 1
    stopped_at = run.store.steps()
    assert len(stopped_at) == 1
    assert 7 <= stopped_at[0] < 24
    output = run.finish(after)
    assert f"resumed from step {stopped_at[0]} of " in output
    assert run.digest() == undisturbed().digest()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("kind", "damage", "complaint"),
    [
        ("model-00001-*", truncate, "bytes in place of"),
        ("optimizer-00001-*", truncate, "bytes in place of"),
        ("model-00001-*", flip_a_bit, "does not match its checksum in the manifest"),
        ("optimizer-00001-*", flip_a_bit, "does not match its checksum in the manifest"),
        ("manifest.json", flip_a_bit, "manifest.json"),
        ("manifest.json", truncate, "manifest.json is not JSON"),
        ("model-00001-*", Path.unlink, "is missing"),
    ],
)
def test_a_damaged_newest_snapshot_is_set_aside_and_the_next_older_one_taken(
    new_run: NewRun, undisturbed: NewRun, kind: str, damage: Callable[[Path], None], complaint: str
) -> None:
    run = new_run()
    shutil.copytree(undisturbed().dir, run.dir)
    newest = Path(run.dir, "snapshots", "step-000000024")
    files = set(newest.iterdir())
    (target,) = newest.glob(kind)
    damage(target)
    output = run.finish(2 if damage is flip_a_bit else 1)
    assert "DAMAGED SNAPSHOT of step 24" in output
    assert complaint in output
    assert "resumed from step 20 of " in output
    assert run.digest() == undisturbed().digest()
    aside = set(newest.iterdir()) - files
    assert [p.name[:10] for p in aside] == ["set-aside-"]


def test_loader_workers_change_nothing(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run("data.workers=2")
    run.finish(2)
    assert run.digest() == undisturbed().digest()


@pytest.mark.parametrize(("every", "steps"), [(1, [24, 23, 22]), (0, [24])], ids=["every step", "never but at the end"])
def test_snapshots_change_nothing_and_keep_is_kept(
    new_run: NewRun, undisturbed: NewRun, every: int, steps: list[int]
) -> None:
    run = new_run(f"snapshot.every_steps={every}", "snapshot.keep=3", "snapshot.keep_best=false")
    run.finish(2)
    assert run.store.steps() == steps
    assert run.digest() == undisturbed().digest()


def test_manifests_hold_the_losses_of_their_step_whoever_wrote_them(new_run: NewRun, undisturbed: NewRun) -> None:
    alone, three = undisturbed(), new_run()
    three.finish(3, "train.log_every=5")
    rows = {row["step"]: row for row in read_metrics(alone.dir)}
    measured = []
    for step in alone.store.steps():
        metrics = read(alone.store, step).manifest.metrics
        assert (metrics.loss, metrics.val_loss) == (rows[step]["loss"], rows[step].get("val_loss"))
        assert metrics == read(three.store, step).manifest.metrics
        measured += [step] if metrics.val_loss is not None else []
    assert measured == [24, 16, 8]


def test_snapshots_by_time_are_taken_at_one_step_by_all(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run("snapshot.every_steps=0", "snapshot.every_seconds=0.0001")
    run.finish(2)
    assert run.store.steps() == list(range(24, 14, -1))
    assert run.digest() == undisturbed().digest()


def test_fast_is_not_equal_so_that_these_tests_can_fail(new_run: NewRun, undisturbed: NewRun) -> None:
    fast = new_run("reduce=fast")
    fast.finish(4)
    assert fast.digest() != undisturbed().digest()
    ours, theirs = (r.dir for r in (fast, undisturbed()))
    for a, b in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)  # the same samples and the same law otherwise
