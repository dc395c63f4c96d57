"""`mingpt audit`: each planted corruption is found, with its step and attempt, and a sound run passes."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mingpt.train.loop
from mingpt.commands.audit import audit_command
from mingpt.observe.trace import RECORD
from mingpt.report.auditing import audit
from mingpt.snapshot.format import Kind
from mingpt.snapshot.store import Store
from mingpt.train.replaying import replay
from mingpt.train.step import train_step
from replay_kit import files_of, train_here
from rewriting_kit import rewrite

Captured = pytest.CaptureFixture[str]
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


def audited(capsys: Captured, code: int, *arguments: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert audit_command([*map(str, arguments), "--json"]) == code
    shown: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["intervals"]
    return shown


def wrong(capsys: Captured, run: Path) -> list[dict[str, Any]]:
    return [interval for interval in audited(capsys, 1, run) if interval["verdict"] == "FAIL"]


def flip(tensor: torch.Tensor, at: int = 5, bit: int = 30) -> None:
    flat = tensor.detach().view(-1).view(torch.int32)
    flat[at % flat.numel()] ^= 1 << bit


def train_with_a_flip(
    monkeypatch: pytest.MonkeyPatch, run: Path, ends: Iterable[int], after: int, number: int, at: int, bit: int,
    *settings: str,
) -> None:  # fmt: skip
    """As `sound`, but a bit of a weight flips in the process's memory after the update of step `after`."""

    def step(run: Any, step: int) -> Any:
        stats = train_step(run, step)
        if step + 1 == after:
            weights = [*run.compute.model.parameters()]
            flip(weights[number % len(weights)], at, bit)
        return stats

    with monkeypatch.context() as patched:
        patched.setattr(mingpt.train.loop, "train_step", step)
        for last in ends:
            train_here(str(run), *DATA, *settings, f"train.max_steps={last}")


def test_a_sound_run_passes_and_is_not_touched(sound: Path, capsys: Captured) -> None:
    def of(*options: str) -> list[tuple[int, int]]:
        return [(i["begin"], i["end"]) for i in audited(capsys, 0, sound, *options)]

    before = files_of(sound)
    assert audit_command([str(sound)]) == 0
    assert capsys.readouterr().out.endswith("\n6 intervals, 12 steps: all right\n")
    assert of() == INTERVALS
    assert of("--from", "6", "--to", "7") == [(5, 6), (6, 8)]
    two = of("--sample", "2", "--seed", "5")
    assert two == of("--sample", "2", "--seed", "5")
    assert len(two) == 2
    assert [audit_command([str(sound), *words]) for words in (("--from", "13"), ("--sample", "0"))] == [64, 64]
    assert files_of(sound) == before


def test_a_run_that_deletes_snapshots_meanwhile_is_not_wrong(run: Path) -> None:
    """Such as one that is being trained; whether it was read already or not."""

    def delete(step: int) -> None:
        shutil.rmtree(run / f"snapshots/step-{step:09d}")

    with replay(str(run), 4) as past:
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


# after step, attempt of it, which weights, at, bit
FLIPS = [(1, 1, 0, 3, 30), (4, 1, 2, 17, 31), (6, 2, 4, 31, 30), (7, 2, 6, 45, 31), (10, 3, 8, 59, 22)]


