"""`mingpt fork`: what it shares with its parent, what it says, and that the fork goes on as a run of its own."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branch_kit import go_on
from config_kit import configured
from mingpt.commands import snapshots
from mingpt.commands.fork import fork_command
from mingpt.commands.log import log_command
from mingpt.console import say
from mingpt.errors import USER_ERROR, UserError
from mingpt.observe.trace import read_trace
from mingpt.report.auditing import intervals
from mingpt.snapshot.forking import parent_of
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.hot import find_run_id
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read_manifest, verify
from mingpt.snapshot.store import Store
from mingpt.train.past import Past
from mingpt.train.replaying import replay
from mingpt.train.resume import check
from snapshot_kit import ALONE

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def base(trained: Path, tmp_path: Path) -> Path:
    """A copy, so that a test may change it."""
    shutil.copytree(trained, tmp_path / "base")
    return tmp_path / "base"


def store(folder: Path) -> Store:
    return Store(f"{folder}/snapshots")


def parts(folder: Path, step: int) -> dict[str, os.stat_result]:
    found = (folder / f"snapshots/step-{step:09d}").glob("*.safetensors")
    return {path.name: path.stat() for path in found}


def test_a_fork_on_the_same_disk_has_the_files_of_its_parent(base: Path, tmp_path: Path, capsys: Captured) -> None:
    before = sorted(p.relative_to(base) for p in base.rglob("*"))
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new), "optimizer.lr=0.005"]) == 0
    out = capsys.readouterr().out
    assert "the same files as the parent's (hard links)" in out
    assert f"train it: mingpt train --config-dir {new} --config-name config\n" in out
    ours, theirs = parts(new, 8), parts(base, 8)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].st_ino == theirs[name].st_ino for name in ours)
    assert sorted(p.relative_to(base) for p in base.rglob("*")) == before
    # What is new on the disk is small: a manifest, a config, an id.
    fresh = [p for p in new.rglob("*") if p.is_file() and p.stat().st_nlink == 1]
    assert sorted(p.name for p in fresh) == ["config.yaml", MANIFEST, "run-id"]
    manifest, old = verify(store(new), 8), read_manifest(store(base), 8)
    assert (manifest.digest, manifest.run, manifest.config) == (old.digest, "new", old.config)
    parent = parent_of(manifest)
    assert parent
    assert (parent.run, parent.step, parent.digest) == ("run", 8, old.digest)
    assert parent.id == find_run_id(str(base)) != find_run_id(str(new))
    assert parent.keys == ("optimizer.lr",)


def test_a_fork_with_nothing_changed_computes_what_its_parent_has(trained: Path, base: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new)]) == 0
    shutil.rmtree(base)  # its parent's retention, or somebody
    go_on(new)
    assert verify(store(new), 12).digest == read_manifest(store(trained), 12).digest
    ours, theirs = read_trace(str(new))[3], read_trace(str(trained))[1]
    assert ours.tobytes() == theirs[8:].tobytes()


def test_changed_keys_need_no_resume_changed_and_the_history_has_them(
    base: Path, tmp_path: Path, capsys: Captured
) -> None:
    new = tmp_path / "new"
    assert (
        fork_command(
            ["--trust", f"{base}@8", str(new), "optimizer.lr=0.005", "train.max_steps=10", "optimizer.name=muon"]
        )
        == 0
    )
    go_on(new)
    assert "forked from step 8 of run with optimizer.lr: 0.01 -> 0.005" in capsys.readouterr().out
    manifest = read_manifest(store(new), 10)
    assert manifest.config["optimizer"]["lr"] == 0.005
    *_, fork, own = manifest.history
    assert fork["changes"]["optimizer.lr"] == [0.01, 0.005]
    assert "changes" not in own
    assert (fork["attempt"], own["attempt"], own["from_step"]) == (2, 3, 8)
    with pytest.raises(UserError, match=r"resume\.changed=true goes on from step 10"):  # as in any run
        check(
            manifest,
            configured(f"--config-dir={new}", "--config-name=config", "seed=7"),
            manifest.fingerprint,
            ALONE,
            say,
        )


def test_a_change_that_the_fork_does_not_name_is_refused_at_its_start(base: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new), "optimizer.lr=0.005"]) == 0
    manifest = read_manifest(store(new), 8)
    config = configured(f"--config-dir={new}", "--config-name=config", "seed=7")
    with pytest.raises(UserError, match="seed: 1 -> 7") as refused:
        check(manifest, config, manifest.fingerprint, ALONE, say)
    assert "optimizer.lr" not in str(refused.value)
    with pytest.raises(UserError, match=r"data\.sha256"):
        check(manifest, config, manifest.fingerprint | {"data": "other"}, ALONE, say)


def test_other_data_may_be_named_by_a_fork(base: Path, tmp_path: Path, text: Path, capsys: Captured) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[:-1] + "e")
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new), f"data.path={other}"]) == 0
    go_on(new)
    assert store(new).steps()[0] == 12


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{base}@9", "{new}"], "no snapshot of step 9; there are 4, 8, 12"),
        (["{base}@8", "{base}"], "a run is there already"),
        (["{base}@8", "{new}", "optimizer.lr=-1", "optimiser.lr=1"], "optimizer.lr=-1"),
        (["{base}@8", "{new}", "train.max_step=3"], "did you mean train.max_steps"),
        (["{base}@8", "{new}/a=b"], "run.name='a=b' may hold letters"),
        (["{new}@8", "{new}2"], "no snapshot is there"),
        (["{base}@8", "{new}", "run.dir={new}/other"], "is the run's directory: leave run.dir out"),
    ],
)
def test_mistakes_are_told_and_nothing_is_made(
    arguments: list[str], told: str, trained: Path, tmp_path: Path, capsys: Captured
) -> None:
    new = tmp_path / "new"
    assert fork_command(["--trust", *(a.format(base=trained, new=new) for a in arguments)]) == USER_ERROR
    assert told in capsys.readouterr().err
    assert not new.exists()


def test_a_fork_of_a_fork_that_has_not_trained_loses_no_setting(base: Path, tmp_path: Path, capsys: Captured) -> None:
    """The first snapshot of the fork has its parent's config."""
    new, other = tmp_path / "new", tmp_path / "other"
    assert fork_command(["--trust", f"{base}@8", str(new), "optimizer.lr=0.005", "train.max_steps=20"]) == 0
    assert fork_command(["--trust", str(new), str(other), "optimizer.weight_decay=0.3"]) == USER_ERROR
    assert "give optimizer.lr=…, train.max_steps=… again, or choose a later step" in capsys.readouterr().err
    assert not other.exists()
    assert fork_command(["--trust", str(new), str(other), "optimizer.lr=0.005", "train.max_steps=10"]) == 0
    go_on(other)
    manifest = read_manifest(store(other), 10)
    assert manifest.config["optimizer"]["lr"] == 0.005


