"""A hostile snapshot costs a reader little memory, whatever it promises."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.errors import Damaged, UserError
from mingpt.snapshot import manifest as manifest_module
from mingpt.snapshot import pieces
from mingpt.snapshot import store as store_module
from mingpt.snapshot.format import Part, State
from mingpt.snapshot.manifest import decode_manifest, encode_manifest
from mingpt.snapshot.reader import PARALLEL_PARTS, read, read_manifest, verify
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.staging import StagedPart
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from tests.kits.snapshot_kit import ALONE, PROVENANCE, digest_of, equal, save, signed

MIB = 2**20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "snapshots"))
    save(store, 3)
    return store


def sign_again(store: Store, **changes: Any) -> None:
    fields = json.loads(store.read_manifest(3)) | changes
    fields["digest"] = digest_of(fields["tensors"])
    Path(store.folder(3), "manifest.json").write_bytes(signed(fields))


@pytest.mark.parametrize("url", ["{}/streamed", "memory://streamed"])
def test_an_honest_state_is_verified_as_a_stream(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(pieces, "RANGE_BYTES", 1000)
    state: State = {"model": {f"w{i}": torch.arange(i * 100.0) for i in range(8)}, "optimizer": {}}
    store, sizes = Store(url.format(tmp_path)), list[int]()
    save(store, 1, state)
    assert equal(read(store, 1).state, state)

    def read_pieces(folder: Any, name: str, size: int) -> Iterator[memoryview]:
        for piece in pieces.read_pieces(folder, name, size):
            sizes.append(len(piece))
            yield piece

    monkeypatch.setattr(store_module, "read_pieces", read_pieces)
    [name] = verify(store, 1).parts
    assert max(sizes) <= 1000
    path = f"{store.folder(1)}/{name}"
    good = store.fs.cat_file(path)
    for position in range(0, len(good), 997):  # wherever a piece ends
        store.fs.pipe_file(path, good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(Damaged, match=f"^{name}"):
            verify(store, 1)


# Manifests


def test_json_that_no_writer_of_ours_makes_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 999)
    for raw in (b'{"a":[' + b"[]," * 999 + b"[]]}", b'{"' + b'":"' * 1998, b"[" * 1000):
        with pytest.raises(Damaged, match="more than 999"):
            decode_manifest(raw)


def test_marks_inside_a_text_are_no_values(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer.json is full of them, and of quotes."""
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 999)
    text = '{"a\\\\": [1, 2], "\\"": {}},\n' * 400
    sign_again(store, vocabulary={"characters": text})
    assert read_manifest(store, 3).vocabulary["characters"] == text


def test_a_manifest_that_no_reader_would_take_is_not_written_and_gpt2_xl_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would write snapshots for days that are set aside when they are needed."""
    manifest = read_manifest(store, 3)
    names = [f"transformer.h.{i % 48}.{i}.exp_avg_sq" for i in range(4 * 580)]
    of_xl = manifest.model_copy(update={"tensors": dict.fromkeys(names, manifest.tensors["w"])})
    assert len(encode_manifest(of_xl)) < MIB
    monkeypatch.setattr(manifest_module, "MOST_VALUES", 999)
    monkeypatch.setattr(manifest_module, "MANIFEST_LIMIT", MIB)
    for vocabulary in ({"text": "a" * MIB}, {"list": [0] * 1000}):
        with pytest.raises(UserError, match="vocabulary"):
            encode_manifest(manifest.model_copy(update={"vocabulary": vocabulary}))


def test_a_part_that_is_written_is_not_kept(store: Store) -> None:
    """The writer's thread puts slices together part by part: they are there only until they are written."""
    alive, most = weakref.WeakSet[torch.Tensor](), 0

    def staged() -> Iterator[StagedPart]:
        nonlocal most
        for i in range(4 * PARALLEL_PARTS):
            tensor = torch.full((100,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield Part("model", i + 1, (f"w{i}",)), {f"w{i}": tensor}
            del tensor

    writer = SnapshotWriter(store, ALONE, Retention(9), PROVENANCE, log=print)
    assert len(writer.write_parts(4, staged())["parts"]) == 4 * PARALLEL_PARTS
    assert most <= PARALLEL_PARTS + 1
    assert len(alive) == 0
