"""mingpt.snapshot: what is written, byte for byte, and that it comes back."""

import errno
import json
import os
from functools import partial
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any
from uuid import uuid4

import pytest
import safetensors.torch
import torch

from mingpt.errors import SnapshotFailed, UserError
from mingpt.snapshot import staging
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.format import DTYPES, Kind, Part, State, lay_out
from mingpt.snapshot.reader import read, verify
from mingpt.snapshot.store import REWOUND, Store
from tests.kits.node_kit import wait_until
from tests.kits.snapshot_kit import PROVENANCE, canonical, equal, files, raw, read_newest, save, state_of
from tests.kits.told import Told


def test_the_layout_follows_sorted_names_and_sizes() -> None:
    sizes = {"e": 4, "b": 6, "a": 4, "c": 11, "d": 0, "f": 7}
    model = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert lay_out({"optimizer": {"z": torch.zeros(())}, "model": model}, part_bytes=10) == [
        Part("model", 1, ("a", "b")),  # exactly full
        Part("model", 2, ("c",)),  # larger than a part: alone
        Part("model", 3, ("d", "e")),
        Part("model", 4, ("f",)),
        Part("optimizer", 1, ("z",)),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_from_what_safetensors_itself_writes(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Byte for byte: any tool reads them. Its own writer is not used, since a later one may order a header anew."""
    store = Store(str(tmp_path))
    for step, shape in enumerate(((), (3, 0, 2), (5,), (2, 3))):
        tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
        if dtype.is_floating_point and tensor.numel() > 1:
            tensor.view(-1)[:2] = torch.tensor([-0.0, torch.nan])  # -0.0 equals 0.0: only its bytes tell
        model = {"a": tensor, "b": torch.tensor([True, False, True]), "größe": torch.tensor(7.0).double()}
        state: State = {"model": model, "optimizer": {"c": tensor.mT if len(shape) > 1 else tensor}}
        save(store, step, state)
        assert equal(read(store, step).state, state)
        [part] = Path(store.folder(step)).glob("model-*")
        assert part.read_bytes() == safetensors.torch.save(model)


def test_the_digest_is_that_of_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    """From hand-packed bytes and design.md's sentence alone, and pinned: a change would orphan every snapshot."""
    state: State = {
        "optimizer": {"w.step": torch.tensor(3.0), "n": torch.tensor([-1], dtype=torch.int64)},
        "model": {"w": torch.tensor([[1.0, 2.0], [3.0, -0.0]]), "b": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)},
    }
    lines = [
        f"b BF16 [2] {sha256(bytes.fromhex('803f00c0')).hexdigest()}\n",
        f"n I64 [1] {sha256(pack('<q', -1)).hexdigest()}\n",
        f"w F32 [2, 2] {sha256(pack('<4f', 1, 2, 3, -0.0)).hexdigest()}\n",
        f"w.step F32 [] {sha256(pack('<f', 3)).hexdigest()}\n",
    ]
    expected = sha256("".join(lines).encode()).hexdigest()
    assert expected == "984258b44a22116de613b5f5e7704954ed36074d0ee09bd59acdbff86a1bb209"
    for size in (1, 9, 20, 10_000):
        store = Store(f"memory://{uuid4().hex}")
        monkeypatch.setattr(staging, "lay_out", partial(lay_out, part_bytes=size))
        assert save(store, 1, state) == expected
        assert equal(read(store, 1).state, state)


def test_a_snapshot_is_its_parts_and_a_manifest_and_nothing_else(store: Store) -> None:
    digest, state = save(store, 3), state_of(3)
    contents = {Path(path).name: store.fs.cat_file(path) for path in store.fs.find(store.root)}
    manifest = json.loads(contents.pop("manifest.json"))
    tensors = dict[str, object]()
    for name, names in zip(sorted(contents), (["w", "b"], ["w.exp_avg", "w.step"]), strict=True):  # larger ones first
        kind: Kind = "model" if name.startswith("model") else "optimizer"
        hashes = {n: sha256(raw(state[kind][n])).hexdigest() for n in names}
        header = contents[name][: 8 + int.from_bytes(contents[name][:8], "little")]
        assert name == f"{kind}-00001-{sha256(header + ''.join(hashes.values()).encode()).hexdigest()[:16]}.safetensors"
        tensors |= {
            n: {"dtype": "BF16" if n == "b" else "F32", "shape": [*state[kind][n].shape], "sha256": h, "part": name}
            for n, h in hashes.items()
        }
    checksum = manifest.pop("checksum")
    assert manifest == PROVENANCE | {
        "format": 3,
        "step": 3,
        "digest": digest,
        "metrics": {"loss": 0.375, "val_loss": None, "best_val_loss": None, "not_finite": []},
        "parts": {name: {"size": len(content)} for name, content in contents.items()},
        "tensors": tensors,
    }
    assert checksum == sha256(canonical(manifest)).hexdigest()
    loaded = read(store, 3)
    assert equal(loaded.state, state)
    assert loaded.manifest.model_dump() == manifest


def test_an_old_snapshot_loses_its_manifest_before_its_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a reader, or a kill at any moment, sees the whole snapshot or none; and the new one is committed by then."""
    save(store, 1)
    parts = [f.name for f in store.files(1) if f.name != "manifest.json"]
    real, seen = store.fs.rm, []

    def watched(path: str | list[str], **options: Any) -> None:
        seen.append((store.steps(), [f.name for f in store.files(1)]))
        real(path, **options)

    monkeypatch.setattr(store.fs, "rm", watched)
    save(store, 2, keep=1)
    assert seen == [([2], parts)]
    assert store.folders() == [2]


def test_what_is_no_committed_step_is_not_listed(tmp_path: Path) -> None:
    """Of ten digits it may be: train.max_steps may be 2^31 - 1."""
    store = Store(str(tmp_path))
    assert (store.steps(), read_newest(store, print)) == ([], None)
    for step in (1, 2**31 - 1):
        save(store, step)
    names = ("step-3", "step-0000000004", "step-000000001x", "xstep-000000006")
    for path in ("step-000000002/.manifest.json.0.tmp", *(f"{name}/manifest.json" for name in names)):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("{}")  # what a killed writer leaves; what is nobody's
    assert store.steps() == [2**31 - 1, 1]


def test_all_is_on_the_disk_before_the_manifest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and the folders' entries of them: a power cut leaves a whole snapshot or none."""
    real, synced = os.fsync, list[str]()

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.strip(".").partition("-0")[0])
        real(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    save(Store(str(tmp_path / "snapshots")), 1)
    manifest = next(i for i, name in enumerate(synced) if name.startswith("manifest"))
    assert set(synced[:manifest]) == {"model", "optimizer", "step"}
    assert synced[manifest + 1 :] == ["step", "snapshots"]


def test_what_a_failed_write_left_goes_at_once_but_not_what_another_snapshot_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """The disk is full when the optimizer's part comes, or the manifest. To try again would help nobody."""
    store, run, full, plain = Store(f"{tmp_path}/snapshots"), f"{tmp_path}/run", list[str](), os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name.startswith(tuple(full)):
            wait_until(lambda: any(path.parent.glob("model-*")), "the model's part", 60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save(store, 1)
    before = files(tmp_path)
    for file in (".optimizer", ".manifest"):
        full[:] = [file]
        with told.mistake(tmp_path):
            save(store, 2, keep=1, log=pytest.fail, retry_seconds=60)
        assert files(tmp_path) == before

    # These are the parts of a snapshot that a rewind has set aside.
    full.clear()
    save(store, 3)
    name = store.set_aside(3, REWOUND)
    full.append(".optimizer")
    with pytest.raises(UserError):
        save(store, 3)
    store.bring_back(3, name)
    assert verify(store, 3).digest

    # A newer attempt may be writing the same parts.
    claim, _ = (Attempt.claim(run, 0, None) for _ in range(2))
    with pytest.raises(UserError):
        save(store, 4, claim=claim)
    assert [file.name[:5] for file in store.files(4)] == ["model"]


def test_a_part_that_the_store_dropped_stops_the_commit(monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    store = Store(f"memory://{uuid4().hex}")
    real = store.fs.pipe_file

    def drop(path: str, content: bytes, **options: str) -> None:
        real(path, content[:-1] if path.endswith(".safetensors") else content, **options)

    monkeypatch.setattr(store.fs, "pipe_file", drop)
    with told.mistake(store.url, of=SnapshotFailed):
        save(store, 1)
    assert {Path(file.name).suffix for file in store.files(1)} == {".safetensors"}  # no manifest was there for a moment


def test_a_snapshot_that_could_not_be_read_back_is_not_committed(tmp_path: Path) -> None:
    """One name in both kinds of state: the manifest has room for one."""
    store = Store(str(tmp_path))
    state: State = {"model": {"a": torch.ones(2)}, "optimizer": {"a": torch.zeros(2)}}
    with pytest.raises((SnapshotFailed, ValueError)):
        save(store, 1, state)
    assert store.steps() == []
