"""`mingpt snapshots prune|copy|show|list --json`, and stores that can only be read."""

import functools
import http.server
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from mingpt.commands import snapshots
from mingpt.observe.jsonl import MetricsLog, read_metrics
from mingpt.snapshot.attempts import newest_number
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Buffer, Store
from snapshot_kit import PROVENANCE, equal, files, save, state_of

Captured = pytest.CaptureFixture[str]
STEPS = (4, 10, 20, 30)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four snapshots, of which step 4 is the best, and what a writer of step 25 left when it was killed."""
    store = Store(str(tmp_path / "run" / "snapshots"))
    for step in STEPS:
        save(store, step, val_loss=step / 2)
    save(store, 25)
    Path(store.folder(25), "manifest.json").unlink()
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


def steps(run: Path) -> list[int]:
    return Store(f"{run}/snapshots").steps()


def make_old(run: Path, step: int) -> None:
    folder = run / "snapshots" / f"step-{step:09d}"
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - 100_000,) * 2)


def damage(run: Path, step: int) -> str:
    path = next(run.glob(f"snapshots/step-{step:09d}/model-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    return path.name


def test_list_for_programs(run: Path, capsys: Captured) -> None:
    (run / "snapshots/step-000000020/manifest.json").write_text("{}")
    next(run.glob("snapshots/step-000000010/model-*")).unlink()
    assert snapshots.main(["list", str(run), "--json"]) == 1
    told = {entry["step"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {step: entry["state"] for step, entry in told.items()} == {
        30: "looks good", 25: "incomplete", 20: "DAMAGED", 10: "DAMAGED", 4: "looks good",
    }  # fmt: skip
    assert told[10]["problem"].endswith(" is missing")
    manifest = read(Store(f"{run}/snapshots"), 30).manifest
    assert 0 <= told[30].pop("age_seconds") < 100
    assert told[30] == {
        "step": 30, "state": "looks good", "problem": "", "digest": manifest.digest, "loss": 3.75, "val_loss": 15.0,
        "not_finite": [],
        "bytes": sum(p.size for p in manifest.parts.values()), "parts": 2, "attempt": 1, "world_size": 4,
    }  # fmt: skip


def test_list_tells_what_was_set_aside_and_a_run_that_has_no_snapshot_yet(run: Path, capsys: Captured) -> None:
    Store(f"{run}/snapshots").set_aside(30)
    assert snapshots.main(["list", str(run), "--step", "30"]) == 0
    assert "set aside: was damaged; its manifest is now set-aside-" in capsys.readouterr().out
    assert snapshots.main(["list", f"{run}/snapshots/step-000000025"]) == 0
    assert "incomplete: there is no manifest" in capsys.readouterr().out


def test_show_tells_the_manifest(run: Path, capsys: Captured) -> None:
    assert snapshots.main(["show", str(run), "--json"]) == 0
    manifest = read(Store(f"{run}/snapshots"), 30).manifest
    assert json.loads(capsys.readouterr().out) == manifest.model_dump()
    assert snapshots.main(["show", str(run), "--step", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run name, step 4, format 3\ndigest ")
    for line in (
        "loss 0.5000, validation loss 2.0000",
        "model: 0.2 KiB in 1 part, 2 tensors",
        "1        -          4           2026-01-01T00:00:00+00:00",
        '  torch="2"',
        "  optimizer.eps=1e-08",
    ):
        assert line in out.splitlines()


def test_show_commands_no_terminal(run: Path, capsys: Captured) -> None:
    save(
        Store(f"{run}/snapshots"), 31, provenance=PROVENANCE | {"run": "\x1b[2J\x9b", "fingerprint": {"\x1b]0": "\x9b"}}
    )
    assert snapshots.main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run \\x1b[2J\\x9b, step 31")
    assert all(c.isprintable() or c == "\n" for c in out)


def test_a_dry_run_says_what_prune_does_and_changes_nothing(run: Path, capsys: Captured) -> None:
    make_old(run, 25)
    before = contents(run)
    arguments = ["prune", str(run), "--keep", "1"]
    assert snapshots.main([*arguments, "--dry-run"]) == 0
    would = capsys.readouterr().out
    assert contents(run) == before
    assert snapshots.main(arguments) == 0
    did = capsys.readouterr().out
    assert would.replace("would delete", "deleted").replace("would stay", "left") == did
    assert did.startswith("deleted the snapshot of step 10\ndeleted the snapshot of step 20\ndeleted step-000000025/")
    assert did.endswith("\nleft: 4, 30\n")
    assert Store(f"{run}/snapshots").folders() == [30, 4]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [30, 20, 10, 4]),  # the three newest and the best
        (["--no-keep-best"], [30, 20, 10]),
        (["--keep", "1", "--keep-every", "10", "--no-keep-best"], [30, 20, 10]),
        (["--keep", "1", "--no-keep-best"], [30]),
    ],
)
def test_what_prune_leaves(run: Path, options: list[str], left: list[int]) -> None:
    assert snapshots.main(["prune", str(run), *options]) == 0
    assert steps(run) == left
    assert (run / "snapshots/step-000000025").exists()  # not a day old


def test_prune_follows_the_runs_own_config(tmp_path: Path) -> None:
    config = {"snapshot": {"keep": 1, "keep_every": 4, "keep_best": False, "dir": "elsewhere"}}
    for step in (4, 5, 6):
        save(Store(f"{tmp_path}/snapshots"), step, provenance=PROVENANCE | {"config": config})
    assert snapshots.main(["prune", str(tmp_path)]) == 0
    assert steps(tmp_path) == [6, 4]


def test_prune_takes_younger_files_when_told(run: Path) -> None:
    for path in run.glob("snapshots/step-000000025/*"):
        os.utime(path, (time.time() - 100,) * 2)
    os.utime(run / "snapshots/step-000000025", (time.time() - 100,) * 2)
    assert snapshots.main(["prune", str(run), "--older-than", "90"]) == 0
    assert not (run / "snapshots/step-000000025").exists()


def test_prune_deletes_nothing_while_the_newest_is_damaged(run: Path, capsys: Captured) -> None:
    name = damage(run, 30)
    before = contents(run)
    assert snapshots.main(["prune", str(run), "--keep", "1"]) == 1
    assert capsys.readouterr() == (
        "",
        f"error: {run}/snapshots/step-000000030: {name}: b does not match its checksum in the manifest: "
        f"nothing was deleted, since older ones may be needed\n",
    )
    assert contents(run) == before


@pytest.mark.parametrize("option", [["--keep", "0"], ["--keep", "x"], ["--keep-every", "-1"], ["--older-than", "0"]])
def test_bad_options_of_prune_exit_64(run: Path, option: list[str]) -> None:
    before = contents(run)
    with pytest.raises(SystemExit) as left:
        snapshots.main(["prune", str(run), *option])
    assert left.value.code == 64
    assert snapshots.main(["prune", f"{run}/snapshots/step-000000004"]) == 64
    assert contents(run) == before


@pytest.mark.parametrize("below", ["", "/snapshots"])
@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_copy_takes_a_run_to_another_store(
    run: Path, tmp_path: Path, capsys: Captured, below: str, scheme: str
) -> None:
    target = f"{tmp_path}/copy" if scheme == "local" else f"memory://{uuid4().hex}"
    assert snapshots.main(["copy", f"{run}{below}", f"{target}{below}"]) == 0
    store = Store(f"{target}/snapshots")
    digests = {step: read(Store(f"{run}/snapshots"), step).manifest.digest for step in STEPS}
    assert capsys.readouterr().out == "".join(
        f"step {step}: copied to {target}/snapshots/step-{step:09d}, digest {digests[step]}\n"
        for step in reversed(STEPS)
    )
    assert store.folders() == [30, 20, 10, 4]
    for step in STEPS:
        assert equal(read(store, step).state, state_of(step))
        assert store.read_manifest(step) == Store(f"{run}/snapshots").read_manifest(step)
    # Again: nothing is left to do.
    assert snapshots.main(["copy", f"{run}{below}", f"{target}{below}"]) == 0
    assert capsys.readouterr().out.count("is there already") == 4


@pytest.mark.parametrize("last", ["", "/", "/snapshots", "/snapshots/step-000000020"])
def test_copy_takes_one_step(run: Path, tmp_path: Path, last: str) -> None:
    source, one = f"{run}/snapshots/step-000000020", f"{tmp_path}/one/snapshots"
    assert snapshots.main(["copy", source, f"{tmp_path}/one{last}"]) == 0
    assert Store(one).folders() == [20]  # where a run of run.dir=one looks for it
    assert snapshots.main(["copy", source, f"{one}/step-000000021"]) == 64
    assert snapshots.main(["copy", str(run), f"{one}/step-000000020"]) == 64
    assert files(tmp_path / "one") == [f"snapshots/step-000000020/{name}" for name in files(Path(source))]


def test_copy_overwrites_nothing_and_says_so_before_it_writes(run: Path, tmp_path: Path, capsys: Captured) -> None:
    theirs = Store(f"{tmp_path}/theirs/snapshots")
    save(theirs, 10, state_of(11))
    save(theirs, 20)
    Path(theirs.folder(20), "manifest.json").write_text("{}")
    before = contents(tmp_path / "theirs")
    assert snapshots.main(["copy", str(run), f"{tmp_path}/theirs"]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert "step 10 is there already with another digest" in err
    assert "step 20 is there already, and damaged" in err
    assert contents(tmp_path / "theirs") == before


def test_copy_verifies_and_writes_the_manifest_last(
    run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = damage(run, 20)
    assert snapshots.main(["copy", str(run), f"{tmp_path}/copy"]) == 1
    assert (
        f"step 20: DAMAGED, not copied: {run}/snapshots/step-000000020: {name}: b does not" in capsys.readouterr().out
    )
    assert steps(tmp_path / "copy") == [30, 10, 4]
    written: list[str] = []
    write, commit = Store.write, Store.commit

    def watched_write(store: Store, step: int, name: str, pieces: Sequence[Buffer]) -> None:
        written.append(name)
        write(store, step, name, pieces)

    def watched_commit(store: Store, step: int, manifest: bytes) -> bool:
        written.append("manifest.json")
        return commit(store, step, manifest)

    monkeypatch.setattr(Store, "write", watched_write)
    monkeypatch.setattr(Store, "commit", watched_commit)
    assert snapshots.main(["copy", f"{run}/snapshots/step-000000010", f"{tmp_path}/third"]) == 0
    assert [name.partition("-")[0] for name in written] == ["model", "optimizer", "manifest.json"]


def test_copy_repairs_a_copy_that_lost_a_part(run: Path, tmp_path: Path) -> None:
    copy = ["copy", str(run), f"{tmp_path}/copy"]
    assert snapshots.main(copy) == 0
    next(tmp_path.glob("copy/snapshots/step-000000030/model-*")).unlink()
    assert snapshots.main(copy) == 0
    assert equal(read(Store(f"{tmp_path}/copy/snapshots"), 30).state, state_of(30))


def test_copy_repairs_a_copy_in_which_a_bit_has_flipped(run: Path, tmp_path: Path, capsys: Captured) -> None:
    """Of the right size; `is there already` was said of it."""
    copy = ["copy", str(run), f"{tmp_path}/copy"]
    assert snapshots.main(copy) == 0
    damage(tmp_path / "copy", 30)
    assert snapshots.main(["verify", f"{tmp_path}/copy"]) == 1
    capsys.readouterr()
    assert snapshots.main(copy) == 0
    told = capsys.readouterr().out
    assert "step 30: copied to" in told
    assert told.count("is there already") == 3
    assert snapshots.main(["verify", f"{tmp_path}/copy"]) == 0


def test_copy_brings_the_metrics_along(run: Path, tmp_path: Path) -> None:
    for attempt in (1, 2):
        log = MetricsLog(str(run), attempt, print)
        log.write({"step": attempt, "loss": 1.0})
        log.file.close()
    (run / "metrics/notes.txt").write_text("mine")
    fork, store = tmp_path / "fork", f"memory://{uuid4().hex}"
    assert snapshots.main(["copy", f"{run}/snapshots/step-000000020", str(fork)]) == 0
    assert Store(f"{fork}/snapshots").steps() == [20]
    assert snapshots.main(["copy", str(run), f"{store}/moved"]) == 0
    assert read_metrics(str(run)) == read_metrics(str(fork)) == read_metrics(f"{store}/moved")
    assert newest_number(str(fork)) == newest_number(f"{store}/moved") == 2
    assert files(fork / "metrics") == ["attempt-00001.jsonl", "attempt-00002.jsonl"]
    # What is there stays, and a copy that has no run around it gets none.
    (fork / "metrics/attempt-00002.jsonl").write_text("")
    assert snapshots.main(["copy", str(run), str(fork)]) == 0
    assert (fork / "metrics/attempt-00002.jsonl").read_text() == ""
    save(Store(f"{tmp_path}/bare"), 1)
    assert snapshots.main(["copy", str(run), f"{tmp_path}/bare"]) == 0
    assert Store(f"{tmp_path}/bare").steps() == [*reversed(STEPS), 1]
    assert not (tmp_path / "metrics").exists()
    (run / "metrics/attempt-00003.jsonl").symlink_to(tmp_path / "secret")
    assert snapshots.main(["copy", str(run), f"{tmp_path}/third"]) == 64


def test_list_of_a_folder_of_runs_is_a_table_of_them(run: Path, tmp_path: Path, capsys: Captured) -> None:
    save(Store(f"{tmp_path}/b\x1b[2J/snapshots"), 7)
    (tmp_path / "no run").mkdir()
    (tmp_path / "file").touch()
    assert snapshots.main(["list", str(tmp_path)]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "step", "age", "size", "digest", "loss", "val_loss", "state"]
    assert first.startswith("b\\x1b[2J")
    assert first.split()[1] == "7"
    assert second.split()[:2] == ["run", "30"]
    assert second.endswith("looks good")
    assert snapshots.main(["list", str(tmp_path), "--json"]) == 0
    assert {name: e["step"] for name, e in json.loads(capsys.readouterr().out).items()} == {"b\x1b[2J": 7, "run": 30}
    damage_manifest = run / "snapshots/step-000000030/manifest.json"
    damage_manifest.write_text("{}")
    assert snapshots.main(["list", str(tmp_path)]) == 1
    assert snapshots.main(["list", str(tmp_path / "no run")]) == 64
    assert snapshots.main(["list", str(tmp_path / "file")]) == 64


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(run: Path) -> Iterator[str]:
    """The run on a web server, which can only be read."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(run)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        fsspec.filesystem("http").clear_instance_cache()


