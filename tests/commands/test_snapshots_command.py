"""`mingpt snapshots list|show|verify|digest|prune`: exit codes, what programs read, and what stays."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mingpt.commands import generate, snapshots
from mingpt.commands.loading import find_manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, equal, files, save, signed, state_of
from told import Told
from web_kit import served

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 4 (the best), 10, 20 and 30, and what a writer of step 25 left when it was killed."""
    store = Store(f"{tmp_path}/run/snapshots")
    for step in (4, 10, 20, 25, 30):
        save(store, step, val_loss=step / 2)
    Path(store.folder(25), "manifest.json").unlink()
    return tmp_path / "run"


def folder(run: Path, step: int) -> Path:
    return run / f"snapshots/step-{step:09d}"


def steps(run: Path) -> list[int]:
    return Store(f"{run}/snapshots").steps()


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in files(run)}


def age(run: Path, step: int, seconds: float) -> None:
    for path in (*folder(run, step).iterdir(), folder(run, step)):
        os.utime(path, (time.time() - seconds,) * 2)


def digest(run: Path, step: int) -> str:
    return read(Store(f"{run}/snapshots"), step).manifest.digest


def damage(run: Path, step: int, file: str = "model-*") -> str:
    [path] = folder(run, step).glob(file)
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    return path.name


def shown(capsys: Captured, *arguments: object, code: int = 0) -> Any:
    capsys.readouterr()
    assert snapshots.main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("url", "step"),
    [
        ("{run}", 30),
        ("{run}/snapshots/", 30),
        ("file://{run}", 30),
        (".", 30),
        ("snapshots/step-000000004", 4),
        ("{run}/snapshots/step-000000004/", 4),
        ("{run}@4", 4),
        ("{run}/snapshots@4", 4),
        ("{run} --step 4", 4),
    ],
)
def test_a_url_is_a_run_its_snapshots_or_a_step(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, url: str, step: int
) -> None:
    monkeypatch.chdir(run)
    where = url.format(run=run).split()
    assert snapshots.main(["digest", *where]) == 0
    assert capsys.readouterr() == (f"{digest(run, step)}\n", "")
    assert snapshots.main(["verify", *where]) == 0
    assert capsys.readouterr().out.startswith(f"step {step}: good, digest {digest(run, step)}\n")
    assert shown(capsys, "list", *where)[0]["step"] == shown(capsys, "show", *where)["step"] == step
    assert find_manifest(where[0], *map(int, where[2:]))[1].step == step  # what generate and model.init_from open


def test_list_is_a_table_of_the_steps(run: Path, capsys: Captured, told: Told) -> None:
    folder(run, 20).joinpath("manifest.json").write_text("{}")
    next(folder(run, 10).glob("model-*")).unlink()
    listed = {entry["step"]: entry for entry in shown(capsys, "list", run, code=1)}
    assert {step: entry["state"] for step, entry in listed.items()} == {
        30: "looks good", 25: "incomplete", 20: "DAMAGED", 10: "DAMAGED", 4: "looks good",
    }  # fmt: skip
    assert 0 <= listed[30].pop("age_seconds") < 1000
    assert listed[30] == {
        "step": 30, "state": "looks good", "problem": "", "digest": digest(run, 30), "loss": 3.75, "val_loss": 15.0,
        "not_finite": [], "parts": 2, "attempt": 1, "world_size": 4,
        "bytes": sum(path.stat().st_size for path in folder(run, 30).glob("*.safetensors")),
    }  # fmt: skip
    Store(f"{run}/snapshots").set_aside(4)
    for step in (4, 10, 20, 25, 30):
        age(run, step, 100_000)
    assert snapshots.main(["list", str(run)]) == 1
    told(capsys.readouterr().out, run)


def test_show_tells_the_manifest_and_commands_no_terminal(run: Path, capsys: Captured, told: Told) -> None:
    manifest = read(Store(f"{run}/snapshots"), 30).manifest
    assert shown(capsys, "show", run) == manifest.model_dump()
    evil = {"run": "\x1b[2J\x9b", "fingerprint": {"\x1b]0": "\x9b"}}
    save(Store(f"{run}/snapshots"), 31, provenance=PROVENANCE | evil)
    assert snapshots.main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    told(out, run)


@pytest.mark.parametrize(("file", "tensor"), [("model-*", "b"), ("optimizer-*", "w.step")])
def test_a_damaged_part_is_named(run: Path, capsys: Captured, file: str, tensor: str) -> None:
    name = damage(run, 4, file)
    assert snapshots.main(["verify", str(run)]) == 1
    *good, bad = capsys.readouterr().out.splitlines()
    assert good == [f"step {step}: good, digest {digest(run, step)}" for step in (30, 20, 10)]
    assert bad.startswith(f"step 4: DAMAGED: {folder(run, 4)}: {name}: {tensor} ")
    assert snapshots.main(["digest", f"{run}@4"]) == 1
    assert f"{name}: {tensor} " in capsys.readouterr().err
    # The others are good, and list reads manifests only.
    assert [snapshots.main(words) for words in (["verify", f"{run}@30"], ["digest", str(run)], ["list", str(run)])] == [
        0, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    ["{run} --step 5", "{run}@5", "{run}/snapshots/step-000000004 --step 30", "{run}/nowhere", "nope://x", "{empty}",
     "{run}/.."],
)  # fmt: skip
def test_what_is_not_there_is_a_mistake(
    run: Path, tmp_path: Path, capsys: Captured, told: Told, arguments: str
) -> None:
    (tmp_path / "empty").mkdir()
    filled = arguments.format(run=run, empty=tmp_path / "empty").split()
    errors = set()
    for main, command in (*((snapshots.main, [verb]) for verb in ("verify", "digest", "show")), (generate.main, [])):
        assert main([*command, *filled]) == 64
        errors.add(capsys.readouterr())
    [(out, err)] = errors
    assert out == ""
    told(err, tmp_path)


