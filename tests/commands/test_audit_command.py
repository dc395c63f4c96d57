"""`mingpt audit`: each planted corruption is found, with its step and attempt, and a sound run passes."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mingpt.observe.trace import RECORD
from mingpt.report.auditing import audit
from mingpt.train import loop
from mingpt.train.replaying import replay
from mingpt.train.step import train_step
from replay_kit import files_of, train_here
from rewriting_kit import rewrite
from verb_kit import mingpt, store

DATA = ("data=sort", "data.val_samples=37", "snapshot.every_steps=3", "snapshot.keep=9")
ENDS = {1: 5, 2: 8, 3: 12}
INTERVALS = [(0, 3), (3, 5), (5, 6), (6, 8), (8, 9), (9, 12)]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three attempts: steps 1 to 5, 6 to 8, 9 to 12; snapshots at 3, 5, 6, 8, 9, 12.

    before-N, beside it: as attempt N found it.
    """
    folder = tmp_path_factory.mktemp("sound") / "run"
    for attempt, last in ENDS.items():
        train_here(str(folder), *DATA, f"train.max_steps={last}")
        shutil.copytree(folder, folder.with_name(f"before-{attempt + 1}"))
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(sound, tmp_path / "run")


def wrong() -> list[dict[str, Any]]:
    found = mingpt.json("audit run", code=1)["intervals"]
    return [interval for interval in found if interval["verdict"] == "FAIL"]


def flip(tensor: torch.Tensor, at: int = 5) -> None:
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[at % flat.numel()] ^= 1 << 30


def delete(*steps: int) -> None:
    for step in steps:
        shutil.rmtree(f"run/snapshots/step-{step:09d}")


def train_with_a_flip(last: int, after: int, number: int, at: int) -> None:
    """As `sound`, but a bit of a weight flips in the process's memory after the update of step `after`."""

    def step(context: Any, step: int, *given: Any) -> Any:
        stats = train_step(context, step, *given)
        if step + 1 == after:
            flip([*context.model.parameters()][number], at)
        return stats

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "train_step", step)
        train_here("run", *DATA, f"train.max_steps={last}")


@pytest.mark.slow
def test_a_sound_run_passes_and_is_not_touched(run: Path) -> None:
    def of(options: str) -> list[tuple[int, int]]:
        return [(i["begin"], i["end"]) for i in mingpt.json(f"audit run {options}")["intervals"]]

    before = files_of(run)
    assert mingpt("audit run").endswith("\n6 intervals, 12 steps: all right\n")
    assert of("") == INTERVALS
    assert of("--from 6 --to 7") == INTERVALS[2:4]
    two = of("--sample 2 --seed 5")
    assert two == of("--sample 2 --seed 5")
    assert len(two) == 2
    for options in ("--from 13", "--sample 0"):
        mingpt(f"audit run {options}", code=64)
    assert files_of(run) == before


def test_a_run_that_deletes_snapshots_meanwhile_is_not_wrong(run: Path) -> None:
    """Such as one that is being trained; whether it was read already or not."""
    with replay("run", 4) as past:
        begin_at = past.begin_at

        def begin(step: int) -> None:
            begin_at(step)
            if step == 8:
                delete(9)  # after it was found good

        past.begin_at = begin  # type: ignore[method-assign]
        found = audit(past, INTERVALS[1:])
        first = next(found)
        delete(6)
        assert [(i.begin, i.end, i.verdict) for i in [first, *found]] == [(3, 5, "ok")]
        assert [note.partition(":")[0] for note in past.notes] == [f"step {a} to {b}" for a, b in INTERVALS[2:]]


def test_a_flipped_bit_in_memory(sound: Path) -> None:
    """The steps after it go on from the wrong weights; one interval alone is wrong."""
    shutil.copytree(sound.with_name("before-2"), "run")
    train_with_a_flip(8, 7, 4, 31)
    [found] = wrong()
    assert (found["begin"], found["end"], found["attempt"], found["step"]) == (6, 8, 2, 8)
    assert found["tensors"]
    assert "step 8 is the first with other bits" in found["why"]


def test_a_rewritten_a_damaged_snapshot_and_a_changed_record(run: Path) -> None:
    """Rewritten with a manifest of its own that fits: `snapshots verify` can't see it."""
    rewrite(store(), 3, lambda state: flip(max(state["optimizer"].values(), key=lambda t: t.numel())))
    [path] = run.glob("trace/attempt-00002-*.bin")
    records = np.fromfile(path, RECORD)
    records["norm"][1] = np.nextafter(records["norm"][1], 9.0)
    records.tofile(path)
    [path] = (run / "snapshots/step-000000012").glob("model-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    rewritten, after, record, damaged = wrong()
    assert (rewritten["end"], rewritten["attempt"], rewritten["step"]) == (3, 1, 3)
    assert "the steps have the right bits up to 3" in rewritten["why"]
    [tensor] = rewritten["tensors"]
    assert "1 of " in tensor
    assert after["begin"] == 3
    assert (record["step"], record["attempt"]) == (7, 2)
    assert record["why"].endswith("the trace was changed")
    assert (damaged["begin"], damaged["end"], damaged["attempt"]) == (9, 12, 3)
    assert "is damaged" in damaged["why"]


@pytest.mark.slow
def test_on_another_machine_a_difference_proves_nothing(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_with_a_flip(5, 4, 1, 3)
    monkeypatch.setattr("mingpt.compute.numerics.cpu_vendor", lambda: "another CPU")
    mingpt(f"audit {sound} --to 3")  # the same digest all the same proves it
    assert "cpu: " in mingpt.err
    assert "differs step 3 to 5: " in mingpt("audit run", code=64)