def test_a_run_on_a_web_server_can_be_read(run: Path, web: str, tmp_path: Path, capsys: Captured) -> None:
    digest = read(Store(f"{run}/snapshots"), 30).manifest.digest
    assert snapshots.main(["digest", web]) == 0
    assert capsys.readouterr().out == f"{digest}\n"
    assert snapshots.main(["list", web, "--json"]) == 0
    assert [e["state"] for e in json.loads(capsys.readouterr().out)] == [
        "looks good",
        "incomplete",
        *["looks good"] * 3,
    ]
    name = damage(run, 10)
    assert snapshots.main(["verify", web]) == 1
    assert f"step 10: DAMAGED: {web}/snapshots/step-000000010: {name}: b does not" in capsys.readouterr().out
    assert snapshots.main(["show", web, "--step", "4"]) == 0
    assert snapshots.main(["copy", f"{web}/snapshots/step-000000030", f"{tmp_path}/down"]) == 0
    assert equal(read(Store(f"{tmp_path}/down/snapshots"), 30).state, state_of(30))


def test_what_needs_to_write_is_a_mistake_on_a_web_server(run: Path, web: str, capsys: Captured) -> None:
    assert snapshots.main(["prune", web, "--keep", "1"]) == 64
    assert "can only be read" in capsys.readouterr().err
    assert steps(run) == [30, 20, 10, 4]
    assert snapshots.main(["copy", str(run), web.replace("//", "//user:password@") + "/new"]) == 64
    out, err = capsys.readouterr()
    assert "can only be read" in err
    assert "password" not in out + err