@pytest.mark.parametrize(("after", "attempt", "number", "at", "bit"), FLIPS)
def test_a_flipped_bit_in_memory(
    after: int, attempt: int, number: int, at: int, bit: int, sound: Path, tmp_path: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The steps after it go on from the wrong weights, and so do later attempts; one interval alone is wrong."""
    run = tmp_path / "run"
    if attempt > 1:
        shutil.copytree(sound.with_name(f"before-{attempt}"), run)
    ends = [12] if attempt == 3 else [ENDS[attempt], *([8] if after == 1 else [])]
    train_with_a_flip(monkeypatch, run, ends, after, number, at, bit)
    [found] = wrong(capsys, run)
    assert found["begin"] < after <= found["end"]
    assert found["attempt"] == attempt
    assert found["tensors"]
    if after < found["end"]:
        assert found["step"] == after + 1
        assert f"step {after + 1} is the first with other bits" in found["why"]


def test_when_a_weight_went_wrong_that_nothing_uses_cannot_be_told(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two histories that leave the same files, byte for byte: the flip came after step 7, or after step 8."""
    left, short = list[list[bytes]](), ("data=addition", "optimizer.weight_decay=0")
    last = 16 * 24 - 1  # of wpe: the 16th position, which sums of 8 tokens do not reach
    for run in (tmp_path / "7", tmp_path / "8"):
        train_with_a_flip(monkeypatch, run, (6, 8), int(run.name), 1, last, 30, *short)
        files = (path for name in ("trace/*2-*.bin", "snapshots/*8/*.safetensors") for path in sorted(run.glob(name)))
        left.append([path.read_bytes() for path in files])
        [found] = wrong(capsys, run)
        assert (found["begin"], found["end"], found["attempt"]) == (6, 8, 2)
        assert "or earlier (from step 7 on)" in found["why"]
    assert left[0] == left[1] != []


KINDS: list[tuple[int, int, Kind]] = [(3, 1, "model"), (6, 2, "optimizer"), (12, 3, "model")]


@pytest.mark.parametrize(("step", "attempt", "kind"), KINDS)
def test_a_snapshot_rewritten_with_another_bit(
    step: int, attempt: int, kind: Kind, run: Path, capsys: Captured
) -> None:
    """With a manifest of its own that fits: `snapshots verify` can't see it."""
    rewrite(Store(f"{run}/snapshots"), step, lambda state: flip(max(state[kind].values(), key=lambda t: t.numel())))
    first = wrong(capsys, run)[0]
    assert (first["end"], first["attempt"], first["step"]) == (step, attempt, step)
    assert f"the steps have the right bits up to {step}" in first["why"]
    [tensor] = first["tensors"]
    assert "1 of " in tensor


def test_an_attempt_that_resumed_from_a_rewritten_snapshot(run: Path, capsys: Captured) -> None:
    for step in (12, 9):
        shutil.rmtree(run / f"snapshots/step-{step:09d}")
    rewrite(Store(f"{run}/snapshots"), 8, lambda state: flip(next(iter(state["model"].values()))))
    train_here(str(run), *DATA, "train.max_steps=10")
    [found] = wrong(capsys, run)
    assert (found["begin"], found["end"], found["attempt"]) == (6, 8, 2)


@pytest.mark.parametrize(("step", "attempt", "field"), [(2, 1, "loss"), (12, 3, "norm")])
def test_a_changed_record(step: int, attempt: int, field: str, run: Path, capsys: Captured) -> None:
    [path] = run.glob(f"trace/attempt-{attempt:05d}-*.bin")
    records = np.fromfile(path, RECORD)
    at = records["step"] == step
    records[field][at] = np.nextafter(records[field][at], 9.0)
    records.tofile(path)
    [found] = wrong(capsys, run)
    assert (found["step"], found["attempt"]) == (step, attempt)
    assert found["why"].endswith("the trace was changed")


@pytest.mark.parametrize("file", ["model-*", "manifest.json"])
def test_a_damaged_snapshot(file: str, run: Path, capsys: Captured) -> None:
    [path] = (run / "snapshots/step-000000006").glob(file)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert [(i["begin"], i["end"]) for i in wrong(capsys, run)] == INTERVALS[2:4]


def test_on_another_machine_a_difference_proves_nothing(
    sound: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train_with_a_flip(monkeypatch, run, (5,), 4, 1, 3, 30)
    monkeypatch.setattr("mingpt.compute.numerics.cpu_vendor", lambda: "another CPU")
    assert audit_command([str(sound), "--to", "3"]) == 0  # the same digest all the same proves it
    assert "cpu: " in capsys.readouterr().err
    assert audit_command([str(run)]) == 64
    assert "differs step 3 to 5: " in capsys.readouterr().out