def test_a_snapshot_of_another_format_is_a_mistake_for_who_needs_it(run: Path, capsys: Captured) -> None:
    path = folder(run, 30) / "manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": 4}))
    for command in ("verify", "digest", "show", "prune"):
        assert snapshots.main([command, str(run)]) == 64
        assert "step 30 has format 4" in capsys.readouterr().err
    assert snapshots.main(["verify", f"{run}@20"]) == 0
    assert [entry["state"] for entry in shown(capsys, "list", run)[::4]] == ["other format", "looks good"]
    assert generate.main([str(run)]) == 64
    assert path.exists()


def test_a_store_that_does_not_answer_is_no_users_mistake(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*_: object) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(Store, "read_manifest", down)
    assert (snapshots.main(["list", str(run)]), generate.main([str(run)])) == (70, 70)


def test_list_of_a_folder_of_runs_is_a_table_of_them(run: Path, tmp_path: Path, capsys: Captured) -> None:
    save(Store(f"{tmp_path}/b\x1b[2J/snapshots"), 7)
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    assert {name: e["step"] for name, e in shown(capsys, "list", tmp_path).items()} == {"b\x1b[2J": 7, "run": 30}
    assert snapshots.main(["list", str(tmp_path)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert [first.split()[:2], second.split()[:2]] == [["b\\x1b[2J", "7"], ["run", "30"]]
    (folder(run, 30) / "manifest.json").write_text("{}")
    assert [snapshots.main(["list", f"{tmp_path}/{name}"]) for name in ("", "no run", "file")] == [1, 64, 64]


# --- prune ---


def test_looking_and_a_dry_run_change_nothing_and_say_what_prune_does(run: Path, capsys: Captured) -> None:
    age(run, 25, 100_000)
    before = contents(run)
    for command in ("list", "verify", "digest", "show"):
        snapshots.main([command, str(run)])
    capsys.readouterr()
    arguments = ["prune", str(run), "--keep", "1"]
    assert snapshots.main([*arguments, "--dry-run"]) == 0
    would = capsys.readouterr().out
    assert contents(run) == before
    assert snapshots.main(arguments) == 0
    assert would.replace("would delete", "deleted").replace("would stay", "left") == capsys.readouterr().out
    assert Store(f"{run}/snapshots").folders() == [30, 4]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("", [30, 20, 10, 4]),  # the three newest and the best
        ("--no-keep-best", [30, 20, 10]),
        ("--keep 1 --keep-every 10 --no-keep-best", [30, 20, 10]),
        ("--keep 1 --no-keep-best", [30]),
    ],
)
def test_what_prune_leaves(run: Path, options: str, left: list[int]) -> None:
    assert snapshots.main(["prune", str(run), *options.split()]) == 0
    assert steps(run) == left
    assert folder(run, 25).exists()  # not a day old
    age(run, 25, 100)
    assert snapshots.main(["prune", str(run), "--older-than", "90"]) == 0
    assert not folder(run, 25).exists()


def test_prune_follows_the_runs_own_config(run: Path) -> None:
    config = {"snapshot": {"keep": 1, "keep_every": 4, "keep_best": False, "dir": "elsewhere"}}
    save(Store(f"{run}/snapshots"), 31, provenance=PROVENANCE | {"config": config})
    assert snapshots.main(["prune", str(run)]) == 0
    assert steps(run) == [31, 20, 4]


def test_prune_deletes_nothing_while_the_newest_is_damaged(run: Path, capsys: Captured) -> None:
    name = damage(run, 30)
    before = contents(run)
    assert snapshots.main(["prune", str(run), "--keep", "1"]) == 1
    out, err = capsys.readouterr()
    assert (out, name in err) == ("", True)
    assert contents(run) == before


@pytest.mark.parametrize("option", ["--keep=0", "--keep=x", "--keep-every=-1", "--older-than=0"])
def test_bad_options_of_prune_exit_64(run: Path, option: str) -> None:
    before = contents(run)
    with pytest.raises(SystemExit) as left:
        snapshots.main(["prune", str(run), option])
    assert left.value.code == snapshots.main(["prune", str(folder(run, 4))]) == 64
    assert contents(run) == before


def test_a_run_on_a_web_server_can_be_read_and_not_written(run: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.rmtree(folder(run, 25))
    damage(run, 10)
    with served(run) as web:
        assert shown(capsys, "show", web)["digest"] == digest(run, 30)
        assert [entry["step"] for entry in shown(capsys, "list", web)] == [30, 20, 10, 4]
        assert snapshots.main(["verify", web]) == 1
        assert snapshots.main(["copy", f"{web}/snapshots/step-000000030", f"{tmp_path}/down"]) == 0
        assert equal(read(Store(f"{tmp_path}/down/snapshots"), 30).state, state_of(30))
        assert snapshots.main(["prune", web, "--keep", "1"]) == 64
        assert snapshots.main(["copy", str(run), web.replace("//", "//user:password@") + "/new"]) == 64
        out, err = capsys.readouterr()
        assert "can only be read" in err
        assert "password" not in out + err
    assert steps(run) == [30, 20, 10, 4]
