"""`mingpt snapshots list|show|verify|digest|prune`: exit codes, what programs read, and what stays."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from mingpt.commands.loading import find_manifest
from mingpt.snapshot.attempts import Attempt
from tests.kits.snapshot_kit import PROVENANCE, contents, save, signed
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store, verified

pytestmark = pytest.mark.usefixtures("run")
LOOKING = "verify", "digest", "show"


def folder(step: int) -> Path:
    return Path(f"run/snapshots/step-{step:09d}")


def age(step: int, seconds: float) -> None:
    for path in (*folder(step).iterdir(), folder(step)):
        os.utime(path, (time.time() - seconds,) * 2)


def digest(step: int) -> str:
    return verified("run", step).digest


def test_a_url_is_a_run_its_snapshots_or_a_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {step: digest(step) for step in (4, 30)}
    monkeypatch.chdir(run)
    for url, step in (
        (f"{run}/snapshots/", 30), (f"file://{run}", 30), (".", 30), ("snapshots/step-000000004", 4),
        (f"{run}/snapshots@4", 4), (f"{run} --step 4", 4),
    ):  # fmt: skip
        assert mingpt(f"snapshots digest {url}") == f"{expected[step]}\n"
        assert mingpt(f"snapshots verify {url}").startswith(f"step {step}: good, digest {expected[step]}\n")
        assert mingpt.json(f"snapshots list {url}")[0]["step"] == mingpt.json(f"snapshots show {url}")["step"] == step
        place, *option = url.split(" --step ")
        assert find_manifest(place, *map(int, option))[1].step == step  # what generate and model.init_from open


def test_the_best_snapshot_has_a_name_for_every_verb(run: Path) -> None:
    """By validation loss, among those that were measured as the newest was."""
    assert [e["step"] for e in mingpt.json("snapshots list run") if e["best"]] == [4]
    [row] = [row for row in mingpt("snapshots list run").splitlines() if row.endswith("looks good, best")]
    assert row.split()[0] == "4"
    for verb in ("digest", "verify"):
        assert mingpt(f"snapshots {verb} run@best") == mingpt(f"snapshots {verb} run@4")
    assert mingpt.json("snapshots show run/snapshots@best")["step"] == 4
    assert find_manifest("run@best")[1].step == 4  # what generate, evaluate and model.init_from open
    assert mingpt("diff run@best run@4") == mingpt("diff run@4 run@4")
    told = PROVENANCE | {"history": [{"attempt": 2, "validation": [1, 9]}]}
    save(store(), 31, provenance=told, val_loss=50.0)  # on another part of the split
    assert mingpt.json("snapshots show run@best")["step"] == 31
    assert "names one step" in mingpt.refused("snapshots prune run@best")
    mingpt("rewind run@best")
    save(store("none"), 1)
    assert "none@best" in mingpt.refused("generate none@best")


def test_list_is_a_table_of_the_steps() -> None:
    folder(20).joinpath("manifest.json").write_text("{}")
    next(folder(10).glob("model-*")).unlink()
    listed = {entry["step"]: entry for entry in mingpt.json("snapshots list run", code=1)}
    assert all(0 <= entry["age_seconds"] < 1000 for entry in listed.values())
    states = {30: "looks good", 25: "incomplete", 20: "DAMAGED", 10: "DAMAGED", 4: "looks good"}
    assert {step: entry["state"] for step, entry in listed.items()} == states
    assert listed[4].items() >= {
        "digest": verified("run", 4).digest, "loss": 0.5, "val_loss": 2.0, "parts": 2, "bytes": 324, "attempt": 1,
        "world_size": 4, "not_finite": [], "best": True, "problem": "",
    }.items()  # fmt: skip
    assert listed[20].items() >= {"digest": None, "loss": None, "parts": None, "bytes": 326, "best": False}.items()
    store().set_aside(4)
    for path in folder(4).parent.iterdir():
        age(int(path.name[-9:]), 100_000)
    head, *rows = [re.split("  +", line, maxsplit=6) for line in mingpt("snapshots list run", code=1).splitlines()]
    assert head == ["step", "age", "size", "digest", "loss", "val_loss", "state"]
    assert rows[0] == ["30", "28 h", "0.3 KiB", listed[30]["digest"][:16], "3.7500", "15.0000", "looks good"]
    assert [row[3:6] for row in rows[1:]] == [["-"] * 3] * 4
    said = ("incomplete: ", "DAMAGED: manifest.json ", "DAMAGED: model-00001-", "set aside: was damaged; ")
    assert [row[-1].startswith(words) for row, words in zip(rows[1:], said, strict=True)] == [True] * 4


def test_show_tells_the_manifest_and_commands_no_terminal() -> None:
    assert mingpt.json("snapshots show run") == verified("run", 30).model_dump()
    save(store(), 31, provenance=PROVENANCE | {"run": "\x1b[2J\x9b", "fingerprint": {"\x1b]0": "\x9b"}})
    out = mingpt("snapshots show run")
    assert all(c.isprintable() or c == "\n" for c in out)
    for line in (
        r"run \x1b[2J\x9b, step 31, format 3", f"digest {verified('run', 31).digest}", "loss 3.8750, validation loss -",
        "model: 0.2 KiB in 1 part, 2 tensors", 'vocabulary: {"characters": "ab–漢", "kind": "char"}',
        "1        -          4           2026-01-01T00:00:00+00:00", r'  \x1b]0="\x9b"', "  optimizer.eps=1e-08",
    ):  # fmt: skip
        assert line in out.splitlines()


@pytest.mark.parametrize(
    "where",
    ["run@5", "run/snapshots/step-000000004 --step 30", "run/nowhere", "nope://x", "empty", "new"],
)
def test_what_is_not_there_is_a_mistake(where: str, told: Told) -> None:
    Path("empty").mkdir()
    Attempt.claim("new", 0, None)
    [error] = {mingpt.refused(f"{verb} {where}") for verb in (*(f"snapshots {v}" for v in LOOKING), "generate")}
    told(error)


def test_a_snapshot_of_another_format_is_a_mistake_for_who_needs_it() -> None:
    path = folder(30) / "manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": 4}))
    for verb in (*LOOKING, "prune"):
        mingpt(f"snapshots {verb} run", code=64)
        assert "step 30 has format 4" in mingpt.err
    mingpt.refused("generate run")
    mingpt("snapshots verify run@20")
    assert [entry["state"] for entry in mingpt.json("snapshots list run")[::4]] == ["other format", "looks good"]
    assert path.exists()


def test_list_of_a_folder_of_runs_is_a_table_of_them() -> None:
    save(store("b\x1b[2J"), 7)
    Path("no_run").mkdir()
    assert {name: e["step"] for name, e in mingpt.json("snapshots list .").items()} == {"b\x1b[2J": 7, "run": 30}
    _, *rows = mingpt("snapshots list .").splitlines()
    assert [re.split("  +", row)[:5:4] for row in rows] == [["b\\x1b[2J", "7"], ["run", "30"]]
    (folder(30) / "manifest.json").write_text("{}")
    assert [mingpt.ends(f"snapshots list {place}") for place in (".", "no_run")] == [1, 64]
    assert mingpt("snapshots list .", code=1).splitlines()[-1].startswith("run: newest snapshot: DAMAGED: ")


# --- prune ---


def test_looking_and_a_dry_run_change_nothing_and_say_what_prune_does(run: Path) -> None:
    age(25, 100_000)
    before = contents(run)
    for verb in ("list", *LOOKING):
        mingpt.ends(f"snapshots {verb} run")
    would = mingpt("snapshots prune run --keep 1 --dry-run")
    assert contents(run) == before
    done = mingpt("snapshots prune run --keep 1")
    assert would.replace("would delete", "deleted").replace("would stay", "left") == done
    assert store().folders() == [30, 4]


def test_what_prune_leaves() -> None:
    mingpt("snapshots prune run")
    assert store().steps() == [30, 20, 10, 4]  # the three newest and the best
    mingpt("snapshots prune run --keep 1 --keep-every 20 --no-keep-best")
    assert store().steps() == [30, 20]
    assert folder(25).exists()  # not a day old
    age(25, 100)
    mingpt("snapshots prune run --older-than 90")
    assert not folder(25).exists()


def test_prune_follows_the_runs_own_config() -> None:
    config = {"snapshot": {"keep": 1, "keep_every": 4, "keep_best": False, "dir": "elsewhere"}}
    save(store(), 31, provenance=PROVENANCE | {"config": config})
    mingpt("snapshots prune run")
    assert store().steps() == [31, 20, 4]


def test_prune_deletes_nothing_while_the_newest_is_damaged_or_an_option_is_wrong(run: Path) -> None:
    [path] = folder(30).glob("model-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    before = contents(run)
    assert path.name in mingpt.refused("snapshots prune run --keep 1", code=1)
    for wrong in ("run --keep=0", "run --keep=x", "run --keep-every=-1", "run --older-than=0", "run@4"):
        mingpt.refused(f"snapshots prune {wrong}")
    assert contents(run) == before


def test_a_run_on_a_web_server_is_a_mistake() -> None:
    err = mingpt.refused("snapshots show http://user:password@host/run")
    assert "URL=http://" in err
    assert "password" not in err