def test_the_first_snapshot_of_a_fork_of_a_fork_is_on_its_line(
    base: Path, tmp_path: Path, text: Path, cache: Path
) -> None:
    """Also after the run was taken back to it."""
    assert fork_command(["--trust", f"{base}@8", f"{tmp_path}/one"]) == 0
    assert fork_command(["--trust", f"{tmp_path}/one", f"{tmp_path}/two"]) == 0
    go_on(tmp_path / "two")
    here = f"data.path={text}", f"data.cache_dir={cache}"
    with replay(f"{tmp_path}/two", 9, here) as run:
        assert run.base == 8
        assert run.advance().same
    assert intervals(Past(f"{tmp_path}/two")) == [(0, 8), (8, 12)]
    assert snapshots.main(["rewind", f"{tmp_path}/two@8"]) == 0
    assert intervals(Past(f"{tmp_path}/two")) == [(0, 8)]


def rewritten(base: Path, **sections: dict[str, Any]) -> None:
    """Step 8 of the run as a stranger may have written it: these keys, in a manifest that is as good as any."""
    path = base / "snapshots/step-000000008" / MANIFEST
    manifest = read_manifest(store(base), 8)
    config = {**manifest.config}
    for name, values in sections.items():
        config[name] = values if name not in config or "_target_" in values else config[name] | values
    path.write_bytes(encode_manifest(manifest.model_copy(update={"config": config})))


def refused(arguments: list[str], capsys: Captured) -> list[str]:
    """The keys that a fork refuses."""
    assert fork_command(arguments) == USER_ERROR
    return re.findall(r"([a-z]+\.\w+) (?:is|names|holds) ", capsys.readouterr().err)


