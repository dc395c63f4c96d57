"""`mingpt evaluate`: the training's own figures again, in any world, on other data, with clear refusals."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mingpt.commands.evaluate import command
from mingpt.observe.jsonl import read_metrics
from mingpt.world.lifetime import Lifetime
from run_kit import TIME_LIMIT, Run
from snapshot_kit import signed

pytestmark = pytest.mark.slow
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(undisturbed: Callable[..., Run]) -> Run:
    return undisturbed()


def evaluated(run: Run, capsys: Captured, *arguments: str) -> dict[str, Any]:
    # Where the text is, an absolute path, is not taken from a snapshot.
    places = (
        f"data.cache_dir={run.cache}",
        *(() if any("data.path" in a for a in arguments) else (f"data.path={run.text}",)),
    )
    assert command([run.dir, "--json", *places, *arguments], Lifetime()) == 0, capsys.readouterr().err
    out: dict[str, Any] = json.loads(capsys.readouterr().out)
    return out


def refused(run: Run, capsys: Captured, *arguments: str) -> str:
    assert command([run.dir, *arguments], Lifetime()) == 64
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize("of", [[], ["--tasks", "arc_easy"]])
def test_a_process_of_several_without_a_rank_does_not_evaluate_alone(
    of: list[str], run: Run, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(run, capsys, *of).startswith("WORLD_SIZE=2 in the environment announces several processes, but RANK")


def test_the_figures_are_those_that_training_has_measured(run: Run, capsys: Captured) -> None:
    measured = {row["step"]: (row["val_loss"], row["val_bits_per_byte"]) for row in read_metrics(run.dir)[7::8]}
    assert sorted(measured) == [8, 16, 24]
    for step, (loss, bits) in measured.items():
        found = evaluated(run, capsys, "--step", str(step))
        assert found["step"] == step
        assert found["loss"] == loss  # to the bit
        assert found["perplexity"] == math.exp(loss)
        assert found["targets"] == 599  # a tenth of 6,000 characters, but for the first
        assert found["bytes"] == 599  # all ASCII
        assert found["bits_per_byte"] == bits  # to the bit
        assert found["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-12)
        assert "accuracy" not in found
    assert evaluated(run, capsys)["digest"] == run.digest()


def test_several_processes_find_the_same_and_one_of_them_tells(run: Run, capsys: Captured) -> None:
    alone = evaluated(run, capsys)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
            *("-m", "mingpt.evaluate", run.dir, "--json", f"data.cache_dir={run.cache}", f"data.path={run.text}"),
        ],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [alone]


def test_people_get_a_few_lines(run: Run, capsys: Captured) -> None:
    found = evaluated(run, capsys)
    assert command([run.dir, f"data.cache_dir={run.cache}", f"data.path={run.text}"], Lifetime()) == 0
    assert capsys.readouterr() == (
        f"{run.dir}/snapshots/step-000000024 on data.kind=text data.path={run.text}\n"
        f"loss           {found['loss']:.4f} nats a token (599 tokens)\n"
        f"perplexity     {math.exp(found['loss']):.4f}\n"
        f"bits per byte  {found['bits_per_byte']:.4f} (599 bytes)\n",
        "",
    )


def test_other_data_is_told_in_the_snapshots_vocabulary(run: Run, capsys: Captured, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("the queen is dead\n" * 40)  # fewer characters than the model knows
    for given in ((f"data.path={other}",), ("data=char", f"data.path={other}"), ("data=byte", f"data.path={other}")):
        found = evaluated(run, capsys, *given, "data.val_fraction=0.5")
        assert found["targets"] == 359
    assert found["loss"] != evaluated(run, capsys)["loss"]
    micro = evaluated(run, capsys, "batch.micro_size=64", f"data.path={other}", "data.val_fraction=0.5")
    assert micro["loss"] == pytest.approx(found["loss"], rel=1e-5)


def test_bits_per_byte_count_the_bytes_of_a_character(
    new_run: Callable[..., Run], text: Path, tmp_path: Path, capsys: Captured
) -> None:
    wide = tmp_path / "wide.txt"
    wide.write_text(text.read_text().replace("e", "é"))
    run = new_run(f"data.path={wide}", "train.max_steps=1")
    run.finish(1)
    found = evaluated(run, capsys, f"data.path={wide}")
    assert found["targets"] == 599
    assert found["bytes"] == len(wide.read_text()[5401:].encode()) > 599
    bits = found["loss"] * 599 / math.log(2) / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_a_text_in_another_vocabulary_is_one_clear_line(run: Run, capsys: Captured, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("0123456789" * 20)
    line = refused(run, capsys, f"data.path={other}", f"data.cache_dir={run.cache}")
    assert line.startswith(f"data.path={other}: the text has characters that the model never saw: '0123456789'")


def test_what_is_not_to_be_set_or_not_there_is_named(run: Run, capsys: Captured, tmp_path: Path) -> None:
    heeded = "only data, world, precision, batch.micro_size, train.threads"
    assert (
        refused(run, capsys, "model.n_layer=3", f"data.path={run.text}") == f"model.n_layer can't be set here, {heeded}"
    )
    assert refused(run, capsys, "data.pth=x", f"data.path={run.text}").startswith(
        "data.pth is not a key (did you mean data.path?)"
    )
    assert refused(run, capsys, f"data.path={tmp_path}/none").startswith(f"data.path={tmp_path}/none: there is no such")
    assert "no snapshot of step 5; there are" in refused(run, capsys, "--step", "5")
    places = f"data.path={run.text}", f"data.cache_dir={run.cache}"
    assert refused(run, capsys, "data.val_fraction=0", *places) == (
        "data.kind=text has nothing to evaluate on: raise data.val_fraction"
    )
    assert refused(run, capsys, "data=char").startswith("data.path: ")


def test_a_strangers_config_is_data_and_nothing_else(
    run: Run, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No interpolation in it is resolved, and no folder of its choice is made."""
    monkeypatch.setenv("SECRET", "of mine")
    theirs = json.loads(Path(run.dir, "snapshots/step-000000024/manifest.json").read_text())
    folder = tmp_path / "run/snapshots/step-000000024"
    folder.mkdir(parents=True)
    for part in Path(run.dir, "snapshots/step-000000024").glob("*.safetensors"):
        (folder / part.name).write_bytes(part.read_bytes())
    theirs["config"]["data"] |= {"path": "${oc.env:SECRET}", "cache_dir": str(tmp_path / "made")}
    (folder / "manifest.json").write_bytes(signed(theirs))
    stranger = Run(str(tmp_path / "run"), run.text, run.cache)
    line = refused(stranger, capsys, f"data.cache_dir={run.cache}")
    assert line.startswith("data.path holds ${…} in the snapshot's config, which is not resolved from there")
    assert evaluated(stranger, capsys, f"data.path={run.text}")["digest"] == run.digest()
    assert not (tmp_path / "made").exists()
    theirs["config"]["data"]["path"] = str(run.text)  # as of any run whose data is in a place of its own
    (folder / "manifest.json").write_bytes(signed(theirs))
    assert "which may be a stranger's" in refused(stranger, capsys)
    theirs["config"]["data"]["path"] = "s3://***@bucket/text"
    (folder / "manifest.json").write_bytes(signed(theirs))
    assert "give data.path=" in refused(stranger, capsys)
