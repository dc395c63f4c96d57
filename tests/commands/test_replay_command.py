"""`mingpt replay`: what it prints, writes and refuses."""

import shutil
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
import torch

from mingpt.observe.trace import RECORD
from mingpt.report.reading import Run
from mingpt.snapshot.format import State
from tests.kits.replay_kit import data_of, files_of, train_here
from tests.kits.rewriting_kit import rewrite
from tests.kits.snapshot_kit import save
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store, verified

Made = tuple[Path, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run of two attempts, not to be changed, and where its data is."""
    folder = tmp_path_factory.mktemp("made")
    how, where = data_of("text", folder / "data")
    here = *where, f"data.cache_dir={folder}/cache"
    for last in (5, 9):
        train_here(f"{folder}/run", *how, *here, f"train.max_steps={last}")
    return folder / "run", " ".join(here)


@pytest.fixture(autouse=True)
def data(made: Made) -> str:
    """Where the data of `run` is, a copy that may be changed."""
    shutil.copytree(made[0], "run")
    return made[1]


def test_without_samples_with_another_setting_and_what_follows(data: str) -> None:
    change = "--drop 0,3 --set optimizer.lr=0.05 --set optimizer.clip_norm=0.1 --then 3"
    found = mingpt.json(f"replay run --step 6 {data} {change}")
    was, now = found["as_it_was"], found["changed"]
    assert (was["targets"], now["targets"]) == (128, 96)
    assert was["clip_factor"] == pytest.approx(1 / was["grad_norm"], rel=1e-4)
    assert now["clip_factor"] == pytest.approx(0.1 / now["grad_norm"], rel=1e-4)
    assert now["lr"] == pytest.approx(5 * was["lr"])
    assert [loss is None for loss in now["losses"]] == [True, False, False, True] + [False] * 4
    rest = [loss for i, loss in enumerate(was["losses"]) if i not in (0, 3)]
    assert now["loss"] == pytest.approx(sum(rest) / 6, rel=1e-5)
    assert [(row["step"], row["same"]) for row in found["then"]] == [(7, False), (8, False), (9, False)]


def test_another_bit_is_named(data: str) -> None:
    (path,) = Path("run/trace").glob("attempt-00002-*.bin")
    records = np.fromfile(path, RECORD)
    records["norm"][1] = np.nextafter(records["norm"][1], 9.0)  # of step 7
    records.tofile(path)
    said = mingpt(f"replay run --step 8 {data}", code=1)
    assert said.startswith("OTHER BITS: step 7 differs first from what attempt 2 recorded: loss ")
    mingpt(f"replay run@7 --out out {data}", code=1)
    assert "step 7" in mingpt.err
    assert not Path("out").exists()
    shutil.rmtree("run/trace")
    assert mingpt(f"replay run --step 8 {data}").startswith("nothing to compare with: ")


@pytest.mark.parametrize(
    "options",
    [
        "--drop 8", "--drop 0,1,2,3,4,5,6,7", "--set optimizer.lrr=1", "--set run.name=x", "--set model.n_embd=48",
        "--attempt 7", "--step 10", "run --out new", "run@3 --out run/snapshots", "run@2 --out old",
        "run@3 --out other",
    ],
)  # fmt: skip
def test_mistakes(options: str, data: str, told: Told) -> None:
    """old: a place that has the step already. other: a place with another run."""
    save(store("other"), 9)
    before = files_of(Path("run"))
    if "old" in options:
        mingpt(f"replay run@2 --out old {data}")
    mingpt(f"replay {options if 'run' in options[:3] else f'run --step 6 {options}'} {data}", code=64)
    told(mingpt.err)
    assert files_of(Path("run")) == before


def test_out_gives_the_digest_of_a_run_that_stored_it(data: str) -> None:
    """And what was written generates, and trains on to the run's own end."""
    train_here("all", *data.split(), "train.max_steps=9", "snapshot.every_steps=1")
    for step in (2, 7, 8):  # the last one was stored
        mingpt(f"replay run@{step} --out out {data}")
    assert store("out").steps() == [8, 7, 2]
    assert {n: k for n, k in Run("out").kept.items() if k} == {1: 5, 2: 8}  # without a trace
    for step in (8, 7, 2):
        ours, theirs = verified("out", step), verified("all", step)
        assert (ours.digest, ours.metrics.loss) == (theirs.digest, theirs.metrics.loss)
    mingpt("generate out --step 7 --tokens 5")
    shutil.rmtree(store("out").folder(8))
    train_here("out", *data.split(), "train.max_steps=9")
    assert verified("out", 9).digest == verified("all", 9).digest


def test_out_computes_a_stored_step_again_and_so_judges_it(made: Made, data: str) -> None:
    """A bit of a weight flips, with checksums that fit: `snapshots verify` finds it good."""

    def flip(state: State) -> None:
        next(iter(state["model"].values())).view(torch.int32).view(-1)[5] ^= 1 << 20

    rewrite(store(), 8, flip)
    mingpt("snapshots verify run@8")
    bucket = f"memory://{uuid4().hex}/out"
    mingpt(f"replay run@8 --out {bucket} {data}")
    assert (
        mingpt(f"snapshots digest {bucket}") == f"{verified(made[0], 8).digest}\n" != mingpt("snapshots digest run@8")
    )


def test_a_change_is_not_taken_for_another_machine(data: str) -> None:
    mingpt(f"replay run --step 9 {data} --set optimizer.name=muon")
    assert mingpt.err == ""


def test_a_trace_with_a_hole_is_named_and_its_steps_are_not_compared(data: str) -> None:
    (path,) = Path("run/trace").glob("attempt-00002-*.bin")
    records = np.fromfile(path, RECORD)
    np.delete(records, 1).tofile(path)  # step 7
    said = mingpt(f"replay run --step 8 {data}")
    assert said.startswith("step 6: same loss and norm bits as recorded by attempt 2\n")
    assert mingpt.err.count("the trace of attempt 2 is damaged: in place of step 7 it has step 8\n") == 1
    assert [row["same"] for row in mingpt.json(f"replay run --step 8 {data}")["steps"]] == [True, None, None]