def test_what_is_written_in_a_strangers_config_is_neither_resolved_nor_imported(
    base: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", "nobody-may-see")
    (tmp_path / "evil_code.py").write_text(f"open('{tmp_path}/ran', 'w')")
    monkeypatch.chdir(tmp_path)
    rewritten(
        base,
        hydra={"searchpath": ["pkg://evil_code"]},
        data={"path": "${oc.env:OF_MINE}"},
        model={"kind": "own", "_target_": "evil_code.Net"},
    )
    for trust in ([], ["--trust"]):
        assert {"data.path", "model._target_"} <= {*refused([*trust, f"{base}@8", "new"], capsys)}
    assert not (tmp_path / "ran").exists()
    assert "evil_code" not in sys.modules


PLACES: dict[str, dict[str, Any]] = {
    "data": {"path": "http://127.0.0.1:9/latest/meta-data"},
    "train": {"eval_tasks": ["evil"], "eval_tasks_path": "base/tasks"},
    "snapshot": {"hot_dir": "elsewhere"},
    "world": {"notice": "aws:http://127.0.0.1:9/imds"},
    "health": {"notify": "http://127.0.0.1:9/hook"},
    "model": {"init_from": "/etc"},
}  # fmt: skip


def test_no_place_and_no_program_is_taken_from_a_strangers_config(
    base: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rewritten(base, **PLACES)
    keys = [f"{section}.{name}" for section, values in PLACES.items() for name in values]
    assert sorted(refused(["base@8", "new"], capsys)) == sorted(keys)
    assert not (tmp_path / "new").exists()
    more = {"init_from": "null", "path": "text.txt", "eval_tasks": "[]", "notice": "none"}
    named = [f"{key}={more.get(key.partition('.')[2], 'null')}" for key in keys if key != "snapshot.hot_dir"]
    assert fork_command(["base@8", "new", *named, "snapshot.hot_dir=/dev/shm"]) == 0


@pytest.mark.parametrize("place", ["base/text.txt", "./base/x/../text.txt", "base", "/etc/passwd", "../text.txt"])
def test_the_strangers_own_folder_is_no_place_and_what_is_kept_is_told(
    base: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rewritten(base, data={"path": place})
    assert refused(["base@8", "new"], capsys) == ["data.path"]
    rewritten(base, data={"path": "texts/mine.txt"})
    assert fork_command(["base@8", "new"]) == 0
    assert "data.path=texts/mine.txt, as in the snapshot's config\n" in capsys.readouterr().out


def test_an_interrupted_fork_can_be_made_again(base: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new)]) == 0
    (new / "snapshots/step-000000008" / MANIFEST).unlink()  # killed before the commit
    assert fork_command(["--trust", f"{base}@8", str(new)]) == 0
    verify(store(new), 8)
    assert not [*new.rglob("*.tmp")]


def test_a_disk_without_hard_links_gets_a_verified_copy(
    base: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def refused(src: str, dst: str, **options: bool) -> None:
        if ".safetensors" in str(src):
            raise OSError(18, "Invalid cross-device link")
        real(src, dst, **options)

    monkeypatch.setattr(os, "link", refused)
    new = tmp_path / "new"
    assert fork_command(["--trust", f"{base}@8", str(new)]) == 0
    assert "copied, since the parent's place can't share" in capsys.readouterr().out
    assert not {s.st_ino for s in parts(new, 8).values()} & {s.st_ino for s in parts(base, 8).values()}
    verify(store(new), 8)


def test_a_parts_missing_bytes_are_noticed_before_the_commit(base: Path, tmp_path: Path, capsys: Captured) -> None:
    [path] = (base / "snapshots/step-000000008").glob("model-*")
    path.write_bytes(path.read_bytes()[:-1])
    assert fork_command(["--trust", f"{base}@8", str(tmp_path / "new")]) == USER_ERROR
    assert "has another size than its manifest says: choose another step" in capsys.readouterr().err
    assert store(tmp_path / "new").steps() == []


def test_log_draws_a_fork_below_the_attempt_that_it_left_and_the_report_from_that_step(
    base: Path, tmp_path: Path, capsys: Captured
) -> None:
    fork_command(["--trust", f"{base}@8", str(tmp_path / "new"), "optimizer.lr=0.005"])
    go_on(tmp_path / "new")
    fork_command(["--trust", f"{tmp_path}/new@12", str(tmp_path / "third")])
    capsys.readouterr()
    assert log_command([str(tmp_path), "--graph"]) == 0
    lines = capsys.readouterr().out.splitlines()
    digests = {(name, s): read_manifest(store(tmp_path / name), s).digest[:16] for name, s in
               (("base", 4), ("base", 8), ("base", 12), ("new", 8), ("new", 12))}  # fmt: skip
    assert [line.partition(", loss")[0] for line in lines] == [
        f"run ({tmp_path}/base): step 12, 1 attempt",
        "└─ attempt 1: steps 1 to 12, 1 × cpu, finished",
        f"   ├─ step 4: {digests['base', 4]}",
        f"   ├─ step 8: {digests['base', 8]}",
        f"   ├─ step 12: {digests['base', 12]}",
        f"   └─ new ({tmp_path}/new): step 12, 1 attempt; forked from run after step 8, with other optimizer.lr",
        f"      ├─ step 8: {digests['new', 8]}",
        "      └─ attempt 3: steps 9 to 12, 1 × cpu, finished",
        f"         ├─ step 12: {digests['new', 12]}",
        f"         └─ third ({tmp_path}/third): step 12, 0 attempts; forked from new after step 12",
        f"            └─ step 12: {digests['new', 12]}",
    ]
    assert log_command([str(tmp_path), "--json"]) == 0
    told = {run["dir"]: run for run in json.loads(capsys.readouterr().out)}
    assert told[f"{tmp_path}/new"]["parent"]["step"] == 8
    assert told[f"{tmp_path}/new"]["attempts"][0]["snapshots"][0]["digest"].startswith(digests["new", 12])


def test_log_of_one_run_and_of_no_run(base: Path, tmp_path: Path, capsys: Captured) -> None:
    assert log_command([str(base)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"run ({base}): step 12, 1 attempt",
        "  attempt 1: steps 1 to 12, 1 × cpu, finished",
    ]
    (tmp_path / "empty").mkdir()
    assert log_command([str(tmp_path / "empty")]) == USER_ERROR
    assert log_command([str(tmp_path / "nowhere")]) == USER_ERROR


def test_log_shows_the_other_runs_of_a_folder_where_one_is_unreadable(
    base: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(base, tmp_path / "bad")
    for ledger in (tmp_path / "bad/ledger").iterdir():
        ledger.unlink()
        ledger.symlink_to("/etc/passwd")
    assert log_command([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert f"run ({base}): step 12" in out
    assert "bad/ledger" in err


@pytest.fixture
def sent(serve: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Each request that is sent to S3: its kind, its key, the bytes of its body."""
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    serve("moto")
    found = list[tuple[str, str, int]]()
    real = AIOHTTPSession.send

    async def send(self: AIOHTTPSession, request: object) -> object:
        body = getattr(request, "body", None)
        size = len(body) if isinstance(body, bytes | bytearray) else int(request.headers.get("Content-Length", 0))  # type: ignore[attr-defined]
        found.append((request.method, request.url.rpartition("/")[2], size))  # type: ignore[attr-defined]
        return await real(self, request)

    monkeypatch.setattr(AIOHTTPSession, "send", send)
    return found


def test_a_fork_within_a_bucket_uploads_nothing_but_a_manifest_and_downloads_no_part(
    base: Path, tmp_path: Path, sent: list[tuple[str, str, int]], capsys: Captured
) -> None:
    fs = Store("s3://runs/base").fs
    for path in base.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"runs/base/{path.relative_to(base)}", path.read_bytes())
    sent.clear()
    assert fork_command(["--trust", "s3://runs/base@8", "s3://runs/new", "optimizer.lr=0.005"]) == 0
    out = capsys.readouterr().out
    assert "copied by the store itself" in out
    assert "the parent's command with run.name=new run.dir=s3://runs/new optimizer.lr=0.005 at its end" in out
    bodies = {name: size for method, name, size in sent if size and method != "GET"}
    (manifest,) = [size for name, size in bodies.items() if name.startswith(MANIFEST)]
    assert not [name for name in bodies if "safetensors" in name]
    assert sum(bodies.values()) - manifest < 8192  # the config, the run's id, the probe of conditional puts
    assert not [name for method, name, _ in sent if method == "GET" and "safetensors" in name]
    assert verify(Store("s3://runs/new/snapshots"), 8).digest == read_manifest(store(base), 8).digest
    # Without its parent it is whole.
    fs.rm("runs/base", recursive=True)
    verify(Store("s3://runs/new/snapshots"), 8)
