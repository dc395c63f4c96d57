"""`mingpt fork`: what it shares with its parent, what it takes from a stranger, and that it goes on as a run."""

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
from mingpt.commands import report, snapshots
from mingpt.commands.diff import diff_command
from mingpt.commands.fork import fork_command
from mingpt.commands.log import log_command
from mingpt.console import say
from mingpt.errors import USER_ERROR, UserError
from mingpt.observe.trace import read_trace
from mingpt.report.auditing import intervals
from mingpt.snapshot import forking
from mingpt.snapshot.forking import parent_of
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.hot import find_run_id
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read_manifest, verify
from mingpt.snapshot.store import Store
from mingpt.train.past import Past
from mingpt.train.replaying import replay
from mingpt.train.resume import check
from snapshot_kit import ALONE
from told import Told

Captured = pytest.CaptureFixture[str]
STEP_8 = "base/snapshots/step-000000008"


@pytest.fixture(autouse=True)
def base(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, so that a test may change it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(trained, tmp_path / "base")


def fork(*arguments: object) -> int:
    return fork_command(["--trust", *map(str, arguments)])


def store(folder: object) -> Store:
    return Store(f"{folder}/snapshots")


def manifest(folder: str, step: int) -> Manifest:
    return read_manifest(store(folder), step)


def inodes(folder: str) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in Path(folder).glob("snapshots/step-000000008/*.safetensors")}


def test_a_fork_on_the_same_disk_has_the_files_of_its_parent(base: Path, tmp_path: Path, capsys: Captured) -> None:
    before = sorted(base.rglob("*"))
    assert fork(f"{base}@8", tmp_path / "new", "optimizer.lr=0.005") == 0
    assert f"mingpt train --config-dir {tmp_path}/new --config-name config\n" in capsys.readouterr().out
    assert inodes("new") == inodes("base")
    assert sorted(base.rglob("*")) == before
    fresh = [p for p in Path("new").rglob("*") if p.is_file() and p.stat().st_nlink == 1]
    assert sorted(p.name for p in fresh) == ["config.yaml", MANIFEST, "run-id"]
    ours, theirs = verify(store("new"), 8), manifest("base", 8)
    assert (ours.digest, ours.run, ours.config) == (theirs.digest, "new", theirs.config)
    parent = parent_of(ours)
    assert parent
    assert (parent.run, parent.step, parent.digest, parent.keys) == ("run", 8, theirs.digest, ("optimizer.lr",))
    assert parent.id == find_run_id("base") != find_run_id("new")


def test_a_fork_with_nothing_changed_computes_what_its_parent_has(trained: Path, base: Path, tmp_path: Path) -> None:
    assert fork("base@8", tmp_path / "new") == 0
    shutil.rmtree(base)  # its parent's retention, or somebody
    go_on(tmp_path / "new")
    assert verify(store("new"), 12).digest == manifest(str(trained), 12).digest
    assert read_trace("new")[3].tobytes() == read_trace(str(trained))[1][8:].tobytes()


def test_changed_keys_and_data_need_no_resume_changed_and_the_history_has_them(tmp_path: Path, text: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[:-1] + "e")
    changed = ("optimizer.lr=0.005", "train.max_steps=10", "optimizer.name=muon", f"data.path={other}")
    assert fork("base@8", tmp_path / "new", *changed) == 0
    go_on(tmp_path / "new")
    new = manifest("new", 10)
    assert new.config["optimizer"]["lr"] == 0.005
    *_, parted, own = new.history
    assert parted["changes"]["optimizer.lr"] == [0.01, 0.005]
    assert "changes" not in own
    assert (parted["attempt"], own["attempt"], own["from_step"]) == (2, 3, 8)
    with pytest.raises(UserError, match=r"resume\.changed=true goes on from step 10"):  # as in any run
        check(new, configured("--config-dir=new", "--config-name=config", "seed=7"), new.fingerprint, ALONE, say)


