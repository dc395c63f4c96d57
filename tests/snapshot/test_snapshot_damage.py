"""A damaged snapshot is set aside, loudly, and the next older one is read."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from mingpt.commands import snapshots
from mingpt.errors import Damaged, TransientError, UserError
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import equal, files, read_newest, save, signed, state_of


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three good snapshots."""
    store = Store(str(tmp_path / "snapshots"))
    for step in (1, 2, 3):
        save(store, step)
    return store


def newest(store: Store) -> Path:
    return Path(store.folder(store.steps()[0]))


def part(folder: Path, kind: str) -> Path:
    [path] = folder.glob(f"{kind}-*.safetensors")
    return path


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def truncated(kind: str, keep: float) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        path = part(folder, kind)
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[: int(size * keep)])
        return f"{path.name} has {int(size * keep)} bytes in place of {size}"

    return damage


def flipped(kind: str, byte: int, says: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        path = part(folder, kind)
        flip(path, byte)
        return f"{path.name}{says}"

    return damage


def missing(kind: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        path = part(folder, kind)
        path.unlink()
        return f"{path.name} is missing"

    return damage


def longer(folder: Path) -> str:
    path = part(folder, "model")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    return f"{path.name} has {size + 100} bytes in place of {size}"  # seen before anything of it is read


def of_another_step(folder: Path) -> str:
    older = folder.with_name("step-000000002")
    for path in older.iterdir():  # the whole of it, good in itself
        (folder / path.name).write_bytes(path.read_bytes())
    return "the manifest is that of step 2"


def manifest_is(content: bytes, says: str) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        (folder / "manifest.json").write_bytes(content)
        return says

    return damage


def manifest_of_format(number: object) -> Callable[[Path], str]:
    def damage(folder: Path) -> str:
        path = folder / "manifest.json"
        path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": number}))
        return f"manifest.json has format {number!r}; this version of mingpt reads 2 and 3"

    return damage


def manifest_of_a_format_that_a_flipped_bit_makes(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 3', b'"format": 2'))
    return "manifest.json does not match its own checksum"


def part_that_is_a_link_to_outside(folder: Path) -> str:
    path = part(folder, "model")
    path.rename(folder.parent / path.name)  # whole and right, but no longer in the snapshot's folder
    path.symlink_to(folder.parent / path.name)
    return f"{path.name} is a link"


HEADER = ": the header does not match the manifest"
TENSOR = " does not match its checksum in the manifest"
DAMAGES = {
    "model part truncated": truncated("model", 0.9),
    "model part empty": truncated("model", 0),
    "optimizer part truncated": truncated("optimizer", 0.5),
    "bit flipped in model's header": flipped("model", 12, HEADER),
    "bit flipped in model's data": flipped("model", -1, ": b" + TENSOR),
    "bit flipped in optimizer's header": flipped("optimizer", 0, HEADER),
    "bit flipped in optimizer's data": flipped("optimizer", -3, ": w.step" + TENSOR),
    "model part missing": missing("model"),
    "optimizer part missing": missing("optimizer"),
    "model part longer": longer,
    "manifest empty": manifest_is(b"", "manifest.json is not JSON: Expecting value: line 1 column 1 (char 0)"),
    "manifest no object": manifest_is(b"[]", "manifest.json is not a JSON object"),
    "manifest of a format that is no number": manifest_of_format("2"),
    "manifest of a format by a flipped bit": manifest_of_a_format_that_a_flipped_bit_makes,
    "model part a link to outside": part_that_is_a_link_to_outside,
    "manifest of another step": of_another_step,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_snapshot_is_set_aside_and_the_older_one_read(store: Store, damage: Callable[[Path], str]) -> None:
    folder = newest(store)
    expected = damage(folder)
    before = {name: (folder / name).read_bytes() for name in files(folder)}
    aside = f"set-aside-{sha256(before['manifest.json']).hexdigest()[:8]}-manifest.json"
    said: list[str] = []
    loaded = read_newest(store, said.append)
    assert loaded
    assert loaded.manifest.step == 2
    assert equal(loaded.state, state_of(2))
    assert said == [
        f"DAMAGED SNAPSHOT of step 3 in {store.url}: {expected}. Set aside (its manifest is now {aside}); "
        f"trying the next older one."
    ]
    # Nothing is deleted: every file is there with its content, only the manifest has another name.
    before[aside] = before.pop("manifest.json")
    assert {name: (folder / name).read_bytes() for name in files(folder)} == before
    assert store.steps() == [2, 1]


def test_a_manifest_that_is_no_file_is_set_aside_without_reading_it(store: Store) -> None:
    path = newest(store) / "manifest.json"
    path.unlink()
    os.mkfifo(path)  # whoever opens it waits for a writer
    said: list[str] = []
    assert (loaded := read_newest(store, said.append))
    assert loaded.manifest.step == 2
    assert "manifest.json is not a regular file" in said[0]


def test_a_part_that_is_a_folder_is_damage(store: Store) -> None:
    path = part(newest(store), "model")
    path.unlink()
    path.mkdir()
    with pytest.raises(Damaged, match=f"^{path.name} is not a regular file$"):
        read(store, 3)


def test_a_manifest_without_end_is_set_aside_without_taking_it_into_memory(store: Store) -> None:
    os.truncate(newest(store) / "manifest.json", 2**40)
    assert (loaded := read_newest(store, print))
    assert loaded.manifest.step == 2


@pytest.mark.parametrize("version", [1, 4])
def test_a_snapshot_of_another_format_is_a_mistake_and_stays(store: Store, version: int) -> None:
    """To set it aside and go on from an older step would throw the other program's work away."""
    folder = newest(store)
    path = folder / "manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": version, "what else it has": [1]}))
    before = files(folder)
    with pytest.raises(UserError) as mistake:
        read_newest(store, print)
    assert str(mistake.value) == (
        f"snapshot.dir={store.url}: the snapshot of step 3 has format {version}; this version of mingpt reads 2 and 3: "
        f"use the version that wrote it, or another run.dir"
    )
    assert files(folder) == before
    assert store.steps() == [3, 2, 1]


def test_a_damaged_snapshot_is_set_aside_in_an_object_store_too() -> None:
    store = Store(f"memory://{uuid4().hex}")
    save(store, 1)
    save(store, 2)
    [name] = (n for n in read(store, 2).manifest.parts if n.startswith("model"))
    store.fs.pipe_file(f"{store.folder(2)}/{name}", b"damaged")
    said: list[str] = []
    loaded = read_newest(store, said.append)
    assert loaded
    assert equal(loaded.state, state_of(1))
    assert len(said) == 1
    assert name in said[0]
    assert len(store.fs.ls(store.folder(2))) == 3


def test_all_damaged_is_no_snapshot(store: Store) -> None:
    for step, damage in enumerate(("model part missing", "manifest empty", "optimizer part truncated"), 1):
        DAMAGES[damage](Path(store.folder(step)))
    said: list[str] = []
    assert read_newest(store, said.append) is None
    assert [line.split(" in ")[0] for line in said] == [f"DAMAGED SNAPSHOT of step {s}" for s in (3, 2, 1)]
    assert store.steps() == []


def test_the_step_can_be_saved_again(store: Store) -> None:
    DAMAGES["bit flipped in model's data"](newest(store))
    read_newest(store, print)
    save(store, 3)
    loaded = read_newest(store, print)
    assert loaded
    assert equal(loaded.state, state_of(3))


def test_an_error_of_the_store_is_no_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that is down for a moment must not cost the newest snapshot."""

    def down(self: Store, step: int, name: str, size: int) -> memoryview:
        raise ConnectionError("down")

    monkeypatch.setattr(Store, "read_part", down)
    with pytest.raises(TransientError, match="down"):
        read_newest(store, print)
    assert store.steps() == [3, 2, 1]


def test_a_part_of_another_size_is_not_even_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies there may be larger than the memory."""
    longer(newest(store))
    wrong = part(newest(store), "model").stat().st_size
    seen: list[int] = []
    real = torch.empty

    def watched(size: int, **options: Any) -> Any:
        seen.append(size)
        return real(size, **options)

    monkeypatch.setattr("mingpt.snapshot.pieces.torch.empty", watched)
    with pytest.raises(Damaged, match=r"^model-"):
        read(store, 3)
    assert seen  # for the manifest
    assert not {wrong, wrong - 100}.intersection(seen)


def test_every_flipped_bit_of_a_manifest_is_seen(store: Store) -> None:
    good = store.read_manifest(3)
    unseen = []
    for position in range(8 * len(good)):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        with suppress(Damaged):
            decode_manifest(bytes(bad))
            unseen.append(bytes(bad[position // 8 - 6 : position // 8 + 6]))
    assert unseen == []


def test_every_truncation_of_a_manifest_is_seen(store: Store) -> None:
    good = store.read_manifest(3)
    assert decode_manifest(good).step == 3
    for length in range(len(good)):
        with pytest.raises(Damaged):
            decode_manifest(good[:length])


def test_a_step_of_ten_digits_is_a_step(tmp_path: Path) -> None:
    """train.max_steps may be 2^31 - 1."""
    store = Store(str(tmp_path / "snapshots"))
    for step in (999_999_999, 10**9, 2**31 - 1):
        save(store, step)
    (tmp_path / "snapshots/step-0000000007").mkdir()  # nobody's: step 7 has nine digits
    assert store.folders() == store.steps() == [2**31 - 1, 10**9, 999_999_999]
    assert (loaded := read_newest(store, print))
    assert loaded.manifest.step == 2**31 - 1
    assert snapshots.main(["verify", str(tmp_path)]) == 0
    assert snapshots.main(["digest", f"{tmp_path}/snapshots/step-1000000000"]) == 0


def test_two_manifests_that_nobody_can_read_are_both_kept(store: Store) -> None:
    """Each is evidence; neither has a content to be named by."""
    for word in ("first", "second"):
        path = Path(store.folder(3), "manifest.json")
        path.unlink()
        path.symlink_to(word)
        store.set_aside(3)
        save(store, 3)
    aside = [p for p in Path(store.folder(3)).iterdir() if p.name.startswith("set-aside-")]
    assert {os.readlink(p) for p in aside} == {"first", "second"}


class Disk:
    """os.preadv of a disk on which a file lies that can't be read (any more)."""

    def __init__(self, bad: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bad, self.left = bad.stat().st_ino, times
        self.real = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)
        monkeypatch.setattr("mingpt.plainfile.PAUSES", (0.0, 0.0))

    def read(self, descriptor: int, into: list[memoryview], start: int) -> int:
        if self.left and os.fstat(descriptor).st_ino == self.bad:
            self.left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.real(descriptor, into, start)


@pytest.mark.parametrize("file", ["manifest.json", "model-*", "optimizer-*"])
def test_a_disk_that_fails_for_good_costs_the_newest_step_and_nothing_is_set_aside(
    store: Store, monkeypatch: pytest.MonkeyPatch, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = newest(store).glob(file)
    Disk(path, -1, monkeypatch)
    before = files(Path(store.root))
    said: list[str] = []
    assert (loaded := read_newest(store, said.append))
    assert loaded.manifest.step == 2
    assert said == [
        f"UNREADABLE SNAPSHOT of step 3: snapshot.dir={store.url}: {path.name}: Input/output error, 3 times: look at "
        f"the disk. It stays as it is; trying the next older one."
    ]
    assert files(Path(store.root)) == before
    assert snapshots.main(["verify", store.url]) == 1
    assert f"{path.name}: Input/output error" in capsys.readouterr().out
    save(store, 4, keep=2)  # goes on writing, and deleting what may go
    assert store.steps() == [4, 3, 2] if file == "manifest.json" else [4, 3]


def test_a_disk_that_fails_twice_costs_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(part(newest(store), "model"), 2, monkeypatch)
    assert (loaded := read_newest(store, print))
    assert loaded.manifest.step == 3


def test_a_disk_on_which_nothing_can_be_read_is_no_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "snapshots"))
    save(store, 1)
    Disk(part(newest(store), "model"), -1, monkeypatch)
    with pytest.raises(TransientError, match="no snapshot can be read: look at the disk, and try again"):
        read_newest(store, print)
    assert store.steps() == [1]
