"""Data of every kind keeps the promise: three processes, one of them killed, end with the digest of one undisturbed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from image_kit import write_cifar, write_idx
from mingpt.observe.jsonl import read_metrics
from own_kit import OwnRun
from run_kit import Run

pytestmark = pytest.mark.slow

IMAGES = ("model._target_=examples.images.model.Classifier", "data._target_=examples.images.files.source")


@dataclass
class TaskRun(Run):
    """A run whose data are named by its overrides alone."""

    def command(self, world: int, *overrides: str, restarts: int = 0) -> list[str]:
        command = super().command(world, *overrides, restarts=restarts)
        return [part for part in command if part not in (f"data.path={self.text}", f"data.cache_dir={self.cache}")]


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(name: str, *overrides: str) -> Run:
        return TaskRun(str(tmp_path / name), Path("no-text"), Path("no-cache"), overrides)

    return make


def assert_exact(make_run: MakeRun, overrides: tuple[str, ...], of_the_second: tuple[str, ...] = ()) -> Run:
    """One process alone, then three of which one is killed; gives the run of the three."""
    alone, three = make_run("alone", *overrides), make_run("three", *overrides, *of_the_second)
    alone.finish(1)
    started = three.start(3, restarts=3)
    killed: list[int] = []

    def kill(step: int) -> None:
        if step >= 10 and not killed:
            killed.append(started.workers()[1])
            os.kill(killed[0], signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert killed
    assert "resumed from step" in started.output
    assert three.digest() == alone.digest()
    return three


@pytest.mark.parametrize("data", [("data=addition",), ("data=sort", "data.letters=6"), ("data=random",)])
def test_tasks_without_files(make_run: MakeRun, data: tuple[str, ...]) -> None:
    few = () if data == ("data=random",) else ("data.val_samples=37",)
    assert_exact(make_run, (*data, *few))


def test_mixtures(make_run: MakeRun, tmp_path: Path) -> None:
    """A block is 16 steps here: the weights change, and runs resume, inside of blocks; one ends at step 20."""
    for name, words in (("web", "the king is dead long live queen"), ("code", "def return self yield for in")):
        (tmp_path / name).write_text(" ".join(Random(name).choices(words.split(), k=1500)))
    about = "kind: text, tokens: byte, stride: 3"
    components = (
        f"data.mix={{web: {{path: {tmp_path}/web, weight: 0.7, {about}}}, "
        f"code: {{path: {tmp_path}/code, weight: [[0, 0.3], [4, 2]], {about}}}}}"
    )
    mixture = (
        "data=mix", components, f"data.cache_dir={tmp_path}/cache", "batch.global_size=256", "batch.micro_size=32",
        "model.block_size=8",
    )  # fmt: skip
    three = assert_exact(make_run, mixture, ("data.workers=1",))
    moved = make_run("moved", *mixture)
    started = moved.start(2)
    started.on_step = lambda step: os.killpg(started.process.pid, signal.SIGKILL) if step == 14 else None
    assert started.wait() != 0
    assert "resumed from step 12" in moved.finish(1)
    assert moved.digest() == three.digest()
    names = ("step", "loss", "val_loss", "val_loss/code", "val_loss/web")
    figures = [[{n: row[n] for n in names if n in row} for row in read_metrics(run.dir)] for run in (three, moved)]
    assert figures[0] == figures[1]
    assert [row["step"] for row in figures[0] if row.keys() == {*names}] == [8, 16, 24]

    other = moved.start(1, "train.max_steps=25", "data.mix.code.weight=[[0, 0.3], [4, 3]]")
    assert other.wait() == 64, other.output
    assert "  data.mix.code.weight: [[0, 0.3], [4, 2]] -> [[0, 0.3], [4, 3]]\n" in other.output


@pytest.mark.parametrize("files", ["idx", "cifar"])
def test_images(tmp_path: Path, files: str) -> None:
    if files == "idx":
        where, keys = write_idx(tmp_path / "images"), ("model.side=8", "data.classes=4", "data.shift=1")
    else:
        where, keys = write_cifar(tmp_path / "cifar"), ("model.side=32", "model.channels=3", "model.dropout=0.1")
    code = (*IMAGES, "model.width=4", f"data.path={where}", *keys)
    assert_exact(
        lambda name, *overrides: OwnRun(str(tmp_path / name), Path(), Path(), overrides, code=code),
        (),
        ("data.workers=1",),
    )


def generate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "mingpt.generate", *arguments], capture_output=True, text=True, timeout=600
    )


def test_bad_files_end_with_one_message_and_64(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "cifar")
    (folder / "test_batch.bin").write_bytes(b"\0" * 3072)
    run = OwnRun(str(tmp_path / "run"), Path(), Path(), code=(*IMAGES, f"data.path={folder}"))
    started = run.start(2)
    assert started.wait() == 1, started.output  # torchrun's; the workers' is 64
    assert len(re.findall(r"error: (?:rank 1 on \S+: )?data\.path=", started.output)) == 1
    assert "test_batch.bin has 3072 bytes, not a multiple of 3073" in started.output
    alone = subprocess.run(run.command(1), capture_output=True, text=True, timeout=600)
    assert alone.returncode == 64


def test_a_model_of_sums_is_asked_in_text(make_run: MakeRun) -> None:
    """The experiment's model, trained for a moment: what it says is digits; that it is right takes a minute."""
    run = make_run("run", "data=addition", "train.max_steps=2")
    run.finish(1)
    done = generate(run.dir, "--prompt", "12+34=", "--tokens", "3", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12+34=")
    assert len(done.stdout) == len("12+34=046\n")