def test_a_change_that_the_fork_does_not_name_is_refused_at_its_start() -> None:
    assert fork("base@8", "new", "optimizer.lr=0.005") == 0
    new, config = manifest("new", 8), configured("--config-dir=new", "--config-name=config", "seed=7")
    with pytest.raises(UserError, match="seed: 1 -> 7") as refused:
        check(new, config, new.fingerprint, ALONE, say)
    assert "optimizer.lr" not in str(refused.value)
    with pytest.raises(UserError, match=r"data\.sha256"):
        check(new, config, new.fingerprint | {"data": "other"}, ALONE, say)


@pytest.mark.parametrize(
    "arguments",
    [
        "base@9 new", "base@8 base", "base@8 new optimizer.lr=-1 optimiser.lr=1 train.max_step=3", "base@8 new/a=b",
        "new@8 new2", "base@8 new run.dir=new/other", "base@8 base/snapshots", "base@8 base/snapshots/inner",
        f"base@8 {STEP_8}",
    ],
)  # fmt: skip
def test_mistakes_are_told_and_nothing_is_made(arguments: str, tmp_path: Path, capsys: Captured, told: Told) -> None:
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    assert fork(*arguments.split()) == USER_ERROR
    told(capsys.readouterr().err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fork_of_a_fork_that_has_not_trained_loses_no_setting(tmp_path: Path, capsys: Captured) -> None:
    """The first snapshot of the fork has its parent's config."""
    assert fork("base@8", "new", "optimizer.lr=0.005", "train.max_steps=20") == 0
    assert fork("new", "other", "optimizer.weight_decay=0.3") == USER_ERROR
    assert "give optimizer.lr=…, train.max_steps=… again" in capsys.readouterr().err
    assert not Path("other").exists()
    assert fork("new", tmp_path / "other", "optimizer.lr=0.005", "train.max_steps=10") == 0
    go_on(tmp_path / "other")
    assert manifest("other", 10).config["optimizer"]["lr"] == 0.005


def test_the_first_snapshot_of_a_fork_of_a_fork_is_on_its_line(tmp_path: Path, text: Path, cache: Path) -> None:
    """Also after the run was taken back to it."""
    assert fork("base@8", "one") == fork("one", tmp_path / "two") == 0
    go_on(tmp_path / "two")
    with replay("two", 9, (f"data.path={text}", f"data.cache_dir={cache}")) as run:
        assert run.base == 8
        assert run.advance().same
    assert intervals(Past("two")) == [(0, 8), (8, 12)]
    assert snapshots.main(["rewind", "two@8"]) == 0
    assert intervals(Past("two")) == [(0, 8)]


# --- what a stranger may have written ---


def rewritten(**sections: dict[str, Any]) -> None:
    """Step 8 of the run as a stranger may have written it: these keys, in a manifest that is as good as any."""
    old = manifest("base", 8)
    config = {**old.config}
    for name, values in sections.items():
        config[name] = values if name not in config or "_target_" in values else config[name] | values
    Path(STEP_8, MANIFEST).write_bytes(encode_manifest(old.model_copy(update={"config": config})))


def refused(capsys: Captured, *arguments: str) -> list[str]:
    """The keys that a fork of the rewritten step refuses."""
    assert fork_command([*arguments, "base@8", "new"]) == USER_ERROR
    assert not Path("new").exists()
    return sorted(re.findall(r"([a-z]+\.\w+) (?:is|names|holds) ", capsys.readouterr().err))


def test_what_is_written_in_a_strangers_config_is_neither_resolved_nor_imported(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_MINE", "nobody-may-see")
    Path("evil_code.py").write_text("open('ran', 'w')")
    rewritten(
        hydra={"searchpath": ["pkg://evil_code"]},
        data={"path": "${oc.env:OF_MINE}"},
        model={"kind": "own", "_target_": "evil_code.Net"},
    )
    for trust in ([], ["--trust"]):
        assert {"data.path", "model._target_"} <= {*refused(capsys, *trust)}
    assert not Path("ran").exists()
    assert "evil_code" not in sys.modules


PLACES: dict[str, dict[str, Any]] = {
    "data": {"path": "http://127.0.0.1:9/latest/meta-data"},
    "health": {"notify": "http://127.0.0.1:9/hook"},
    "model": {"init_from": "/etc"},
    "snapshot": {"hot_dir": "elsewhere"},
    "train": {"eval_tasks": ["evil"], "eval_tasks_path": "base/tasks"},
    "world": {"notice": "aws:http://127.0.0.1:9/imds"},
}


def test_no_place_and_no_program_is_taken_from_a_strangers_config(capsys: Captured) -> None:
    rewritten(**PLACES)
    assert refused(capsys) == [f"{section}.{name}" for section, values in PLACES.items() for name in values]
    named = ("data.path=text.txt", "health.notify=null", "model.init_from=null", "snapshot.hot_dir=/dev/shm",
             "train.eval_tasks=[]", "train.eval_tasks_path=null", "world.notice=none")  # fmt: skip
    assert fork_command(["base@8", "new", *named]) == 0


@pytest.mark.parametrize("place", ["base/text.txt", "./base/x/../text.txt", "base", "/etc/passwd", "../text.txt"])
def test_the_strangers_own_folder_is_no_place_and_what_is_kept_is_told(capsys: Captured, place: str) -> None:
    rewritten(data={"path": place})
    assert refused(capsys) == ["data.path"]
    rewritten(data={"path": "texts/mine.txt"})
    assert fork_command(["base@8", "new"]) == 0
    assert "data.path=texts/mine.txt" in capsys.readouterr().out


def test_no_line_and_no_escape_code_of_a_strangers_is_printed(tmp_path: Path, capsys: Captured) -> None:
    forged = "a\nfinished: step 2000\u2028finished: \x1b[2J"
    assert fork("base@8", "child") == 0
    for folder in ("base", "child"):
        old = manifest(folder, 8)
        entry = old.history[-1] | {"world_size": forged, "changes": {forged: [forged, 1]}}
        if parent := entry.get("fork"):
            entry["fork"] = parent | {"run": forged, "dir": forged, "keys": [forged]}
        config = {**old.config, "seed": forged, "health": {"notify": f"http://h/S3CRET{forged}"}, forged: 1}
        new = {"run": forged, "history": [*old.history[:-1], entry], "config": config}
        path = Path(folder, "snapshots/step-000000008", MANIFEST)
        path.write_bytes(encode_manifest(old.model_copy(update=new)))
    for _ in range(2):  # the second time as the newest, from which more is shown
        for words in ("list child", "show child", "list .", "show base@8", "verify base@8"):
            assert snapshots.main(words.split()) == 0
        log_command(["."])
        log_command([".", "--graph"])
        diff_command(["base@8", "child"])
        fork_command(["base@8", "new", f"data.path={tmp_path}/text", "health.notify=null", "seed=1"])
        report.main(["base", "child", "--out", "page.html"])
        shutil.rmtree("base/snapshots/step-000000012", ignore_errors=True)
    out, err = capsys.readouterr()
    assert not [line for line in (out + err).splitlines() if line.lstrip(" ├─└│").startswith("finished: ")]
    assert "\x1b" not in out + err
    assert "S3CRET" not in out + err
    assert "\nfinished: " not in Path("page.html").read_text()


# --- killed, raced, and on other disks ---


@pytest.mark.parametrize("where", ["make_run_dir", "create_config", "_take", "encode_manifest", "after"])
def test_a_fork_that_was_killed_is_made_by_the_same_command_and_by_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    new, real = tmp_path / "new", getattr(forking, where, None)

    def killed(*arguments: Any) -> None:
        if real and where == "create_config":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if real:
            patched.setattr(forking, where, killed)
        fork("base@8", new)
    if where != "make_run_dir":
        assert fork("base@4", new) == fork("base@8", new, "seed=2") == USER_ERROR
    assert fork("base@8", new) == 0
    assert store(new).folders() == [8]
    verify(store(new), 8)
    assert not [*new.rglob("*.tmp")]
    go_on(new)
    assert fork("base@8", new) == USER_ERROR


def test_of_two_forks_into_one_place_at_once_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    real = forking.make_run_dir

    def overtaken(run_dir: str) -> None:
        """The other fork has seen that nothing is there."""
        monkeypatch.setattr(forking, "make_run_dir", real)
        assert fork("base@4", "new") == 0
        real(run_dir)

    monkeypatch.setattr(forking, "make_run_dir", overtaken)
    assert fork("base@8", "new") == USER_ERROR
    assert store("new").folders() == [4]


@pytest.mark.parametrize("odd", [Path.mkdir, lambda path: path.symlink_to("elsewhere"), os.mkfifo])
def test_a_fork_that_cannot_write_its_config_has_failed(odd: Callable[[Path], None]) -> None:
    Path("new").mkdir()
    odd(Path("new/config.yaml"))
    assert fork("base@8", "new") == USER_ERROR
    assert store("new").folders() == []
    assert not Path("new/elsewhere").exists()


def test_a_disk_without_hard_links_gets_a_verified_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(src: str, dst: str, **options: bool) -> None:
        if ".safetensors" in str(src):
            raise OSError(18, "Invalid cross-device link")
        real(src, dst, **options)

    monkeypatch.setattr(os, "link", link)
    assert fork("base@8", "new") == 0
    assert not {*inodes("new").values()} & {*inodes("base").values()}
    verify(store("new"), 8)


def test_a_parts_missing_bytes_are_noticed_before_the_commit() -> None:
    [path] = Path(STEP_8).glob("model-*")
    path.write_bytes(path.read_bytes()[:-1])
    assert fork("base@8", "new") == USER_ERROR
    assert store("new").steps() == []


def test_a_fork_within_a_bucket_uploads_nothing_but_a_manifest_and_downloads_no_part(
    base: Path, serve: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiobotocore.httpsession import AIOHTTPSession  # type: ignore[import-untyped]

    serve("moto")
    sent, real = list[tuple[str, str, int]](), AIOHTTPSession.send

    async def send(self: AIOHTTPSession, request: Any) -> object:
        body = getattr(request, "body", None)
        size = len(body) if isinstance(body, bytes | bytearray) else int(request.headers.get("Content-Length", 0))
        sent.append((request.method, request.url.rpartition("/")[2], size))
        return await real(self, request)

    fs = store("s3://runs/base").fs
    for path in base.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"runs/base/{path.relative_to(base)}", path.read_bytes())
    monkeypatch.setattr(AIOHTTPSession, "send", send)
    assert fork("s3://runs/base@8", "s3://runs/new", "optimizer.lr=0.005") == 0
    bodies = {name: size for method, name, size in sent if size and method != "GET"}
    (described,) = [size for name, size in bodies.items() if name.startswith(MANIFEST)]
    assert sum(bodies.values()) - described < 8192  # the config, the run's id, the probe of conditional puts
    assert not [name for method, name, size in sent if "safetensors" in name and (size or method == "GET")]
    # Without its parent it is whole.
    fs.rm("runs/base", recursive=True)
    assert verify(store("s3://runs/new"), 8).digest == manifest("base", 8).digest


# --- log ---


def test_log_shows_the_other_runs_of_a_folder_where_one_is_unreadable(base: Path, capsys: Captured) -> None:
    assert log_command([str(base)]) == 0
    shutil.copytree(base, "bad")
    for ledger in Path("bad/ledger").iterdir():
        ledger.unlink()
        ledger.symlink_to("/etc/passwd")
    assert log_command(["."]) == 0
    out, err = capsys.readouterr()
    assert "run (./base): step 12, 1 attempt" in out
    assert "bad/ledger" in err
    Path("empty").mkdir()
    assert log_command(["empty"]) == log_command(["nowhere"]) == USER_ERROR
