"""The same promises on every kind of store: real servers on loopback, memory, and a local folder."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.commands import snapshots
from mingpt.errors import Damaged, Superseded
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, leftovers
from mingpt.snapshot.store import Store
from run_kit import Run
from snapshot_kit import equal, read_newest, save, state_of
from store_kit import Stores, nightly

ALL = ("local", "memory", pytest.param("moto", marks=pytest.mark.slow), *map(nightly, ("azurite", "proxied", "google")))
# Those that refuse to create what exists. On the others the last writer of a step has the word.
CONDITIONAL = {"local", "memory", "moto", "azurite"}


def place(kind: str, serve: Stores, tmp_path: Path) -> str:
    if kind == "local":
        return str(tmp_path / "local")
    return f"memory://{tmp_path}" if kind == "memory" else f"{serve(kind).url}/some/where"


def change_a_part(store: Store, step: int) -> str:
    part = next(f for f in store.files(step) if f.name.startswith("model"))
    raw = store.fs.cat_file(f"{store.folder(step)}/{part.name}")
    store.fs.pipe_file(f"{store.folder(step)}/{part.name}", raw[:-1] + bytes([raw[-1] ^ 1]))
    return part.name


def remove_a_part(store: Store, step: int) -> str:
    part = next(f for f in store.files(step) if f.name.startswith("optimizer"))
    store.fs.rm_file(f"{store.folder(step)}/{part.name}")
    return part.name


def empty_the_manifest(store: Store, step: int) -> str:
    """A range of nothing is an error of S3's."""
    store.fs.pipe_file(f"{store.folder(step)}/manifest.json", b"")
    return "manifest.json"


@pytest.mark.parametrize("kind", ALL)
def test_every_store_keeps_the_promises(
    kind: str, serve: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, elsewhere = place(kind, serve, tmp_path), Store(str(tmp_path / "elsewhere"))
    store = Store(url)
    assert store.steps() == []
    assert read_newest(store, pytest.fail) is None

    # What is saved is listed and read back.
    digests = {step: save(store, step) for step in (1, 2, 10)}
    assert digests == {step: save(elsewhere, step) for step in (1, 2, 10)}
    assert Store(url).steps() == [10, 2, 1]
    for step, digest in digests.items():
        loaded = read(store, step)
        assert loaded.manifest.digest == digest
        assert equal(loaded.state, state_of(step))
        assert {(f.name, f.size) for f in store.files(step)} == {(f.name, f.size) for f in elsewhere.files(step)}
        assert all(f.modified is not None and abs(time.time() - f.modified) < 3600 for f in store.files(step))
    assert store.conditional_puts == (kind in CONDITIONAL)
    assert store.files(None) == []  # of that trial, nothing is left

    # Who comes second to a step.
    manifest = store.read_manifest(10)
    save(Store(url), 10)  # the same bits
    assert store.read_manifest(10) == manifest
    if kind in CONDITIONAL:
        with pytest.raises(Superseded, match=f"attempt 1.*{digests[10][:16]}"):
            save(Store(url), 10, state_of(4))
        assert store.read_manifest(10) == manifest
    else:
        assert save(Store(url), 10, state_of(4)) != digests[10]
    assert capsys.readouterr().out == ""

    # What is damaged is set aside, and the step before taken.
    said = list[str]()
    for step, damage in enumerate((change_a_part, remove_a_part, empty_the_manifest), 11):
        save(store, step)
        name = damage(store, step)
        with pytest.raises(Damaged, match=name):
            read(store, step)
    assert (newest := read_newest(Store(url), said.append))
    assert newest.manifest.step == 10
    assert [re.findall(r"^DAMAGED SNAPSHOT of step (\d+) in (.*?): ", line) for line in said] == [
        [(str(step), url)] for step in (13, 12, 11)
    ]
    assert [sum(f.is_set_aside for f in store.files(step)) for step in (13, 12, 11, 10)] == [1, 1, 1, 0]
    assert save(store, 13) == read(store, 13).manifest.digest  # the step may be written again

    # What need not stay goes, and so does what the dead left.
    save(store, 20, keep=Retention(1, keep_every=5))
    assert store.steps() == [20, 10]
    store.fs.rm_file(f"{store.folder(10)}/manifest.json")
    store.fs.pipe_file(f"{store.root}/.probe-of-a-dead-writer", b"1")
    assert store.steps() == [20]
    left = [f for f in leftovers(store, 3600, 0, now=lambda: time.time() + 7200) if f.step in (None, 10)]
    assert {f.name.partition("-")[0] for f in left} == {".probe", "model", "optimizer"}
    assert leftovers(store, 3600, 0) == []
    store.remove(left)
    assert 10 not in store.folders()
    assert store.files(None) == []


@pytest.mark.parametrize(
    ("source", "target"),
    [("local", "memory"), pytest.param("local", "moto", marks=pytest.mark.slow), nightly("azurite", "google")],
)
def test_snapshots_are_copied_from_one_kind_of_store_to_another(
    source: str, target: str, serve: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = (place(kind, serve, tmp_path) for kind in (source, target))
    for step in (2, 1):
        save(Store(f"{here}/snapshots"), step)
    for _ in range(2):  # the second time all is there
        assert snapshots.main(["copy", here, there]) == 0
    assert len(re.findall(r"^step \d: .*, digest \w{64}$", capsys.readouterr().out, re.M)) == 4
    assert snapshots.main(["verify", there]) == 0
    assert snapshots.main(["prune", there, "--keep", "1", "--no-keep-best"]) == 0
    assert Store(f"{there}/snapshots").folders() == [2]


@pytest.mark.parametrize("kind", ["azurite", nightly("proxied")])
@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_its_store_to_the_same_bits(
    kind: str, serve: Stores, text: Path, cache: Path, undisturbed: Callable[..., Run]
) -> None:
    server = serve(kind)
    run = Run(f"{server.url}/run", text, cache)
    started = run.start(1)
    started.on_step = lambda step: os.kill(started.process.pid, signal.SIGKILL) if step == 10 else None
    assert started.wait() == -signal.SIGKILL
    output = started.output + run.finish(2)
    assert f"resumed from step 8 of {run.dir}/snapshots" in output
    assert run.digest() == undisturbed().digest()
    stored = run.store.read_manifest(24).decode()
    assert f'"conditional_puts": {str(kind in CONDITIONAL).lower()}' in stored
    assert [secret for secret in server.secrets() if secret in output + stored] == []
