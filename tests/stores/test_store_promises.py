"""What a store is not trusted with: to answer, to keep the bytes, to hand over whole files, to drop old uploads."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mingpt.cli import cli
from mingpt.errors import Damaged, Incomplete, SnapshotFailed, TransientError, UserError
from mingpt.files import localfile
from mingpt.files.folder import Folder
from mingpt.snapshot import tries
from mingpt.snapshot.attempts import Attempt, records
from mingpt.snapshot.reader import read, verify
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.store import Store
from mingpt.tiers.hot import run_id
from tests.kits.snapshot_kit import equal, read_newest, save, state_of
from tests.kits.store_kit import BUCKET, Stores

Handed = Callable[[str, bytes], bytes]
Spoil = Callable[[Any, Handed], None]


@pytest.fixture
def store() -> Store:
    """With a snapshot of step 1."""
    store = Store(f"memory://{uuid4().hex}")
    save(store, 1)
    return store


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Has a store hand over what this makes of a file's path and bytes."""

    def spoil(fs: Any, handed: Handed) -> None:
        real = fs.cat_file
        monkeypatch.setattr(fs, "cat_file", lambda path, *range, **named: handed(path, real(path, *range, **named)))

    return spoil


def failing(part: str) -> Handed:
    """What hands over all files but those with this in their path."""

    def handed(path: str, content: bytes) -> bytes:
        if part in path:
            raise OSError("503")
        return content

    return handed


def test_a_server_that_accepts_and_never_answers_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "0.05")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/run"
        with pytest.raises(TransientError, match=rf"run\.dir={url}: .* 0.05 s: .*MINGPT_STORE_SECONDS"):
            Folder(url).entries()


def test_a_limit_that_is_none_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for limit in ("0", "nan", "soon"):
        monkeypatch.setenv("MINGPT_STORE_SECONDS", limit)
        with pytest.raises(UserError, match=rf"^MINGPT_STORE_SECONDS={limit} "):
            Store(str(tmp_path))


def test_a_byte_flipped_on_the_way_is_seen_at_once_where_parts_are_read_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the writes arrive with one byte changed, and the store says that all went well."""
    monkeypatch.setattr(tries, "FIRST_RETRY_SECONDS", 0)
    real, flipped, said = store.fs.pipe_file, ["model"], list[str]()

    def unreliable(path: str, content: bytes, **options: Any) -> None:
        if flipped and flipped[0] in path:
            flipped.pop(0)
            content = content[:-1] + bytes([content[-1] ^ 1])
        real(path, content, **options)

    monkeypatch.setattr(store.fs, "pipe_file", unreliable)
    save(store, 2, log=said.append, retry_seconds=10, verify=True)
    [line] = said
    assert "read back" in line
    assert equal(read(store, 2).state, state_of(2))

    flipped += ["optimizer", "optimizer"]
    with pytest.raises(SnapshotFailed, match=r"optimizer-.*read back"):
        save(store, 3, verify=True)
    assert store.steps() == [2, 1]
    save(store, 3)  # its size is right
    with pytest.raises(Damaged, match=r"^optimizer-"):
        read(store, 3)


def test_a_download_that_was_cut_off_is_no_damage(store: Store, spoil: Spoil) -> None:
    """The file may be whole: it is not set aside, and the next try may have it."""
    spoil(store.fs, lambda path, content: content[: None if "json" in path else -1])
    with pytest.raises(TransientError, match=r"snapshot\.dir=memory://.*: \d+ bytes"):
        read(store, 1)


def test_a_file_that_alone_cant_be_had_is_named_and_older_ones_are_taken(
    store: Store, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(localfile, "PAUSES", (0, 0))
    save(store, 2)
    spoil(store.fs, failing("step-000000002/model"))
    assert cli.run("snapshots", ["verify", store.url]) == 1
    bad, good = capsys.readouterr().out.splitlines()
    assert bad.startswith(f"step 2: DAMAGED: {store.url}/step-000000002: URL={store.url}: step-000000002/model-00001-")
    assert good.startswith("step 1: good")
    said = list[str]()
    assert (newest := read_newest(store, said.append))
    assert newest.manifest.step == 1
    assert [line[:28] for line in said] == ["UNREADABLE SNAPSHOT of step "]


def test_a_bit_that_flips_once_on_the_way_damages_nothing(store: Store, spoil: Spoil) -> None:
    """Of each file, the first time; no client sees it."""
    seen = set[str]()

    def flipped(path: str, content: bytes) -> bytes:
        if path in seen:
            return content
        seen.add(path)
        return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]

    spoil(store.fs, flipped)
    assert equal(read(store, 1).state, state_of(1))
    seen.clear()
    assert verify(store, 1).step == 1


def test_a_claim_that_cant_be_had_is_left_out_with_a_line(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(localfile, "PAUSES", (0, 0))
    url = f"memory://{uuid4().hex}"
    for _ in range(3):
        Attempt.claim(url, 0, None)
    fs = Store(url).fs
    spoil(fs, failing("00002"))
    assert [*records(url)] == [1, 3]
    assert capsys.readouterr().err.startswith(f"run.dir={url}: attempts/00002.json: others in there can be read: 503: ")
    spoil(fs, failing(""))  # none can be had
    with pytest.raises(TransientError):
        records(url)


def test_a_claim_that_the_store_drops_is_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid4().hex}"
    monkeypatch.setattr(Store(url).fs, "pipe_file", lambda *_, **__: None)
    with pytest.raises(Incomplete, match=r"attempts/00001\.json is not there"):
        Attempt.claim(url, 0, None)
    with pytest.raises(Incomplete, match="run-id is not there"):
        run_id(url)


def test_a_manifest_is_set_aside_only_if_its_copy_is_there(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.fs, "cp_file", lambda *_, **__: None)
    with pytest.raises(Incomplete, match="set-aside-"):
        store.set_aside(1)
    assert store.steps() == [1]


@pytest.mark.slow
def test_unfinished_uploads_go_after_a_safe_age_and_others_stay(serve: Stores) -> None:
    """What a writer leaves that was killed between two pieces of a large part."""
    url = f"{serve('moto').url}/run/snapshots"
    store = Store(url)
    save(store, 1)
    part = "step-000000002/model-00001-0123456789abcdef.safetensors"
    keys = [f"other/snapshots/{part}", f"run/snapshots/{part}", "run/snapshots/step-000000002/notes.txt"]
    for key in keys:
        store.fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)

    def left() -> list[str]:
        return sorted(u["Key"] for u in store.fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", ()))

    assert [u.path for u in store.unfinished_uploads()] == [part]
    # This server says of each that it was begun in 2010.
    assert plan(store, Retention(9, orphan_age=1e9), 1, {}).leftovers == []  # its writer may be alive
    assert cli.run("snapshots", ["prune", url, "--dry-run"]) == 0
    assert left() == keys
    assert cli.run("snapshots", ["prune", url]) == 0
    assert left() == [keys[0], keys[2]]
    assert store.steps() == [1]
