"""A run's directory may be a stranger's: a link, a FIFO or a device in it is refused, nothing outside is touched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.commands import snapshots
from mingpt.errors import Damaged, UserError
from mingpt.observe.jsonl import MetricsLog, read_metrics
from mingpt.snapshot import hot, retention
from mingpt.snapshot.attempts import newest_number
from mingpt.snapshot.files import File
from mingpt.snapshot.reader import read, read_manifest, verify
from mingpt.snapshot.retention import Retention, leftovers
from mingpt.snapshot.store import Store
from snapshot_kit import files, read_newest, save, state_of

Captured = pytest.CaptureFixture[str]
IS_LINK = "is a link, and a run's directory must hold plain folders and files only"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What is outside: a good snapshot of somebody else's, old enough to be a leftover, and other files."""
    store = Store(str(tmp_path / "victim" / "snapshots"))
    save(store, 10)
    folder = Path(store.folder(10))
    (folder / ".notes.tmp").write_text("mine")
    (folder / "set-aside-0-manifest.json").write_text("mine")
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, 0))
    return folder


@pytest.fixture
def run(tmp_path: Path, victim: Path) -> Path:
    """A run with the good snapshots of steps 3 and 40; the tests put a link into it."""
    store = Store(str(tmp_path / "run" / "snapshots"))
    save(store, 3)
    save(store, 40)
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


def of(run: Path) -> Store:
    return Store(f"{run}/snapshots")


# Everything that is done with a step's folder; step 10 is the link.
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "steps": Store.steps,
    "folders": Store.folders,
    "files": lambda store: store.files(10),
    "size": lambda store: store.size(10, "manifest.json"),
    "read_manifest": lambda store: store.read_manifest(10),
    "read_part": lambda store: store.read_part(10, "manifest.json", 1),
    "read_pieces": lambda store: list(store.read_pieces(10, "manifest.json", 1)),
    "reader.read_manifest": lambda store: read_manifest(store, 10),
    "read": lambda store: read(store, 10),
    "verify": lambda store: verify(store, 10),
    "write": lambda store: store.write(10, "model-00001-0000000000000000.safetensors", [b"x"]),
    "commit": lambda store: store.commit(10, b"{}"),
    "set_aside": lambda store: store.set_aside(10),
    "delete": lambda store: store.delete(10),
    "remove": lambda store: store.remove([File(10, ".notes.tmp", 4, 0.0)]),
    "leftovers": lambda store: leftovers(store, 1, 10**9),
    "plan": lambda store: retention.plan(store, Retention(1, orphan_age=1), 40, {}).apply(store),
    "restore": lambda store: read_newest(store, print),
    "save": lambda store: save(store, 10),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("uncommitted", [False, True])
def test_no_operation_goes_through_a_steps_folder_that_is_a_link(
    run: Path, victim: Path, operation: Callable[[Store], object], uncommitted: bool
) -> None:
    if uncommitted:  # then what is there looks like a dead writer's
        (victim / "manifest.json").rename(victim / "settings.json")
    (run / "snapshots/step-000000010").symlink_to(victim)
    before, ours = contents(victim), files(run)
    with pytest.raises(UserError, match=f"step-000000010 {IS_LINK}"):
        operation(of(run))
    assert contents(victim) == before
    assert files(run) == ours


@pytest.mark.parametrize("step", [10, 999, 2**31 - 1])
@pytest.mark.parametrize(
    "command", [["list"], ["verify"], ["digest"], ["show"], ["prune", "--keep", "1"], ["copy"], ["export"]]
)
def test_no_command_goes_through_a_link(
    run: Path, victim: Path, capsys: Captured, command: list[str], step: int
) -> None:
    (run / f"snapshots/step-{step:09d}").symlink_to(victim)
    before, ours = contents(victim), files(run)
    target = [str(run.parent / "target")] if command[0] in ("copy", "export") else []
    assert snapshots.main([*command, str(run), *target]) == 64
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: URL={run}/snapshots/step-{step:09d} {IS_LINK}" + err.partition("only")[2])
    assert err.endswith("since others lead outside of it: remove it, or copy the run without it\n")
    assert contents(victim) == before
    assert files(run) == ours


def test_a_dangling_link_a_fifo_and_a_file_are_no_folders_either(run: Path) -> None:
    path = run / "snapshots/step-000000999"
    for make, what in (
        (lambda: path.symlink_to(run.parent / "new"), "is a link"),
        (lambda: os.mkfifo(path), "is not a folder"),
        (lambda: path.write_text("x"), "is not a folder"),
    ):
        make()
        with pytest.raises(UserError, match=f"step-000000999 {what}, and"):
            of(run).steps()
        with pytest.raises(UserError, match=f"step-000000999 {what}, and"):
            save(of(run), 999)
        path.unlink()
    assert not (run.parent / "new").exists()


def test_the_snapshots_folder_of_a_run_is_no_link_and_one_that_the_user_names_may_be(run: Path, victim: Path) -> None:
    (run.parent / "stranger").mkdir()
    link = run.parent / "stranger/snapshots"
    link.symlink_to(victim.parent)
    before = contents(victim.parent)
    for operation in (Store.steps, lambda store: save(store, 11), lambda store: store.delete(10)):
        with pytest.raises(UserError, match=f"stranger/snapshots {IS_LINK}"):
            operation(Store(str(link)))
    assert contents(victim.parent) == before
    (run.parent / "large-disk").symlink_to(run / "snapshots")
    assert Store(str(run.parent / "large-disk")).steps() == [40, 3]
    (run.parent / "moved").symlink_to(run)
    assert Store(f"{run.parent}/moved/snapshots").steps() == [40, 3]


