"""A damaged snapshot is set aside, loudly, nothing of it is lost, and the next older one is read."""

import errno
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.errors import Damaged, TransientError
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.manifest import decode_manifest
from mingpt.snapshot.reader import read, verify
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import contents, equal, files, read_newest, save, signed, state_of
from tests.kits.told import Told


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three good snapshots."""
    store = Store(str(tmp_path / "snapshots"))
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
    said: list[str] = []
    for reader in (read, verify):
        with pytest.raises(Damaged) as error:
            reader(store, 3)
        said.append(str(error.value))
    assert (loaded := read_newest(store, said.append))
    assert loaded.manifest.step == 2
    assert said[0] == said[1]
    told(re.sub("set-aside-[0-9a-f]+", "set-aside-…", said[2]), store.url)
    assert store.steps() == [2, 1]


@pytest.mark.parametrize("version", [1, 4])
def test_a_snapshot_of_another_format_is_a_mistake_and_stays(store: Store, version: int, told: Told) -> None:
    """To set it aside and go on from an older step would throw the other program's work away."""
    of_format(version)(file_of(store, MANIFEST))
    with told.mistake(store.url):
        read_newest(store, print)
    assert store.steps() == [3, 2, 1]


# --- any damage: it is found, whatever it is ---


def damages(good: dict[str, bytes], others: list[bytes]) -> Iterator[tuple[str, bytes]]:
    """The file that is damaged, and its new content."""
    chooser = random.Random(1)
    for name, content in good.items():
        for bit in chooser.sample(range(8 * len(content)), 30):
            bad = bytearray(content)
            bad[bit // 8] ^= 1 << bit % 8
            yield name, bytes(bad)
        for length in [0, 8, len(content) - 1, *chooser.sample(range(len(content)), 3)]:
            yield name, content[:length]
            yield name, content[:length].ljust(len(content), b"\0")  # as a power cut leaves it
        for whole in (content + b"\0", content * 2, content[::-1], *others):
            yield name, whole


def test_whatever_is_damaged_is_found_and_the_older_one_read(store: Store) -> None:
    place = Path(store.folder(3))
    good, older = (contents(Path(store.folder(step))) for step in (3, 2))
    unfound = list[object]()
    for name, bad in damages(good, [*good.values(), *older.values()]):
        if bad == good[name]:  # a tail of zeros may be one already
            continue
        after = good | {name: bad}
        shutil.rmtree(place)
        place.mkdir()
        for n, content in after.items():
            (place / n).write_bytes(content)
        said: list[str] = []
        with suppress(Damaged):
            verify(store, 3)
            said.append("verify found nothing")
        loaded = read_newest(store, said.append)
        aside = f"set-aside-{sha256(after[MANIFEST]).hexdigest()[:8]}-{MANIFEST}"
        after[aside] = after.pop(MANIFEST)
        if not (
            loaded
            and equal(loaded.state, state_of(2))
            and len(said) == 1
            and name.removesuffix(".json") in said[0]
            and aside in said[0]
            and contents(place) == after  # nothing is lost
        ):
            unfound.append((name, bad))
    assert unfound == []


def test_a_flipped_bit_anywhere_in_a_manifest_and_every_truncation_is_seen(store: Store) -> None:
    good = store.read_manifest(3)
    for byte, value in enumerate(good):
        for bit in {byte % 8, 5}:  # 5: another case of a letter
            for content in (good[:byte], good[:byte] + bytes([value ^ 1 << bit]) + good[byte + 1 :]):
                with pytest.raises(Damaged):
                    decode_manifest(content)


def test_a_run_whose_snapshots_are_all_damaged_says_that_it_starts_anew(store: Store) -> None:
    for step in (1, 2, 3):
        flip(file_of(store, "model", step), 9)
    said: list[str] = []
    assert read_newest(store, said.append) is None
    assert len(said) == 4
    assert said[-1].endswith("no snapshot is left: training starts from step 1")
    assert read_newest(store, said.append) is None
    assert len(said) == 4


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


@pytest.mark.parametrize("file", [MANIFEST, "model", "optimizer"])
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
