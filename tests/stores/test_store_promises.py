"""What a store is not trusted with: to answer, to keep the bytes, to hand over whole files, to drop old uploads."""

import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from mingpt.commands import snapshots
from mingpt.errors import Damaged, SnapshotFailed, TransientError, UserError
from mingpt.snapshot import pieces
from mingpt.snapshot import store as store_module
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.store import Store
from mingpt.snapshot.uploads import unfinished_uploads
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, equal, save, state_of
from store_kit import BUCKET, Stores


def flip_on_the_way(store: Store, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], times: int) -> None:
    """Some of the next writes arrive with one byte changed, and the store says that all went well."""
    real, left = store.fs.pipe_file, [times]

    def unreliable(path: str, content: bytes, **options: Any) -> None:
        if Path(path).name.startswith(kinds) and left[0]:
            left[0] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        real(path, content, **options)

    monkeypatch.setattr(store.fs, "pipe_file", unreliable)


def test_a_server_that_accepts_and_never_answers_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", "0.5")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/run"
        with pytest.raises(TransientError, match=rf"snapshot\.dir={url}: .* 0.5 s: .*MINGPT_STORE_SECONDS"):
            Store(url).steps()


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan", "soon"])
def test_a_limit_that_is_none_is_a_mistake(monkeypatch: pytest.MonkeyPatch, limit: str, tmp_path: Path) -> None:
    monkeypatch.setenv("MINGPT_STORE_SECONDS", limit)
    with pytest.raises(UserError, match=rf"^MINGPT_STORE_SECONDS={limit} "):
        Store(str(tmp_path))


def test_a_byte_flipped_on_the_way_is_seen_at_once_where_parts_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"memory://{uuid4().hex}")
    flip_on_the_way(store, monkeypatch, ("model",), times=1)
    said: list[str] = []

    def writer(**options: Any) -> SnapshotWriter:
        return SnapshotWriter(store, ALONE, Retention(9), PROVENANCE, said.append, **options)

    writer(retry_seconds=10, verify=True).save(1, state_of(1))
    [line] = said
    assert "read back" in line
    assert equal(read(store, 1).state, state_of(1))

    flip_on_the_way(store, monkeypatch, ("optimizer",), times=9)
    with pytest.raises(SnapshotFailed, match=r"optimizer-.*read back"):
        writer(verify=True).save(2, state_of(2))
    assert store.steps() == [1]
    writer().save(3, state_of(3))  # its size is right
    with pytest.raises(Damaged, match=r"^optimizer-"):
        read(store, 3)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64])
def test_a_part_is_the_same_whatever_the_ranges(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    store = Store(f"memory://{uuid4().hex}")
    save(store, 1)
    monkeypatch.setattr(pieces, "RANGE_BYTES", size)
    assert equal(read(store, 1).state, state_of(1))


def test_of_a_manifest_no_more_is_read_than_its_server_has_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"memory://{uuid4().hex}")
    save(store, 1)
    content, announced = store.read_manifest(1), store.size(1, "manifest.json")
    store.fs.pipe_file(f"{store.folder(1)}/manifest.json", content * 9)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "MANIFEST_LIMIT", announced)
        with pytest.raises(Damaged, match=rf"^manifest\.json .*{announced}"):
            store.read_manifest(1)
    monkeypatch.setattr(store, "size", lambda *_: announced)
    assert store.read_manifest(1) == content


def test_a_download_that_was_cut_off_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may be whole: it is not set aside, and the next try may have it."""
    store = Store(f"memory://{uuid4().hex}")
    save(store, 1)
    real = store.fs.cat_file

    def cut(path: str, **options: Any) -> bytes:
        content = bytes(real(path, **options))
        return content if path.endswith(".json") else content[:-1]

    monkeypatch.setattr(store.fs, "cat_file", cut)
    with pytest.raises(TransientError, match=r"snapshot\.dir=memory://.*: \d+ bytes"):
        read(store, 1)


@pytest.mark.slow
def test_unfinished_uploads_go_after_a_safe_age_and_others_stay(serve: Stores) -> None:
    """What a writer leaves that was killed between two pieces of a large part."""
    url = f"{serve('moto').url}/run/snapshots"
    store = Store(url)
    save(store, 1)
    part = "step-000000002/model-00001-0123456789abcdef.safetensors"
    keys = [f"other/snapshots/{part}", f"run/snapshots/{part}", "run/snapshots/step-000000002/notes.txt"]
    for key in keys:
        upload = store.fs.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
        piece = {"UploadId": upload["UploadId"], "PartNumber": 1, "Body": b"half"}
        store.fs.call_s3("upload_part", Bucket=BUCKET, Key=key, **piece)

    def left() -> list[str]:
        return sorted(u["Key"] for u in store.fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", ()))

    assert [u.path for u in unfinished_uploads(store)] == [part]
    # This server says of each that it was begun in 2010.
    assert plan(store, Retention(9, orphan_age=1e9), 1, {}).uploads == []  # its writer may be alive
    assert snapshots.main(["prune", url, "--dry-run"]) == 0
    assert left() == keys
    assert snapshots.main(["prune", url]) == 0
    assert left() == [keys[0], keys[2]]
    assert store.steps() == [1]


@pytest.mark.slow
def test_a_part_of_many_pieces_is_read_in_ranges_from_s3(serve: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB and more go up as a multipart upload and come back in several requests at a time."""
    store = Store(f"{serve('moto').url}/snapshots")
    state = {"model": {"w": torch.arange(20 * 2**20, dtype=torch.float32)}, "optimizer": {"n": torch.tensor(1)}}
    digest = save(store, 1, state)  # type: ignore[arg-type]
    ranges: list[int] = []
    real = store.fs.cat_ranges

    def watched(paths: list[str], starts: list[int], ends: list[int], **options: Any) -> list[bytes]:
        ranges.append(len(paths))
        return list(real(paths, starts, ends, **options))

    object.__setattr__(store.fs, "cat_ranges", watched)
    assert read(store, 1).manifest.digest == digest
    assert ranges == [6]  # 80 MiB and a header