def put_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def put_fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def put_endless(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def put_link_beside(path: Path, outside: Path) -> None:
    """Even one that stays in the folder: who follows it does not know."""
    outside.rename(path.with_name("beside"))
    path.symlink_to("beside")


@pytest.mark.parametrize("put", [put_link, put_fifo, put_endless, put_link_beside])
@pytest.mark.parametrize("name", ["manifest.json", "model-*", "optimizer-*"])
def test_a_file_of_a_snapshot_that_is_none_is_damage_that_names_it(
    run: Path, put: Callable[[Path, Path], None], name: str, capsys: Captured
) -> None:
    [path] = (run / "snapshots/step-000000040").glob(name)
    outside = path.rename(run.parent / path.name)
    put(path, outside)
    before = outside.read_bytes() if outside.exists() else b""
    for act in (read, verify):
        with pytest.raises(Damaged, match=rf"^{path.name} is (a link|not a regular file)$"):
            act(of(run), 40)
    assert snapshots.main(["list", str(run)]) == 1
    assert f"DAMAGED: {path.name} is " in capsys.readouterr().out
    said: list[str] = []
    loaded = read_newest(of(run), said.append)
    assert loaded
    assert loaded.manifest.step == 3
    assert f"{path.name} is " in said[0]
    of(run).delete(40)
    assert (outside.read_bytes() if outside.exists() else b"") == before


def test_a_snapshot_is_written_where_a_manifest_links_outside(run: Path, victim: Path) -> None:
    """The link itself is set aside; what it leads to stays."""
    path = run / "snapshots/step-000000040/manifest.json"
    path.unlink()
    path.symlink_to(victim / "manifest.json")
    before = contents(victim)
    save(of(run), 40, state_of(41))
    assert not path.is_symlink()
    assert read(of(run), 40).state["model"]["w"][0, 0] == 41
    assert contents(victim) == before


def test_a_part_that_is_a_link_is_replaced_and_not_followed(run: Path, victim: Path) -> None:
    [part] = (run / "snapshots/step-000000040").glob("model-*")
    (run / "snapshots/step-000000040/manifest.json").unlink()
    part.unlink()
    part.symlink_to(victim / "manifest.json")
    before = contents(victim)
    save(of(run), 40)
    assert not part.is_symlink()
    assert contents(victim) == before


def test_a_link_that_comes_between_looking_and_opening_is_not_followed(
    run: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [part] = (run / "snapshots/step-000000040").glob("model-*")
    size, real = part.stat().st_size, os.open
    (victim / "secret").write_bytes(bytes(size))

    def late(path: str, flags: int, *mode: int, **options: int) -> int:
        if path == part.name:
            part.unlink()
            part.symlink_to(victim / "secret")
        return real(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", late)
    with pytest.raises(OSError, match="symbolic links"):
        of(run).read_part(40, part.name, size)


# run-id and metrics


@pytest.mark.parametrize(
    ("put", "what"), [(put_link, "a link"), (put_fifo, "not a regular file"), (put_endless, "a link")]
)
def test_a_run_id_that_is_no_file_is_neither_read_nor_replaced(
    tmp_path: Path, put: Callable[[Path, Path], None], what: str
) -> None:
    keys = tmp_path / "authorized_keys"
    keys.write_text("ssh-ed25519 mine")
    run = tmp_path / "run"
    run.mkdir()
    put(run / "run-id", keys)
    for act in (hot.find_run_id, hot.run_id):
        with pytest.raises(UserError, match=f"^run.dir={run}/run-id is {what}, and a run's directory must hold"):
            act(str(run))
    assert keys.read_text() == "ssh-ed25519 mine"


def test_a_run_id_that_is_a_dangling_link_makes_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run-id").symlink_to(tmp_path / "made")
    with pytest.raises(UserError, match="run-id is a link"):
        hot.run_id(str(tmp_path / "run"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("put", [put_link, put_fifo, put_endless])
@pytest.mark.parametrize("name", ["metrics", "metrics/attempt-00001.jsonl"])
def test_metrics_that_are_no_plain_files_are_refused(
    tmp_path: Path, put: Callable[[Path, Path], None], name: str
) -> None:
    outside = tmp_path / "home"
    outside.mkdir()
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    put(path, outside)
    for act in (newest_number, read_metrics):
        with pytest.raises(UserError, match=f"^run.dir={path} is "):
            act(str(tmp_path / "run"))
    assert list(outside.iterdir()) == []


def test_plain_metrics_are_none_the_worse_for_it(tmp_path: Path) -> None:
    log = MetricsLog(str(tmp_path), 1, print)
    log.write({"step": 1, "loss": 2.0})
    log.file.close()
    (tmp_path / "metrics/plots").mkdir()
    assert newest_number(str(tmp_path)) == 1
    assert [row["step"] for row in read_metrics(str(tmp_path))] == [1]
