"""A damaged snapshot is set aside, loudly, nothing of it is lost, and the next older one is read."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.cli import cli
from mingpt.errors import Damaged, TransientError
from mingpt.snapshot import pieces
from mingpt.snapshot import store as store_module
from mingpt.snapshot.format import MANIFEST, State, decode_part
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.reader import read, read_manifest, verify
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import contents, equal, files, read_newest, save, signed, state_of
from tests.kits.told import Told


@pytest.fixture
def store(store: Store) -> Store:
    """Three good snapshots."""
    for step in (1, 2, 3):
        save(store, step)
    return store


def file_of(store: Store, kind: str, step: int = 3) -> Path:
    [path] = Path(store.folder(step)).glob(f"{kind}*")
    return path


# --- each kind of damage: what is told ---


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def link(path: Path) -> None:
    """What it leads to is whole and right, but not in the snapshot's folder."""
    path.symlink_to(path.rename(path.parents[2] / path.name))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_format(number: object) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": number}))


def of_another_step(path: Path) -> None:
    shutil.copytree(path.parent.with_name("step-000000002"), path.parent, dirs_exist_ok=True)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "truncated": ("model", lambda path: os.truncate(path, 100)),
    "larger than the memory": ("model", lambda path: os.truncate(path, 2**40)),
    "missing": ("optimizer", Path.unlink),
    "header": ("optimizer", lambda path: flip(path, 12)),
    "tensor": ("model", lambda path: flip(path, -1)),
    "link": ("model", link),
    "fifo": ("optimizer", fifo),
    "manifest without end": (MANIFEST, lambda path: os.truncate(path, 2**40)),
    "manifest of a format that is no number": (MANIFEST, of_format("2")),
    "manifest of another step": (MANIFEST, of_another_step),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_by_each_reader_and_the_older_one_read(store: Store, damage: str, told: Told) -> None:
    kind, act = DAMAGES[damage]
    act(file_of(store, kind))
    said, files = list[str](), {*os.listdir(store.folder(3))}
    for reader in (read, verify):
        with pytest.raises(Damaged) as error:
            reader(store, 3)
        said.append(str(error.value))
    assert (loaded := read_newest(store, said.append))
    assert equal(loaded.state, state_of(2))
    assert said[0] == said[1]
    told(re.sub("set-aside-[0-9a-f]+", "set-aside-…", said[2]), store.url)
    assert store.steps() == [2, 1]
    assert len(files - {*os.listdir(store.folder(3))}) == 1  # the manifest, under that name: nothing is lost


@pytest.mark.parametrize("version", [1, 4])
def test_a_snapshot_of_another_format_is_a_mistake_and_stays(store: Store, version: int, told: Told) -> None:
    """To set it aside and go on from an older step would throw the other program's work away."""
    of_format(version)(file_of(store, MANIFEST))
    with told.mistake(store.url):
        read_newest(store, print)
    assert store.steps() == [3, 2, 1]


# --- any damage: it is found, whatever it is ---


def test_a_flipped_bit_anywhere_and_every_truncation_is_seen(store: Store) -> None:
    """In a manifest and in parts. A tail of zeros is what a power cut leaves."""
    manifest = read_manifest(store, 3)

    def decoded(name: str, raw: bytes) -> object:
        return decode_manifest(raw) if name == MANIFEST else decode_part(manifest, name, memoryview(bytearray(raw)))

    for name, good in contents(Path(store.folder(3))).items():
        assert decoded(name, good)
        bad = {good + b"\0"}
        for byte, value in enumerate(good):
            bad |= {good[:byte], good[:byte].ljust(len(good), b"\0")} - {good}
            for bit in (byte % 8, 5):  # 5: another case of a letter
                bad.add(good[:byte] + bytes([value ^ 1 << bit]) + good[byte + 1 :])
        for content in bad:
            with pytest.raises(Damaged, match=f"^{name}"):
                decoded(name, content)


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


def test_a_run_whose_snapshots_are_all_damaged_says_that_it_starts_anew(store: Store) -> None:
    for step in (1, 2, 3):
        flip(file_of(store, "model", step), 9)
    said: list[str] = []
    assert read_newest(store, said.append) is None
    assert len(said) == 4
    assert said[-1].endswith("no snapshot is left: training starts from step 1")
    assert read_newest(store, said.append) is None
    assert len(said) == 4
    for aside in Path(store.root).glob("*/set-aside-*"):  # whoever comes second gives it the same name
        assert aside.name == f"set-aside-{sha256(aside.read_bytes()).hexdigest()[:8]}-{MANIFEST}"


# --- a disk that fails ---


def fail_to_read(path: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a disk on which a file lies that can't be read (any more), so many times."""
    bad, real, left = path.stat().st_ino, os.preadv, iter(range(times))

    def read(descriptor: int, into: list[memoryview], start: int) -> int:
        if os.fstat(descriptor).st_ino == bad and next(left, None) is not None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, into, start)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr("mingpt.files.localfile.PAUSES", (0.0, 0.0))


@pytest.mark.parametrize("file", [MANIFEST, "model"])
def test_a_disk_that_fails_for_good_costs_the_newest_step_and_nothing_is_set_aside(
    store: Store, monkeypatch: pytest.MonkeyPatch, file: str, told: Told
) -> None:
    fail_to_read(file_of(store, file), 999, monkeypatch)
    before = files(Path(store.root))
    said: list[str] = []
    assert (loaded := read_newest(store, said.append))
    assert loaded.manifest.step == 2
    told(said, store.url)
    assert files(Path(store.root)) == before
    assert cli.run("snapshots", ["verify", store.url]) == 1
    save(store, 4, keep=2)  # goes on writing, and deleting what may go
    assert store.steps() == ([4, 3, 2] if file == MANIFEST else [4, 3])


def test_a_disk_that_fails_twice_costs_nothing_and_one_on_which_nothing_can_be_read_is_no_new_run(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_read(file_of(store, "model"), 2, monkeypatch)
    assert (loaded := read_newest(store, print))
    assert loaded.manifest.step == 3
    for step in (1, 2):
        store.delete(step)
    fail_to_read(file_of(store, "model"), 999, monkeypatch)
    with pytest.raises(TransientError):
        read_newest(store, print)
    assert store.steps() == [3]
