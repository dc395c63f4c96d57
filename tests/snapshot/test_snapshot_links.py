"""A run's directory may be a stranger's: a link, a FIFO or a device in it is refused, nothing outside is touched.

What is odd in a snapshot is damage: test_snapshot_damage.py. All names of a run, all verbs: test_run_directory.py.
"""

import os
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.snapshot.reader import read_manifest, verify
from mingpt.snapshot.store import File, Store
from tests.kits.snapshot_kit import contents, files, save


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What is outside: a good snapshot of somebody else's, and other files."""
    store = Store(str(tmp_path / "victim" / "snapshots"))
    save(store, 10)
    folder = Path(store.folder(10))
    (folder / ".notes.tmp").write_text("mine")
    (folder / "set-aside-0-manifest.json").write_text("mine")
    return folder


@pytest.fixture
def store(tmp_path: Path, victim: Path) -> Store:
    """The good snapshots of steps 3 and 40; the tests put a link among them."""
    store = Store(str(tmp_path / "run" / "snapshots"))
    save(store, 3)
    save(store, 40)
    return store


# What a store does with a step's folder; step 10 is the link.
OPERATIONS: dict[str, tuple[object, ...]] = {
    "steps": (),
    "folders": (),
    "files": (10,),
    "size": (10, "manifest.json"),
    "read_part": (10, "manifest.json", 1),
    "write_part": (10, "model-00001-0000000000000000.safetensors", [b"x"]),
    "commit": (),
    "set_aside": (10,),
    "bring_back": (10, "set-aside-0-manifest.json"),
    "delete": (10,),
    "remove": ([File(10, ".notes.tmp", 4, 0.0)],),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_operation_goes_through_a_steps_folder_that_is_a_link(store: Store, victim: Path, operation: str) -> None:
    Path(store.folder(10)).symlink_to(victim)
    given = OPERATIONS[operation]
    if operation == "commit":
        given = (read_manifest(store, 3).model_copy(update={"step": 10}),)
    for committed in (True, False):
        if not committed:  # then what is there looks like a dead writer's
            (victim / "manifest.json").rename(victim / "settings.json")
        before, ours = contents(victim), files(Path(store.root))
        with pytest.raises(UserError, match="step-000000010 is a link"):
            getattr(store, operation)(*given)
        assert contents(victim) == before
        assert files(Path(store.root)) == ours


def test_the_snapshots_folder_of_a_run_is_no_link_and_one_that_the_user_names_may_be(
    store: Store, victim: Path, tmp_path: Path
) -> None:
    (tmp_path / "stranger").mkdir()
    for link, target in (("stranger/snapshots", victim.parent), ("disk", store.root), ("moved", tmp_path / "run")):
        (tmp_path / link).symlink_to(target)
    before = contents(victim.parent)
    for operation in (Store.steps, lambda store: save(store, 11), lambda store: store.delete(10)):
        with pytest.raises(UserError, match="stranger/snapshots is a link"):
            operation(Store(f"{tmp_path}/stranger/snapshots"))
    assert contents(victim.parent) == before
    for url in (f"{tmp_path}/disk", f"{tmp_path}/moved/snapshots"):
        assert Store(url).steps() == [40, 3]


@pytest.mark.parametrize("linked", ["manifest.json", "model-*"])
def test_a_file_that_is_a_link_is_replaced_and_not_followed(store: Store, victim: Path, linked: str) -> None:
    folder = Path(store.folder(40))
    [path] = folder.glob(linked)
    (folder / "manifest.json").unlink()
    path.unlink(missing_ok=True)
    path.symlink_to(victim / "manifest.json")
    before = contents(victim)
    save(store, 40)
    assert not path.is_symlink()
    assert verify(store, 40)
    assert contents(victim) == before


def test_a_link_that_comes_between_looking_and_opening_is_not_followed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    [part] = Path(store.folder(40)).glob("model-*")
    real, size = os.open, part.stat().st_size

    def late(path: str, flags: int, *mode: int, **options: int) -> int:
        if path == part.name:
            part.symlink_to(part.rename(part.with_name("aside")))
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OSError, match="symbolic links"):
        store.read_part(40, part.name, size)
