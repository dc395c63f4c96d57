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
from mingpt.observe.jsonl import read_metrics
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, leftovers
from mingpt.snapshot.store import Store
from run_kit import Run
from snapshot_kit import equal, read_newest, save, state_of
from store_kit import Stores

pytestmark = pytest.mark.slow

ALL = ("local", "memory", "moto", "proxied", "azurite", "google")
# Those that refuse to create what exists. On the others the last writer of a step has the word.
CONDITIONAL = {"local", "memory", "moto", "azurite"}


@pytest.fixture
def url(kind: str, serve: Stores, tmp_path: Path) -> str:
    """A place on a store of the kind that the test asks for."""
    return place(kind, serve, tmp_path)


def place(kind: str, serve: Stores, tmp_path: Path) -> str:
    if kind == "local":
        return str(tmp_path / "local")
    return f"memory://{tmp_path}" if kind == "memory" else f"{serve(kind).url}/some/where"


def every(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds)


@every(*ALL)
def test_what_is_saved_is_listed_and_read_back(kind: str, url: str, tmp_path: Path) -> None:
    store, elsewhere = Store(f"{url}/snapshots"), Store(str(tmp_path / "elsewhere"))
    assert store.steps() == []
    assert read_newest(store, pytest.fail) is None
    digests = {step: save(store, step) for step in (1, 2, 10)}
    assert digests == {step: save(elsewhere, step) for step in (1, 2, 10)}
    assert Store(f"{url}/snapshots").steps() == [10, 2, 1]
    for step, digest in digests.items():
        loaded = read(store, step)
        assert loaded.manifest.digest == digest
        assert equal(loaded.state, state_of(step))
        assert {(f.name, f.size) for f in store.files(step)} == {(f.name, f.size) for f in elsewhere.files(step)}
        assert all(f.modified is not None and abs(time.time() - f.modified) < 3600 for f in store.files(step))
    assert store.conditional_puts == (kind in CONDITIONAL)
    assert store.files(None) == []  # of that trial, nothing is left


@every(*ALL)
def test_who_comes_second_to_a_step(kind: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(url)
    first = save(store, 3)
    manifest = store.read_manifest(3)
    save(Store(url), 3)  # the same bits
    assert capsys.readouterr().out == ""
    assert store.read_manifest(3) == manifest
    if kind in CONDITIONAL:
        there = rf"^step 3 of {re.escape(url)} is there, from attempt 1, with another digest \({first[:16]}, "
        with pytest.raises(Superseded, match=there):
            save(Store(url), 3, state_of(4))
    else:
        assert save(Store(url), 3, state_of(4)) != first
    assert capsys.readouterr().out == ""
    assert equal(read(Store(url), 3).state, state_of(3 if kind in CONDITIONAL else 4))


@every(*ALL)
def test_what_need_not_stay_goes_and_so_does_what_the_dead_left(url: str) -> None:
    store = Store(url)
    for step in (1, 2, 3, 4, 5):
        save(store, step, keep=Retention(2, keep_every=3), val_loss=float(step))
    assert store.steps() == [5, 4, 3, 1]
    assert store.folders() == [5, 4, 3, 1]
    store.fs.rm_file(f"{store.folder(4)}/manifest.json")
    store.fs.pipe_file(f"{store.root}/.probe-of-a-dead-writer", b"1")
    assert store.steps() == [5, 3, 1]
    assert leftovers(store, 3600, 0) == []
    left = leftovers(store, 3600, 0, now=lambda: time.time() + 7200)
    assert {(f.step, re.sub("-[0-9a-f]{16}", "", f.name)) for f in left} == {
        (None, ".probe-of-a-dead-writer"),
        (4, "model-00001.safetensors"),
        (4, "optimizer-00001.safetensors"),
    }
    store.remove(left)
    assert store.folders() == [5, 3, 1]
    assert store.files(None) == []


def empty_the_manifest(store: Store, step: int) -> None:
    store.fs.pipe_file(f"{store.folder(step)}/manifest.json", b"")


def cut_the_manifest(store: Store, step: int) -> None:
    store.fs.pipe_file(f"{store.folder(step)}/manifest.json", store.read_manifest(step)[:-2])


def change_a_part(store: Store, step: int) -> None:
    part = next(f for f in store.files(step) if f.name.startswith("model"))
    raw = store.fs.cat_file(f"{store.folder(step)}/{part.name}")
    store.fs.pipe_file(f"{store.folder(step)}/{part.name}", raw[:-1] + bytes([raw[-1] ^ 1]))


def remove_a_part(store: Store, step: int) -> None:
    part = next(f for f in store.files(step) if f.name.startswith("optimizer"))
    store.fs.rm_file(f"{store.folder(step)}/{part.name}")


DAMAGE: dict[Callable[[Store, int], None], str] = {
    empty_the_manifest: "manifest.json is not JSON",
    cut_the_manifest: "manifest.json is not JSON",
    change_a_part: "model-00001-",
    remove_a_part: "optimizer-00001-",
}


@every(*ALL)
def test_what_is_damaged_is_set_aside_and_the_step_before_taken(kind: str, url: str) -> None:
    store, said = Store(url), list[str]()
    good = save(store, 1)
    for step, damage in enumerate(DAMAGE, 2):
        save(store, step)
        damage(store, step)
        with pytest.raises(Damaged, match=DAMAGE[damage]):
            read(store, step)
    loaded = read_newest(Store(url), said.append)
    assert loaded
    assert loaded.manifest.digest == good
    assert [re.findall(r"^DAMAGED SNAPSHOT of step (\d) in (.*?): ", line) for line in said] == [
        [(str(step), url)] for step in (5, 4, 3, 2)
    ]
    assert Store(url).steps() == [1]
    assert [sum(f.is_set_aside for f in store.files(step)) for step in store.folders()] == [1, 1, 1, 1, 0]
    assert save(store, 5) == read(store, 5).manifest.digest  # the step may be written again


@pytest.mark.parametrize(("source", "target"), [("azurite", "moto"), ("local", "google")])
def test_snapshots_are_copied_from_one_kind_of_store_to_another(
    source: str, target: str, serve: Stores, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = (place(kind, serve, tmp_path) for kind in (source, target))
    digests = [save(Store(f"{here}/snapshots"), step) for step in (2, 1)]
    capsys.readouterr()
    for _ in range(2):  # the second time all is there
        assert snapshots.main(["copy", here, there]) == 0
    folder = f"{there}/snapshots/step-00000000"
    assert capsys.readouterr().out == (
        f"step 2: copied to {folder}2, digest {digests[0]}\nstep 1: copied to {folder}1, digest {digests[1]}\n"
        f"step 2: is there already, digest {digests[0]}\nstep 1: is there already, digest {digests[1]}\n"
    )
    assert snapshots.main(["verify", there]) == 0
    assert capsys.readouterr().out == f"step 2: good, digest {digests[0]}\nstep 1: good, digest {digests[1]}\n"
    assert snapshots.main(["list", there]) == 0
    assert re.findall(r"^(\d) .* looks good$", capsys.readouterr().out, re.M) == ["2", "1"]
    assert snapshots.main(["prune", there, "--keep", "1", "--no-keep-best"]) == 0
    assert Store(f"{there}/snapshots").folders() == [2]


@every("proxied", "azurite")
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
    assert [row["step"] for row in read_metrics(run.dir)] == list(range(1, 25))
    stored = run.store.read_manifest(24).decode()
    assert f'"conditional_puts": {str(kind in CONDITIONAL).lower()}' in stored
    assert [secret for secret in server.secrets() if secret in output + stored] == []
