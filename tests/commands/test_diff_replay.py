"""`mingpt diff --replay`: the step in which two runs part is executed for both, and the planted cause is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import mingpt.train.loop
from branch_kit import train
from mingpt.commands.diff import diff_command
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from mingpt.train.step import train_step
from replay_kit import files_of
from rewriting_kit import rewrite
from run_kit import Run

Captured = pytest.CaptureFixture[str]
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def here(text: Path, cache: Path) -> tuple[str, ...]:
    places = [f"{side}={key}" for side in ("--a", "--b") for key in (f"data.path={text}", f"data.cache_dir={cache}")]
    return "--replay", *places


def diff(capsys: Captured, *arguments: str) -> dict[str, Any]:
    """What the replay told; fails unless there was one."""
    capsys.readouterr()
    code = diff_command([*arguments, "--json"])
    told = capsys.readouterr()
    assert code == 0, told.err
    replayed: dict[str, Any] = json.loads(told.out)["replay"]
    return replayed


def first(told: dict[str, Any], at: int, what: str) -> str | None:
    """The name of what differs first in one of the steps that are told of."""
    found = told["steps"][at][what]
    return found["name"] if found else None


def flip(state: dict[Any, dict[str, torch.Tensor]]) -> None:
    state["model"][WEIGHT].view(torch.int32)[3, 5] ^= 1 << 20


def test_a_key_of_the_model_shows_in_an_output(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    b = tmp_path / "b"
    train(b, text, cache, "model.dropout=0.2")
    before = files_of(trained), files_of(b)
    told = diff(capsys, str(trained), str(b), *here)
    assert [s["step"] for s in told["steps"]] == [1]
    assert (told["step"], told["begin"], told["before"]) == (1, [0, 0], None)
    assert (first(told, 0, "samples"), first(told, 0, "outputs")) == (None, "transformer.h.0.ln_1")
    assert told["steps"][0]["around"]  # the dropout of the embeddings is no module
    assert told["same"] == [True, True]
    assert diff_command([str(trained), str(b), *here]) == 0
    *_, line, out = capsys.readouterr().out.splitlines()
    assert line == "replay: step 1, from config and seed"
    assert out.startswith("  step 1: the same samples; the first output that differs is that of transformer.h.0.ln_1 (")
    assert "; the first gradient, in the order of backward, that of " in out
    assert (files_of(trained), files_of(b)) == before


def test_a_key_of_the_optimizer_shows_in_an_update(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    """The trace shows it in step 2, whose state it has changed."""
    train(tmp_path / "b", text, cache, "optimizer.weight_decay=0.2")
    told = diff(capsys, str(trained), str(tmp_path / "b"), *here)
    assert (told["step"], [s["step"] for s in told["steps"]], told["before"]) == (2, [1, 2], None)
    parted = told["steps"][0]
    assert [parted[k] for k in ("samples", "outputs", "gradients")] == [None] * 3
    assert parted["state"]["name"] == "transformer.h.0.attn.c_attn.weight"
    assert first(told, 1, "outputs") == "transformer.wte"
    diff_command([str(trained), str(tmp_path / "b"), *here])
    assert (
        "  step 1: the same samples, outputs and gradients; its update makes the difference: "
        in capsys.readouterr().out
    )


def test_a_byte_of_the_data_shows_in_a_sample(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    other = tmp_path / "other.txt"
    before, king, after = text.read_text().partition("king")
    other.write_text(before + king + after[:2000] + after[2000:].replace("king", "kong", 1))
    train(tmp_path / "b", other, cache)
    told = diff(capsys, str(trained), str(tmp_path / "b"), *here, f"--b=data.path={other}")
    found = told["steps"][0]["samples"]
    assert (found["differ"], found["of"]) == (1, 16)
    assert found["name"].startswith("position ")
    assert first(told, 0, "outputs") == "transformer.wte"


def test_a_number_of_threads_shows_in_a_modules_output(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    train(tmp_path / "b", text, cache, "train.threads=3")
    told = diff(capsys, str(trained), str(tmp_path / "b"), *here)
    assert told["step"]  # which one depends on the CPU: the last bits of a gradient need not show in its norm
    assert first(told, 0, "samples") is None
    assert str(first(told, 0, "outputs") or first(told, 0, "gradients")).startswith("transformer.")  # by the CPU
    assert told["same"] == [True, True]


def test_a_flipped_bit_of_a_snapshot_shows_in_the_state(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    b = tmp_path / "b"
    shutil.copytree(trained, b)
    shutil.rmtree(b / "snapshots/step-000000012")
    rewrite(Store(f"{b}/snapshots"), 8, flip)
    train(b, text, cache)
    told = diff(capsys, str(trained), str(b), *here)
    assert (told["step"], told["begin"]) == (9, [8, 8])
    assert told["before"] == {"name": WEIGHT, "differ": 1, "of": 112, "only": ""}
    assert (first(told, 0, "outputs"), first(told, 0, "samples")) == ("transformer.h.1.mlp.c_fc", None)
    # The trace of this one is as it was: the first snapshot that differs says which step to execute.
    c = tmp_path / "c"
    shutil.copytree(trained, c)
    rewrite(Store(f"{c}/snapshots"), 8, flip)
    told = diff(capsys, str(trained), str(c), *here)
    assert (told["step"], told["before"]["name"], told["same"]) == (9, WEIGHT, [True, False])
    rewrite(Store(f"{c}/snapshots"), 8, flip)
    rewrite(Store(f"{c}/snapshots"), 12, flip)
    told = diff(capsys, str(trained), str(c), *here)  # no step follows it: the one that leads to it
    assert (told["step"], told["steps"], told["same"]) == (12, [], [True, True])


def test_two_attempts_of_which_one_machine_was_sick(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 2 computes steps 9 to 12 again, with a bit that flips in step 10."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shutil.rmtree(run / "snapshots/step-000000012")

    def sick(run: Any, step: int) -> Any:
        if step == 9:
            with torch.no_grad():
                flip({"model": dict(run.compute.model.named_parameters())})
        return train_step(run, step)

    with monkeypatch.context() as patched:
        patched.setattr(mingpt.train.loop, "train_step", sick)
        train(run, text, cache)
    places = ("--replay", f"--a=data.path={text}", f"--a=data.cache_dir={cache}")
    told = diff(capsys, str(run), "--attempts", "1", "2", *places)
    assert (told["step"], told["steps"], told["same"]) == (10, [], [True, False])
    assert diff_command([str(run), "--attempts", "1", "2", *places]) == 0
    assert capsys.readouterr().out.endswith(
        "replay: steps 9 to 10, from step 8's snapshot\n"
        "  both come out alike on this machine; B recorded other bits in step 10: its machine computed otherwise\n"
    )


@pytest.mark.slow
def test_kernels_that_no_key_chose(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    b = Run(f"{tmp_path}/b", text, cache, env={"ATEN_CPU_CAPABILITY": "default"})
    b.finish(1, "train.max_steps=12", "run.name=run")
    told = diff(capsys, str(trained), b.dir, *here)
    assert (told["steps"], told["same"]) == ([], [True, False])
    assert "-> cpu " in told["notes"][1][0]


def test_equal_runs_have_no_step_to_execute(trained: Path, capsys: Captured, here: tuple[str, ...]) -> None:
    assert diff_command([str(trained), str(trained), *here]) == 0
    assert capsys.readouterr().out.endswith("replay: none, since no step and no snapshot differs\n")


def test_what_this_checkout_cannot_execute(
    trained: Path, tmp_path: Path, text: Path, cache: Path, capsys: Captured, here: tuple[str, ...]
) -> None:
    b = tmp_path / "b"
    train(b, text, cache, "model.dropout=0.2")
    assert diff_command([str(trained), str(b), "--replay"]) == 64  # where the data is, nobody has said
    assert "A: data.path" in capsys.readouterr().err
    store = Store(f"{b}/snapshots")
    for step in store.steps():
        manifest = read_manifest(store, step)
        history = [h | {"numerics": h["numerics"] | {"mingpt": 999}} for h in manifest.history]
        Path(store.folder(step), "manifest.json").write_bytes(
            encode_manifest(manifest.model_copy(update={"history": history}))
        )
    assert diff_command([str(trained), str(b), *here]) == 64
    assert "B: attempt 1 was computed by version 999 of mingpt's numerics" in capsys.readouterr().err
    assert diff_command([str(trained), str(b), "--a=data.path=x"]) == 64
    assert "--a and --b are for --replay" in capsys.readouterr().err


def test_two_steps_are_no_step_to_execute(trained: Path, capsys: Captured, here: tuple[str, ...]) -> None:
    assert diff_command([f"{trained}@4", f"{trained}@8", *here]) == 64
    assert "--replay: these are the snapshots of two steps, 4 and 8, " in capsys.readouterr().err
